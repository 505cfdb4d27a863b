"""What stands in the form -> a recipe and where its result goes; plain values, no gradio."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from .. import blocks, rule_text
from .. import recipe as recipes
from ..changes import named_loras
from ..errors import MergeError, OutputError, PlanError, RecipeError
from ..execute import Result
from ..fold import Folded
from ..host import Host
from ..kernels.registry import Param, Value
from ..lora import LoraResult
from ..lora_strengths import STRENGTH
from ..merge import named_blocks, run
from ..patterns import split
from ..recipe import Lora, Optimizer, Output, Recipe, Slot
from . import lora_lines
from .task import DEVICE, EXISTS, FOLDER, KEEP_RECIPE, MEASURE, NAME, Field, Task, Values

Made = Result | LoraResult | Folded
OUTPUT_FIELDS = ("save_dtype", "override_dtype", "names")
OPTIMIZER_FIELDS = Optimizer.__struct_fields__
_LONGEST_PROPOSAL = 120


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
        measure: every tensor is measured, for the report.
    """

    task: Task
    recipe: Recipe
    files: Mapping[str, Path]
    target: Path
    exists: str
    keep_recipe: bool
    device: str = "cpu"
    measure: bool = True

    def check(self, host: Host) -> None:
        """Raise what headers and the recipe tell against it.

        Raises:
            MergeError: it cannot run.
        """
        planned = self.run(host, dry_run=True)
        if isinstance(planned, Result):
            with closing(planned.plan) as plan:
                errors = plan.errors()
        else:
            errors = list(planned.problems) if isinstance(planned, Folded) else []
        if errors:
            raise PlanError(errors)

    def run(self, host: Host, **running: Any) -> Made:
        """Carry it out, or with `dry_run=True` only plan it; `running` as in `lib_merge.run`."""
        if self.target.parent.is_dir():
            return self._run(host, self.target, running)
        if running.get("dry_run"):  # planned where there is a folder already
            planned = self._run(host, _nearest(self.target.parent) / self.target.name, running)
            return replace(planned, output=self.target)
        with _made_folder(self.target.parent):
            return self._run(host, self.target, running)

    def _run(self, host: Host, target: Path, running: dict[str, Any]) -> Made:
        return run(
            self.recipe,
            out=target,
            files=self.files,
            overwrite=self.exists == "overwrite",
            number=self.exists == "number",
            keep_recipe=self.keep_recipe,
            device=self.device,
            report=self.measure,
            threads=host.threads,
            cache=host.hashes(),
            **running,
        )


def _nearest(folder: Path) -> Path:
    """The folder itself, or the next one above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


@contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Makes a folder for a result; those that are empty after an error are taken away again.

    Raises:
        OutputError: it cannot be made.
    """
    new = [parent for parent in (folder, *folder.parents) if not os.path.lexists(parent)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "choose another name, or change the permissions"
        raise OutputError(f"the folder cannot be made: {error.strerror}", file=folder, hint=hint) from error
    try:
        yield
    except BaseException:
        for made in new:
            with suppress(OSError):
                made.rmdir()
        raise


def request(task: Task, values: Values, host: Host) -> Request:
    """Read the form.

    Raises:
        FormError: an entry is missing or cannot be used; all of them together.
    """
    wrong: dict[str, MergeError] = {}
    files = _files(task, values, host, wrong)
    loras, lora_files = _loras(task, values, host, files, wrong)
    fields: dict[str, Any] = {}
    for field in task.fields:
        if field.name in READERS and (not field.only_with or task.shows(field, values)):
            with _noted(wrong, field.name):
                fields[field.name] = READERS[field.name](values, task)
    params = _params(task, values, wrong)
    if wrong:
        raise FormError(wrong)
    recipe = _recipe(task, values, files, fields | {"params": params, "loras": loras})
    files = {slot: path for slot, path in files.items() if not slot.startswith("lora")} | lora_files
    with _noted(wrong, NAME):
        target = host.target(task.writes, values.get(FOLDER) or "", file_name(task, values, files))
    if wrong:
        raise FormError(wrong)
    switches = bool(values[KEEP_RECIPE]), values[DEVICE], bool(values[MEASURE])
    return Request(task, recipe, files, target, values[EXISTS], *switches)


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
    files = {}
    for field in task.fields:
        value = values.get(field.name)
        if field.kind != "model" or not task.shows(field, values):
            continue
        if not value and field.needed:
            wrong[field.name] = RecipeError("choose a model")
        elif value:
            with _noted(wrong, field.name):
                files[field.name] = host.models(field.models).resolve(value)
    return files


def _loras(
    task: Task, values: Values, host: Host, files: Mapping[str, Path], wrong: dict[str, MergeError]
) -> tuple[tuple[Lora, ...], dict[str, Path]]:
    """The recipe's LoRAs, from lines or from one list, and slot -> file of each."""
    given: list[tuple[Any, ...]] = [(path,) for slot, path in files.items() if slot.startswith("lora")]
    for field in task.fields:
        if field.kind == "loras":
            with _noted(wrong, field.name):
                given += _lines(field, values, host)
    alpha = None
    with _noted(wrong, "lora_alpha"):
        alpha = optional_number(values.get("lora_alpha"))
    loras, paths = named_loras(given, alpha)
    return loras, {slot: Path(path) for slot, path in paths.items()}


def _lines(field: Field, values: Values, host: Host) -> list[tuple[Any, ...]]:
    lines = lora_lines.read(values[field.name], host.models(field.models))
    if not lines and field.needed:
        raise RecipeError("choose a LoRA")
    return [(line.path, line.strength, line.te_strength, line.blocks) for line in lines]


def _params(task: Task, values: Values, wrong: dict[str, MergeError]) -> dict[str, Value]:
    """Parameters of the method, and those that have a field of their own where it is filled."""
    params: dict[str, Value] = {}
    method = task.method(values)
    for param in method.params if method else ():
        with _noted(wrong, param.name):
            params[param.name] = _number(param, values[param.name])
    for field in task.fields:
        if field.param and task.shows(field, values):
            with _noted(wrong, field.name):
                value = _PARAM_READERS[field.kind](values[field.name])
                params |= {} if value is None or value == field.default else {field.name: value}
    return params


def optional_number(value: Any) -> float | None:
    """A number as typed; None where nothing is.

    Raises:
        RecipeError: it is no finite number.
    """
    if value in (None, ""):
        return None
    try:
        number = float(str(value).strip().replace(",", "."))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{value!r} is no number", hint="type a number, or leave the field empty")
    return number


def _optional_count(value: Any) -> float | None:
    number = optional_number(value)
    if number is not None and (number < 1 or number != int(number)):
        raise RecipeError(f"{value!r} is no whole number of at least 1", hint="type one, or leave the field empty")
    return number


# Kind of a parameter's field -> its value in the recipe; None, or the field's default, where it is left out.
_PARAM_READERS: Mapping[str, Callable[[Any], Value | None]] = {
    "number": optional_number,
    "count": _optional_count,
    "check": bool,
}


def _recipe(task: Task, values: Values, files: Mapping[str, Path], fields: dict[str, Any]) -> Recipe:
    method = task.method(values)
    models: dict[str, Slot | None] = {
        field.name: Slot(file=files[field.name].name) for field in task.fields if field.is_slot and field.name in files
    }
    output = {name: fields.pop(name) for name in OUTPUT_FIELDS if name in fields}
    words = {name: fields.pop(name) for name in OPTIMIZER_FIELDS if name in fields}
    fields |= {"method": method.id} if method else {}
    fields |= {"rules": fields.pop("rule")} if "rule" in fields else {}  # the optimizer has rules of its own
    return Recipe(
        task=task.id,
        models=models,
        vae=Slot(file=files["vae"].name) if "vae" in files else None,
        output=Output(**output),
        optimizer=Optimizer(**words),
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
    method, text = task.method(values), values["blocks"] or ""
    if method:
        return named_blocks(text, method.id)
    return {
        name: {param or STRENGTH: value for param, value in params.items()}
        for name, params in blocks.parse(text).items()
    }


def _read_seed(values: Values, task: Task) -> int:
    text = str(values["seed"] if values["seed"] is not None else "").strip()
    if not re.fullmatch(r"\d{1,20}", text, re.ASCII):
        raise RecipeError("the seed must be a whole number", hint="0 is as good as any")
    return int(text)


def _as_chosen(name: str) -> Callable[[Values, Task], Any]:
    return lambda values, task: values[name]


# Field -> its value in the recipe.
READERS: Mapping[str, Callable[[Values, Task], Any]] = {
    "blocks": _read_blocks,
    "rule": lambda values, task: rule_text.read(values["rule"]),
    "exclude": lambda values, task: tuple(split([values["exclude"] or ""])),
    "discard": lambda values, task: tuple(split([values["discard"] or ""])),
    "glob": lambda values, task: bool(values["glob"]),
    "include_mode": lambda values, task: bool(values["include_mode"]),
    "mismatch": lambda values, task: values["mismatch"],
    "save_dtype": lambda values, task: values["save_dtype"],
    "allow_mixed_prediction": lambda values, task: bool(values["allow_mixed_prediction"]),
    "override_dtype": lambda values, task: bool(values["override_dtype"]),
    "seed": _read_seed,
    "method": lambda values, task: values["method"],
    "names": lambda values, task: values["names"],
    "only": lambda values, task: values["only"] or None,
    **{name: _as_chosen(name) for name in OPTIMIZER_FIELDS},
}


def proposed_name(task: Task, values: Values, files: Mapping[str, Path]) -> str:
    """A name for the result, made of its inputs, the method and its strength: `base+style weighted_sum 0.3`."""
    told = task.named_after or task.slots(values)
    models = [path for slot, path in files.items() if slot in told or slot.startswith("lora")]
    stems = [path.name if path.is_dir() else path.stem for path in models]
    method = task.method(values)
    parts = [task.joined_by.join(stems) or task.id]
    parts += [method.id, f"{float(values[method.strength]):g}"] if method else [task.ending]
    return re.sub(r"[^\w.+ -]", "_", " ".join(parts))[:_LONGEST_PROPOSAL].strip(". ")


def file_name(task: Task, values: Values, files: Mapping[str, Path]) -> str:
    """The name as typed or proposed, with the ending that the result needs."""
    name = (values.get(NAME) or "").strip() or proposed_name(task, values, files)
    base = files.get(task.shaped_by) if task.writes == "checkpoint" else None
    return name if name.endswith(".safetensors") or (base is not None and base.is_dir()) else f"{name}.safetensors"


def recipe_text(request: Request) -> str:
    """The recipe as a file that `lib-merge run` takes."""
    return msgspec.json.format(recipes.to_json(request.recipe), indent=2)
