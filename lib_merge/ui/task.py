"""What a task of the tab is: its fields, methods and words, as data; no gradio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..host import Kind
from ..kernels.registry import Method, Param
from ..recipe import Task as TaskId

FieldKind = Literal["model", "loras", "choice", "lines", "check", "whole number", "number", "count"]
Values = Mapping[str, Any]

# Fields of the result, the same for every task.
NAME, FOLDER, EXISTS, KEEP_RECIPE, DEVICE = "name", "folder", "exists", "keep_recipe", "device"
MEASURE = "measure"
EXISTS_CHOICES = (("add a number", "number"), ("stop", "stop"), ("overwrite it", "overwrite"))
DEVICES = {"cpu": "CPU", "cuda": "GPU (cuda): the host's models leave it meanwhile"}
FIRST_SCREEN, MORE = "", "More options"


@dataclass(frozen=True)
class Field:
    """One entry of a task's form.

    Attributes:
        name: of the slot or the recipe's field that it fills.
        label: for people; no two in a task are alike.
        kind: how it is entered. `number` and `count`, a whole number of at least 1, may stay empty; `loras` are lines.
        help: one line beside it.
        default: value to start with.
        choices: (text, value), of a `choice`.
        models: which list of models, of a `model`.
        section: the closed box it stands in.
        needed: the task cannot do without it; of a `model`.
        param: it fills a parameter of the recipe, unless it is empty or off.
        only_with: methods that it belongs to, where they are a field of their own; empty for all.
    """

    name: str
    label: str
    kind: FieldKind
    help: str = ""
    default: Any = ""
    choices: tuple[tuple[str, str], ...] = ()
    models: Kind = "checkpoint"
    section: str = MORE
    needed: bool = False
    param: bool = False
    only_with: tuple[str, ...] = ()

    @property
    def is_slot(self) -> bool:
        """It is a model that the recipe knows by a name in capitals."""
        return self.kind == "model" and self.name.isupper()


@dataclass(frozen=True)
class Task:
    """One thing that the tab does: the form of one kind of recipe.

    Attributes:
        id: the recipe's task.
        label: for people.
        fields: the form, in reading order. Models named in capitals are slots of the recipe.
        methods: to choose from; none for tasks without, and for those with a field of that name.
        first_method: id of the one to start with.
        writes: which list of models the result belongs to.
        verb: on the button that starts it.
        ending: last word of the names that are proposed where there is no method.
        joined_by: stands between the inputs in such a name.
        named_after: inputs that such a name tells; empty for all that are needed.
        shaped_by: the model whose container, file or folder, a checkpoint that it makes has.
        gpu: a checkpoint may be computed on a GPU.
    """

    id: TaskId
    label: str
    fields: tuple[Field, ...]
    methods: tuple[Method, ...] = ()
    first_method: str = ""
    writes: Kind = "checkpoint"
    verb: str = "Merge"
    ending: str = ""
    joined_by: str = "+"
    named_after: tuple[str, ...] = ()
    shaped_by: str = "A"
    gpu: bool = True

    def field(self, name: str) -> Field:
        """The field of that name."""
        return next(field for field in self.fields if field.name == name)

    def method(self, values: Values) -> Method | None:
        """The method that is chosen; None in a task without methods."""
        return next((method for method in self.methods if method.id == values.get("method")), None)

    def slots(self, values: Values) -> tuple[str, ...]:
        """The models that are needed with the method that is chosen."""
        method = self.method(values)
        return method.inputs if method else tuple(field.name for field in self.fields if field.needed)

    def shows(self, field: Field, values: Values) -> bool:
        """False for a field that the method that is chosen does not take."""
        if field.only_with:
            return values.get("method") in field.only_with
        return not field.needed or field.name in self.slots(values)

    @property
    def params(self) -> dict[str, Param]:
        """Name -> a parameter of that name, of all methods together: alpha, beta, gamma … as the methods order them."""
        places: dict[str, tuple[int, Param]] = {}
        for method in self.methods:
            for place, param in enumerate(method.params):
                places[param.name] = max(places.get(param.name, (0, param)), (place, param), key=lambda pair: pair[0])
        return {name: param for name, (_, param) in sorted(places.items(), key=lambda item: item[1][0])}

    def first_values(self) -> dict[str, Any]:
        """What stands in the form at the beginning."""
        values = {field.name: field.default for field in self.fields}
        if first := next((method for method in self.methods if method.id == self.first_method), None):
            values |= {"method": first.id} | {param.name: param.default for param in first.params}
        return values | {NAME: "", FOLDER: "", EXISTS: "number", KEEP_RECIPE: True, DEVICE: "cpu", MEASURE: True}
