"""Interpolation along the arc between two tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .arithmetic import step_towards
from .measure import pair_dots
from .registry import Param, merge_method

if TYPE_CHECKING:
    from torch import Tensor

_STRAIGHT = 1e-6


@merge_method(
    "slerp",
    label="SLERP",
    inputs="AB",
    strength="alpha",
    params=(Param("alpha", 0.5, "how far along the arc from A to B: 0 is A, 1 is B", 0.0, 1.0),),
    formula="A·sin((1 − alpha)·θ)/sin θ + B·sin(alpha·θ)/sin θ, cos θ = ⟨A, B⟩/(‖A‖·‖B‖) over the whole tensor; "
    "A + alpha·(B − A) where sin θ < 1e-6 or a norm is 0",
    kind="whole",
    exact_a="alpha = 0",
    exact_b="alpha = 1",
)
def slerp(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Blend two models along the arc between their tensors, which keeps the length of the weights.

    Args:
        a: a whole tensor, float32 or float64; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.

    Returns:
        The blend, same shape and dtype.
    """
    if alpha in (0, 1):
        return b if alpha else a
    aa, ab, bb = pair_dots(a, b)
    lengths = math.sqrt(aa) * math.sqrt(bb)
    cosine = max(-1.0, min(1.0, ab / lengths)) if lengths else 1.0
    angle = math.acos(cosine)
    if math.sin(angle) < _STRAIGHT:
        return step_towards(a, b, alpha)
    from_a = math.sin((1 - alpha) * angle) / math.sin(angle)
    from_b = math.sin(alpha * angle) / math.sin(angle)
    return a.mul_(from_a).add_(b.mul_(from_b))
