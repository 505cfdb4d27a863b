"""Positions that one delta has nearly to itself: kept out of the merge, added to its result (arXiv:2405.07813)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..lazy import torch
from .scratch import PIECE, pieces

if TYPE_CHECKING:
    from torch import Tensor


class Split(NamedTuple):
    """Deltas cut in two.

    Attributes:
        selfish: Σ w·g where one delta dominates, else 0; to be added to what the rests make.
        rests: the deltas without that, not scaled by their weights.
        share: of positions that are selfish, 0 … 1.
    """

    selfish: Tensor
    rests: list[Tensor]
    share: float


def default_dominance(count: int) -> float:
    """1 for three and more deltas, 3 for two: of two, one is always the larger, and 1 would leave nothing to merge."""
    return 3.0 if count == 2 else 1.0


def tall_split(gs: Sequence[Tensor], ws: Sequence[float], dominance: float | None = None) -> Split:
    """Take out each position where one w·|g| is at least `dominance` times that of all others together.

    Where two share the largest value nobody dominates. Σ w·rest + selfish is Σ w·g.

    Args:
        gs: oriented deltas, all of one shape and dtype.
        ws: their weights, above 0.
        dominance: the factor lambda, above 0; None is `default_dominance`.
    """
    factor = default_dominance(len(gs)) if dominance is None else dominance
    selfish, *rests = [torch.empty_like(gs[0], memory_format=torch.contiguous_format) for _ in range(len(gs) + 1)]
    count = 0
    for target, *parts in pieces(PIECE, selfish, *rests, *gs):
        kept, deltas = parts[: len(gs)], parts[len(gs) :]
        owned = _owned([delta * w for delta, w in zip(deltas, ws, strict=True)], factor)
        target.zero_()
        for rest, delta, own, w in zip(kept, deltas, owned, ws, strict=True):
            taken = delta * own
            torch.sub(delta, taken, out=rest)
            target += taken * w
            count += int(own.sum())
    return Split(selfish, rests, count / selfish.numel() if selfish.numel() else 0.0)


def _owned(scaled: Sequence[Tensor], factor: float) -> list[Tensor]:
    """For each delta the positions that it dominates; at most one delta at each."""
    sizes = torch.stack([part.abs() for part in scaled])
    top = sizes.amax(0)
    hit = (sizes == top) & (top >= factor * (sizes.sum(0) - top)) & (top > 0)
    return list(hit & (hit.sum(0) == 1))


def shared_mask(gs: Sequence[Tensor], ws: Sequence[float], dominance: float = 0.4, least: int = 2) -> Tensor:
    """True where at least `least` deltas matter: the consensus mask of the paper, which takes selfish weights away.

    A delta matters where w·|g| > dominance·|Σ others w·g|. The merged delta is to be multiplied by the mask.

    Args:
        gs: oriented deltas, all of one shape and dtype.
        ws: their weights, above 0.
        dominance: the paper's lambda, 0.2 … 0.6.
        least: how many deltas.

    Returns:
        bool, of their shape.
    """
    scaled = [g * w for g, w in zip(gs, ws, strict=True)]
    total = torch.stack(scaled).sum(0)
    used = sum(
        ((part.abs() > dominance * (total - part).abs()).int() for part in scaled), torch.zeros_like(total).int()
    )
    return used >= least
