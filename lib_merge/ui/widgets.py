"""Fields of a form as gradio components, and their values to and from plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..host import Host
from ..kernels.registry import Method, Param
from . import gr_compat
from .task import Field, Task

NONE = "(none)"


@dataclass(frozen=True)
class Widget:
    """One component of the form.

    Attributes:
        name: of the value.
        component: gradio's.
        texts: value -> the text shown for it; empty where values are shown as they are.
    """

    name: str
    component: Any
    texts: Mapping[Any, str]

    def read(self, raw: Any) -> Any:
        """The value of what stands in the component."""
        value = gr_compat.blank(raw)
        return next((key for key, text in self.texts.items() if text == value), value)

    def show(self, value: Any) -> Any:
        """What has to stand in the component for a value."""
        return self.texts.get(value, value)


def element(task: Task, name: str) -> str:
    """The id of a task's element in the page."""
    return f"merge_{task.id}_{name}"


def model_list(task: Task, field: Field, host: Host, value: str | None) -> Widget:
    """A list of the host's models."""
    texts = {} if field.needed else {None: NONE}
    start = NONE if texts and value is None else value
    choices = model_choices(field, host)
    return Widget(
        field.name, gr_compat.choice(choices, start, label=field.label, elem_id=element(task, field.name)), texts
    )


def model_choices(field: Field, host: Host) -> list[str]:
    """What a list of models offers; one that may be left out has an entry for that."""
    names = host.models(field.models).names
    return names if field.needed else [NONE, *names]


def choice(name: str, label: str, choices: Mapping[Any, str], value: Any, elem_id: str, info: str = "") -> Widget:
    """A list of texts that stand for values."""
    component = gr_compat.choice(
        list(choices.values()), choices[value], label=label, info=info or None, elem_id=elem_id
    )
    return Widget(name, component, choices)


def entry(task: Task, field: Field, host: Host, model: str | None = None) -> Widget:
    """The component for a field of any kind; `model` is chosen at first where it lists models."""
    elem_id = element(task, field.name)
    if field.kind == "model":
        return model_list(task, field, host, model)
    if field.kind == "choice":
        texts = {value: text for text, value in field.choices}
        return choice(field.name, field.label, texts, field.default, elem_id, field.help)
    return Widget(field.name, gr_compat.own(_PLAIN[field.kind](field, elem_id)), {})


def _line(field: Field, elem_id: str) -> Any:
    return gr.Textbox(value=field.default, label=field.label, info=field.help or None, elem_id=elem_id)


def _lines(field: Field, elem_id: str) -> Any:
    return gr.Textbox(value=field.default, label=field.label, info=field.help or None, lines=2, elem_id=elem_id)


_PLAIN: Mapping[str, Callable[[Field, str], Any]] = {
    "lines": _lines,
    "loras": _lines,
    # texts, since an emptied number is 0 in some versions
    "number": _line,
    "count": _line,
    "check": lambda field, elem_id: gr.Checkbox(
        value=field.default, label=field.label, info=field.help or None, elem_id=elem_id
    ),
    "whole number": _line,
}


def parameter(task: Task, param: Param, method: Method | None) -> Widget:
    """Slider or check box of a method parameter; shown only where the method has it."""
    elem_id = element(task, f"param_{param.name}")
    mine = next((other for other in (method.params if method else ()) if other.name == param.name), None)
    look = parameter_look(mine or param)
    kind = gr.Checkbox if isinstance(param.default, bool) else gr.Slider
    return Widget(param.name, gr_compat.own(kind(**look, visible=mine is not None, elem_id=elem_id)), {})


def parameter_look(param: Param, value: Any = None) -> dict[str, Any]:
    """Caption, range and value of a parameter's component, as constructor arguments or as an update."""
    value = param.default if value is None else value
    if isinstance(param.default, bool):
        return {"value": value, "label": f"{param.name}: {param.meaning}"}
    low, high = param.slider
    return {
        "value": value,
        "label": param.name,
        "info": f"{param.meaning} ({param.range})",
        "minimum": min(low, value),
        "maximum": max(high, value),
        "step": 0.01,
    }
