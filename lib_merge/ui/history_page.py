"""The page of past runs: what, when, how long, what came of it; each can be loaded, run again and verified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from ..errors import MergeError
from ..history import Entry, History
from ..host import Host
from . import cards, checks, gr_compat, past
from .checks import CHECKS
from .merge_page import MergePage
from .pages import Pages
from .runs import RUNS

POLL_S = 0.4
Updates = dict[Any, Any]


class HistoryPage:
    """Builds the page inside an open gradio context, and answers its events.

    Args:
        host: where the history lies, and models.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        with gr_compat.row():
            with gr.Column(scale=3, min_width=260):
                self._list = gr_compat.own(gr.Radio(**self._choices(None), label="Runs", elem_id="merge_runs"))
                self._clear = gr_compat.button("Forget all of them", size="sm", elem_id="merge_runs_clear")
                self._armed = gr.State(False)  # a second press forgets
            with gr.Column(scale=2, min_width=260):
                self._said = gr_compat.html(_hint(), elem_id="merge_run_said")
                with gr_compat.row():
                    self._load = gr_compat.button(
                        "Load into the form", variant="primary", min_width=80, elem_id="merge_run_load"
                    )
                    self._run = gr_compat.button("Run it again", min_width=80, elem_id="merge_run_again")
                with gr_compat.row():
                    self._verify = gr_compat.button("Verify its result", min_width=80, elem_id="merge_run_verify")
                    self._stop = gr_compat.button(
                        "Stop verifying", min_width=80, interactive=False, elem_id="merge_run_verify_stop"
                    )
                self._checked = gr_compat.html(elem_id="merge_run_checked")

    def listen(self, blocks: Any, merging: MergePage, pages: Pages) -> None:
        """Connect the events.

        Args:
            blocks: the Blocks the page lies in.
            merging: whose form is filled.
            pages: to turn to that page.
        """
        self._merging, self._pages = merging, pages
        refreshed = [self._list, self._armed, self._clear]
        gr_compat.on(self._list.input, self._choose, [self._list], [self._said, self._checked])
        gr_compat.on(
            self._load.click, self._fill, [self._list, *merging.inputs], [*merging.filled, pages.tabs, self._said]
        )
        event = gr_compat.on(self._run.click, self._run_it, [self._list], [self._said, pages.tabs])
        merging.follow_after(event)
        queue = self._host.generators
        check: Any = self._check if queue else self._check_once
        gr_compat.on(self._verify.click, check, [self._list], [self._checked, self._stop], queue=queue)
        gr_compat.on(self._stop.click, self._stop_check, [], [self._checked])
        gr_compat.on(self._clear.click, self._forget, [self._armed], [*refreshed, self._said])
        gr_compat.on(blocks.load, self.refreshed, [self._list], refreshed)
        pages.on_select("history", self.refreshed, [self._list], refreshed)

    def refreshed(self, chosen: Any) -> Updates:
        """The list as it is now; the runs of other pages and processes are in it."""
        return {self._list: gr.update(**self._choices(gr_compat.blank(chosen))), **self._disarmed()}

    def _history(self) -> History:
        return History(self._host.data())

    def _choices(self, chosen: str | None) -> dict[str, Any]:
        entries = self._history().entries()
        known = [entry.id for entry in entries]
        return {
            "choices": [(past.line(entry), entry.id) for entry in entries],
            "value": chosen if chosen in known else None,
        }

    def _entry(self, chosen: Any) -> Entry:
        """The run that is chosen.

        Raises:
            MergeError: none is, or it is forgotten by now.
        """
        id = gr_compat.blank(chosen)
        entry = self._history().get(id) if id else None
        if entry is None:
            raise MergeError("no run is chosen", hint="choose one of the list")
        return entry

    def _choose(self, chosen: Any) -> Updates:
        try:
            return {self._said: cards.facts_card("This run", past.facts(self._entry(chosen))), self._checked: ""}
        except MergeError as error:
            return {self._said: cards.error_card(error)}

    def _fill(self, chosen: Any, *raw: Any) -> Updates:
        try:
            entry = self._entry(chosen)
            filled = self._merging.fill(entry.read_recipe(), raw, f"the run of {past.when(entry)}")
        except MergeError as error:
            return {self._said: cards.error_card(error)}
        return {**filled, **self._pages.turn_to("merge")}

    def _run_it(self, chosen: Any) -> Updates:
        try:
            RUNS.start(past.again(self._entry(chosen).read_recipe(), self._host), self._host)
        except MergeError as error:
            return {self._said: cards.error_card(error)}
        return self._pages.turn_to("merge")

    def _check(self, chosen: Any) -> Iterator[Updates]:
        try:
            job = CHECKS.start(past.result_of(self._entry(chosen), self._host), self._host)
        except MergeError as error:
            yield {self._checked: cards.error_card(error)}
            return
        while not job.wait(POLL_S):
            yield {self._checked: checks.card(job), self._stop: gr.update(interactive=True)}
        yield {self._checked: checks.card(job), self._stop: gr.update(interactive=False)}

    def _check_once(self, chosen: Any) -> Updates:
        """Where an event answers once, it answers when the check is over."""
        last: Updates = {}
        for answer in self._check(chosen):
            last = answer
        return last

    def _stop_check(self) -> Updates:
        CHECKS.stop()
        return {self._checked: cards.note_card("Stopping", ["The check stops at its next tile."])}

    def _forget(self, armed: bool) -> Updates:
        """The first press asks, the second forgets."""
        if not armed:
            return {
                self._armed: True,
                self._clear: gr.update(value="Press again to forget all of them", variant="stop"),
            }
        try:
            self._history().clear()
        except OSError as error:
            said = cards.error_card(MergeError(f"cannot be forgotten: {error.strerror or error}"))
            return {self._said: said, **self._disarmed()}
        return {**self.refreshed(None), self._said: cards.note_card("Forgotten", ["The models are where they were."])}

    def _disarmed(self) -> Updates:
        return {self._armed: False, self._clear: gr.update(value="Forget all of them", variant="secondary")}


def _hint() -> str:
    return cards.note_card("History", ["The last 50 runs, also of earlier days. Choose one."])
