"""Where the tensors of a torch pickle (`.ckpt .pt .pth .bin`) lie, without torch and without executing it."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import FileError
from .dtypes import BY_TORCH, nbytes
from .header import TensorInfo
from .unpickle import AGAIN, RESAVE, Machine, Storage, Stream, Tensor, are_sizes, count_tensors, kind_of

MAX_DIRECTORY_BYTES = 20_000_000
WRAPPERS = ("state_dict", "model", "module", "params_ema", "params")
LEGACY_NOTE = "legacy torch file (not a zip): its tensors are read by position, it is not loaded whole"

_Records = dict[str, zipfile.ZipInfo]
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STRANGERS = (  # where, what stands there, what it is, what to do
    (0, b"<", "a web page, not a model", "open the link in a browser, log in, and download the file itself"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model", "fetch the file: git lfs pull"),
    (8, b"{", "a safetensors file, not a torch file", "name it .safetensors"),
    (257, b"ustar", "a tar archive (torch before 0.1.10 wrote them), which is not read", RESAVE),
)
# An entry at the top that shows what a file without tensors for a model is -> what it is, what to do.
_OTHERS: dict[str, tuple[str, str]] = {
    "string_to_param": (
        "a textual inversion, which changes no weight",
        "put it into the folder of embeddings and write its name into the prompt",
    ),
    "layer_structure": ("a hypernetwork, which adds layers of its own", "load it in the program that made it"),
    "activation_func": ("a hypernetwork, which adds layers of its own", "load it in the program that made it"),
}


@dataclass(frozen=True)
class PickleIndex:
    """What a torch file holds.

    Attributes:
        tensors: by name, in the order of the file; offsets in bytes from its start, strides in elements.
        legacy: pickles followed by raw storages, as torch before 1.6 wrote them; else a zip.
        notes: what a user should know; every entry that was left out is named.
    """

    tensors: dict[str, TensorInfo]
    legacy: bool
    notes: list[str]


def read_pickle_index(path: Path, file: int = 0) -> PickleIndex:
    """Find the tensors of a torch file; no pickle is executed and no byte of tensor data is read.

    Args:
        path: what `torch.save` wrote: a table of tensors, or a checkpoint with one under one of `WRAPPERS`.
        file: index stored in each `TensorInfo.file`.

    Raises:
        FileError: the file is missing, cut off, no torch file, or names more than tensors and plain values;
            a tensor is sparse, quantized, of an unknown dtype, or runs past its storage.
    """
    try:
        with Stream(path) as stream:
            head = stream.at(0, 512).read()
            if not head:
                raise stream.bad("the file is empty")
            for at, mark, what, hint in _STRANGERS:
                if (head[at:] if at else head.lstrip()).startswith(mark):
                    raise stream.bad(f"this is {what}", hint)
            return _read_zip(stream, file) if head.startswith(b"PK\3\4") else _read_legacy(stream, file)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error


def _read_zip(stream: Stream, file: int) -> PickleIndex:
    records = _records(stream)
    names = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(names) != 1:
        raise stream.bad(f"not a torch file: a zip with {len(names)} records */data.pkl", RESAVE)
    root = names[0].removesuffix("data.pkl")
    order = root + "byteorder"
    if order in records and stream.at(*_record(stream, records, order)).read() != b"little":
        raise stream.bad("a big-endian file, which is not read", RESAVE)
    tensors, notes = _choose(stream, Machine(stream).run(*_record(stream, records, names[0])))
    starts: dict[str, int] = {}
    for key, tensor in tensors.items():
        storage = tensor.storage
        if storage and storage.key not in starts:
            starts[storage.key], length = _record(stream, records, f"{root}data/{storage.key}", key)
            if length < storage.nbytes:
                raise stream.bad(f"the record {root}data/{storage.key} is too short", tensor=key)
    placed = {key: _place(stream, key, item, starts, file) for key, item in tensors.items()}
    return PickleIndex(placed, False, notes)


def _records(stream: Stream) -> _Records:
    try:
        entries = zipfile.ZipFile(stream.at(0, MAX_DIRECTORY_BYTES)).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, LookupError, EOFError, OSError) as error:
        raise stream.bad("file is cut off, or its zip directory is damaged") from error
    records = {entry.filename: entry for entry in entries}
    if len(records) != len(entries):
        raise stream.bad("the zip directory names a record twice", RESAVE)
    return records


def _record(stream: Stream, records: _Records, name: str, tensor: str | None = None) -> tuple[int, int]:
    """Absolute start and length (bytes) of the data of a zip record; `tensor` is the one that needs it."""
    entry = records.get(name)
    if entry is None:
        raise stream.bad(f"the record {name} is missing", tensor=tensor)
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        hint = "unpack the file and zip it again without compression, or save the model again"
        raise stream.bad(f"the record {name} is compressed or encrypted, torch stores it plain", hint, tensor)
    header, length = max(0, entry.header_offset), entry.file_size
    local = stream.at(header, 30).read()
    # The padding stands in the local header only: its lengths count, not those of the directory.
    start = header + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if not local.startswith(b"PK\3\4") or length != entry.compress_size or start + length > stream.size:
        raise stream.bad(f"file is cut off or damaged at the record {name}", tensor=tensor)
    return start, length


def _read_legacy(stream: Stream, file: int) -> PickleIndex:
    """Five pickles (mark, version, machine, objects, list of storages), then the storages in that order."""
    machine = Machine(stream)
    if machine.run(0, what="neither a zip nor a pickle, so not a torch file") != _MAGIC:
        raise stream.bad("a pickle, but not one of torch.save", RESAVE)
    version, system = machine.run(stream.tell()), machine.run(stream.tell())
    if version != _PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise stream.bad("a legacy torch file of an unknown version or byte order", RESAVE)
    tensors, notes = _choose(stream, machine.run(stream.tell()))
    starts = _legacy_starts(stream, machine.run(stream.tell()), machine.storages)
    placed = {key: _place(stream, key, item, starts, file) for key, item in tensors.items()}
    return PickleIndex(placed, True, [LEGACY_NOTE, *notes])


def _legacy_starts(stream: Stream, keys: Any, storages: Mapping[str, Storage]) -> dict[str, int]:
    """Where the data of each storage starts; the int64 count before each one proves it."""
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or sorted(keys) != sorted(storages):
        raise stream.bad("damaged: the list of storages is not that of the tensors")
    starts: dict[str, int] = {}
    at = stream.tell()
    for storage in map(storages.__getitem__, keys):
        count = int.from_bytes(stream.at(at, 8).read(), "little")
        start, at = at + 8, at + 8 + storage.nbytes
        if at > stream.size:
            raise stream.bad(f"file is cut off: a storage ends at byte {at}, the file has {stream.size}")
        if count != storage.numel:
            raise stream.bad(f"damaged: wrong size before the storage at byte {start}")
        starts[storage.key] = start
    if at != stream.size:
        raise stream.bad(f"{stream.size - at} bytes at the end of the file belong to no tensor")
    return starts


def _choose(stream: Stream, top: object) -> tuple[dict[str, Tensor], list[str]]:
    """The table of tensors in what a file holds, and a note that names every entry beside them."""
    table = top if isinstance(top, dict) else {}
    wrapper = next((name for name in WRAPPERS if count_tensors(table.get(name))), None)
    inner = table[wrapper] if wrapper else table
    if not count_tensors(inner):
        for mark, (what, hint) in _OTHERS.items():
            if mark in table:
                raise stream.bad(f"not a model: {what}", hint)
        found = ", ".join(f"{key} ({kind_of(value)})" for key, value in list(table.items())[:5]) or kind_of(top)
        raise stream.bad(f"no tensors at the top or under {', '.join(WRAPPERS)}; found: {found}", RESAVE)
    chosen = {key: item for key, item in inner.items() if isinstance(key, str) and isinstance(item, Tensor)}
    beside = [(key, item) for key, item in inner.items() if key not in chosen]
    beside += [(key, item) for key, item in table.items() if wrapper and key != wrapper]
    names = ", ".join(f"{key} ({kind_of(item)})" for key, item in beside)
    return chosen, [f"left out: {names}"] if names else []


def _place(stream: Stream, key: str, tensor: Tensor, starts: Mapping[str, int], file: int) -> TensorInfo:
    """The place of a tensor (offset and size in bytes, strides in elements), checked against its storage."""

    def bad(what: str, hint: str = RESAVE) -> NoReturn:
        raise stream.bad(f"the tensor {what}", hint, key)

    storage, size, stride, dtype = tensor.storage, tensor.size, tensor.stride, BY_TORCH.get(tensor.dtype)
    if tensor.flaw or storage is None:
        bad(tensor.flaw)
    if dtype is None:
        bad(f"has dtype {tensor.dtype}, which is not read")
    if not all(map(are_sizes, (size, stride, (tensor.offset,)))) or len(size) != len(stride):
        bad("has a shape, strides or an offset that are no sizes", AGAIN)
    numel, itemsize = math.prod(size), dtype.bits // 8
    end = tensor.offset + (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if numel else 0)
    if end * itemsize > storage.nbytes or numel * itemsize >= 2**63:
        bad(f"runs past its storage: it needs {end * itemsize} bytes of {storage.nbytes}", AGAIN)
    rows = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    plain = not numel or all(n == 1 or s == row for n, s, row in zip(size, stride, rows, strict=True))
    at = starts[storage.key] + tensor.offset * itemsize
    return TensorInfo(dtype.name, size, file, at, nbytes(dtype.name, numel), None if plain else stride)
