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

# A sum is kept as multiples of up to three units 2**(28·n). Whole numbers are added without rounding (up to 2**53), and
# so neither order nor grouping matters.
_BITS = 28
LEVELS = 3
_LEAST = -38  # 2**(28·_LEAST) is the least such unit that float64 has


@dataclass(frozen=True)
class ColumnSums:
    """Sums of numbers ≥ 0, one for each column.

    Attributes:
        top: number n of the largest unit, 2**(28·n).
        multiples: [columns] float64 each: how many of the units `top`, `top` − 1, `top` − 2; units that none needs are
            left out at the end. What is less than the last unit is lost: 2**−55 of the largest block's sum, or less.
    """

    top: int
    multiples: tuple[Tensor, ...]

    def add(self, other: ColumnSums) -> ColumnSums:
        """Sums of both; any order and any grouping gives the same."""
        if self.top < other.top:
            return other.add(self)
        multiples = list(self.multiples)
        for level, multiple in enumerate(other.multiples, self.top - other.top):
            if level < len(multiples):
                multiples[level] = multiples[level] + multiple
            elif level < LEVELS:
                multiples += [torch.zeros_like(multiple)] * (level - len(multiples)) + [multiple]
        return ColumnSums(self.top, tuple(multiples))

    def total(self) -> Tensor:
        """[columns] float64."""
        total = torch.zeros_like(self.multiples[0])
        for level in reversed(range(len(self.multiples))):
            total += self.multiples[level] * unit(self.top - level)
        return total


def column_sums(blocks: Tensor, largest: float) -> ColumnSums:
    """Sums over blocks of rows.

    Args:
        blocks: [blocks, columns] float64, numbers ≥ 0, from `sum_rows`; overwritten.
        largest: no block's sum is larger, rounding aside.
    """
    top = top_unit(largest)
    rest, whole = blocks.div_(unit(top)), room("whole", blocks)
    multiples: list[Tensor] = []
    while len(multiples) < LEVELS:
        multiples.append(torch.floor(rest, out=whole).sum(0))
        if not rest.sub_(whole).amax() > 0:  # so at once with most numbers that came from 16 bits
            break
        rest.mul_(unit(1))
    return ColumnSums(top, tuple(multiples))


def top_unit(largest: float) -> int:
    """Number of the unit that the largest block's sum is counted in."""
    return max(math.frexp(largest)[1] // _BITS, _LEAST) if largest else _LEAST


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
    for low in range(0, rows, size):
        yield [matrix[low : low + size] for matrix in matrices]


def unit(number: int) -> float:
    """2**(28·number)."""
    return math.ldexp(1.0, _BITS * number)
