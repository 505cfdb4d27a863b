"""Sums over tensors that do not depend on tile size or thread count: float64, fixed blocks, block order."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ..lazy import np, torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

BLOCK = 1 << 16


def row_block(columns: int) -> int:
    """Rows of a matrix that are summed as one block: as many as fit 2**16 elements, at least one.

    The block is part of a sum's definition, so that no sum depends on where tiles were cut.
    """
    return max(1, BLOCK // max(1, columns))


def block_dots(x: Tensor, y: Tensor) -> list[float]:
    """Σ x·y of each block of 2**16 elements, in float64.

    Args:
        x: float32 or float64, any shape.
        y: as many elements.
    """
    return [_product(left, right, room) for (left, right), room in _blocks(x, y)]


def dot(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩ in float64, the blocks' sums added exactly."""
    return math.fsum(block_dots(x, y))


def pair_dots(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """⟨x, x⟩, ⟨x, y⟩ and ⟨y, y⟩ in one pass; see `dot`."""
    xx, xy, yy = [], [], []
    for (left, right), room in _blocks(x, y):
        xx.append(_product(left, left, room))
        xy.append(_product(left, right, room))
        yy.append(_product(right, right, room))
    return math.fsum(xx), math.fsum(xy), math.fsum(yy)


def _blocks(*tensors: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """A block of each tensor in float64, and room for another; the next block overwrites them."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    count = flat[0].numel()
    *buffers, room = [torch.empty(min(BLOCK, count), dtype=torch.float64) for _ in range(len(flat) + 1)]
    for at in range(0, count, BLOCK):
        size = min(BLOCK, count - at)
        yield [buffer[:size].copy_(x[at : at + size]) for buffer, x in zip(buffers, flat, strict=True)], room[:size]


def _product(x: Tensor, y: Tensor, room: Tensor) -> float:
    """Σ x·y of a block. Torch splits so long a sum between its threads: the engine gives each worker one."""
    return float(torch.sum(torch.mul(x, y, out=room)))


def bits_finite(raw: NDArray[np.uint8], bits: int, unbounded: int) -> bool:
    """True when no element of a float format is NaN or infinite, told from the bits; as fast as memory.

    Args:
        raw: the elements' bytes, little-endian.
        bits: size of one element.
        unbounded: first positive bit pattern that is not finite; all above it are not finite either.
    """
    return raw.size == 0 or patterns_finite(*patterns(raw, bits), bits, unbounded)


def patterns(raw: NDArray[np.uint8], bits: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The elements' bytes as signed and as unsigned integers of `bits` bits, without a copy."""
    return raw.view(f"<i{bits // 8}"), raw.view(f"<u{bits // 8}")


def patterns_finite(signed: NDArray[Any], unsigned: NDArray[Any], bits: int, unbounded: int) -> bool:
    """`bits_finite` of views made once by `patterns`; not of empty ones."""
    negative = unbounded | 1 << (bits - 1)
    return bool(np.maximum.reduce(signed) < unbounded and np.maximum.reduce(unsigned) < negative)


def all_finite(x: Tensor) -> bool:
    """True when no element is NaN or infinite; two reductions, much faster than `isfinite().all()` and `aminmax`.

    Args:
        x: float32 or float64, any shape; empty is finite.
    """
    if x.numel() == 0:
        return True
    return math.isfinite(float(x.amin())) and math.isfinite(float(x.amax()))


def compare_sums(a: Tensor, b: Tensor, c: Tensor | None = None) -> dict[str, float]:
    """Sums of one tile from which norms, cosines and sign conflicts of whole tensors follow by addition.

    Args:
        a: float32 or float64, any shape.
        b: same shape.
        c: a second donor, or None.

    Returns:
        `aa`, `bb`, `ab` products; `dd` of B − A; with C also `ee` of C − A, `de`, and the counts `conflicts` and
        `both` of positions where B − A and C − A are both non-zero.
    """
    sums: dict[str, list[float]] = defaultdict(list)
    for (x, y, *more), room in _blocks(a, b, *(() if c is None else (c,))):
        sums["aa"].append(_product(x, x, room))
        sums["bb"].append(_product(y, y, room))
        sums["ab"].append(_product(x, y, room))
        first = y.sub_(x)
        sums["dd"].append(_product(first, first, room))
        for z in more:
            second = z.sub_(x)
            sums["ee"].append(_product(second, second, room))
            sums["de"].append(_product(first, second, room))
            agreement = first.sign_().mul_(second.sign_())
            both = _product(agreement, agreement, room)
            sums["both"].append(both)
            sums["conflicts"].append((both - float(torch.sum(agreement))) / 2)
    return {name: math.fsum(values) for name, values in sums.items()}


def change_sums(a: Tensor, out: Tensor) -> dict[str, float]:
    """`oo` of the result, `cc` of its change against A, and `max_change`, of one tile; see `compare_sums`."""
    oo, cc, largest = [], [], [0.0]
    for (x, y), room in _blocks(a, out):
        oo.append(_product(y, y, room))
        change = y.sub_(x)
        cc.append(_product(change, change, room))
        largest += [-float(change.amin()), float(change.amax())]
    return {"oo": math.fsum(oo), "cc": math.fsum(cc), "max_change": max(largest)}
