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
        owned, dominated = _owned([(delta * w).abs_() for delta, w in zip(deltas, ws, strict=True)], factor)
        target.zero_()
        for rest, delta, own, w in zip(kept, deltas, owned, ws, strict=True):
            taken = delta * own
            torch.sub(delta, taken, out=rest)
            target += taken.mul_(w)
        count += int(dominated.count_nonzero())
    return Split(selfish, rests, count / selfish.numel() if selfish.numel() else 0.0)


def _owned(sizes: Sequence[Tensor], factor: float) -> tuple[list[Tensor], Tensor]:
    """For each delta the positions that it dominates, and all such positions; never two deltas at one."""
    top, total = sizes[0].clone(), sizes[0].clone()
    for size in sizes[1:]:
        torch.maximum(top, size, out=top)
        total += size
    largest = [size == top for size in sizes]
    seen, shared = largest[0], torch.zeros_like(largest[0])
    for one in largest[1:]:
        shared |= seen & one
        seen = seen | one
    dominated = (top >= total.sub_(top).mul_(factor)) & (top > 0) & ~shared
    return [one & dominated for one in largest], dominated


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
