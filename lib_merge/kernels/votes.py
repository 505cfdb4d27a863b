"""Votes of several deltas about each weight: trim, elect a sign, average those that agree (TIES, arXiv:2306.01708).

Deltas come oriented, sign(s)·d, with weights w = |s|, so that a negative strength votes the other way
(`combinations.oriented`). Nothing is overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ..lazy import torch
from .scratch import PIECE, pieces

if TYPE_CHECKING:
    from torch import Tensor

Vote = Literal["frequency", "total"]
Divisor = Literal["weight", "count"]
Score = Literal["row_sum", "projection"]
Mode = Literal["all", "low_conflict", "high_conflict"]

# A dozen numbers for each element are at hand at a time.
_PIECE = PIECE // 4
_NUDGE = 1e-9  # beyond the rounding of density times count: 0.3 of 1001 elements is 300


def kth_threshold(x: Tensor, density: float) -> float:
    """The k-th largest |x|, k = ⌊density·(n − 1)⌋ + 1: the (1 − density) quantile as an order statistic, exact.

    Args:
        x: float32 or float64, any shape and any number of elements (`torch.quantile` ends at 2**24).
        density: share that is kept. 1 or more gives 0, as does an empty tensor; 0 or less gives infinity.
    """
    count = x.numel()
    if density >= 1 or count == 0:
        return 0.0
    if density <= 0:
        return math.inf
    smaller = count - 1 - math.floor(density * (count - 1) + _NUDGE)
    sizes = x.detach().abs().reshape(-1).cpu().numpy()
    sizes.partition(smaller)
    return float(sizes[smaller])


def trim(x: Tensor, density: float) -> Tensor:
    """A delta without its smallest entries; those as large as the last one kept stay.

    Args:
        x: float32 or float64, any shape.
        density: share that is kept; 1 or more keeps all and gives `x` itself, 0 or less nothing.
    """
    return _trimmed(x, _just_below(kth_threshold(x, density), x))


def _just_below(limit: float, like: Tensor) -> float:
    """The next smaller number in the tensor's dtype; 0 of 0."""
    return float(torch.nextafter(like.new_tensor(limit), like.new_zeros(())))


def _trimmed(x: Tensor, below: float) -> Tensor:
    return torch.hardshrink(x, below) if below else x


def elect(gs: Sequence[Tensor], ws: Sequence[float], vote: Vote = "frequency") -> Tensor:
    """The sign that wins at each position: −1, 0 or 1, in the deltas' dtype.

    Args:
        gs: oriented deltas, all of one shape and dtype.
        ws: their weights, above 0.
        vote: `total`: sign of Σ w·g. `frequency`: each delta has one vote; a tie, which is what every disagreement of
            two deltas is, falls back to the total. A tie of that elects 0: no sign is preferred.
    """
    total = _sum(g * w for g, w in zip(gs, ws, strict=True)).sign_()
    if vote == "total":
        return total
    return _sum(g.sign() for g in gs).mul_(2).add_(total).sign_()


def disjoint(ts: Sequence[Tensor], ws: Sequence[float], elected: Tensor, divisor: Divisor = "weight") -> Tensor:
    """Mean of the deltas whose sign is the elected one, at each position; 0 where none agrees.

    Args:
        ts: oriented deltas, trimmed or sparsified, all of one shape and dtype.
        ws: their weights, above 0.
        elected: from `elect`.
        divisor: `weight`: Σ w·t / Σ w over those that agree, so that a common factor of all weights changes nothing.
            `count`: Σ w·t / their number.
    """
    sizes = [(t * elected).clamp_(min=0) for t in ts]  # of those that agree, 0 of the others
    upper = _sum(size * w for size, w in zip(sizes, ws, strict=True)).mul_(elected)
    shares = _shares(ws, divisor)
    lower = _sum(size.sign_().mul_(share) for size, share in zip(sizes, shares, strict=True))
    return upper.div_(lower.clamp_(min=min(shares)))


def _shares(ws: Sequence[float], divisor: Divisor) -> Sequence[float]:
    return ws if divisor == "weight" else [1.0] * len(ws)


def _sum(terms: Iterator[Tensor]) -> Tensor:
    """Fresh tensors, one at a time, added in their order into the first."""
    total = next(terms)
    for term in terms:
        total += term
    return total


def ties(
    gs: Sequence[Tensor],
    ws: Sequence[float],
    density: float,
    vote: Vote = "frequency",
    divisor: Divisor = "weight",
) -> Tensor:
    """Trim each delta, elect a sign at each position, average what agrees.

    Args:
        gs: oriented deltas, all of one shape and dtype; sparsified ones with density 1.
        ws: their weights, above 0.
        density: share of each delta that is kept, 0 … 1.
        vote: see `elect`.
        divisor: see `disjoint`.

    Returns:
        A new tensor of the same shape and dtype.
    """
    limits = [_just_below(kth_threshold(g, density), g) for g in gs]

    def merge(parts: Sequence[Tensor]) -> Tensor:
        ts = [_trimmed(part, below) for part, below in zip(parts, limits, strict=True)]
        return disjoint(ts, ws, elect(ts, ws, vote), divisor)

    return elementwise(merge, gs)


def elementwise(function: Callable[[Sequence[Tensor]], Tensor], xs: Sequence[Tensor]) -> Tensor:
    """A function of several tensors' elements, worked out piece by piece, which stay in a core's cache.

    Args:
        function: one piece of each tensor, flat -> the result there; must not overwrite them.
        xs: all of one shape and dtype.
    """
    out = torch.empty_like(xs[0], memory_format=torch.contiguous_format)
    for target, *parts in pieces(_PIECE, out, *xs):
        target.copy_(function(parts))
    return out


def columnwise(
    ts: Sequence[Tensor],
    ws: Sequence[float],
    vote: Vote = "frequency",
    divisor: Divisor = "weight",
    score: Score = "row_sum",
) -> Tensor:
    """TIES with one vote for each output neuron (a row): a delta's row goes in whole, or not at all.

    Args:
        ts: oriented deltas, trimmed or sparsified, all of one shape and dtype; rows are their first dimension.
            Deltas of one dimension vote element by element.
        ws: their weights, above 0.
        vote: see `elect`, here about the scores of the rows.
        divisor: see `disjoint`.
        score: a row's vote. `row_sum`: the sum of its entries. `projection`: its inner product with the weighted sum of
            all deltas' rows, which does not depend on the signs of the neuron's inputs.

    Returns:
        A new tensor of the same shape and dtype.
    """
    if ts[0].ndim < 2:
        return disjoint(ts, ws, elect(ts, ws, vote), divisor)
    rows = [t.flatten(1) for t in ts]
    scores = _SCORES[score](rows, ws)
    elected = elect(scores, ws, vote)
    agreeing = [((one * elected) > 0).to(ts[0].dtype) for one in scores]
    upper = _sum(row * (agree * w) for row, agree, w in zip(rows, agreeing, ws, strict=True))
    shares = _shares(ws, divisor)
    lower = _sum(agree * share for agree, share in zip(agreeing, shares, strict=True))
    return upper.div_(lower.clamp_(min=min(shares))).reshape(ts[0].shape)


def _row_sums(rows: Sequence[Tensor], ws: Sequence[float]) -> list[Tensor]:
    return [row.sum(1, keepdim=True, dtype=torch.float64) for row in rows]


def _projections(rows: Sequence[Tensor], ws: Sequence[float]) -> list[Tensor]:
    total = _sum(row * w for row, w in zip(rows, ws, strict=True))
    return [(row * total).sum(1, keepdim=True, dtype=torch.float64) for row in rows]


_SCORES: dict[str, Callable[[Sequence[Tensor], Sequence[float]], list[Tensor]]] = {
    "row_sum": _row_sums,
    "projection": _projections,
}


def conflict_mask(gs: Sequence[Tensor]) -> Tensor:
    """True where at least one oriented delta is positive and at least one is negative; bool, of their shape."""
    positive, negative = gs[0] > 0, gs[0] < 0
    for g in gs[1:]:
        positive |= g > 0
        negative |= g < 0
    return positive & negative


def conflict_mode_masks(gs: Sequence[Tensor], ws: Sequence[float], modes: Sequence[Mode]) -> list[Tensor | None]:
    """For each delta the positions that its conflict mode leaves it; None where that is all.

    `low_conflict` keeps what has the sign that most deltas have there (`elect`), `high_conflict` the rest, so that the
    two add up to the delta. Where no sign wins nothing agrees.

    Args:
        gs: oriented deltas, all of one shape and dtype.
        ws: their weights, above 0.
        modes: one for each delta.
    """
    if all(mode == "all" for mode in modes):
        return [None] * len(gs)
    majority = elect(gs, ws)
    agreeing = {"low_conflict": True, "high_conflict": False}
    return [
        None if mode == "all" else ((g * majority) > 0) == agreeing[mode] for g, mode in zip(gs, modes, strict=True)
    ]
