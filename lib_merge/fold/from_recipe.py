"""A fold as a recipe: DENSE, SHIPPED and one adapter; the rounding is its method. The result holds no recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..catalog import PathLike
from ..errors import RecipeError
from ..execute import Running
from ..recipe import Lora, Recipe
from .rounding import AUTO, CHOICES
from .run import Folded, fold

SLOTS = ("DENSE", "SHIPPED")
_PARAMS = {"round_dense"}
# What a recipe of this task says; any other entry must be as it is in an empty one.
_SAID = {"lib_merge", "task", "method", "params", "models", "loras"}


def fold_recipe(recipe: Recipe, located: Mapping[str, PathLike], target: Path, how: Running) -> Folded:
    """Carry out a recipe of the task `fold`.

    Args:
        recipe: `models` DENSE and SHIPPED, one LoRA at strength 1, `method` a rounding, `params` round_dense.
        located: slot (`DENSE`, `SHIPPED`, `lora1`) -> file or folder.
        target: file or folder to write.
        how: see `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    adapter = _adapter(recipe)
    _refuse_what_no_fold_has(recipe)
    return fold(
        located["DENSE"],
        located["lora1"],
        target,
        quantize=located["SHIPPED"],
        rounding=recipe.method or AUTO,
        round_dense=bool(recipe.params.get("round_dense", False)),
        lora_alpha=adapter.alpha,
        **vars(how),
    )


def _adapter(recipe: Recipe) -> Lora:
    if len(recipe.loras) != 1:
        raise RecipeError(f"a fold takes one adapter, not {len(recipe.loras)}", hint="combine them into one first")
    adapter = recipe.loras[0]
    if adapter.strength != 1 or adapter.te_strength not in (None, 1) or adapter.blocks:
        hint = "change the adapter's alpha, or combine it alone at another strength first"
        raise RecipeError("a fold takes its adapter at strength 1 and without block weights", hint=hint)
    return adapter


def _refuse_what_no_fold_has(recipe: Recipe) -> None:
    for slot in SLOTS:
        if recipe.models.get(slot) is None:
            raise RecipeError(f"a fold needs model {slot}", hint="the dense checkpoint, and the one quantized from it")
    if recipe.method is not None and recipe.method not in CHOICES:
        raise RecipeError(f"there is no rounding {recipe.method!r}", hint=f"choose {', '.join(CHOICES)}")
    plain = Recipe()
    more = [name for name in recipe.__struct_fields__ if name not in _SAID]
    wrong = [name for name in more if getattr(recipe, name) != getattr(plain, name)]
    wrong += [f"params.{name}" for name in recipe.params if name not in _PARAMS]
    wrong += [f"models.{name}" for name in recipe.models if name not in SLOTS]
    if wrong:
        raise RecipeError(f"a fold has no {', '.join(wrong)}")
