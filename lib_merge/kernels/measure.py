"""Sums over tensors that do not depend on tile size or thread count: float64, fixed blocks, block order."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ..lazy import torch

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


def dot(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩: products and block sums in float64, the blocks' sums added exactly.

    Args:
        x: float32 or float64, any shape.
        y: as many elements.
    """
    return math.fsum(_product(left, right) for left, right in _blocks(x, y))


def pair_dots(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """⟨x, x⟩, ⟨x, y⟩ and ⟨y, y⟩ in one pass; see `dot`."""
    sums = [(_product(left, left), _product(left, right), _product(right, right)) for left, right in _blocks(x, y)]
    xx, xy, yy = (math.fsum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
    return xx, xy, yy


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors' elements in float64, one block of each at a time."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), BLOCK):
        yield [tensor[at : at + BLOCK].double() for tensor in flat]


def _product(x: Tensor, y: Tensor) -> float:
    return float(torch.sum(x * y))


def bits_finite(raw: NDArray[np.uint8], bits: int, unbounded: int) -> bool:
    """True when no element of a float format is NaN or infinite, told from the bits; as fast as memory.

    Args:
        raw: the elements' bytes, little-endian.
        bits: size of one element.
        unbounded: first positive bit pattern that is not finite; all above it are not finite either.
    """
    if raw.size == 0:
        return True
    size = bits // 8
    sign = 1 << (bits - 1)
    positive = int(raw.view(f"<i{size}").max()) < unbounded
    return positive and int(raw.view(f"<u{size}").max()) < (unbounded | sign)


def all_finite(x: Tensor) -> bool:
    """True when no element is NaN or infinite; two reductions, much faster than `isfinite().all()`.

    Args:
        x: float32 or float64, any shape; empty is finite.
    """
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)
    return math.isfinite(float(low)) and math.isfinite(float(high))


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
    for x, y, *more in _blocks(a, b, *(() if c is None else (c,))):
        first = y - x
        pairs = {"aa": (x, x), "bb": (y, y), "ab": (x, y), "dd": (first, first)}
        for z in more:
            second = z - x
            pairs |= {"ee": (second, second), "de": (first, second)}
            agreement = torch.sign(first).mul_(torch.sign(second))
            both = _product(agreement, agreement)
            sums["both"].append(both)
            sums["conflicts"].append((both - float(torch.sum(agreement))) / 2)
        for name, pair in pairs.items():
            sums[name].append(_product(*pair))
    return {name: math.fsum(values) for name, values in sums.items()}


def change_sums(a: Tensor, out: Tensor) -> dict[str, float]:
    """`oo` of the result, `cc` of its change against A, and `max_change`, of one tile; see `compare_sums`."""
    oo, cc, largest = [0.0], [0.0], [0.0]
    for x, y in _blocks(a, out):
        change = y - x
        oo.append(_product(y, y))
        cc.append(_product(change, change))
        low, high = torch.aminmax(change)
        largest += [-float(low), float(high)]
    return {"oo": math.fsum(oo), "cc": math.fsum(cc), "max_change": max(largest)}
