"""How LoRAs are to be put together: a recipe's words and numbers, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from ..choose import SMOOTHING, Strategy
from ..errors import RecipeError
from ..recipe import Optimizer, Recipe, Value

AUTO = "auto"
STRATEGIES: tuple[str, ...] = get_args(Strategy)

# Share of entries kept: by the trim of TIES, and by sparsification.
TRIM_DENSITY, SPARSIFY_DENSITY = 0.5, 0.7

# Parameter -> (smallest, largest) value.
_RANGES: Mapping[str, tuple[float, float]] = {
    "density": (0.0, 1.0),
    "dampening": (0.0, 1.0),
    "smoothing": (0.0, 1.0),
    "output_strength": (-math.inf, math.inf),
}
# Variant of a step -> what it does, for those who compare with papers and other programs; each is off by default.
VARIANTS: Mapping[str, str] = {
    "count_divisor": "TIES divides Σw·d by how many LoRAs agree, not by their Σw: a common strength keeps its effect",
    "projection_vote": "the vote on rows goes by a row's product with the rows of all LoRAs together, not by its sum",
    "drop_selfish": "entries that one LoRA alone uses are taken away, as TALL masks do, not protected",
    "linear_dampening": "dampening divides by p + dampening·(1 − p), p the density, not by p^(1 − dampening)",
    "document_della": "DELLA by the optimizer's document: large entries of a row go most, half as many as density says",
}
_SWITCHES = ("auto_density", "auto_strength", "auto_output_strength", "normalize", "lossless", *VARIANTS)
PARAMS = (*_RANGES, *_SWITCHES)


@dataclass(frozen=True)
class Settings:
    """What a user asked for.

    Attributes:
        method: a strategy for all weights, or `auto`: each one's own.
        words: scope, profile, rules, refinement, sparsify.
        density: share of entries kept, 0 … 1; None: 0.5 by TIES, 0.7 by sparsification.
        auto_density: TIES keeps what stands out of the noise, measured for each weight.
        dampening: of the rescaling after entries are dropped: 0 keeps the expected value, 1 the entries.
        smoothing: how far each weight's numbers are drawn to its block's mean, 0 … 1.
        auto_strength: results no larger than the largest input; None: of sums that the optimizer made.
        output_strength: factor of the whole result; None: the largest one that is advised.
        normalize: averages, SLERP, consensus and TIES give a mean, whatever a common strength; else its size counts.
        lossless: weights that factors cannot hold are stored whole.
        seed: of random steps.
        count_divisor, projection_vote, drop_selfish, linear_dampening, document_della: see `VARIANTS`.
    """

    method: str = AUTO
    words: Optimizer = field(default_factory=Optimizer)
    density: float | None = None
    auto_density: bool = False
    dampening: float = 0.0
    smoothing: float = SMOOTHING
    auto_strength: bool | None = None
    output_strength: float | None = 1.0
    normalize: bool = True
    lossless: bool = False
    seed: int = 0
    count_divisor: bool = False
    projection_vote: bool = False
    drop_selfish: bool = False
    linear_dampening: bool = False
    document_della: bool = False

    @property
    def sparsified(self) -> bool:
        """Whether entries are dropped by chance."""
        return self.words.sparsify != "none"

    @property
    def refined(self) -> bool:
        """Whether what one LoRA alone brings is protected."""
        return self.words.refinement != "standard"

    def kept(self, measured: float) -> float:
        """Share of entries that are kept of a weight.

        Args:
            measured: what stands out of the noise there, where it was measured.
        """
        if self.auto_density:
            return measured
        if self.density is not None:
            return self.density
        return SPARSIFY_DENSITY if self.sparsified else TRIM_DENSITY

    @classmethod
    def read(cls, recipe: Recipe) -> Settings:
        """From a recipe of the task lora_merge.

        Raises:
            RecipeError: a number outside its range, one that leaves nothing, or two that exclude each other.
        """
        params = recipe.params
        numbers = {name: _number(params, name) for name in _RANGES if name in params}
        switches = {name: _switch(params, name) for name in _SWITCHES if name in params}
        for number, automatic in (("density", "auto_density"), ("output_strength", "auto_output_strength")):
            if number in numbers and switches.get(automatic):
                raise RecipeError(f"{number} is given, and to be found", hint=f"leave out one of {number}, {automatic}")
        if numbers.get("output_strength") == 0:
            raise RecipeError("output_strength 0 would leave nothing", hint="give another, or leave it out: 1")
        if switches.pop("auto_output_strength", False):
            numbers["output_strength"] = None
        method = "weighted_sum" if recipe.method in (None, "concat") else recipe.method
        return cls(method, recipe.optimizer, seed=recipe.seed, **numbers, **switches)  # type: ignore[arg-type]


def _number(params: Mapping[str, Value], name: str) -> float | None:
    value, (low, high) = float(params[name]), _RANGES[name]
    if not low <= value <= high or not math.isfinite(value):
        known = f"{low:g} … {high:g}" if math.isfinite(low) else "a finite number"
        raise RecipeError(f"{name} must be {known}, not {value:g}")
    return value


def _switch(params: Mapping[str, Value], name: str) -> bool:
    value = params[name]
    if not isinstance(value, bool):
        raise RecipeError(f"{name} must be true or false, not {value:g}")
    return value
