"""The widgets of one task's form: models with what their headers say, method with its own captions, closed boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import gradio as gr

from ..blocks import SHAPES
from ..errors import MergeError
from ..host import Host
from . import cards, gr_compat, lora_lines, matches, widgets
from .block_look import shape_text
from .facts import Facts, facts, tensor_names
from .task import FIRST_SCREEN, NAME, Field, Task
from .widgets import Widget, element

Updates = dict[Any, Any]


class TaskForm:
    """The widgets of one task; built inside an open gradio context."""

    def __init__(self, task: Task, host: Host) -> None:
        self.task, self._host = task, host
        self.widgets: dict[str, Widget] = {}
        self.notes: dict[str, Any] = {}
        self.boxes: dict[str, Any] = {}
        self.adders: list[tuple[Any, Any]] = []
        self.shapers: list[tuple[Any, Any]] = []
        first = [field for field in task.fields if field.section == FIRST_SCREEN]
        values = task.first_values()
        for field in first:
            self._entry(field, values)
        if task.methods:
            self._method(values)
        rest = [field for field in task.fields if field not in first]
        for section in dict.fromkeys([field.section for field in rest]):
            self._section(section, [field for field in rest if field.section == section])

    def _entry(self, field: Field, values: dict[str, Any]) -> None:
        """One entry of the first screen, in a box that is shown where the method takes it."""
        with gr.Column(visible=self.task.shows(field, values), elem_id=element(self.task, f"box_{field.name}")) as box:
            start = self._base() if field.name == "A" and field.needed else None
            self._widget(field, start)
        self.boxes[field.name] = box

    def _base(self) -> str | None:
        """The host's checkpoint, else the first of the list."""
        models, loaded = self._host.models("checkpoint"), self._host.loaded()
        return (models.name_of(loaded) if loaded else None) or next(iter(models.names), None)

    def _method(self, values: dict[str, Any]) -> None:
        method = self.task.method(values)
        texts = {other.id: other.label for other in self.task.methods}
        self._add(widgets.choice("method", "Method", texts, values["method"], element(self.task, "method")))
        self.method_text = gr_compat.html(
            cards.method_text(method) if method else "", close=True, elem_id=element(self.task, "method_text")
        )
        for param in self.task.params.values():
            self._add(widgets.parameter(self.task, param, method))
        self._note("params")

    def _section(self, title: str, fields: Sequence[Field]) -> None:
        name = title.lower().replace(" ", "_")
        with gr.Accordion(title, open=False, elem_id=element(self.task, f"section_{name}")):
            for field in fields:
                self._widget(field, None)
            if self.patterns([field.name for field in fields]):
                self._note("matches")

    def _widget(self, field: Field, start: str | None) -> None:
        """The component of a field and the line below it; LoRAs are chosen from a list, and become lines."""
        if field.kind == "loras":
            offered = replace(field, name="add_lora", label="Add a LoRA", needed=True)
            adder = widgets.model_list(self.task, offered, self._host, None)
        self._add(widgets.entry(self.task, field, self._host, start))
        if field.name == "blocks":
            self.shapers.append((self._shapes(), self.widgets[field.name].component))
        if field.kind == "loras":
            self.adders.append((adder.component, self.widgets[field.name].component))
        self._note(field.name)

    def _shapes(self) -> Any:
        """The list that writes a shape into the block weights, for the layers of model A; what counts is the text."""
        label = "Write a shape, for the layers of the model above"
        return gr_compat.choice(list(SHAPES), None, label=label, elem_id=element(self.task, "shape_blocks"))

    def _add(self, widget: Widget) -> None:
        self.widgets[widget.name] = widget

    def _note(self, name: str) -> None:
        self.notes[name] = gr_compat.html(
            cards.help_note(self._help(name)), close=True, elem_id=element(self.task, f"note_{name}")
        )

    def label(self, name: str) -> str:
        """What people call an entry."""
        labels = {field.name: field.label for field in self.task.fields} | {NAME: "Name of the result"}
        return labels.get(name, name)

    def _help(self, name: str) -> str:
        """What stands below a field; entries other than models show it above themselves."""
        return next((field.help for field in self.task.fields if field.name == name and field.kind == "model"), "")

    def choose_method(self, values: Mapping[str, Any]) -> Updates:
        """Captions, ranges and defaults of the method that was chosen; models that it does not need disappear."""
        method = self.task.method(values)
        if method is None:
            return self._method_look(values)
        return {
            **self._method_look(values),
            **{
                self.widgets[param.name].component: gr.update(**widgets.parameter_look(param), visible=True)
                for param in method.params
            },
        }

    def _method_look(self, values: Mapping[str, Any]) -> Updates:
        method = self.task.method(values)
        updates: Updates = {
            box: gr.update(visible=self.task.shows(self.task.field(name), values)) for name, box in self.boxes.items()
        }
        if method is None:
            return updates
        names = {param.name for param in method.params}
        updates[self.method_text] = cards.method_text(method)
        updates |= {
            self.widgets[name].component: gr.update(visible=False) for name in self.task.params if name not in names
        }
        return updates

    def show(self, values: Mapping[str, Any]) -> Updates:
        """Every widget with the values given."""
        method = self.task.method(values)
        updates: Updates = {
            widget.component: gr.update(value=widget.show(values[name]))
            for name, widget in self.widgets.items()
            if name in values
        }
        if method:
            for param in method.params:
                look = widgets.parameter_look(param, values[param.name])
                updates[self.widgets[param.name].component] = gr.update(**look, visible=True)
        return updates | self._method_look(values)

    def models(self) -> list[Any]:
        """The components that list models."""
        lists = [self.widgets[field.name].component for field in self.task.fields if field.kind == "model"]
        return lists + [adder for adder, _ in self.adders]

    def looks(self) -> list[Any]:
        """Everything that `choose_method` may update."""
        params = [self.widgets[name].component for name in self.task.params]
        return [*([self.method_text] if self.task.methods else []), *self.boxes.values(), *params]

    def plain_notes(self) -> Updates:
        """Every note as it is at first."""
        return {note: cards.help_note(self._help(name)) for name, note in self.notes.items()}

    def facts(self, values: Mapping[str, Any]) -> dict[str, Facts]:
        """Field -> what the header says, of every model that is chosen, needed and readable."""
        found = {}
        for field in self.task.fields:
            if field.kind == "model" and values.get(field.name) and self.task.shows(field, values):
                with suppress(MergeError, OSError):  # the plan says what is wrong with it
                    found[field.name] = facts(self._host.models(field.models).resolve(values[field.name]))
        for field in self.task.fields:
            if field.kind == "loras":
                with suppress(MergeError, OSError):
                    lines = lora_lines.read(values[field.name], self._host.models(field.models))
                    found |= {f"lora{number}": facts(line.path) for number, line in enumerate(lines, 1)}
        return found

    @staticmethod
    def patterns(names: Iterable[str]) -> list[str]:
        """Those of the entries that say which tensors a rule or a filter reaches."""
        return [name for name in names if name in (matches.RULES, *matches.FILTERS, "include_mode", "glob")]

    def matches(self, values: Mapping[str, Any]) -> str:
        """What each rule and filter reaches in the model that stands in A."""
        with suppress(MergeError, OSError):  # the plan says what is wrong with it
            if values.get("A"):
                return matches.matches_note(values, tensor_names(self._host.models("checkpoint").resolve(values["A"])))
        return ""

    def shape(self, chosen: Any, base: Any) -> str:
        """Block weights of that shape, for the model that stands in A."""
        name, model = self.widgets["A"].read(base), None
        with suppress(MergeError, OSError):  # the plan says what is wrong with it
            model = facts(self._host.models("checkpoint").resolve(name)) if name else None
        return shape_text(chosen, model)

    def gone(self, values: Mapping[str, Any]) -> list[str]:
        """Fields whose model is not in the list any more."""
        return [
            field.name
            for field in self.task.fields
            if field.kind == "model"
            and values.get(field.name)
            and values[field.name] not in self._host.models(field.models).names
        ]

    def refreshed(self, values: Mapping[str, Any]) -> Updates:
        """The lists of models as they are now; a value that is gone is taken out."""
        gone = self.gone(values)
        updates: Updates = {adder: gr.update(choices=self._host.models("lora").names) for adder, _ in self.adders}
        for field in self.task.fields:
            if field.kind == "model":
                widget = self.widgets[field.name]
                emptied = {"value": widget.show(None)} if field.name in gone else {}
                updates[widget.component] = gr.update(choices=widgets.model_choices(field, self._host), **emptied)
        return updates
