"""Finished tensors wait in a file without a name, not in memory, until all are there and the result can be laid out."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import calls
from ..files.publish import output_errors
from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 64 << 20
# Smaller tensors stay in memory.
_LEAST_BYTES = 1 << 16
_ALIGNED = 64

Keep = Callable[["Tensor"], "Tensor"]


class Spool:
    """A place beside the result for tensors that wait; use as a context manager. Safe to use from many threads.

    What is kept is written by calls that can fail in an orderly way, and read through a mapping, whose pages are given
    back by `forget`: memory that is mapped counts as the process's own while it is looked at.

    Args:
        target: the result; the file lies in its folder while it is open, and is gone with the process.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._chunks: list[mmap.mmap] = []
        self._free = self._end = 0

    def __enter__(self) -> Spool:
        with output_errors(self._target):
            self._file = tempfile.TemporaryFile(dir=self._target.parent, prefix=".lib_merge-")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, tensor: Tensor) -> Tensor:
        """The same tensor, in the file.

        Raises:
            OutputError: the disk is full.
        """
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        count = flat.numel()
        if count < _LEAST_BYTES:
            return tensor
        with self._lock, output_errors(self._target):
            if self._free + count > self._end:
                self._add_chunk(count)
            offset, self._free = self._free, -(-(self._free + count) // _ALIGNED) * _ALIGNED
            chunk, start = self._chunks[-1], offset - (self._end - len(self._chunks[-1]))
        with output_errors(self._target):
            calls.CALLS.write_at(self._file.fileno(), flat.numpy().data, offset)
        return (
            torch.frombuffer(chunk, dtype=torch.uint8, count=count, offset=start)
            .view(tensor.dtype)
            .reshape(tensor.shape)
        )

    def forget(self) -> None:
        """Give back the pages that were looked at; they come again from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for chunk in self._chunks:
                chunk.madvise(mmap.MADV_DONTNEED)

    def _add_chunk(self, count: int) -> None:
        size = -(-max(count, _CHUNK_BYTES) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._file.fileno(), self._end + size)
        self._chunks.append(mmap.mmap(self._file.fileno(), size, offset=self._end))
        self._free, self._end = self._end, self._end + size
