"""Small files that a user keeps: where they lie, written whole or not at all, one process at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import platformdirs

from . import calls
from .publish import name_file, output_errors
from .temporary import remove, temporary_beside

DATA_VARIABLE = "LIB_MERGE_DATA"


def data_folder() -> Path:
    """Where presets and the history of runs are kept: $LIB_MERGE_DATA, or the user's data folder."""
    return Path(os.environ.get(DATA_VARIABLE) or platformdirs.user_data_dir("lib_merge", appauthor=False))


def write_whole(path: Path, contents: bytes, *, overwrite: bool) -> None:
    """Write a small file under a temporary name and give it its own by one rename; folders are made.

    Raises:
        OutputError: it cannot be written, or it exists and may not be replaced.
    """
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        try:
            fd = calls.open_write(temporary)
            try:
                calls.CALLS.write_at(fd, memoryview(contents), 0)
            finally:
                os.close(fd)
            name_file(temporary, path, overwrite)
        finally:
            remove(temporary)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file of this name stands for; other threads and processes wait.

    Raises:
        OSError: the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        _lock(stream)
        try:
            yield
        finally:
            _unlock(stream)


def _lock(stream: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        stream.seek(0)
        msvcrt.locking(stream.fileno(), msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        with suppress(OSError):  # file systems without locks: two processes at once are rare enough there
            fcntl.flock(stream, fcntl.LOCK_EX)


def _unlock(stream: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        stream.seek(0)
        with suppress(OSError):
            msvcrt.locking(stream.fileno(), msvcrt.LK_UNLCK, 1)
