"""Memory for intermediate numbers, kept by each thread: to ask the system for it anew costs as much as arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Elements worked on at a time: few enough for a core's cache, enough that threads seldom wait for the interpreter. No
# result depends on it.
PIECE = 1 << 18
_WIDEST_BYTES = 8


class _Rooms(threading.local):
    """For each purpose, memory and the last tensor made of it."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}


_ROOMS = _Rooms()


def room(purpose: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of any content, good until the thread's next call for the same purpose.

    Args:
        purpose: any name.
        like: has its shape, device and dtype; of about a piece's size.
        dtype: another dtype.
    """
    return _shaped(purpose, like.shape, dtype or like.dtype, like.device)


def flat_room(purpose: str, count: int, dtype: torch.dtype) -> Tensor:
    """`room` for some elements in main memory."""
    return _shaped(purpose, torch.Size((count,)), dtype, torch.device("cpu"))


def _shaped(purpose: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    last = _ROOMS.last.get(purpose)
    if last is not None and last.shape == shape and last.dtype == dtype and last.device == device:
        return last
    size = shape.numel() * dtype.itemsize
    memory = _ROOMS.memory.get(purpose)
    if memory is None or memory.numel() < size or memory.device != device:
        memory = torch.empty(max(size, PIECE * _WIDEST_BYTES), dtype=torch.uint8, device=device)
        _ROOMS.memory[purpose] = memory
    _ROOMS.last[purpose] = memory[:size].view(dtype).view(shape)
    return _ROOMS.last[purpose]


def pieces(size: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors' elements in their order, `size` of each at a time; views where no gaps lie between them."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    for low in range(0, len(flat[0]), size):
        yield [tensor[low : low + size] for tensor in flat]


def scalar(value: float, like: Tensor) -> Tensor:
    """A number as a tensor without dimensions: torch takes 10 to 20 µs longer for each number that comes from Python.

    Args:
        value: any number.
        like: of any dtype that holds the number; the result has it, and lies in main memory, where all devices find it.
    """
    return _scalar(float(value), like.dtype)


@lru_cache(maxsize=4096)
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)
