"""What stands in the form <-> a recipe; plain values on both sides, no gradio."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import blocks
from .. import recipe as recipes
from ..errors import MergeError, RecipeError
from ..execute import Result
from ..host import Host, Kind
from ..kernels.registry import Method, Param, Value
from ..merge import named_blocks, run
from ..patterns import split
from ..recipe import Output, Recipe, Slot
from ..recipe import Task as TaskId

FieldKind = Literal["model", "choice", "lines", "check", "whole number"]
Values = Mapping[str, Any]

# Fields of the result, the same for every task.
NAME, FOLDER, EXISTS, KEEP_RECIPE, DEVICE = "name", "folder", "exists", "keep_recipe", "device"
EXISTS_CHOICES = (("add a number", "number"), ("stop", "stop"), ("overwrite it", "overwrite"))
DEVICES = {"cpu": "CPU", "cuda": "GPU (cuda): the host's models leave it meanwhile"}
_LONGEST_PROPOSAL = 120


@dataclass(frozen=True)
class Field:
    """One entry of a task's form.

    Attributes:
        name: of the slot or the recipe's field that it fills.
        label: for people; no two in a task are alike.
        kind: how it is entered.
        help: one line beside it.
        default: value to start with.
        choices: (text, value), of a `choice`.
        models: which list of models, of a `model`.
        section: the closed box it stands in; empty for the first screen, which is for models that are always needed.
    """

    name: str
    label: str
    kind: FieldKind
    help: str = ""
    default: Any = ""
    choices: tuple[tuple[str, str], ...] = ()
    models: Kind = "checkpoint"
    section: str = ""

    @property
    def is_slot(self) -> bool:
        """True for a model that stands in the recipe's slots; another model may be left out."""
        return self.kind == "model" and len(self.name) == 1


@dataclass(frozen=True)
class Task:
    """One thing that the tab does: the form of one kind of recipe.

    Attributes:
        id: the recipe's task.
        label: for people.
        fields: the form, in reading order. Models named by one capital letter are slots of the recipe.
        methods: to choose from; none for tasks without.
        first_method: id of the one to start with.
        writes: which list of models the result belongs to.
    """

    id: TaskId
    label: str
    fields: tuple[Field, ...]
    methods: tuple[Method, ...] = ()
    first_method: str = ""
    writes: Kind = "checkpoint"

    def field(self, name: str) -> Field:
        """The field of that name."""
        return next(field for field in self.fields if field.name == name)

    def method(self, values: Values) -> Method | None:
        """The method that is chosen; None in a task without methods."""
        return next((method for method in self.methods if method.id == values.get("method")), None)

    def slots(self, values: Values) -> tuple[str, ...]:
        """The model slots that are needed with the method that is chosen."""
        method = self.method(values)
        return method.inputs if method else tuple(field.name for field in self.fields if field.is_slot)

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
        return values | {NAME: "", FOLDER: "", EXISTS: "number", KEEP_RECIPE: True, DEVICE: "cpu"}


class FormError(MergeError):
    """Entries that cannot be used; `fields` says by name of the field what is wrong with each."""

    def __init__(self, fields: Mapping[str, MergeError]) -> None:
        self.fields = dict(fields)
        first = next(iter(self.fields.values()))
        super().__init__(first.what, file=first.file, tensor=first.tensor, hint=first.hint)


@dataclass(frozen=True)
class Request:
    """What the form asks for, with the files of this machine.

    Attributes:
        task: which one.
        recipe: what to do.
        files: slot -> file or folder.
        target: where the result goes.
        exists: what happens where it exists: number, stop or overwrite.
        keep_recipe: the result holds its recipe.
        device: where methods are computed: cpu or cuda.
    """

    task: Task
    recipe: Recipe
    files: Mapping[str, Path]
    target: Path
    exists: str
    keep_recipe: bool
    device: str = "cpu"

    def run(self, host: Host, **running: Any) -> Result:
        """Carry it out, or with `dry_run=True` only plan it; `running` as in `lib_merge.run`."""
        made = run(
            self.recipe,
            out=self.target,
            files=self.files,
            overwrite=self.exists == "overwrite",
            number=self.exists == "number",
            keep_recipe=self.keep_recipe,
            device=self.device,
            threads=host.threads,
            cache=host.hashes(),
            **running,
        )
        assert isinstance(made, Result)  # no task writes a LoRA yet: its result has other fields
        return made


def request(task: Task, values: Values, host: Host) -> Request:
    """Read the form.

    Raises:
        FormError: an entry is missing or cannot be used; all of them together.
    """
    wrong: dict[str, MergeError] = {}
    files = _files(task, values, host, wrong)
    fields: dict[str, Any] = {}
    params: dict[str, Value] = {}
    for field in task.fields:
        if field.name in _READERS:
            with _noted(wrong, field.name):
                fields[field.name] = _READERS[field.name](values, task)
    method = task.method(values)
    for param in method.params if method else ():
        with _noted(wrong, param.name):
            params[param.name] = _number(param, values[param.name])
    if wrong:
        raise FormError(wrong)
    recipe = _recipe(task, values, files, fields | ({"params": params} if params else {}))
    with _noted(wrong, NAME):
        target = host.target(task.writes, values.get(FOLDER) or "", _file_name(task, values, files))
    if wrong:
        raise FormError(wrong)
    return Request(task, recipe, files, target, values[EXISTS], bool(values[KEEP_RECIPE]), values[DEVICE])


class _noted(suppress):  # noqa: N801 - reads as a verb, like suppress itself
    """Goes on after a `MergeError`, which is noted under the field's name."""

    def __init__(self, wrong: dict[str, MergeError], name: str) -> None:
        super().__init__(MergeError)
        self._wrong, self._name = wrong, name

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, MergeError):
            self._wrong[self._name] = error
        return bool(super().__exit__(kind, error, trace))


def _files(task: Task, values: Values, host: Host, wrong: dict[str, MergeError]) -> dict[str, Path]:
    """Slot -> file of every model that is needed or chosen."""
    needed, files = task.slots(values), {}
    for field in task.fields:
        value = values.get(field.name)
        if field.kind != "model" or (field.is_slot and field.name not in needed):
            continue
        if not value and field.name in needed:
            wrong[field.name] = RecipeError("choose a model")
        elif value:
            with _noted(wrong, field.name):
                files[field.name] = host.models(field.models).resolve(value)
    return files


def _recipe(task: Task, values: Values, files: Mapping[str, Path], fields: dict[str, Any]) -> Recipe:
    method = task.method(values)
    models: dict[str, Slot | None] = {slot: Slot(file=files[slot].name) for slot in task.slots(values)}
    output = {name: fields.pop(name) for name in ("save_dtype", "override_dtype") if name in fields}
    return Recipe(
        task=task.id,
        method=method.id if method else None,
        models=models,
        vae=Slot(file=files["vae"].name) if "vae" in files else None,
        output=Output(**output),
        **fields,
    )


def _number(param: Param, value: Any) -> Value:
    """The value of a parameter; its limits are the plan's to check.

    Raises:
        RecipeError: the entry is empty or no number.
    """
    if isinstance(param.default, bool):
        return bool(value)
    if not isinstance(value, (int, float)):
        raise RecipeError("type a number", hint=param.range)
    return float(value)


def _read_blocks(values: Values, task: Task) -> dict[str, dict[str, Value]]:
    method = task.method(values)
    return named_blocks(values["blocks"] or "", method.id) if method else {}


def _read_seed(values: Values, task: Task) -> int:
    value = values["seed"]
    if not isinstance(value, (int, float)) or not math.isfinite(value) or int(value) != value:
        raise RecipeError("the seed must be a whole number")
    return int(value)


# Field -> its value in the recipe.
_READERS: Mapping[str, Callable[[Values, Task], Any]] = {
    "blocks": _read_blocks,
    "exclude": lambda values, task: tuple(split([values["exclude"] or ""])),
    "discard": lambda values, task: tuple(split([values["discard"] or ""])),
    "glob": lambda values, task: bool(values["glob"]),
    "include_mode": lambda values, task: bool(values["include_mode"]),
    "mismatch": lambda values, task: values["mismatch"],
    "save_dtype": lambda values, task: values["save_dtype"],
    "allow_mixed_prediction": lambda values, task: bool(values["allow_mixed_prediction"]),
    "override_dtype": lambda values, task: bool(values["override_dtype"]),
    "seed": _read_seed,
}


def proposed_name(task: Task, values: Values, files: Mapping[str, Path]) -> str:
    """A name for the result, made of its inputs, the method and its strength: `base+style weighted_sum 0.3`."""
    models = [path for slot, path in sorted(files.items()) if len(slot) == 1]
    stems = [path.name if path.is_dir() else path.stem for path in models]
    method = task.method(values)
    parts = ["+".join(stems) or task.id]
    if method:
        parts += [method.id, f"{float(values[method.strength]):g}"]
    return re.sub(r"[^\w.+ -]", "_", " ".join(parts))[:_LONGEST_PROPOSAL].strip(". ")


def _file_name(task: Task, values: Values, files: Mapping[str, Path]) -> str:
    """The name as typed or proposed, with the ending that the result needs."""
    name = (values.get(NAME) or "").strip() or proposed_name(task, values, files)
    base = files.get("A")
    return name if name.endswith(".safetensors") or (base is not None and base.is_dir()) else f"{name}.safetensors"


def values_of(task: Task, recipe: Recipe, host: Host) -> dict[str, Any]:
    """What stands in the form for a recipe; models by the names of this host's lists, None where they are not there.

    Raises:
        RecipeError: the recipe holds something that the form cannot show.
    """
    _refuse_unshown(task, recipe)
    method = next((method for method in task.methods if method.id == recipe.method), None)
    if recipe.method and method is None:
        raise RecipeError(f"{recipe.method} is no method of this form", hint="run the recipe with lib-merge run")
    values = task.first_values()
    if method:
        values |= {"method": method.id, **method.check(recipe.params)}
    for field in task.fields:
        if field.kind == "model":
            slot = recipe.vae if field.name == "vae" else recipe.models.get(field.name)
            values[field.name] = _listed(host, field, slot)
    shown = msgspec.structs.asdict(recipe) | msgspec.structs.asdict(recipe.output)
    for field in task.fields:
        if field.name in _WRITERS:
            values[field.name] = _WRITERS[field.name](shown[field.name])
        elif field.kind != "model":
            values[field.name] = shown[field.name]
    return values


# Recipe's value -> what stands in the field, where the two differ.
_WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "blocks": blocks.format,
    "exclude": "\n".join,
    "discard": "\n".join,
}


def _refuse_unshown(task: Task, recipe: Recipe) -> None:
    if recipe.task != task.id:
        raise RecipeError(f"this is a recipe of the task {recipe.task}, not {task.id}")
    known = {field.name for field in task.fields} | {"lib_merge", "task", "method", "params", "models", "output", "vae"}
    plain = Recipe()
    hidden = [name for name in recipe.__struct_fields__ if getattr(recipe, name) != getattr(plain, name)]
    hidden = [name for name in hidden if name not in known]
    hidden += ["metadata"] if recipe.output.metadata else []
    hidden += [f"models.{name}" for name, slot in recipe.models.items() if slot is not None and slot.recipe is not None]
    if hidden:
        raise RecipeError(
            f"this form cannot show the recipe's {', '.join(hidden)}", hint="run the recipe with lib-merge run"
        )


def _listed(host: Host, field: Field, slot: Slot | None) -> str | None:
    """The name under which this host lists the model that a recipe means."""
    if slot is None or slot.file is None:
        return None
    models = host.models(field.models)
    cache = host.hashes()
    same = [name for name in models.names if models.resolve(name).name == slot.file]
    if slot.sha256:
        known = [name for name in models.names if cache.get(models.resolve(name)) == slot.sha256]
        return next(iter(known), same[0] if len(same) == 1 else None)
    return same[0] if len(same) == 1 else None


def recipe_text(request: Request) -> str:
    """The recipe as a file that `lib-merge run` takes."""
    return msgspec.json.format(recipes.to_json(request.recipe), indent=2)
