"""An opened model: its tensors by name, where their bytes lie, and positioned reads of any part of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import FileError
from . import calls
from .dtypes import DTYPES
from .header import TensorInfo

SourceKind = Literal["safetensors", "pickle", "folder", "gguf"]


@dataclass(frozen=True)
class Part:
    """One weights file of a model, as the output is to be cut.

    Attributes:
        name: path relative to the model folder, or the file's own name.
        prefix: component prefix that its keys have in `Source.tensors` but not in the file (`unet/`), or empty.
        keys: full keys, in the order of the file.
        metadata: the file's own metadata.
        index: relative path of the index file that lists it, or empty.
    """

    name: str
    prefix: str
    keys: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    index: str = ""


@dataclass
class Source:
    """A model file or folder, opened for positioned reads; made by `open_model`, safe to use from many threads.

    Attributes:
        path: the file or folder.
        kind: `safetensors`, `pickle`, `folder` or `gguf`.
        files: weights files, which `TensorInfo.file` indexes; of a PEFT folder its configuration too, as the last.
        tensors: full key -> where it lies, in the model's own order.
        metadata: strings of the header (of a folder: of all parts, the first one wins).
        parts: how the model is cut into files.
        side_files: of a folder, the other files (configs, tokenizers), relative paths.
        notes: what a user should know about how it was read.
    """

    path: Path
    kind: SourceKind
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    parts: tuple[Part, ...]
    side_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._lock, self._gathering = threading.Lock(), threading.Lock()
        self._open: dict[int, int] = {}
        self._seen = [stamp(path) for path in self.files]
        self._gathered: tuple[str, bytearray] | None = None

    @property
    def name(self) -> str:
        """File or folder name, what a recipe calls this model."""
        return self.path.name

    def read_into(self, key: str, start: int, view: memoryview) -> None:
        """Fill `view` with the tensor's row-major bytes from byte `start` on.

        Raises:
            FileError: the file can no longer be read or has become shorter.
        """
        info = self.tensors[key]
        if info.strides is not None:
            with self._gathering:  # threads that want tiles of the same tensor wait for one of them to put it in order
                rows = self._gather(key, info)
            view[:] = memoryview(rows)[start : start + len(view)]
            return
        self._read(info.file, info.offset + start, view, key)

    def descriptor(self, key: str) -> tuple[int, int] | None:
        """(file descriptor, absolute offset) for kernel copies; None where the bytes are not in row-major order."""
        info = self.tensors[key]
        return None if info.strides is not None else (self._fd(info.file), info.offset)

    def shorter(self, key: str) -> FileError:
        """The error for a file that ends before its header says."""
        return FileError(
            "the file became shorter while it was read",
            file=self.files[self.tensors[key].file],
            tensor=key,
            hint="start again when nothing else writes to it",
        )

    def unreadable(self, key: str, error: OSError) -> FileError:
        """The error for a file that the system cannot read."""
        file = self.files[self.tensors[key].file]
        return FileError(f"cannot read: {error.strerror or error}", file=file, tensor=key)

    def changed(self) -> Path | None:
        """The first file that was written to since the model was opened, or None."""
        return next((path for path, seen in zip(self.files, self._seen, strict=True) if stamp(path) != seen), None)

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        with self._lock:
            self._gathered = None
            while self._open:
                with suppress(OSError):  # of a file that was only read: nothing is lost
                    os.close(self._open.popitem()[1])

    def _fd(self, file: int) -> int:
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = calls.open_read(self.files[file])
                except OSError as error:
                    what = f"cannot read: {error.strerror or error}"
                    raise FileError(what, file=self.files[file]) from error
            return self._open[file]

    def _read(self, file: int, offset: int, view: memoryview, key: str) -> None:
        fd = self._fd(file)
        try:
            calls.CALLS.read_at(fd, view, offset)
        except EOFError:
            raise self.shorter(key) from None
        except OSError as error:
            raise self.unreadable(key, error) from error

    def _gather(self, key: str, info: TensorInfo) -> bytearray:
        """Row-major bytes of a tensor that is stored as a view; the last one is kept for its next tiles."""
        kept = self._gathered
        if kept is not None and kept[0] == key:
            return kept[1]
        import numpy as np

        size = DTYPES[info.dtype].bits // 8
        assert info.strides is not None
        span = 1 + sum((n - 1) * step for n, step in zip(info.shape, info.strides, strict=True)) if info.numel else 0
        raw = bytearray(span * size)
        self._read(info.file, info.offset, memoryview(raw), key)
        stored = np.frombuffer(raw, dtype=f"V{size}")
        steps = [step * size for step in info.strides]
        rows = bytearray(np.lib.stride_tricks.as_strided(stored, info.shape, steps).tobytes())
        self._gathered = (key, rows)
        return rows


def stamp(path: Path) -> tuple[int, int]:
    """(size in bytes, time of the last write in ns), by which a changed file is told; (−1, −1) for one that is gone."""
    try:
        stat = path.stat()
    except OSError:
        return (-1, -1)
    return (stat.st_size, stat.st_mtime_ns)
