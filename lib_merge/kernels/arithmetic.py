"""Methods made of a few additions and multiplications per element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import torch
from .registry import Param, merge_method
from .scratch import scalar

if TYPE_CHECKING:
    from torch import Tensor


_BITS = {4: "int32", 8: "int64"}


def step_towards(a: Tensor, b: Tensor, share: float, chosen: Tensor | None = None) -> Tensor:
    """A + share·(B − A), written as A minus a multiple: where A equals B, the bits of A stay (−0.0 too).

    Three separate operations: fused ones round differently from CPU to CPU. Overwrites `a` and `b`.

    Args:
        a: float32 or float64, any shape.
        b: same shape and dtype.
        share: 0 gives the bits of A, 1 those of B; any finite number.
        chosen: mask from `mask_below`, same shape; elements outside it keep the bits of A. None is everywhere.
    """
    if share == 0:
        return a
    if share == 1:
        return b if chosen is None else chosen_or(a, b, chosen)
    back = torch.sub(a, b, out=b) if share > 0 else b.sub_(a)
    back.mul_(scalar(abs(share), back))
    if chosen is not None:
        back.view(chosen.dtype).bitwise_and_(chosen)
    return a.sub_(back)


def as_bits(values: Tensor) -> Tensor:
    """The same memory as integers of the same size; of numbers that are not negative, in the same order."""
    return values.view(torch.int64 if values.element_size() == 8 else torch.int32)


def mask_below(values: Tensor, limit: int, like: Tensor) -> Tensor:
    """Mask of the positions where values < limit: all bits set there, none elsewhere; overwrites `values`.

    Args:
        values: int32 or int64, any shape.
        limit: bound.
        like: tensor whose element size the mask takes.
    """
    mask = values.lt_(scalar(limit, values)).neg_()
    wanted = getattr(torch, _BITS[like.element_size()])
    return mask if mask.dtype == wanted else mask.to(wanted)


def chosen_or(base: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """`other` where `chosen`, else the bits of `base`; overwrites `other`.

    A blend of bits: no arithmetic that could turn −0.0 into 0.0, and faster than `torch.where`.

    Args:
        base: float32 or float64, any shape.
        other: same shape and dtype; overwritten.
        chosen: mask from `mask_below`, same shape.
    """
    kept, result = base.view(chosen.dtype), other.view(chosen.dtype)
    result.bitwise_xor_(kept).bitwise_and_(chosen).bitwise_xor_(kept)
    return other


@merge_method(
    "weighted_sum",
    label="Weighted sum",
    inputs="AB",
    strength="alpha",
    params=(Param("alpha", 0.5, "share of B: 0 is A, 1 is B", 0.0, 1.0, clamp=True),),
    formula="A + alpha·(B − A)",
    shows=("alpha",),
    exact_arithmetic=True,
    exact_a="alpha ≤ 0",
    exact_b="alpha ≥ 1",
)
def weighted_sum(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Blend two models evenly: every weight moves the same share of the way from A to B.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.

    Returns:
        The blend, same shape and dtype.
    """
    return step_towards(a, b, alpha)


@merge_method(
    "add_difference",
    label="Add difference",
    inputs="ABC",
    strength="alpha",
    params=(
        Param("alpha", 1.0, "how much of what B learned over C is added to A", slider=(-1.0, 2.0)),
        Param("smooth", False, "smooth the difference first: median of 3, then Gaussian of σ 1, along each axis"),
    ),
    formula="A + alpha·(B − C); smooth: the difference as a matrix [out, rest] goes through a median of 3 along each "
    "axis in turn, then a Gaussian (σ 1, 9 taps) along each axis in turn, edges mirrored",
    whole_when="smooth",
    shows=(),
    exact_arithmetic=True,
    exact_a="alpha = 0",
)
def add_difference(a: Tensor, b: Tensor, c: Tensor, *, alpha: float, smooth: bool) -> Tensor:
    """Add to A what B learned over its own base C.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        c: same shape and dtype.
        alpha: multiplier of the difference, any finite number.
        smooth: needs whole tensors in their shape.

    Returns:
        The sum, same shape and dtype.
    """
    if alpha == 0:
        return a
    back = torch.sub(c, b, out=b) if alpha > 0 else b.sub_(c)
    if smooth:
        back = smoothed(back)
    return a.sub_(back.mul_(scalar(abs(alpha), back)))


# exp(−t²/2) for t = 0 … 4, scaled so that all nine taps sum to 1; digits, for exp differs between systems.
_HALF_GAUSSIAN = (
    0.39894346935609776,
    0.24197144565660073,
    0.0539911274207044,
    0.0044318616200312655,
    0.00013383062461474175,
)
_REACH = len(_HALF_GAUSSIAN) - 1


def smoothed(delta: Tensor) -> Tensor:
    """Median of 3, then Gaussian of σ 1 (9 taps), along each axis of the matrix [out, rest]; edges mirrored (abc|cba).

    Args:
        delta: any shape, float32 or float64; overwritten.

    Returns:
        Smoothed delta, same shape and dtype; a scalar or an empty one comes back as it is.
    """
    if delta.dim() == 0 or delta.numel() == 0:
        return delta
    matrix = delta.reshape(delta.shape[0], -1)
    axes = (0,) if delta.dim() == 1 else (0, 1)
    for axis in axes:
        matrix = _median_of_3(matrix, axis)
    for axis in axes:
        matrix = _gaussian(matrix, axis)
    return matrix.reshape(delta.shape)


def _median_of_3(matrix: Tensor, axis: int) -> Tensor:
    before, here, after = _neighbours(matrix, axis, 1)
    high, low = torch.maximum(before, here), torch.minimum(before, here, out=matrix)
    return torch.maximum(low, torch.minimum(high, after, out=high), out=low)


def _gaussian(matrix: Tensor, axis: int) -> Tensor:
    mean = torch.zeros_like(matrix)
    for tap, neighbour in enumerate(_neighbours(matrix, axis, _REACH), start=-_REACH):
        mean.add_(torch.mul(neighbour, _HALF_GAUSSIAN[abs(tap)], out=matrix))
    return mean


def _neighbours(matrix: Tensor, axis: int, reach: int) -> list[Tensor]:
    """Views whose position i holds position i − reach … i + reach, mirrored at the edges (abc|cba), of a copy."""
    size = matrix.shape[axis]
    beyond = [at % (2 * size) for at in (*range(-reach, 0), *range(size, size + reach))]
    mirrored = [at if at < size else 2 * size - 1 - at for at in beyond]
    edges = matrix.index_select(axis, torch.tensor(mirrored, device=matrix.device))
    wider = torch.cat((edges.narrow(axis, 0, reach), matrix, edges.narrow(axis, reach, reach)), axis)
    return [wider.narrow(axis, start, size) for start in range(2 * reach + 1)]
