"""Merges that are sums of the deltas with a scalar each: exact in a LoRA's factors, at the sum of the ranks.

Scalars follow from strengths and inner products alone, so no dense matrix is needed: `lowrank.joined` takes them. A
Gram matrix here is [N][N] of Python floats, ⟨dᵢ, dⱼ⟩ in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .measure import dot

if TYPE_CHECKING:
    from torch import Tensor

Gram = Sequence[Sequence[float]]

_STRAIGHT = 1e-6
_LARGEST_CORRECTION = 2.0
# A rest shorter than this is what float64 leaves of a delta that others make up already.
_NOTHING_LEFT = 1e-6


def oriented(deltas: Sequence[Tensor], strengths: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """sign(s)·d and |s|: what votes, angles and importance are about.

    Args:
        deltas: all of one shape, not scaled by their strengths.
        strengths: none is 0.
    """
    return (
        [delta if s > 0 else -delta for delta, s in zip(deltas, strengths, strict=True)],
        [abs(s) for s in strengths],
    )


def gram(xs: Sequence[Tensor]) -> list[list[float]]:
    """⟨xᵢ, xⱼ⟩ of dense tensors in float64.

    Args:
        xs: float32 or float64, all of one shape.
    """
    found = {(i, j): dot(xs[i], xs[j]) for i in range(len(xs)) for j in range(i, len(xs))}
    return [[found[min(i, j), max(i, j)] for j in range(len(xs))] for i in range(len(xs))]


def combined(xs: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
    """Σ cᵢ·xᵢ as a new tensor.

    Args:
        xs: all of one shape and dtype.
        scalars: one for each.
    """
    total = xs[0] * scalars[0]
    for x, scalar in zip(xs[1:], scalars[1:], strict=True):
        if scalar:
            total += x * scalar
    return total


def mean_norm(norms: Sequence[float], ws: Sequence[float]) -> float:
    """Σ w·‖d‖ / Σ w: the size that SLERP and consensus give their result.

    Args:
        norms: of the deltas.
        ws: their weights, 0 or more, not all 0.
    """
    return sum(w * norm for w, norm in zip(ws, norms, strict=True)) / sum(ws)


def weighted_sum_scalars(strengths: Sequence[float]) -> list[float]:
    """Σ s·d."""
    return list(strengths)


def weighted_average_scalars(strengths: Sequence[float]) -> list[float]:
    """Σ s·d / Σ |s|: a common factor of all strengths changes nothing.

    Args:
        strengths: not all 0.
    """
    total = sum(abs(s) for s in strengths)
    return [s / total for s in strengths]


def slerp_scalars(gram: Gram, strengths: Sequence[float]) -> list[float]:
    """SLERP of two or more deltas, pairwise from the strongest on, as scalars for the deltas themselves.

    Each step goes w/(W + w) of the way along the arc from what there is, of weight W, to the next delta; where the two
    are parallel or opposite (sin of their angle below 1e-6) or one is 0, along the straight line. At the end the norm
    is set to Σ w·‖d‖ / Σ w, but at most doubled: what cancels stays small. From three on, the order of deltas of equal
    strength matters.

    Args:
        gram: inner products of the oriented deltas, sign(s)·d.
        strengths: signed; none is 0.

    Returns:
        Scalars for the deltas as they are, not oriented.
    """
    ws = [abs(s) for s in strengths]
    order = sorted(range(len(ws)), key=lambda k: -ws[k])
    made, weight = [0.0] * len(ws), ws[order[0]]
    made[order[0]] = 1.0
    for k in order[1:]:
        weight += ws[k]
        made = _towards(gram, made, k, ws[k] / weight)
    gain = _correction(_norm(gram, made), mean_norm([math.sqrt(gram[k][k]) for k in range(len(ws))], ws))
    return [math.copysign(gain, s) * scalar for scalar, s in zip(made, strengths, strict=True)]


def _towards(gram: Gram, made: Sequence[float], k: int, share: float) -> list[float]:
    """Scalars `share` of the way from a combination to delta k."""
    lengths = _norm(gram, made) * math.sqrt(gram[k][k])
    cosine = _inner(gram, made, _unit(len(made), k)) / lengths if lengths else 1.0
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    sine = math.sin(angle)
    straight = sine < _STRAIGHT
    kept = 1 - share if straight else math.sin((1 - share) * angle) / sine
    added = share if straight else math.sin(share * angle) / sine
    return [kept * scalar + added * (i == k) for i, scalar in enumerate(made)]


def _correction(norm: float, wanted: float) -> float:
    return min(wanted / norm, _LARGEST_CORRECTION) if norm else 1.0


def orthogonalize_scalars(gram: Gram, strengths: Sequence[float], gain_cap: float = 2.0) -> list[list[float]]:
    """Deltas made orthogonal to each other, the largest |s|·‖d‖ first (ties by position), as sums of the old ones.

    Modified Gram-Schmidt; each keeps its norm, but what is left of it grows by at most `gain_cap`: of near duplicates
    only rounding is left, which must not come out at full size. What is left below a millionth is 0.

    Args:
        gram: inner products of the deltas, oriented or not.
        strengths: one for each; only their sizes matter, for the order.
        gain_cap: 1 or more.

    Returns:
        [N][N]: row k gives new delta k as scalars for the deltas that the Gram matrix is of.
    """
    norms = [math.sqrt(gram[k][k]) for k in range(len(gram))]
    order = sorted(range(len(norms)), key=lambda k: -abs(strengths[k]) * norms[k])
    directions: list[list[float]] = []
    rows = [[0.0] * len(norms) for _ in norms]
    for k in order:
        if norms[k] == 0:
            continue
        rest = _unit(len(norms), k, 1 / norms[k])
        for direction in directions * 2:  # twice: once leaves what rounding let through
            projection = _inner(gram, direction, rest)
            rest = [own - projection * other for own, other in zip(rest, direction, strict=True)]
        left = _norm(gram, rest)
        if left < _NOTHING_LEFT:
            continue
        directions.append([scalar / left for scalar in rest])
        size = norms[k] * min(1.0 / left, gain_cap)
        rows[k] = [scalar * size for scalar in rest]
    return rows


def kept_shares(gram: Gram, rows: Sequence[Sequence[float]]) -> list[float]:
    """‖new delta k‖ / ‖old delta k‖ of combinations, 0 of what was 0.

    Args:
        gram: inner products of the old deltas.
        rows: [N][N], from `orthogonalize_scalars`.
    """
    return [_norm(gram, row) / math.sqrt(gram[k][k]) if gram[k][k] > 0 else 0.0 for k, row in enumerate(rows)]


def _unit(count: int, k: int, size: float = 1.0) -> list[float]:
    return [size * (i == k) for i in range(count)]


def _inner(gram: Gram, left: Sequence[float], right: Sequence[float]) -> float:
    """Inner product of two combinations."""
    return math.fsum(x * gram[i][j] * y for i, x in enumerate(left) if x for j, y in enumerate(right) if y)


def _norm(gram: Gram, scalars: Sequence[float]) -> float:
    return math.sqrt(max(_inner(gram, scalars, scalars), 0.0))
