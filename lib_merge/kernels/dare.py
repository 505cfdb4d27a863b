"""Drop and rescale: random sparsification of what B changed (DARE, arXiv:2311.03099)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arithmetic import mask_below, step_towards
from .random import STEPS, threshold
from .registry import Param, merge_method

if TYPE_CHECKING:
    from torch import Tensor


@merge_method(
    "power_up_dare",
    label="Power-up (DARE)",
    inputs="AB",
    strength="beta",
    params=(
        Param("alpha", 0.85, "drop rate: share of B's changes that are left out at random", 0.0, 1.0),
        Param("beta", 1.0, "multiplier of the changes that stay", slider=(-1.0, 4.0)),
    ),
    formula="A + beta·keep·(B − A)/(1 − alpha), keep = 1 with probability 1 − alpha, else 0",
    random="element",
    exact_arithmetic=True,
    exact_a="alpha = 1 or beta = 0",
    exact_b="alpha = 0 and beta = 1",
)
def power_up_dare(a: Tensor, b: Tensor, *, alpha: float, beta: float, draws: Tensor) -> Tensor:
    """Add a random part of what B changed, scaled up so that the whole keeps its expected size.

    Which changes survive is chance; their magnitude plays no part.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: drop rate, 0 … 1.
        beta: any finite number.
        draws: int32, same shape; see `kernels.random.draws`; overwritten.

    Returns:
        The sum, same shape and dtype; dropped elements have the bits of A.
    """
    limit = threshold(1 - alpha)
    if limit == 0 or beta == 0:
        return a
    chosen = None if limit == STEPS else mask_below(draws, limit, a)
    return step_towards(a, b, beta * STEPS / limit, chosen)
