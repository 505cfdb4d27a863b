"""Writing a model: header first, tensors at their final offsets from any thread, published by one rename at the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FileError, OutputError
from . import calls
from .dtypes import DTYPES, nbytes
from .header import encode_header, read_header
from .publish import give_name, output_errors, sync_folder
from .source import Source
from .temporary import remove, temporary_beside

_WRITEBACK_BYTES = 32 << 20


@dataclass(frozen=True)
class OutPart:
    """One weights file to write.

    Attributes:
        name: path relative to the output folder; unused for a single file.
        prefix: taken off the keys in the file.
        tensors: full key -> (dtype, shape), in the order of model A.
        metadata: header metadata, with place holders as long as what will replace them.
        inherited: metadata of model A's part, from which `metadata` is made.
        index: relative path of the index file that lists it, or empty.
    """

    name: str
    prefix: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    metadata: Mapping[str, str]
    index: str = ""
    inherited: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        """Full key -> (dtype, shape, begin, end), widest dtype first, so that each tensor is aligned without gaps."""
        placed = {}
        at = 0
        for key, (dtype, shape) in sorted(self.tensors.items(), key=lambda item: -DTYPES[item[1][0]].bits):
            count = 1
            for size in shape:
                count *= size
            end = at + nbytes(dtype, count)
            placed[key] = (dtype, shape, at, end)
            at = end
        return placed

    def header(self, metadata: Mapping[str, str], reserve: int = 0) -> bytes:
        """The part's header with this metadata; see `encode_header`."""
        entries = {key.removeprefix(self.prefix): entry for key, entry in self.entries().items()}
        return encode_header(entries, metadata, reserve)


@dataclass
class _OpenPart:
    """A part being written: its file, where its data starts, and the range that waits for write-back (bytes)."""

    spec: OutPart
    path: Path
    fd: int
    start: int
    size: int
    begin: int
    end: int = 0
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class FileSink:
    """A model on its way to disk, under a temporary name beside its target; safe to write to from many threads.

    Use as a context manager: leaving it without `publish` removes what was written.
    """

    def __init__(
        self, target: Path, parts: Sequence[OutPart], *, folder: bool, overwrite: bool = False, fsync: bool = True
    ) -> None:
        self.target = target
        self.temporary = temporary_beside(target)
        self._folder, self._overwrite, self._fsync, self._kept = folder, overwrite, fsync, False
        self._parts: list[_OpenPart] = []
        self._place: dict[str, tuple[int, int]] = {}
        try:
            if folder:
                with output_errors(self.target):
                    os.mkdir(self.temporary)
            for spec in parts:
                with output_errors(self._final(spec)):
                    self._create(spec)
        except BaseException:
            self.discard()
            raise

    def _final(self, spec: OutPart) -> Path:
        """What a part will be called, for errors: nobody knows its temporary name."""
        return self.target / spec.name if self._folder else self.target

    def _create(self, spec: OutPart) -> None:
        path = self.temporary
        if self._folder:
            path = self.temporary / spec.name
            os.makedirs(path.parent, exist_ok=True)
        header, entries = spec.header(spec.metadata), spec.entries()
        size = len(header) + max((entry[3] for entry in entries.values()), default=0)
        part = _OpenPart(spec, path, calls.open_write(path), len(header), size, begin=size)
        self._parts.append(part)
        calls.CALLS.write_at(part.fd, memoryview(header), 0)
        os.ftruncate(part.fd, size)
        for key, entry in entries.items():
            self._place[key] = (len(self._parts) - 1, part.start + entry[2])

    def place(self, key: str) -> tuple[int, int]:
        """(number of the part, absolute byte offset) of a tensor."""
        return self._place[key]

    def write(self, key: str, offset: int, view: memoryview) -> None:
        """Write bytes of a tensor, `offset` bytes from its start.

        Raises:
            OutputError: the disk is full or the file cannot be written.
        """
        number, start = self._place[key]
        part = self._parts[number]
        with output_errors(self._final(part.spec), key):
            calls.CALLS.write_at(part.fd, view, start + offset)
            self._write_back(part, start + offset, len(view))

    def copy(self, key: str, offset: int, source: Source, source_key: str, count: int) -> None:
        """Copy `count` bytes, `offset` bytes from the start of both tensors, inside the kernel if it can.

        `count` may run over following tensors where both files hold the same ones in the same order.
        """
        place = source.descriptor(source_key)
        if place is None:
            buffer = memoryview(bytearray(count))
            source.read_into(source_key, offset, buffer)
            self.write(key, offset, buffer)
            return
        number, start = self._place[key]
        part = self._parts[number]
        with output_errors(self._final(part.spec), key):
            try:
                calls.CALLS.copy_range(place[0], place[1] + offset, part.fd, start + offset, count)
            except EOFError:
                raise source.shorter(source_key) from None
            except calls.UnreadableError as error:
                raise source.unreadable(source_key, error) from error
            self._write_back(part, start + offset, count)

    def _write_back(self, part: _OpenPart, offset: int, count: int) -> None:
        """Start writing to disk in large runs while the merge goes on, so that the sync at the end is short."""
        if not self._fsync:
            return
        with part.lock:
            part.begin, part.end = min(part.begin, offset), max(part.end, offset + count)
            part.waiting += count
            if part.waiting < _WRITEBACK_BYTES:
                return
            begin, end = part.begin, part.end
            part.begin, part.end, part.waiting = part.size, 0, 0
        calls.CALLS.start_writeback(part.fd, begin, end - begin)

    def add_side_files(self, root: Path, names: Sequence[str]) -> None:
        """Copy configs and the like from a model folder.

        Raises:
            FileError: one of them cannot be read.
            OutputError: one of them cannot be written.
        """
        for name in names:
            with closing(_pieces(root / name)) as pieces:
                self._write_small(name, pieces)

    def add_file(self, name: str, contents: bytes) -> None:
        """Write a small file, such as a config, into an output folder.

        Raises:
            OutputError: it cannot be written.
        """
        self._write_small(name, [contents])

    def publish(self, metadata: Sequence[Mapping[str, str]]) -> Path:
        """Write the final headers, check them, sync, and rename to the target.

        Args:
            metadata: of each part, as long as the place holders or shorter.

        Raises:
            OutputError: anything failed; nothing stands under the target's name that was not there before.
        """
        for part, values in zip(self._parts, metadata, strict=True):
            self._finish(part, values)
        for name in sorted({part.spec.index for part in self._parts} - {""}):
            self._write_index(name)
        if self._folder and self._fsync:
            for folder, _, _ in os.walk(self.temporary):
                sync_folder(Path(folder))
        self._rename()
        return self.target

    def _finish(self, part: _OpenPart, metadata: Mapping[str, str]) -> None:
        header = part.spec.header(metadata, reserve=part.start)
        if len(header) != part.start:
            raise OutputError("the final header is longer than the room kept for it", file=self._final(part.spec))
        with output_errors(self._final(part.spec)):
            calls.CALLS.write_at(part.fd, memoryview(header), 0)
            if self._fsync:
                os.fsync(part.fd)
            fd, part.fd = part.fd, -1
            os.close(fd)
        try:
            written = read_header(part.path)
        except FileError as error:
            raise OutputError(
                f"what was written does not read back: {error.what}", file=self._final(part.spec), tensor=error.tensor
            ) from error
        wanted = {key.removeprefix(part.spec.prefix): entry for key, entry in part.spec.entries().items()}
        found = {
            key: (i.dtype, i.shape, i.offset - part.start, i.offset - part.start + i.nbytes)
            for key, i in written.tensors.items()
        }
        if found != wanted or written.metadata != metadata:
            raise OutputError("what was written does not read back as planned", file=self._final(part.spec))

    def _write_index(self, name: str) -> None:
        parts = [part for part in self._parts if part.spec.index == name]
        weights = {
            key.removeprefix(part.spec.prefix): Path(part.spec.name).name for part in parts for key in part.spec.tensors
        }
        total = sum(part.size - part.start for part in parts)
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        self._write_small(name, [text.encode()])

    def _write_small(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file of an output folder that holds no tensors."""
        with output_errors(self.target / name):
            os.makedirs((self.temporary / name).parent, exist_ok=True)
            fd, at = calls.open_write(self.temporary / name), 0
            try:
                for piece in pieces:
                    calls.CALLS.write_at(fd, memoryview(piece), at)
                    at += len(piece)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)

    def _rename(self) -> None:
        """Give the finished file its name; the temporary one is kept when only this last step fails."""
        try:
            give_name(self.temporary, self.target, folder=self._folder, overwrite=self._overwrite, fsync=self._fsync)
        except OutputError:
            self._kept = True
            raise

    def discard(self) -> None:
        """Close and remove what was written; does nothing after `publish`."""
        for part in self._parts:
            if part.fd >= 0:
                fd, part.fd = part.fd, -1
                with suppress(OSError):
                    os.close(fd)
        if not self._kept:
            remove(self.temporary)

    def __enter__(self) -> FileSink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()


def _pieces(path: Path) -> Generator[bytes]:
    """A file's contents in pieces; its errors are not the output's."""
    try:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                yield piece
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
