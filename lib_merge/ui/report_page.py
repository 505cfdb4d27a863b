"""The page of reports: one sentence, a heatmap, bars, the worst tensors, one of them among all; and older reports."""

from __future__ import annotations

from typing import Any

import gradio as gr

from ..history import Entry, History
from ..host import Host
from . import cards, gr_compat, past, report_view, value_view
from .pages import Pages
from .report_view import ALL, View

Updates = dict[Any, Any]
_EMPTY = "Each run leaves its report here. There is none yet: start one on the Merge page."
_KEPT = 4


class ReportPage:
    """Builds the page inside an open gradio context, and answers its events.

    Args:
        host: where the reports lie.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._views: dict[str, View] = {}
        self._newest = gr.State("")  # the newest report that this page has seen
        self._report = gr_compat.choice([], None, label="Report of", elem_id="merge_report")
        self._said = gr_compat.html(cards.note_card("Report", [_EMPTY]), elem_id="merge_report_said")
        with gr.Column(visible=False, elem_id="merge_report_box") as self._box:
            self._quantity = gr_compat.choice([], None, label="Show", elem_id="merge_report_quantity")
            self._heatmap = gr.Plot(show_label=False, elem_id="merge_report_heatmap")
            self._bars = gr.Plot(show_label=False, elem_id="merge_report_bars")
            self._block = gr_compat.choice([ALL], ALL, label="Tensors of the block", elem_id="merge_report_block")
            self._table = gr.Dataframe(interactive=False, wrap=False, elem_id="merge_report_table")
            self._tensor = gr_compat.choice([], None, label="One tensor among all", elem_id="merge_report_tensor")
            self._spread = gr.Plot(show_label=False, elem_id="merge_report_spread")
            self._values = gr.Plot(show_label=False, visible=False, elem_id="merge_report_values")
            self._numbers = gr_compat.html(elem_id="merge_report_numbers")
            with gr_compat.row():
                self._csv = gr_compat.button("All rows as CSV", size="sm", elem_id="merge_report_csv")
                self._page = gr_compat.button("The report as HTML", size="sm", elem_id="merge_report_html")
            self._file = gr.File(label="Report file", interactive=False, visible=False, elem_id="merge_report_file")

    def listen(self, blocks: Any, pages: Pages) -> None:
        """Connect the events.

        Args:
            blocks: the Blocks the page lies in.
            pages: that tell when this page is turned to.
        """
        values = [self._values, self._numbers]
        pictures = [self._heatmap, self._bars, self._spread, *values]
        table = [self._table, self._tensor]
        everything = [self._report, self._said, self._box, self._quantity, self._block, *pictures, *table, self._file]
        chosen = [self._report, self._quantity, self._block]
        gr_compat.on(self._report.input, self._open, [self._report], everything)
        gr_compat.on(self._quantity.input, self._show, chosen, [*pictures, *table])
        gr_compat.on(self._block.input, self._narrow, chosen, [*table, self._spread, *values])
        marked = [self._tensor, self._spread, *values]
        for event, answer, about in (
            (self._tensor.input, self._mark, self._tensor),
            (self._table.select, self._pick, self._table),
        ):
            picked = gr_compat.on(event, answer, [self._report, self._quantity, about], marked)
            # Large files may take a while: what is chosen is shown before they are read.
            gr_compat.on(picked.then, self._read, [self._report, self._tensor], values)
        gr_compat.on(self._csv.click, self._download_csv, [self._report], [self._file])
        gr_compat.on(self._page.click, self._download_page, [self._report], [self._file])
        pages.on_select("report", self._turned_to, [self._report, self._newest], [*everything, self._newest])

    # Reports

    def _entries(self) -> dict[str, Entry]:
        """Text in the list -> run, newest first; no two texts are alike."""
        return {f"{past.line(entry)} ({entry.id[:6]})": entry for entry in self._history().with_reports()}

    def _history(self) -> History:
        return History(self._host.data())

    def _view(self, name: Any) -> View | None:
        entry = self._entries().get(gr_compat.blank(name) or "")
        if entry is None:
            return None
        if entry.id not in self._views:
            report = self._history().report(entry.id)
            if report is None:
                return None
            self._views[entry.id] = View(report.title, report.header, report.rows)
            for old in list(self._views)[:-_KEPT]:
                self._views.pop(old, None)
        return self._views.get(entry.id)

    # Answers

    def _turned_to(self, name: Any, newest: str) -> Updates:
        """The list as it is now; the newest report, if another one has come since, or none was shown."""
        entries = list(self._entries())
        if not entries:
            return {self._report: gr.update(choices=[], value=None), self._box: gr.update(visible=False)}
        name = gr_compat.blank(name)
        seen = name in entries
        shown = name if seen and newest == entries[0] else entries[0]
        listed = {self._report: gr.update(choices=entries, value=shown), self._newest: entries[0]}
        return listed if seen and shown == name else {**self._open(shown), **listed}

    def _open(self, name: Any) -> Updates:
        view = self._view(name)
        if view is None:
            said = cards.note_card("Report", ["This report cannot be read any more."], tone="bad")
            return {self._said: said, self._box: gr.update(visible=False)}
        labels = list(view.quantities)
        first = labels[0] if labels else None
        lines = [line for line in (view.sentence, report_view.drawing_problem()) if line]
        about = cards.note_card(view.title, lines) + cards.facts_card("Made by", view.header)
        about += cards.facts_card("Chosen in each block", view.chosen) if view.chosen else ""
        return {
            self._said: about,
            self._box: gr.update(visible=True),
            self._quantity: gr.update(choices=labels, value=first),
            self._block: gr.update(choices=view.blocks, value=ALL),
            self._file: gr.update(value=None, visible=False),
            **self._show(name, first, ALL),
        }

    def _show(self, name: Any, label: Any, block: Any) -> Updates:
        view = self._view(name)
        if view is None:
            return {self._heatmap: gr.update()}
        id = self._id(view, label)
        return {
            self._heatmap: _plot(report_view.heatmap(view, id)),
            self._bars: _plot(report_view.bars(view, id)),
            **self._narrow(name, label, block),
        }

    def _narrow(self, name: Any, label: Any, block: Any) -> Updates:
        view = self._view(name)
        if view is None:
            return {self._table: gr.update()}
        id = self._id(view, label)
        table = view.table(id, gr_compat.blank(block) or ALL)
        keys = list(dict.fromkeys(table["key"]))
        first = keys[0] if keys else None
        return {
            self._table: gr.update(value=table),
            self._tensor: gr.update(choices=keys, value=first),
            self._spread: _plot(report_view.distribution(view, id, first or "")),
            self._values: gr.update(visible=False),
            self._numbers: cards.help_note("Press a row, or choose a tensor, to see its values.") if keys else "",
        }

    def _mark(self, name: Any, label: Any, key: Any) -> Updates:
        view = self._view(name)
        if view is None:
            return {self._spread: gr.update()}
        key = gr_compat.blank(key) or ""
        return {
            self._spread: _plot(report_view.distribution(view, self._id(view, label), key)),
            self._values: gr.update(visible=False),
            self._numbers: cards.note_card(f"Values of {key}", ["They are being read …"]),
        }

    def _read(self, name: Any, key: Any) -> Updates:
        """The values of a tensor in the inputs and in the result."""
        view, entry, key = self._view(name), self._entries().get(gr_compat.blank(name) or ""), gr_compat.blank(key)
        keys = [str(row["key"]) for row in view.rows] if view else []
        if entry is None or key not in keys:
            return {self._numbers: ""}
        shown = value_view.values_of(entry, self._host, key, keys)
        return {self._values: _plot(value_view.picture(shown)), self._numbers: value_view.card(shown)}

    def _pick(self, name: Any, label: Any, table: Any, event: gr.SelectData) -> Updates:
        """The tensor whose row was pressed; where the order that is shown is not known here, its name's cell tells."""
        keys = [str(key) for key in table["key"]]
        key = str(event.value)
        if key not in keys:
            row = getattr(event, "row_value", None)
            place = event.index[0] if isinstance(event.index, (list, tuple)) else event.index
            key = str(row[0]) if row else keys[place] if place < len(keys) else ""
        if key not in keys:
            return {self._tensor: gr.update()}
        return {self._tensor: gr.update(value=key), **self._mark(name, label, key)}

    def _download_csv(self, name: Any) -> Updates:
        view = self._view(name)
        return {self._file: gr.update(value=str(view.csv()), visible=True) if view else gr.update()}

    def _download_page(self, name: Any) -> Updates:
        view = self._view(name)
        return {self._file: gr.update(value=str(view.page()), visible=True) if view else gr.update()}

    def _id(self, view: View, label: Any) -> str:
        known = view.quantities
        return known.get(gr_compat.blank(label) or "", next(iter(known.values()), ""))


def _plot(figure: Any) -> Any:
    """The update that shows a picture, or hides it where there is none."""
    return gr.update(visible=False) if figure is None else gr.update(value=figure, visible=True)
