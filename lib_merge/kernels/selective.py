"""Methods that merge some input columns of a tensor and leave the others, by how similar A and B are there.

A column is all weights that meet one input: its mean similarity is the mean over a tensor's first dimension. Of a
vector it is the mean over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from ..lazy import torch
from .arithmetic import step_towards
from .column_sums import ColumnSums, column_sums, row_blocks, sum_rows
from .measure import row_block
from .registry import Measure, Param, merge_method
from .scratch import PIECE, room
from .similarity import SIMILARITY, blend, exponent_of, gaps, needs_wide, raised, similarities, undefined

if TYPE_CHECKING:
    from torch import Tensor


class GatePart(NamedTuple):
    """Of a tile: largest |A − B|, its sums down the columns, number of rows; and the limits and dtype to compare in."""

    largest: float
    sums: ColumnSums | None
    rows: int
    lower: float
    upper: float
    dtype: torch.dtype


class Gate(NamedTuple):
    """Of a tensor: largest |A − B|, and which columns are open (None: all)."""

    largest: float
    open: Tensor | None

    @property
    def closed(self) -> bool:
        """True when nothing can change: A equals B, or no column is open."""
        return self.largest == 0 or (self.open is not None and not bool(self.open.any()))


def is_limited(lower: float, upper: float) -> bool:
    """False where no column can lie outside; 0 and 1 are no limits."""
    return lower > 0 or upper < 1


def _nothing_between(low: str, lower: float, high: str, upper: float) -> str:
    if lower < upper:
        return ""
    return f"nothing lies above {low} {lower:g} and below {high} {upper:g}: A stays as it is; are the limits swapped?"


def _measure_columns(a: Tensor, b: Tensor, lower: float, upper: float, wide: bool) -> GatePart:
    limited = is_limited(lower, upper)
    rows, columns = a.shape
    size = row_block(columns)
    sums = room("sums", a[::size], torch.float64)
    largest = 0.0
    for number, (x, y) in enumerate(row_blocks(a, b) if columns else ()):
        gap = gaps(x, y, wide)
        largest = max(largest, float(gap.amax()))
        if limited:
            sum_rows(gap, sums[number])
    total = column_sums(sums, size * largest) if limited and a.numel() else None
    return GatePart(largest, total, rows, lower, upper, a.dtype)


def _open_columns(parts: list[GatePart]) -> Gate:
    """The gate: a column is open where its mean similarity lies between the limits; 0 and 1 are no limits."""
    largest = max((part.largest for part in parts), default=0.0)
    sums = [part.sums for part in parts if part.sums is not None]
    if largest == 0 or math.isinf(largest) or not sums:
        return Gate(largest, None)
    _, _, _, lower, upper, dtype = parts[0]
    means = reduce(ColumnSums.add, sums).total().div_(sum(part.rows for part in parts))
    similarity = means.neg_().add_(largest).div_(largest).to(dtype)
    is_open = torch.ones_like(similarity, dtype=torch.bool)
    if lower > 0:
        is_open &= similarity > lower
    if upper < 1:
        is_open &= similarity < upper
    return Gate(largest, is_open)


def _mask(gate: Gate, like: Tensor) -> Tensor | None:
    """The open columns as a mask for `step_towards`."""
    return None if gate.open is None else gate.open.to(torch.int64 if like.element_size() == 8 else torch.int32).neg_()


@merge_method(
    "enhanced_man_interp",
    label="Enhanced interpolation, manual limits",
    inputs="AB",
    strength="alpha",
    params=(
        Param("alpha", 0.5, "pull towards B in the open columns: 0 is A, 1 is B, between them it bends the curve of "
              "the shares", 0.0, 1.0),
        Param("beta", 0.0, "lower limit: columns whose mean similarity is not above it stay A; 0 is no limit",
              0.0, 1.0),
        Param("gamma", 1.0, "upper limit: columns whose mean similarity is not below it stay A; 1 is no limit",
              0.0, 1.0),
        Param("delta", 1.0, "smoothness: 1 blends, 0 takes each weight from A or B by chance", 0.0, 1.0),
    ),
    formula="A + k·(B − A), k = delta·m + (1 − delta)·(1 with probability m, else 0), m = s^(1/alpha − 1) in columns "
    f"with beta < mean of s < gamma, else 0; {SIMILARITY}, its mean over the first dimension",
    rows=True,
    measures=(
        Measure(
            lambda a, b, *, alpha, beta, gamma, **_: _measure_columns(a, b, beta, gamma, needs_wide(alpha)),
            _open_columns,
            needed=lambda params: (
                params["alpha"] > 0
                and params["beta"] < params["gamma"]
                and (params["alpha"] < 1 or is_limited(params["beta"], params["gamma"]))
            ),
        ),
    ),
    random="element",
    settled="delta",
    exact_a="alpha = 0, or no column lies between the limits (as with beta ≥ gamma)",
    exact_b="alpha = 1, beta = 0 and gamma = 1",
    caution=lambda params: _nothing_between("beta", params["beta"], "gamma", params["gamma"]),
)  # fmt: skip
def enhanced_man_interp(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float,
    beta: float,
    gamma: float,
    delta: float,
    measures: Sequence[Gate],
    draws: Tensor | None = None,
) -> Tensor:
    """Blend each weight by its similarity, but only in input columns that are alike enough, and not too alike.

    The limits are on the mean similarity of a column: all weights that meet one input, the mean over a tensor's first
    dimension; of a vector, over all of it. The mode document speaks of layers and weights. How much of B comes in
    depends on the models: its "over 90 % Model A" at alpha 0.25 and "up to 50 %" at alpha 0.5 do not hold.

    Args:
        a: [rows, columns], float32 or float64; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: lower limit, 0 … 1.
        gamma: upper limit, 0 … 1.
        delta: smoothness, 0 … 1; the expected result is the same for all.
        measures: the gate of the whole tensor.
        draws: int32, same shape, needed where delta < 1; see `kernels.random.draws`.

    Returns:
        The blend, same shape and dtype; closed columns have the bits of A.
    """
    if alpha == 0 or beta >= gamma:
        return a
    if alpha == 1 and not is_limited(beta, gamma):
        return b
    gate = measures[0]
    if gate.closed:
        return a
    if math.isinf(gate.largest):
        return undefined(a)
    if alpha == 1:
        return step_towards(a, b, 1, _mask(gate, a))
    exponent, wide = exponent_of(alpha), needs_wide(alpha)
    factor = None if gate.open is None else gate.open.to(a.dtype)

    def share(x: Tensor, y: Tensor, back: Tensor) -> Tensor:
        share_of_b = raised(similarities(x, y, gate.largest, wide, back), exponent)
        return share_of_b if factor is None else share_of_b.mul_(factor)

    blend(a, b, share, delta, draws)
    return a


@merge_method(
    "weight_sum_cutoff",
    label="Weighted sum with cutoff",
    inputs="AB",
    strength="alpha",
    params=(
        Param("alpha", 0.5, "share of B in the open columns: 0 is A, 1 is B", 0.0, 1.0),
        Param("beta", 1.0, "upper limit: columns whose mean similarity is not below it stay A; 1 is no limit",
              0.0, 1.0),
        Param("gamma", 0.0, "lower limit: columns whose mean similarity is not above it stay A; 0 is no limit",
              0.0, 1.0),
    ),
    formula=f"A + alpha·(B − A) in columns with gamma < mean of s < beta, else A; {SIMILARITY}, its mean over the "
    "first dimension",
    rows=True,
    measures=(
        Measure(
            lambda a, b, *, beta, gamma, **_: _measure_columns(a, b, gamma, beta, wide=False),
            _open_columns,
            needed=lambda params: (
                params["alpha"] > 0
                and params["gamma"] < params["beta"]
                and is_limited(params["gamma"], params["beta"])
            ),
        ),
    ),
    exact_arithmetic=True,
    exact_a="alpha = 0, or no column lies between the limits (as with gamma ≥ beta)",
    exact_b="alpha = 1, beta = 1 and gamma = 0",
    caution=lambda params: _nothing_between("gamma", params["gamma"], "beta", params["beta"]),
)  # fmt: skip
def weight_sum_cutoff(
    a: Tensor, b: Tensor, *, alpha: float, beta: float, gamma: float, measures: Sequence[Gate]
) -> Tensor:
    """Blend two models evenly, but only in input columns whose similarity lies between two limits.

    The limits are on similarity, not on difference as the mode document has it: to merge only what differs little,
    raise gamma. They are asked of columns, not of weights: of all weights that meet one input, the mean over a tensor's
    first dimension; of a vector, over all of it.

    Args:
        a: [rows, columns], float32 or float64; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: upper limit, 0 … 1.
        gamma: lower limit, 0 … 1.
        measures: the gate of the whole tensor.

    Returns:
        The blend, same shape and dtype; closed columns have the bits of A.
    """
    if alpha == 0 or gamma >= beta:
        return a
    if not is_limited(gamma, beta):
        return b if alpha == 1 else a.sub_(torch.sub(a, b, out=b).mul_(alpha).add_(0.0))  # A − 0.0 has the bits of A
    gate = measures[0]
    if gate.closed:
        return a
    if math.isinf(gate.largest) and alpha < 1:
        return undefined(a)
    mask = _mask(gate, a)
    if alpha == 1:
        return step_towards(a, b, 1, mask)
    size = max(1, PIECE // max(1, a.shape[1]))
    for low in range(0, len(a), size):
        step_towards(a[low : low + size], b[low : low + size], alpha, mask)
    return a
