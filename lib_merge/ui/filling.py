"""A recipe -> what stands in the form; plain values, no gradio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from .. import blocks, rule_text
from ..errors import RecipeError
from ..host import Host, Kind
from ..recipe import Optimizer, Output, Recipe, Slot
from . import lora_lines
from .form import OPTIMIZER_FIELDS, OUTPUT_FIELDS
from .task import Task

_ELSEWHERE = "run the recipe with lib-merge run"


def values_of(task: Task, recipe: Recipe, host: Host) -> dict[str, Any]:
    """What stands in the form for a recipe; models by the names of this host's lists, None where they are not there.

    Raises:
        RecipeError: the recipe holds something that the form cannot show.
    """
    _refuse_unshown(task, recipe)
    method = next((method for method in task.methods if method.id == recipe.method), None)
    values = task.first_values()
    if method:
        values |= {"method": method.id, **method.check(recipe.params)}
    shown: dict[str, Any] = {}
    for part in (recipe, recipe.output, recipe.optimizer):
        shown |= msgspec.structs.asdict(part)
    shown["rule"] = recipe.rules  # the optimizer has rules of its own
    for field in task.fields:
        if field.kind == "model":
            values[field.name] = listed(host, field.models, _slot(recipe, field.name))
        elif field.kind == "loras":
            values[field.name] = lora_lines.write(
                (listed(host, field.models, Slot(file=lora.file, sha256=lora.sha256)) or lora.file, lora)
                for lora in recipe.loras
            )
        elif field.name == "lora_alpha":
            values[field.name] = _number_text(next((lora.alpha for lora in recipe.loras), None))
        elif field.param and field.kind == "check":
            values[field.name] = bool(recipe.params.get(field.name, field.default))
        elif field.param:
            values[field.name] = _number_text(recipe.params.get(field.name))
        else:
            values[field.name] = _WRITERS.get(field.name, _as_it_is)(shown[field.name])
    return values


def not_found(task: Task, recipe: Recipe, host: Host) -> list[str]:
    """What to say of each model that the recipe names and the form leaves open: missing, or there several times."""
    said = []
    for field in task.fields:
        slot = _slot(recipe, field.name) if field.kind == "model" else None
        if slot is None or slot.file is None or listed(host, field.models, slot) is not None:
            continue
        same = namesakes(host, field.models, slot)
        why = f"is there {len(same)} times ({', '.join(same)}): choose one" if same else "is not among the models"
        said.append(f"{field.label}: {slot.file} {why}")
    return said


def left_open(task: Task, recipe: Recipe) -> list[str]:
    """The fields that a preset has nothing to say of: models of open slots, and LoRAs where it has none."""
    slots = [field.name for field in task.fields if field.is_slot and recipe.models.get(field.name, 1) is None]
    loras = (
        [] if recipe.loras else [field.name for field in task.fields if field.name == "lora1" or field.kind == "loras"]
    )
    return slots + loras


def _slot(recipe: Recipe, name: str) -> Slot | None:
    """The model of a field: the recipe's VAE, one of its models, or its first LoRA."""
    if name == "vae":
        return recipe.vae
    if name == "lora1":
        return next((Slot(file=lora.file, sha256=lora.sha256) for lora in recipe.loras), None)
    return recipe.models.get(name)


def _as_it_is(value: Any) -> Any:
    return value


def _number_text(value: float | None) -> str:
    """What a field that may stay empty shows: `16`, `0.95`."""
    return "" if value is None else f"{int(value)}" if value == int(value) else repr(value)


# Recipe's value -> what stands in the field, where the two differ.
_WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "blocks": blocks.format,
    "rule": rule_text.write,
    "seed": str,
    "exclude": "\n".join,
    "discard": "\n".join,
    "only": lambda value: value or "",
}


def _refuse_unshown(task: Task, recipe: Recipe) -> None:
    if recipe.task != task.id:
        raise RecipeError(f"this is a recipe of the task {recipe.task}, not {task.id}")
    hidden = list(dict.fromkeys(_hidden(task, recipe)))
    if hidden:
        raise RecipeError(f"this form cannot show the recipe's {', '.join(hidden)}", hint=_ELSEWHERE)
    offered = {method.id for method in task.methods}
    for field in task.fields:
        if field.name == "method":
            offered = {value for _, value in field.choices}
    if recipe.method and recipe.method not in offered:
        raise RecipeError(f"{recipe.method} is no method of this form", hint=_ELSEWHERE)


def _hidden(task: Task, recipe: Recipe) -> Iterator[str]:
    """Names of the recipe's entries that differ from their defaults and have no field."""
    fields = {field.name: field for field in task.fields}
    plain, plain_output = Recipe(), Output()
    known = (fields.keys() - set(OPTIMIZER_FIELDS)) | {
        "lib_merge",
        "task",
        "method",
        "params",
        "models",
        "output",
        "vae",
        "loras",
        "optimizer",
        *(["rules"] if "rule" in fields else []),
    }
    for name in recipe.__struct_fields__:
        if name not in known and getattr(recipe, name) != getattr(plain, name):
            yield name
    for name in recipe.output.__struct_fields__:
        if not (name in fields and name in OUTPUT_FIELDS) and getattr(recipe.output, name) != getattr(
            plain_output, name
        ):
            yield name
    for name in OPTIMIZER_FIELDS:
        if name not in fields and getattr(recipe.optimizer, name) != getattr(Optimizer(), name):
            yield f"optimizer.{name}"
    for name, slot in recipe.models.items():
        if slot is not None and (slot.recipe is not None or name not in fields):
            yield f"models.{name}"
        if slot is not None and slot.strength is not None:
            yield f"models.{name}.strength"
    if recipe.vae is not None and "vae" not in fields:
        yield "vae"
    if not task.methods:
        yield from (f"params.{name}" for name in recipe.params if name not in fields or not fields[name].param)
    yield from _hidden_of_loras(task, recipe)


def _hidden_of_loras(task: Task, recipe: Recipe) -> Iterator[str]:
    names = {field.name for field in task.fields}
    lines = any(field.kind == "loras" for field in task.fields)
    if recipe.loras and not lines and not ("lora1" in names and len(recipe.loras) == 1):
        yield "loras"
    for lora in recipe.loras:
        if not lines and (lora.strength != 1 or lora.te_strength is not None or lora.blocks):
            yield "loras"
        if (lora.conflict_mode, lora.key_filter) != ("all", "all"):
            yield "loras' conflict_mode and key_filter"
        if lora.alpha != recipe.loras[0].alpha or (lora.alpha is not None and "lora_alpha" not in names):
            yield "loras' own alpha"


def listed(host: Host, kind: Kind, slot: Slot | None) -> str | None:
    """The name under which this host lists the model that a recipe means."""
    if slot is None or slot.file is None:
        return None
    models = host.models(kind)
    cache = host.hashes()
    same = namesakes(host, kind, slot)
    if slot.sha256:
        known = [name for name in models.names if cache.get(models.resolve(name)) == slot.sha256]
        return next(iter(known), same[0] if len(same) == 1 else None)
    return same[0] if len(same) == 1 else None


def namesakes(host: Host, kind: Kind, slot: Slot) -> list[str]:
    """The models of that file name, in whatever folder."""
    models = host.models(kind)
    return [name for name in models.names if models.resolve(name).name == slot.file]
