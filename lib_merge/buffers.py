"""Memory that a worker uses again for every tile, and its views, which are made once for each size."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .files.dtypes import Dtype
from .kernels.measure import patterns, patterns_finite
from .lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

WIDEST_BYTES = 8
_VIEWS_KEPT = 512
# Size of a large page, and of what a buffer takes at least.
_PAGE = 1 << 21


class Buffer:
    """Room for some elements of any dtype.

    Args:
        elements: capacity, counted in the widest dtype (8 bytes).
        device: where the memory lies; `bytes` and `finite` are for that of the CPU.
    """

    def __init__(self, elements: int, device: str = "cpu") -> None:
        self.elements = elements
        self._memory = _memory(elements * WIDEST_BYTES, device)
        self._tensors: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self._bytes: dict[int, memoryview] = {}
        self._signs: dict[tuple[int, int, int], tuple[NDArray[Any], NDArray[Any]]] = {}

    @cached_property
    def _array(self) -> NDArray[Any]:
        return self._memory.numpy()

    def tensor(self, dtype: torch.dtype, count: int, start: int = 0) -> Tensor:
        """`count` elements from element `start` on, as a tensor of that dtype."""
        found = self._tensors.get((dtype, count, start))
        if found is None:
            self._trim()
            size = dtype.itemsize
            found = self._memory[start * size : (start + count) * size].view(dtype)
            self._tensors[dtype, count, start] = found
        return found

    def array(self, count: int) -> NDArray[np.uint8]:
        """The first `count` bytes, for compiled code."""
        found: NDArray[np.uint8] = self._array[:count]
        return found

    def bytes(self, count: int) -> memoryview:
        """The first `count` bytes, for reads and writes."""
        found = self._bytes.get(count)
        if found is None:
            self._trim()
            found = self._bytes[count] = self._array[:count].data
        return found

    def finite(self, dtype: Dtype, count: int, start: int = 0) -> bool:
        """True when `count` elements from `start` on, taken as this float format, hold no NaN and no infinity."""
        if count == 0:
            return True
        found = self._signs.get((dtype.bits, count, start))
        if found is None:
            self._trim()
            size = dtype.bits // 8
            found = patterns(self._array[start * size : (start + count) * size], dtype.bits)
            self._signs[dtype.bits, count, start] = found
        return patterns_finite(*found, dtype.bits, dtype.unbounded)

    def _trim(self) -> None:
        """Forget all views when there are many: a model of countless sizes must not fill memory with them."""
        if len(self._tensors) + len(self._bytes) + len(self._signs) > _VIEWS_KEPT:
            self._tensors.clear()
            self._bytes.clear()
            self._signs.clear()


def _memory(count: int, device: str) -> Tensor:
    """Bytes; of main memory as pages of their own, which go back to the system whole when nobody needs them."""
    if device == "cpu" and count:
        pages = mmap.mmap(-1, -(-count // _PAGE) * _PAGE)
        with suppress(AttributeError, OSError):  # large pages where the system has them: fewer look-ups of addresses
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)[:count]
    return torch.empty(count, dtype=torch.uint8, device=device)
