"""The header of a safetensors file (u64 length, JSON, data): reading with every check the format asks for, writing."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import FileError, OutputError
from .dtypes import DTYPES, nbytes

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64
ALIGNMENT = 8
# An entry's name in the header that is no tensor.
_METADATA = "__metadata__"
_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors name, a key of `DTYPES`.
        shape: sizes; `()` is a scalar.
        file: index into the source's `files`.
        offset: absolute byte offset in that file.
        nbytes: bytes of the tensor in row-major order.
        strides: in elements, only where the stored order is not row-major (views in pickles); else None.
    """

    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A checked header: tensors in the order of the JSON, metadata, and where data starts and ends (bytes)."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: Path, file: int = 0) -> Header:
    """Read and check the header of a safetensors file; no byte of tensor data is read.

    Args:
        path: the file.
        file: index stored in each `TensorInfo.file`.

    Raises:
        FileError: the file is missing, cut off, or breaks the format; the tensor is named where there is one.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(_exactly(stream, 8, path), "little")
            if length > MAX_HEADER_BYTES:
                raise FileError(f"not a safetensors file: header length {length} is over 100 MB", file=path)
            if 8 + length > size:
                raise FileError(
                    f"file is cut off: header ends at byte {8 + length}, the file has {size}",
                    file=path,
                    hint=_AGAIN,
                )
            raw = _exactly(stream, length, path)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    return parse_header(raw, size, path, file)


def parse_header(raw: bytes, size: int, path: object, file: int = 0) -> Header:
    """Check the JSON of a header against the size of its file; see `read_header`."""
    start = 8 + len(raw)
    entries = load_json(raw, path, "header", "not a safetensors file: ")
    metadata = _metadata(entries.pop(_METADATA, None), path)
    tensors = {key: _entry(key, value, start, path, file) for key, value in entries.items()}
    _check_layout(tensors, start, size, path)
    return Header(tensors, metadata, start, size)


def encode_header(
    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, str], reserve: int = 0
) -> bytes:
    """Header bytes, length word included, padded with spaces so that data starts at a multiple of 8.

    Args:
        entries: key -> (dtype, shape, begin, end), offsets relative to the start of data.
        metadata: strings only.
        reserve: pad to at least this many bytes in all.

    Raises:
        OutputError: a name or text that the format cannot hold, or a header that no reader would take.
    """
    if _METADATA in entries:
        raise OutputError("safetensors cannot hold a tensor of this name", tensor=_METADATA, hint="discard the tensor")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise OutputError(f"the metadata value of {name!r} is no text: {reprlib.repr(value)}")
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for key, (dtype, shape, begin, end) in entries.items():
        document[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    try:
        body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[max(0, error.start - 20) : error.end + 20]
        raise OutputError(f"a name or a metadata text is not valid Unicode: … {part!a} …") from error
    total = max(8 + len(body), reserve)
    total += -total % ALIGNMENT
    if total - 8 > MAX_HEADER_BYTES:
        raise OutputError(f"names and metadata take {total - 8} bytes, a header may have 100 MB")
    return (total - 8).to_bytes(8, "little") + body.ljust(total - 8, b" ")


def _exactly(stream: Any, count: int, path: Path) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            raise FileError("file is cut off inside its header", file=path, hint=_AGAIN)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def load_json(raw: bytes, path: object, what: str, opening: str = "") -> dict[str, Any]:
    """A JSON object whose keys are unique and whose texts are valid Unicode.

    Args:
        raw: UTF-8.
        path: file it is from.
        what: what it is, for errors: `header`, `index`.
        opening: how these errors begin.

    Raises:
        FileError: it is something else.
    """

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise FileError(f"the {what} names a key twice", file=path, tensor=key)
            result[key] = value
        return result

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if b"\\u" in raw:  # may be half a surrogate pair, which could be neither written nor shown
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FileError(f"{opening}the {what} is not JSON ({error})", file=path, hint=_AGAIN) from error
    if not isinstance(document, dict):
        raise FileError(f"{opening}the {what} is not a JSON object", file=path, hint=_AGAIN)
    return document


def _metadata(value: Any, path: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FileError("the header's metadata is not a table of strings", file=path)
    return value


def _entry(key: str, value: Any, start: int, path: object, file: int) -> TensorInfo:
    def bad(what: str) -> NoReturn:
        raise FileError(what, file=path, tensor=key)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        bad("the header entry is not {dtype, shape, data_offsets}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        bad(f"unknown dtype {reprlib.repr(dtype)}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        bad(f"shape {reprlib.repr(shape)} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        bad(f"the shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(at) for at in offsets):
        bad(f"data_offsets {reprlib.repr(offsets)} is not a pair of offsets")
    begin, end = offsets
    bits = DTYPES[dtype].bits * math.prod(shape)
    if bits % 8:
        bad(f"{dtype} {shape} does not fill whole bytes")
    if end - begin != nbytes(dtype, math.prod(shape)):
        bad(f"wrong size: {dtype} {shape} takes {bits // 8} bytes, the header gives {end - begin}")
    return TensorInfo(dtype, tuple(shape), file, start + begin, end - begin)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_layout(tensors: Mapping[str, TensorInfo], start: int, size: int, path: object) -> None:
    """Data must be covered from start to end of file without overlap or gap."""
    at = start
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset + info.nbytes > size:
            raise FileError(
                f"file is cut off: the tensor ends at byte {info.offset + info.nbytes}, the file has {size}",
                file=path,
                tensor=key,
                hint=_AGAIN,
            )
        if info.offset < at:
            raise FileError("the tensor's bytes overlap another tensor's", file=path, tensor=key)
        if info.offset > at:
            raise FileError(f"{info.offset - at} bytes before the tensor belong to no tensor", file=path, tensor=key)
        at = info.offset + info.nbytes
    if at != size:
        raise FileError(f"{size - at} bytes at the end of the file belong to no tensor", file=path)
