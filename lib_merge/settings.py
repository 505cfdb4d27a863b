"""The parameters of each tensor: the recipe's own, then those of its block, then those of each rule that matches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import ascii_uppercase

import msgspec

from . import blocks
from .errors import Problem, RecipeError
from .families import Detected, block_names, blocks_of, layer_names
from .kernels.registry import Method, Value, method
from .patterns import compiled
from .recipe import Recipe, validated

_SEEDS = 2**64
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def checked(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe with every parameter written out, and what was moved to a limit.

    Raises:
        RecipeError: task, method, parameter, seed or slots do not fit together.
    """
    recipe = validated(recipe)
    if recipe.task not in ("merge", "convert", "bake"):
        raise RecipeError(f"this version cannot run the task {recipe.task}", hint="update lib_merge")
    if not 0 <= recipe.seed < _SEEDS:
        raise RecipeError(f"seed must be 0 … 2**64 − 1, not {recipe.seed}")
    if recipe.output.override_dtype and recipe.output.save_dtype in ("auto", "keep"):
        raise RecipeError("override_dtype has nothing to force", hint="name a dtype with --save-dtype")
    if reserved := [name for name in recipe.output.metadata if name.startswith(("lib_merge.", "sd_merge_"))]:
        raise RecipeError(f"the metadata name {reserved[0]} is lib_merge's own", hint="choose another name")
    if recipe.only and recipe.task != "convert":
        raise RecipeError("only is for the task convert")
    if recipe.task != "merge":
        _check_slots(recipe, recipe.task, ("A",))
        if recipe.method or recipe.params:
            raise RecipeError(f"{recipe.task} takes no method and no parameters")
        if recipe.task == "convert" and recipe.loras:
            raise RecipeError("convert takes no LoRAs", hint="the task bake does")
        if recipe.task == "bake" and not recipe.loras:
            raise RecipeError("bake needs a LoRA", hint="lib-merge bake CHECKPOINT LORA -o OUT")
        return recipe, []
    if recipe.method is None:
        raise RecipeError("the recipe names no method", hint="lib-merge methods lists them")
    chosen = method(recipe.method)
    _check_slots(recipe, chosen.id, chosen.inputs, more=chosen.more)
    _check_model_strengths(recipe, chosen)
    moved = _moved(chosen, recipe.params, "")
    for rule in recipe.rules:
        moved += _moved(chosen, rule.params, f" (rule {rule.match})")
    return msgspec.structs.replace(recipe, params=chosen.check(recipe.params)), moved


def _moved(chosen: Method, values: Mapping[str, Value], where: str) -> list[Problem]:
    """Warnings about values that count as the limit they are beyond."""
    checked_values = chosen.check(values)
    return [
        Problem(
            "warning",
            f"{name} {value:g} is outside {chosen.param(name).range} and counts as {checked_values[name]:g}{where}",
            hint="task_arithmetic takes values outside" if chosen.id == "weighted_sum" else None,
        )
        for name, value in values.items()
        if checked_values[name] != value
    ]


def _check_model_strengths(recipe: Recipe, chosen: Method) -> None:
    given = {name: slot.strength for name, slot in recipe.models.items() if slot and slot.strength is not None}
    for name, strength in given.items():
        if not chosen.more:
            raise RecipeError(f"{chosen.id} takes no strength for each model", hint=f"set {chosen.strength} instead")
        if name == "A":
            raise RecipeError("model A is the base and takes no strength", hint="give strengths to the others")
        if not math.isfinite(strength):
            raise RecipeError(f"strength of model {name} is no finite number: {strength}")
    if chosen.more and not any(given.get(name) != 0 for name in recipe.models if name != "A"):
        raise RecipeError("every model but A has strength 0", hint="give one of them another")


def _check_slots(recipe: Recipe, what: str, wanted: tuple[str, ...], *, more: bool = False) -> None:
    for slot in wanted:
        if recipe.models.get(slot) is None:
            raise RecipeError(f"{what} needs model {slot}", hint=f"it works on {', '.join(wanted)}")
    if more:
        if missing := next((slot for slot, model in recipe.models.items() if model is None), None):
            raise RecipeError(f"{what} needs model {missing}", hint="leave the slot out, or name a file for it")
        if strange := next((slot for slot in recipe.models if slot not in ascii_uppercase), None):
            raise RecipeError(f"there is no model {strange!r}", hint="models are called A, B, C … Z")
        return
    for slot in recipe.models:
        if slot not in wanted:
            raise RecipeError(f"{what} does not use model {slot}", hint=f"it works on {', '.join(wanted)}")


class Settings:
    """Looks up the parameters of a tensor."""

    def __init__(self, recipe: Recipe, chosen: Method | None, keys: Tensors, family: Detected) -> None:
        """Check every block and every rule.

        Args:
            recipe: with checked general parameters.
            chosen: its method.
            keys: key -> (dtype, shape) of model A.
            family: of model A.

        Raises:
            RecipeError: a rule that is no pattern or matches no tensor; an unknown or forbidden value.
        """
        self._general, self._family = recipe.params, family
        self._blocks: dict[str, dict[str, Value]] = {}
        self.notes: list[Problem] = []
        if recipe.blocks and recipe.task != "bake":  # there they are weights of the LoRAs
            self._set_blocks(recipe, chosen, block_names(keys, family, overrides=True), layer_names(keys, family))
        self._rules = []
        for rule in recipe.rules:
            if chosen is None:
                raise RecipeError("rules need a method")
            if not rule.match.strip():
                raise RecipeError("a rule has no pattern", hint='write it as "PATTERN: alpha=0.3"')
            test = compiled(rule.match, recipe.glob)
            if not any(map(test, keys)):
                raise RecipeError(
                    f"the rule {rule.match!r} matches no tensor of model A",
                    hint="lib-merge inspect FILE lists the names",
                )
            if not rule.params:
                raise RecipeError(f"the rule {rule.match!r} sets nothing", hint='write it as "PATTERN: alpha=0.3"')
            values = {name: chosen.param(name).check(value) for name, value in rule.params.items()}
            self._rules.append((rule.match, test, values))

    def _set_blocks(self, recipe: Recipe, chosen: Method | None, names: list[str], layers: list[str]) -> None:
        if chosen is None:
            raise RecipeError("blocks need a method")
        for name, params in blocks.expand(recipe.blocks, names, layers).items():
            given = {param or chosen.strength: value for param, value in params.items()}
            self._blocks[name] = {param: chosen.param(param).check(value) for param, value in given.items()}
        for name, params in recipe.blocks.items():
            given = {param or chosen.strength: value for param, value in params.items()}
            self.notes += _moved(chosen, given, f" (block {name})")
        if missing := blocks.unknown(recipe.blocks, names):
            known = f"it has {', '.join(names)}" if names else "it has no blocks that are known"
            self.notes.append(Problem("warning", f"model A has no block {', '.join(missing)}", hint=known))

    def of(self, key: str) -> tuple[Mapping[str, Value], str]:
        """(parameters, why they are not the general ones)."""
        params, reasons = dict(self._general), []
        names = blocks_of(key, self._family) if self._blocks else ()
        block = next((name for name in names if name in self._blocks), None)
        if block is not None:
            params.update(self._blocks[block])
            reasons.append(f"block {block}")
        for text, test, values in self._rules:
            if test(key):
                params.update(values)
                reasons.append(f"rule {text}")
        return params, ", ".join(reasons)
