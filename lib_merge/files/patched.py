"""A byte copy of a model file or folder in which some ranges are written anew, published by one rename at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError, OutputError
from . import calls
from .publish import give_name, output_errors, sync_folder
from .source import stamp
from .temporary import remove, temporary_beside

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Range:
    """Bytes of one file: its number, where they start and how many there are."""

    file: int
    offset: int
    count: int


def outside(sizes: Sequence[int], holes: Sequence[Range]) -> Iterator[Range]:
    """Every byte of some files that lies in none of the holes, in pieces of at most 64 MiB.

    Args:
        sizes: of the files, in bytes.
        holes: ranges to leave out.
    """
    for number, size in enumerate(sizes):
        mine = sorted((hole.offset, hole.offset + hole.count) for hole in holes if hole.file == number)
        at = 0
        for begin, end in [*mine, (size, size)]:
            for start in range(at, begin, _PIECE_BYTES):
                yield Range(number, start, min(_PIECE_BYTES, begin - start))
            at = max(at, end)


class PatchedCopy:
    """A copy on its way to disk, under a temporary name beside its target; safe to use from many threads.

    Every byte outside of `holes` is to be copied (`pieces`, `copy`), every byte inside to be written (`write`). Files
    are opened for each call, so that any number of them can be worked on. Leaving it without `publish` removes it.

    Args:
        files: what is copied.
        names: of the copies, relative to the target; of a single file, empty.
        target: folder or file to make.
        holes: ranges that are not copied.
        folder: the target is a folder.
        overwrite: an existing target may be replaced.
        fsync: it is on the disk, not only on its way there, when it is published.
    """

    def __init__(
        self,
        files: Sequence[Path],
        names: Sequence[str],
        target: Path,
        holes: Sequence[Range],
        *,
        folder: bool,
        overwrite: bool = False,
        fsync: bool = True,
    ) -> None:
        self.target, self.temporary = target, temporary_beside(target)
        self._files, self._names, self._holes = tuple(files), tuple(names), tuple(holes)
        self._folder, self._overwrite, self._fsync, self._kept = folder, overwrite, fsync, False
        self._stamps = [stamp(path) for path in files]
        try:
            if folder:
                with output_errors(target):
                    os.mkdir(self.temporary)
            for number in range(len(self._files)):
                with output_errors(self._final(number)):
                    self._create(number)
        except BaseException:
            self.discard()
            raise

    def pieces(self) -> Iterator[Range]:
        """Everything that has to be copied, in handy pieces."""
        return outside([size for size, _ in self._stamps], self._holes)

    def copy(self, piece: Range) -> None:
        """Copy bytes from the original to the same place, inside the kernel if it can.

        Raises:
            FileError: the original cannot be read or became shorter.
            OutputError: the disk is full or the copy cannot be written.
        """
        source = self._files[piece.file]
        try:
            fd = calls.open_read(source)
        except OSError as error:
            raise FileError(f"cannot read: {error.strerror or error}", file=source) from error
        try:
            with output_errors(self._final(piece.file)), _Opened(self._part(piece.file)) as to:
                calls.CALLS.copy_range(fd, piece.offset, to, piece.offset, piece.count)
                if self._fsync and piece.count == _PIECE_BYTES:
                    calls.CALLS.start_writeback(to, piece.offset, piece.count)
        except EOFError:
            raise FileError("the file became shorter while it was read", file=source) from None
        except OutputError as error:
            if isinstance(error.__cause__, calls.UnreadableError):
                what = f"cannot read: {error.__cause__.strerror or error.__cause__}"
                raise FileError(what, file=source) from error.__cause__
            raise
        finally:
            with suppress(OSError):  # of a file that was only read: nothing is lost
                os.close(fd)

    def write(self, file: int, offset: int, view: memoryview, tensor: str | None = None) -> None:
        """Write bytes into a hole.

        Raises:
            OutputError: the disk is full or the copy cannot be written.
        """
        with output_errors(self._final(file), tensor), _Opened(self._part(file)) as fd:
            calls.CALLS.write_at(fd, view, offset)

    def publish(self) -> Path:
        """Check the originals once more, sync, and rename to the target.

        Raises:
            FileError: an original was written to meanwhile.
            OutputError: anything else failed; nothing stands under the target's name that was not there before.
        """
        for path, seen in zip(self._files, self._stamps, strict=True):
            if stamp(path) != seen:
                hint = "start again when nothing else writes to it"
                raise FileError("the file was written to while it was read", file=path, hint=hint)
        for number, (size, _) in enumerate(self._stamps):
            with output_errors(self._final(number)), _Opened(self._part(number)) as fd:
                if self._fsync:
                    os.fsync(fd)
                if os.fstat(fd).st_size != size:
                    raise OutputError("the copy has another length than the original", file=self._final(number))
        if self._folder and self._fsync:
            sync_folder(self.temporary)
        try:
            give_name(self.temporary, self.target, folder=self._folder, overwrite=self._overwrite, fsync=self._fsync)
        except OutputError:
            self._kept = True  # it is complete: only the name is missing
            raise
        return self.target

    def discard(self) -> None:
        """Remove what was written; does nothing after `publish`."""
        if not self._kept:
            remove(self.temporary)

    def _create(self, number: int) -> None:
        fd = calls.open_write(self._part(number))
        try:
            os.ftruncate(fd, max(0, self._stamps[number][0]))
        finally:
            os.close(fd)

    def _part(self, number: int) -> Path:
        return self.temporary / self._names[number] if self._folder else self.temporary

    def _final(self, number: int) -> Path:
        """What a file will be called, for errors: nobody knows its temporary name."""
        return self.target / self._names[number] if self._folder else self.target

    def __enter__(self) -> PatchedCopy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()


class _Opened:
    """A file that exists, open for writing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = calls.open_existing(self._path)
        return self._fd

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
