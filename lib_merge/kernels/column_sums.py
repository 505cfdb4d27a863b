"""Sums down the columns of a matrix that come out the same however its rows were cut into tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lazy import torch
from .measure import row_block
from .scratch import room

if TYPE_CHECKING:
    from torch import Tensor

# A sum is kept as multiples of a few units 2**(28·n). Whole numbers are added without rounding (up to 2**53), and so
# neither order nor grouping matters.
_BITS = 28
_LEVELS = {4: 2, 8: 3}
_LEAST = -38  # 2**(28·_LEAST) is the least such unit that float64 has


@dataclass(frozen=True)
class ColumnSums:
    """Sums of numbers ≥ 0, one for each column.

    Attributes:
        top: number n of the largest unit that occurs, 2**(28·n).
        multiples: [levels, columns] float64: how many of the units `top`, `top` − 1, … Of every block, less than one of
            the last unit is left out: 2**−28 of the largest block's sum (2**−56 with three levels).
    """

    top: int
    multiples: Tensor

    def add(self, other: ColumnSums) -> ColumnSums:
        """Sums of both; any order and any grouping gives the same."""
        if self.top < other.top:
            return other.add(self)
        down = min(self.top - other.top, len(self.multiples))
        multiples = self.multiples.clone()
        multiples[down:] += other.multiples[: len(multiples) - down]
        return ColumnSums(self.top, multiples)

    def total(self) -> Tensor:
        """[columns] float64."""
        total = torch.zeros_like(self.multiples[0])
        for level in reversed(range(len(self.multiples))):
            total += self.multiples[level] * _unit(self.top - level)
        return total


def column_sums(blocks: Tensor, limit: float, element_size: int) -> ColumnSums:
    """Sums over blocks of rows.

    Args:
        blocks: [blocks, columns] float64, numbers ≥ 0, from `sum_rows`; overwritten.
        limit: no block's sum is larger.
        element_size: 4 if they are sums of float32 numbers, 8 if of float64.
    """
    top = max((math.frexp(limit)[1] - 1) // _BITS, _LEAST) if limit else _LEAST
    rest, whole = blocks.div_(_unit(top)), room("whole", blocks)
    multiples = torch.zeros(_LEVELS[element_size], blocks.shape[1], dtype=torch.float64, device=blocks.device)
    for level in multiples:
        torch.sum(torch.floor(rest, out=whole), 0, out=level)
        if not rest.sub_(whole).amax() > 0:  # so with most numbers that came from 16 bits
            break
        rest.mul_(_unit(1))
    return ColumnSums(top, multiples)


def sum_rows(block: Tensor, out: Tensor) -> None:
    """Sums of one of `row_blocks` down its columns.

    Torch's order of addition depends on the block's shape, and on the number of its threads: the engine gives each
    worker one.

    Args:
        block: [rows, columns].
        out: [columns] float64.
    """
    wide = block if block.dtype == torch.float64 else room("wide", block, torch.float64).copy_(block)
    torch.sum(wide, 0, out=out)


def row_blocks(*matrices: Tensor) -> Iterator[list[Tensor]]:
    """The matrices' rows, one block (see `row_block`) of each at a time."""
    rows, columns = matrices[0].shape
    size = row_block(columns)
    for low in range(0, rows if columns else 0, size):
        yield [matrix[low : low + size] for matrix in matrices]


def _unit(number: int) -> float:
    return math.ldexp(1.0, _BITS * number)
