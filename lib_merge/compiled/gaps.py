"""How far stored tensors are apart: the largest difference, all of them in float64, and sums down the columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.column_sums import LEVELS, ColumnSums, column_sums, top_unit, unit
from ..kernels.measure import row_block
from ..kernels.scratch import flat_room
from ..lazy import torch
from .numbers import bits_of, kept, widen

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_INFINITE = np.float32(np.inf)
# Torch adds up to four sums of sums, each of at least 2**4 numbers.
_SUMS, _LEAST_POWER = 4, 4
_COLUMNS = 512  # added at a time: their sums stay in a core's cache


def finite(found: tuple[int, bool], dtype: Any) -> float:
    """The number of some bits, found with whether a value is not finite.

    Raises:
        ArithmeticError: what it was found among is not finite.
    """
    bits, bad = found
    if bad:
        raise ArithmeticError("a value is not finite")
    return float(np.array(bits, f"i{np.dtype(dtype).itemsize}").view(dtype))


def largest_of(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Largest |A − B| by float32; 0 for no elements. Raises as `finite`."""
    return finite(_largest(a, b), np.float32)


@kept
def _largest(a: Any, b: Any) -> Any:
    """Bits of the largest |A − B|, and whether a value is not finite."""
    largest, bad = np.int32(0), False
    for i in range(a.size):
        x, y = widen(a[i]), widen(b[i])
        bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE)
        bits = bits_of(abs(x - y))
        largest = bits if bits > largest else largest
    return largest, bad


def widest_of(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Largest |A − B| by float64; 0 for no elements. Raises as `finite`."""
    return finite(_widest(a, b), np.float64)


@kept
def _widest(a: Any, b: Any) -> Any:
    largest, bad = np.int64(0), False
    for i in range(a.size):
        x, y = widen(a[i]), widen(b[i])
        bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE)
        bits = bits_of(abs(np.float64(x) - np.float64(y)))
        largest = bits if bits > largest else largest
    return largest, bad


def gap_blocks(a: NDArray[Any], b: NDArray[Any], size: int, wide: bool) -> Iterator[tuple[float, Tensor]]:
    """Largest |A − B|, and all in float64, of blocks of elements; good until the next one. Raises as `finite`.

    Args:
        a: stored, flat.
        b: as many.
        size: of a block.
        wide: subtract in float64.
    """
    for low in range(0, a.size, size):
        x, y = a[low : low + size], b[low : low + size]
        gaps = flat_room("wide", x.size, torch.float64)
        yield finite(_gaps(x, y, wide, gaps.numpy()), np.float64), gaps


@kept
def _gaps(a: Any, b: Any, wide: Any, out: Any) -> Any:
    """`similarity.gaps` as float64; bits of the largest, and whether a value is not finite."""
    largest, bad = np.int64(0), False
    for i in range(out.size):
        x, y = widen(a[i]), widen(b[i])
        gap = abs(np.float64(x) - np.float64(y)) if wide else np.float64(abs(x - y))
        bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE)
        bits = bits_of(gap)
        largest = bits if bits > largest else largest
        out[i] = gap
    return largest, bad


def column_gaps(a: NDArray[Any], b: NDArray[Any], columns: int, wide: bool) -> tuple[float, ColumnSums | None]:
    """Largest |A − B| and its sums down the columns; None for no elements. Raises as `finite`.

    Args:
        a: stored rows, flat.
        b: as many.
        columns: of a row.
        wide: subtract in float64.
    """
    if a.size == 0:
        return 0.0, None
    largest, size = widest_of(a, b) if wide else largest_of(a, b), row_block(columns)
    if columns == 1 or not _adds_as_torch():
        blocks = [torch.sum(gaps.view(-1, columns), 0) for _, gaps in gap_blocks(a, b, size * columns, wide)]
        return largest, column_sums(torch.stack(blocks), size * largest)
    top = top_unit(size * largest)
    multiples = torch.zeros(LEVELS, columns, dtype=torch.float64)
    levels = _sum_columns(a, b, size, wide, unit(top), unit(1), multiples.numpy())
    return largest, ColumnSums(top, tuple(multiples[:levels]))


@kept
def _sum_columns(a: Any, b: Any, size: Any, wide: Any, top: Any, step: Any, out: Any) -> Any:
    """Sums of blocks of `size` rows as multiples of units, as `column_sums.column_sums`; how many units."""
    columns, levels = out.shape[1], 1
    rows, sums = a.size // columns, np.empty((_SUMS, _COLUMNS))
    for at in range(0, columns, _COLUMNS):
        width = min(_COLUMNS, columns - at)
        for first in range(0, rows, size):
            _sum_block(a, b, columns, at, width, first, min(rows, first + size), wide, sums)
            rest = sums[0]
            for level in range(out.shape[0]):
                total, left, factor = out[level, at : at + width], 0.0, step if level else 1 / top
                for column in range(width):
                    scaled = rest[column] * factor
                    whole = np.floor(scaled)
                    total[column] += whole
                    rest[column] = scaled - whole
                    left += rest[column]
                if not left > 0:
                    break
                levels = max(levels, min(level + 2, out.shape[0]))
    return levels


@kept
def _sum_block(a: Any, b: Any, columns: Any, at: Any, width: Any, first: Any, last: Any, wide: Any, sums: Any) -> None:
    """Sums of some columns over a block of rows in torch's order: sums of sums of 2**power rows."""
    power = 0
    while 1 << power < last - first:
        power += 1
    power = max(_LEAST_POWER, power // _SUMS)
    step = 1 << power
    used = _SUMS if last - first >= step else 1
    sums[:used] = 0.0
    total = sums[0]
    for done, row in enumerate(range(first, last), 1):
        left, right = a[row * columns + at :], b[row * columns + at :]
        for column in range(width):
            x, y = widen(left[column]), widen(right[column])
            total[column] += abs(np.float64(x) - np.float64(y)) if wide else np.float64(abs(x - y))
        if done % step == 0:
            for level in range(1, _SUMS):
                sums[level] += sums[level - 1]
                sums[level - 1] = 0.0
                if done & ((step - 1) << (level * power)):
                    break
    for level in range(1, used):
        total += sums[level]


@cache
def _adds_as_torch() -> bool:
    """True when `_sum_block` gives the bits of torch, whose order of addition nobody promises."""
    rng = np.random.default_rng(0)
    for columns, rows in ((2, 1000), (9, 7281), (36, 1820), (320, 204), (320, 17), (1000, 65), (5000, 13)):
        a, b = rng.standard_normal((2, rows * columns), dtype=np.float32)
        ours = np.empty((_SUMS, columns))
        _sum_block(a, b, columns, 0, columns, 0, rows, False, ours)
        gaps = torch.from_numpy(np.abs(a - b)).double().view(rows, columns)
        if not np.array_equal(torch.sum(gaps, 0).numpy(), ours[0]):
            return False
    return True
