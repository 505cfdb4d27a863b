"""The strength of a LoRA on a tensor: its own, the text encoders' own, and its block weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import blocks
from .errors import RecipeError
from .recipe import Lora

STRENGTH = "strength"


def strength_at(lora: Lora, component: str, names: Iterable[str], of_block: Mapping[str, float]) -> float:
    """What a LoRA's change of one tensor is multiplied by.

    Args:
        lora: with its strengths.
        component: that the tensor belongs to: unet, te1 …
        names: the blocks that reach the tensor, most specific first.
        of_block: block -> multiplier, as `multipliers` gives it.
    """
    own = lora.te_strength
    strength = own if component.startswith("te") and own is not None else lora.strength
    named = next((name for name in names if name in of_block), None)
    return strength if named is None else strength * of_block[named]


def multipliers(
    lora: Lora, weights: blocks.Values, names: Sequence[str], layers: Sequence[str] | None
) -> dict[str, float]:
    """Block -> multiplier of the strength, for the blocks that the weights reach.

    Args:
        lora: whose weights they are.
        weights: as `blocks.parse` gives them.
        names: the blocks that there are.
        layers: those that a shape runs over, in order; None for all.

    Raises:
        RecipeError: a weight sets something else than a strength.
    """
    for name, values in weights.items():
        if other := values.keys() - {"", STRENGTH}:
            raise RecipeError(
                f"block {name} of {lora.file} sets {min(other)}, but LoRAs have a strength alone",
                hint="write it as BASE=0, IN00-IN05=0.2",
            )
    return {name: next(iter(values.values())) for name, values in blocks.expand(weights, names, layers).items()}
