"""Methods that give every weight its own share of B, by how similar A and B are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..lazy import torch
from .arithmetic import as_bits
from .measure import BLOCK
from .registry import Measure, Param, merge_method
from .scratch import PIECE, pieces, room, scalar
from .similarity import SIMILARITY, blend, exponent_of, gaps, needs_wide, raised, similarities, undefined

if TYPE_CHECKING:
    from torch import Tensor

    from .similarity import Share


def _blend_flat(a: Tensor, b: Tensor, share: Share, smoothness: float, draws: Tensor | None) -> Tensor:
    flat = a.reshape(-1)
    blend(flat, b.reshape(-1), share, smoothness, None if draws is None else draws.reshape(-1))
    return flat.reshape(a.shape)


def _measure_largest(a: Tensor, b: Tensor, *, alpha: float, **_: Any) -> float:
    wide = needs_wide(alpha)
    return max((float(gaps(x, y, wide).amax()) for x, y in pieces(PIECE, a, b)), default=0.0)


def _largest(parts: list[float]) -> float:
    return max(parts, default=0.0)


class MeanPart(NamedTuple):
    """Of a tile: largest |A − B|, its sums over blocks of 2**16 elements, number of elements."""

    largest: float
    sums: list[float]
    elements: int


class Mean(NamedTuple):
    """Of a tensor: largest |A − B|, mean similarity."""

    largest: float
    similarity: float


def _measure_mean(a: Tensor, b: Tensor, *, alpha: float, **_: Any) -> MeanPart:
    largest, sums = 0.0, []
    for x, y in pieces(BLOCK, a, b):
        gap = gaps(x, y, needs_wide(alpha))
        largest = max(largest, float(gap.amax()))
        sums.append(float(room("wide", gap, torch.float64).copy_(gap).sum()))
    return MeanPart(largest, sums, a.numel())


def _mean(parts: list[MeanPart]) -> Mean:
    largest = max((part.largest for part in parts), default=0.0)
    if largest == 0 or math.isinf(largest):
        return Mean(largest, 0.0)
    mean = math.fsum(total for part in parts for total in part.sums) / sum(part.elements for part in parts)
    return Mean(largest, (largest - mean) / largest)


@merge_method(
    "comparative_interpolation",
    label="Comparative interpolation",
    inputs="AB",
    strength="alpha",
    params=(
        Param("alpha", 0.5, "pull towards B: 0 is A, 1 is B, between them it bends the curve of the shares", 0.0, 1.0),
        Param("beta", 0.0, "which weights take most of B: 0 those most similar in A and B, 1 those most different",
              0.0, 1.0),
        Param("gamma", 1.0, "smoothness: 1 blends, 0 takes each weight from A or B by chance", 0.0, 1.0),
    ),
    formula="A + k·(B − A), k = gamma·m + (1 − gamma)·(1 with probability m, else 0), "
    f"m = (1 − beta)·s^e + beta·(1 − s)^e, e = 1/alpha − 1, {SIMILARITY}",
    measures=(Measure(_measure_largest, _largest, needed=lambda params: 0 < params["alpha"] < 1),),
    random="element",
    settled="gamma",
    exact_a="alpha = 0",
    exact_b="alpha = 1",
)  # fmt: skip
def comparative_interpolation(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float,
    beta: float,
    gamma: float,
    measures: Sequence[float],
    draws: Tensor | None = None,
) -> Tensor:
    """Blend each weight by how similar it is in A and B, measured against the largest difference of its tensor.

    At beta 0 the most different weight stays A at any alpha below 1, and one outlier makes all others look similar.
    alpha 0 is exactly A and alpha 1 exactly B, where the mode document says "heavily" and "strongly".

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: 0 … 1; between its ends the two curves are mixed.
        gamma: 0 … 1; the expected result is the same for all.
        measures: largest |A − B| of the whole tensor.
        draws: int32, same shape, needed where gamma < 1; see `kernels.random.draws`.

    Returns:
        The blend, same shape and dtype; at gamma 0 each element has the bits of A or of B.
    """
    if alpha in (0, 1):
        return b if alpha else a
    largest = measures[0]
    if largest == 0:
        return a
    if math.isinf(largest):
        return undefined(a)
    exponent, wide = exponent_of(alpha), needs_wide(alpha)

    def share(x: Tensor, y: Tensor, back: Tensor) -> Tensor:
        if beta == 0:
            return raised(similarities(x, y, largest, wide, back), exponent)
        gap = gaps(x, y, wide, back)
        different = raised(room("different", x).copy_(gap.div_(scalar(largest, gap))), exponent)
        if beta == 1:
            return different
        similar = raised(similarities(x, y, largest, wide, back), exponent)
        return similar.mul_(1 - beta).add_(different.mul_(beta))

    return _blend_flat(a, b, share, gamma, draws)


def band(mean: float, beta: float, dtype: torch.dtype) -> tuple[int, int] | None:
    """Bits of the lowest and highest similarity between mean·(1 − beta) and mean·(1 + beta); None: there is none."""
    limits = torch.tensor(mean, dtype=dtype) * torch.tensor([1 - beta, 1 + beta], dtype=dtype)
    lowest, highest = (int(limit) for limit in as_bits(limits) + torch.tensor([1, -1]))
    return None if lowest > highest else (lowest, highest)


@merge_method(
    "enhanced_auto_interp",
    label="Enhanced interpolation, automatic limits",
    inputs="AB",
    strength="alpha",
    params=(
        Param("alpha", 0.5, "pull towards B inside the band: 0 is A, 1 is B, between them it bends the curve of the "
              "shares", 0.0, 1.0),
        Param("beta", 0.5, "half width of the band of similarity, as a share of the tensor's mean; weights outside "
              "stay A, 0 leaves all of A", 0.0, 1.0),
        Param("gamma", 1.0, "smoothness: 1 blends, 0 takes each weight from A or B by chance", 0.0, 1.0),
    ),
    formula="A + k·(B − A), k = gamma·m + (1 − gamma)·(1 with probability m, else 0), m = s^(1/alpha − 1) where "
    f"mean of s·(1 − beta) < s < mean of s·(1 + beta), else 0; {SIMILARITY}, its mean over the tensor",
    measures=(Measure(_measure_mean, _mean, needed=lambda params: params["alpha"] > 0 and params["beta"] > 0),),
    random="element",
    settled="gamma",
    exact_a="alpha = 0 or beta = 0",
)  # fmt: skip
def enhanced_auto_interp(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float,
    beta: float,
    gamma: float,
    measures: Sequence[Mean],
    draws: Tensor | None = None,
) -> Tensor:
    """Blend each weight by its similarity, but only weights whose similarity is near the mean of their tensor.

    The band lies around the mean similarity, not the mean difference as the mode document has it, and it is asked of
    each weight; the method with manual limits asks it of columns. Even at beta 1 the most different weight stays A, and
    so do those that are more than twice as similar as the mean.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1; at 1 all weights inside the band are B.
        beta: 0 … 1.
        gamma: 0 … 1; the expected result is the same for all.
        measures: largest |A − B| and mean similarity of the whole tensor.
        draws: int32, same shape, needed where gamma < 1; see `kernels.random.draws`.

    Returns:
        The blend, same shape and dtype; weights outside the band have the bits of A.
    """
    if alpha == 0 or beta == 0:
        return a
    largest, mean = measures[0]
    if largest == 0:
        return a
    if math.isinf(largest):
        return undefined(a)
    exponent, wide = exponent_of(alpha), needs_wide(alpha)
    inner = band(mean, beta, a.dtype)
    if inner is None:
        return a
    lowest, highest = inner

    def share(x: Tensor, y: Tensor, back: Tensor) -> Tensor:
        similarity = similarities(x, y, largest, wide, back)
        bits = as_bits(similarity)
        inside = torch.clamp(bits, lowest, highest, out=room("inside", bits)).eq_(bits).neg_()
        m = similarity.fill_(1) if exponent == 0 else raised(similarity, exponent)
        as_bits(m).bitwise_and_(inside)
        return m

    return _blend_flat(a, b, share, gamma, draws)
