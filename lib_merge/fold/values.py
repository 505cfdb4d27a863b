"""Stored tensors as torch tensors of their own dtype: whole ones, and rows of matrices."""

from __future__ import annotations

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


def read_rows(source: Source, key: str, low: int, high: int) -> Tensor:
    """Rows of a stored matrix in its own dtype."""
    info = source.tensors[key]
    row_bytes = info.shape[1] * DTYPES[info.dtype].bits // 8
    raw = torch.empty((high - low) * row_bytes, dtype=torch.uint8)
    source.read_into(key, low * row_bytes, raw.numpy().data)
    return raw.view(torch_dtype(info.dtype)).view(high - low, info.shape[1])
