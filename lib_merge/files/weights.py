"""One weights file to its tensors, by what the file holds and not by its name."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import FileError
from .header import MAX_HEADER_BYTES, TensorInfo, read_header
from .pickles import read_pickle_index

_AGAIN = "download or copy the file again"
_STRANGERS = (
    (b"GGUF", "GGUF files cannot be merged", "use the safetensors file that the GGUF was made from"),
    (b"<", "not a model: a web page was saved under this name", "download the file itself"),
    (b"version https://git-lfs", "not a model: a Git LFS pointer, not the file it stands for", "git lfs pull"),
    (b"{", "not a model: a JSON text", "name the weights file, or the folder where this is an index"),
)


@dataclass(frozen=True)
class Weights:
    """What one weights file holds.

    Attributes:
        kind: how it is stored.
        tensors: key -> where it lies, in the order of the file.
        metadata: strings of the header; pickles have none.
        notes: what a user should know about how it was read.
    """

    kind: Literal["safetensors", "pickle"]
    tensors: dict[str, TensorInfo]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_weights(path: Path, file: int = 0) -> Weights:
    """Find the tensors of a safetensors file or a torch pickle; reads no tensor data.

    Args:
        path: the file.
        file: index stored in each `TensorInfo.file`.

    Raises:
        FileError: it is missing, of another kind, cut off, or breaks its format.
    """
    start = _first_bytes(path)
    if not _has_header(start):
        for mark, what, hint in _STRANGERS:
            if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(mark):
                raise FileError(what, file=path, hint=hint)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            index = read_pickle_index(path, file)
            return Weights("pickle", index.tensors, {}, tuple(index.notes))
    header = read_header(path, file)
    return Weights("safetensors", header.tensors, header.metadata)


def _has_header(start: bytes) -> bool:
    """True for a safetensors file: its length word may by chance look like the start of a pickle or a web page."""
    length = int.from_bytes(start[:8], "little")
    return len(start) <= 8 or (length <= MAX_HEADER_BYTES and start[8:].lstrip().startswith(b"{"))


def _first_bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for somebody to write
            raise FileError("neither a file nor a folder", file=path)
        with path.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    if not start:
        raise FileError("the file is empty", file=path, hint=_AGAIN)
    return start
