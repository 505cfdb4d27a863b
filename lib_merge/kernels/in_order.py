"""Products of thin matrices in float64, the sum over the rank in its own order: the same bits on every machine."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PROBED_COLUMNS = 256


def product(up: Tensor, down: Tensor, out: Tensor, *, fast: bool = True) -> Tensor:
    """Σ up[:, t] · down[t, :] for t = 0, 1, … in that order, each product and each sum rounded to float64.

    Matrix multiplication may add in another order. Where it does not on this machine it is used: it is much faster.

    Args:
        up: float64 [rows, rank]; values that float32 can hold, so that products are exact and fused ones the same.
        down: float64 [rank, columns], as `up`.
        out: float64 [rows, columns], overwritten.
        fast: False for values of full float64 precision, and to be certain.

    Returns:
        `out`.
    """
    rank, columns = down.shape
    if fast and _multiplication_is_in_order(up.shape[0], rank, min(columns, _PROBED_COLUMNS)):
        return torch.mm(up, down, out=out)
    return _sum_in_order(up, down, out)


def _sum_in_order(up: Tensor, down: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    room = torch.empty_like(out)
    for number in range(down.shape[0]):
        out.add_(torch.mul(up[:, number : number + 1], down[number : number + 1], out=room))
    return out


@lru_cache(maxsize=256)
def _multiplication_is_in_order(rows: int, rank: int, columns: int) -> bool:
    """True when `torch.mm` gives the in-order sums for this shape, found by trying it on random float32 values."""
    numbers = torch.Generator().manual_seed(0)
    up = torch.randn(rows, rank, generator=numbers).double()
    down = torch.randn(rank, columns, generator=numbers).double()
    ordered = _sum_in_order(up, down, torch.empty(rows, columns, dtype=torch.float64))
    return torch.equal(torch.mm(up, down), ordered)
