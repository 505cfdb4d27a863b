"""The page of recipes: presets to choose from, one text that all its buttons work on, and ways in and out."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr

from ..errors import MergeError, RecipeError
from ..host import Host, Kind
from ..presets import (
    SUFFIX,
    Presets,
    checked_name,
    described,
    from_file,
    from_text,
    opened,
    readable,
    shared_text,
)
from ..recipe import from_json
from . import cards, gr_compat, past
from .merge_page import MergePage
from .pages import Pages
from .runs import RUNS

Updates = dict[Any, Any]
_SOURCES: tuple[Kind, ...] = ("checkpoint", "lora")
_SHIPPED = "shipped"
_TEXT_FILES = (SUFFIX, ".txt")


class RecipesPage:
    """Builds the page inside an open gradio context, and answers its events.

    Args:
        host: where presets lie, and models.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        with gr_compat.row():
            with gr.Column(scale=2, min_width=240):
                self._list = gr_compat.own(gr.Radio(**self._choices(None), label="Recipes", elem_id="merge_presets"))
                self._delete = gr_compat.button("Delete", size="sm", elem_id="merge_preset_delete")
                self._armed = gr.State("")  # the preset that a second press on Delete deletes
            with gr.Column(scale=3, min_width=260):
                self._build_text()

    def _build_text(self) -> None:
        self._said = gr_compat.html(_hint(), elem_id="merge_preset_said")
        with gr_compat.row():
            self._load = gr_compat.button(
                "Load into the form", variant="primary", min_width=80, elem_id="merge_preset_load"
            )
            self._run = gr_compat.button("Run it now", min_width=80, elem_id="merge_preset_run")
        self._text = gr_compat.own(gr.Textbox(label="Recipe", lines=12, max_lines=24, elem_id="merge_preset_text"))
        self._name = gr_compat.own(gr.Textbox(label="Name to save it under", elem_id="merge_preset_name"))
        with gr_compat.row():
            self._save = gr_compat.button("Save", min_width=80, elem_id="merge_preset_save")
            self._open = gr.Checkbox(value=False, label="Without its models", elem_id="merge_preset_open")
            self._replace = gr.Checkbox(value=False, label="Replace mine of that name", elem_id="merge_preset_replace")
            gr_compat.own(self._open), gr_compat.own(self._replace)
        self._take = gr_compat.button("Take what the form says", size="sm", elem_id="merge_preset_take")
        self._build_ways()

    def _build_ways(self) -> None:
        with gr.Accordion("Import", open=False, elem_id="merge_section_import"):
            self._pasted = gr_compat.own(
                gr.Textbox(label="Paste JSON or shared text", lines=3, elem_id="merge_preset_paste")
            )
            self._paste = gr_compat.button("Take it", size="sm", elem_id="merge_preset_paste_take")
            self._model = gr_compat.choice(
                self._models(), None, label="Or from a merged model", elem_id="merge_preset_model"
            )
            self._file = gr.File(
                label="Or from a .json file", file_types=list(_TEXT_FILES), elem_id="merge_preset_file"
            )
        with gr.Accordion("Export", open=False, elem_id="merge_section_export"):
            self._export = gr_compat.button("Make them from the recipe", size="sm", elem_id="merge_preset_export")
            self._shared = gr_compat.own(
                gr.Textbox(
                    label="Text for a link or a message", lines=2, interactive=False, elem_id="merge_preset_word"
                )
            )
            self._download = gr.File(label="File", interactive=False, visible=False, elem_id="merge_preset_download")

    # What happens

    def listen(self, blocks: Any, merging: MergePage, pages: Pages) -> None:
        """Connect the events.

        Args:
            blocks: the Blocks the page lies in.
            merging: whose form is read and filled.
            pages: to turn to that page.
        """
        self._merging, self._pages = merging, pages
        shown = [self._text, self._name, self._said, self._armed, self._delete]
        gr_compat.on(self._list.input, self._choose, [self._list], shown)
        gr_compat.on(self._paste.click, self._take_pasted, [self._pasted], shown)
        gr_compat.on(self._model.input, self._take_model, [self._model], [*shown, self._model])
        gr_compat.on(self._file.upload, self._take_file, [self._file], shown)
        gr_compat.on(self._take.click, self._take_form, merging.inputs, shown)
        saved = [self._text, self._name, self._open, self._replace]
        gr_compat.on(self._save.click, self._keep, saved, [self._list, *shown])
        gr_compat.on(self._delete.click, self._remove, [self._list, self._armed], [self._list, *shown])
        gr_compat.on(
            self._export.click, self._export_it, [self._text, self._name], [self._shared, self._download, *shown]
        )
        gr_compat.on(
            self._load.click,
            self._fill,
            [self._text, self._name, *merging.inputs],
            [*merging.filled, pages.tabs, self._said],
        )
        event = gr_compat.on(self._run.click, self._run_it, [self._text], [self._said, pages.tabs])
        merging.follow_after(event)
        gr_compat.on(blocks.load, self.refreshed, [self._list], [self._list, self._model])
        pages.on_select("recipes", self.refreshed, [self._list], [self._list, self._model])

    def refreshed(self, chosen: Any) -> Updates:
        """The lists as the folders are now."""
        self._host.look_again()
        return {
            self._list: gr.update(**self._choices(gr_compat.blank(chosen))),
            self._model: gr.update(choices=self._models()),
        }

    def _presets(self) -> Presets:
        return Presets(self._host.data() / "presets")

    def _choices(self, chosen: str | None) -> dict[str, Any]:
        known = self._presets().all()
        texts = [(name if preset.own else f"{name} ({_SHIPPED})", name) for name, preset in known.items()]
        return {"choices": texts, "value": chosen if chosen in known else None}

    def _models(self) -> list[str]:
        return [name for kind in _SOURCES for name in self._host.models(kind).names]

    def _choose(self, name: Any) -> Updates:
        try:
            recipe = self._presets().load(gr_compat.blank(name) or "")
        except MergeError as error:
            return self._refused(error)
        return self._shows(readable(recipe), name)

    def _take_pasted(self, text: str) -> Updates:
        try:
            return self._shows(readable(from_text(text or "")), "")
        except MergeError as error:
            return self._refused(error)

    def _take_model(self, name: Any) -> Updates:
        name = gr_compat.blank(name)
        if name is None:
            return {self._said: _hint()}
        try:
            kind = next((kind for kind in _SOURCES if name in self._host.models(kind).names), _SOURCES[0])
            path = self._host.models(kind).resolve(name)
            notes: list[str] = []
            recipe = from_file(path, notes.append)
            shown = self._shows(readable(recipe), _plain_name(path.stem))
            return {**shown, self._said: _about(recipe, notes), self._model: gr.update(value=None)}
        except MergeError as error:
            return self._refused(error)

    def _take_file(self, file: Any) -> Updates:
        path = getattr(file, "name", file)
        if not path:
            return {self._said: _hint()}
        try:
            if Path(path).suffix.lower() not in _TEXT_FILES:
                raise RecipeError("this is no file of text", hint=f"choose one that ends in {' or '.join(_TEXT_FILES)}")
            return self._shows(readable(from_file(Path(path))), _plain_name(Path(path).stem))
        except MergeError as error:
            return self._refused(MergeError(error.what, hint=error.hint))  # the path is a temporary one of ours

    def _take_form(self, *raw: Any) -> Updates:
        try:
            return self._shows(readable(self._merging.recipe_of(raw)), "")
        except MergeError as error:
            return self._refused(error)

    def _keep(self, text: str, name: str, open_: bool, replace: bool) -> Updates:
        try:
            recipe = from_json(text or "")
            recipe = opened(recipe) if open_ else recipe
            self._presets().save((name or "").strip(), recipe, overwrite=bool(replace))
        except MergeError as error:
            return self._refused(error)
        name = name.strip()
        note = cards.note_card("Saved", [name, described(recipe)], tone="good")
        return {self._list: gr.update(**self._choices(name)), **self._shows(readable(recipe), name), self._said: note}

    def _remove(self, name: Any, armed: str) -> Updates:
        """The first press asks, the second deletes."""
        try:
            preset = self._presets().get(gr_compat.blank(name) or "")
            if not preset.own:
                self._presets().delete(preset.name)  # says why not
            if armed != preset.name:
                return {
                    self._armed: preset.name,
                    self._delete: gr.update(value="Press again to delete it", variant="stop"),
                    self._said: cards.note_card("Delete it?", [preset.name, "Press the button once more."]),
                }
            self._presets().delete(preset.name)
        except MergeError as error:
            return self._refused(error)
        note = cards.note_card("Deleted", [f"{preset.name}; its text is still here, to be saved again."])
        return {self._list: gr.update(**self._choices(None)), **self._disarmed(), self._said: note}

    def _export_it(self, text: str, name: str) -> Updates:
        try:
            recipe = from_json(text or "")
            folder = Path(tempfile.mkdtemp(prefix="lib_merge-"))
            path = folder / f"{_plain_name(name) or 'recipe'}{SUFFIX}"
            path.write_text(readable(recipe), "utf-8", newline="\n")
        except MergeError as error:
            return self._refused(error)
        return {self._shared: shared_text(recipe), self._download: gr.update(value=str(path), visible=True)}

    def _fill(self, text: str, name: str, *raw: Any) -> Updates:
        try:
            recipe = from_json(text or "")
            filled = self._merging.fill(recipe, raw, (name or "").strip() or "the recipe")
        except MergeError as error:
            return self._refused(error, only=True)
        return {**filled, **self._pages.turn_to("merge"), self._said: _about(recipe)}

    def _run_it(self, text: str) -> Updates:
        try:
            RUNS.start(past.again(from_json(text or ""), self._host), self._host)
        except MergeError as error:
            return self._refused(error, only=True)
        return {
            self._said: cards.note_card("Begun", ["The Merge page shows how it goes on."]),
            **self._pages.turn_to("merge"),
        }

    def _shows(self, text: str, name: str) -> Updates:
        return {self._text: text, self._name: name, self._said: _about(from_json(text)), **self._disarmed()}

    def _disarmed(self) -> Updates:
        return {self._armed: "", self._delete: gr.update(value="Delete", variant="secondary")}

    def _refused(self, error: MergeError, only: bool = False) -> Updates:
        card = {self._said: cards.error_card(error)}
        return card if only else {**card, **self._disarmed()}


def _hint() -> str:
    return cards.note_card("Recipes", ["Choose one, import one, or take what the form says."])


def _about(recipe: Any, notes: Sequence[str] = ()) -> str:
    return cards.note_card("This recipe", [described(recipe), *notes])


def _plain_name(text: str) -> str:
    """A name that a preset can have, near the text; empty where nothing of it can stay."""
    name = re.sub(r"[^\w.+() -]", "_", text or "")[:60].strip(" .")
    with suppress(MergeError):
        return checked_name(name)
    return ""
