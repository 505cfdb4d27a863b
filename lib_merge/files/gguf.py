"""The header of a GGUF file: fields, and where each tensor lies; no tensor data is read.

Layout (version 2 and 3): magic, u32 version, u64 tensors, u64 fields; the fields; name, u32 axes, u64 sizes (fastest
first), u32 type, u64 offset of each tensor; data from the next multiple of `general.alignment` (32) on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FileError
from .header import TensorInfo
from .source import Part, Source

MAGIC = b"GGUF"
_MOST = 1 << 24  # entries, bytes of a text: more is no header
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# Number of a type -> its name, weights of a block, bytes of a block.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True)
class Gguf:
    """An opened GGUF file.

    Attributes:
        source: its tensors as plain bytes: U8 [rows, bytes of a row].
        types: name of each tensor's type.
        shapes: sizes of each tensor, slowest axis first as elsewhere.
        fields: `general.architecture` and the like; arrays are left out.
    """

    source: Source
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    fields: Mapping[str, Any]


def is_gguf(path: Path) -> bool:
    """True for a file that begins as GGUF files do."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> Gguf:
    """Read the header.

    Raises:
        FileError: it cannot be read, is cut off, or is of an unknown version or type; names the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _read(stream, size, path)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    except (EOFError, UnicodeDecodeError, struct.error) as error:
        raise FileError("the file is cut off or damaged inside its header", file=path) from error


def _read(stream: BinaryIO, size: int, path: Path) -> Gguf:
    magic, version = _exactly(stream, 4), _scalar(stream, "<I")
    if magic != MAGIC or version not in (2, 3):
        raise FileError(f"not a GGUF file of version 2 or 3 but {version}", file=path)
    tensors, count = _count(stream), _count(stream)
    fields = {}
    for _ in range(count):
        name = _text(stream)
        value = _value(stream, _scalar(stream, "<I"))
        if not isinstance(value, list):
            fields[name] = value
    entries = [_entry(stream, path) for _ in range(tensors)]
    alignment = int(fields.get("general.alignment", 32))
    if alignment < 1:
        raise FileError(f"the alignment is {alignment}", file=path)
    start = -(-stream.tell() // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for name, shape, (_, block, block_bytes), offset in entries:
        if name in infos:
            raise FileError("the header names a tensor twice", file=path, tensor=name)
        columns = shape[-1] if shape else 1
        if columns % block:
            raise FileError(f"rows of {columns} weights are not whole blocks of {block}", file=path, tensor=name)
        rows, row_bytes = math.prod(shape[:-1]), columns // block * block_bytes
        infos[name] = TensorInfo("U8", (rows, row_bytes), 0, start + offset, rows * row_bytes)
    _check_layout(infos, size, path)
    source = Source(path, "gguf", (path,), infos, {}, (Part(path.name, "", tuple(infos)),))
    types = {name: kind[0] for name, _, kind, _ in entries}
    return Gguf(source, types, {name: shape for name, shape, _, _ in entries}, fields)


def _entry(stream: BinaryIO, path: Path) -> tuple[str, tuple[int, ...], tuple[str, int, int], int]:
    name = _text(stream)
    axes = _scalar(stream, "<I")
    if axes > 8:
        raise FileError(f"a tensor of {axes} axes", file=path, tensor=name)
    shape = tuple(reversed([_scalar(stream, "<Q") for _ in range(axes)]))
    number, offset = _scalar(stream, "<I"), _scalar(stream, "<Q")
    if number not in TYPES:
        raise FileError(f"the tensor has the unknown type {number}", file=path, tensor=name, hint="update lib_merge")
    return name, shape, TYPES[number], offset


def _check_layout(infos: Mapping[str, TensorInfo], size: int, path: Path) -> None:
    """Tensors lie one behind the other, gaps for alignment between them, and end inside the file."""
    at = 0
    for name, info in sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < at:
            raise FileError("the tensor's bytes overlap another tensor's", file=path, tensor=name)
        at = info.offset + info.nbytes
        if at > size:
            raise FileError(
                f"file is cut off: the tensor ends at byte {at}, the file has {size}", file=path, tensor=name
            )


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(stream)
    if kind == _ARRAY:
        inner, count = _scalar(stream, "<I"), _count(stream)
        if inner in _SCALARS:
            _exactly(stream, struct.calcsize(_SCALARS[inner]) * count)
            return []
        return [_value(stream, inner) for _ in range(count)]
    if kind not in _SCALARS:
        raise EOFError
    return _scalar(stream, _SCALARS[kind])


def _scalar(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(form, _exactly(stream, struct.calcsize(form)))[0]


def _count(stream: BinaryIO) -> int:
    found = int(_scalar(stream, "<Q"))
    if found > _MOST:
        raise EOFError
    return found


def _text(stream: BinaryIO) -> str:
    return _exactly(stream, _count(stream)).decode("utf-8")


def _exactly(stream: BinaryIO, count: int) -> bytes:
    found = stream.read(count)
    if len(found) < count:
        raise EOFError
    return found
