"""Stored tensors as torch tensors of their own dtype: whole ones, and rows of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..files.dtypes import DTYPES
from ..files.source import Source
from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of a safetensors one."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch)
    return found


def read_values(source: Source, key: str) -> Tensor:
    """A stored tensor in its own dtype and shape."""
    info = source.tensors[key]
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    source.read_into(key, 0, raw.numpy().data)
    return raw.view(torch_dtype(info.dtype)).view(info.shape)


def read_rows(source: Source, key: str, low: int, high: int, room: Tensor | None = None) -> Tensor:
    """Rows of a stored matrix in its own dtype.

    Args:
        source: where they lie.
        key: of the matrix.
        low: first row.
        high: row after the last.
        room: bytes, at least as many as the rows have, to put them into; None for fresh memory.
    """
    info = source.tensors[key]
    row_bytes = info.shape[1] * DTYPES[info.dtype].bits // 8
    count = (high - low) * row_bytes
    raw = torch.empty(count, dtype=torch.uint8) if room is None else room[:count]
    source.read_into(key, low * row_bytes, raw.numpy().data)
    return raw.view(torch_dtype(info.dtype)).view(high - low, info.shape[1])


class Scratch:
    """Memory of one thread that is used again: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def of(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor of that name and dtype, in that shape; holds whatever was left in it."""
        count = math.prod(shape)
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < count:
            kept = self._kept[name, dtype] = torch.empty(count, dtype=dtype)
        return kept[:count].view(*shape)

    def double(self, name: str, values: Tensor) -> Tensor:
        """The values in float64, under that name."""
        return self.of(name, torch.float64, values.shape).copy_(values)
