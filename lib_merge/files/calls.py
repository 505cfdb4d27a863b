"""Positioned reads, writes and kernel copies: the fast call where the system has it, else its portable twin.

`CALLS` is chosen once at import; nothing else in the library asks which system it runs on for file access.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_BUFFER_BYTES = 1 << 20
_MOST_BYTES = 1 << 30  # in one call: some systems refuse 2 GiB and more instead of doing a part
_BINARY = getattr(os, "O_BINARY", 0)
_SEEK = threading.Lock()
# What kernels answer when they cannot copy between these two files; the bytes then go through memory, which also
# tells on which of the two sides a disk failed.
_CANNOT_COPY = {
    errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY, errno.EIO
}  # fmt: skip
_SYNC_FILE_RANGE_WRITE = 2


class UnreadableError(OSError):
    """The file that is copied from cannot be read; a failure of the one copied to is any other OSError."""


class Calls(NamedTuple):
    """The file calls in use; offsets and counts are bytes.

    Attributes:
        read_at: fill a writable buffer from an offset; raises EOFError when the file ends before it is full.
        write_at: write a whole buffer at an offset.
        copy_range: (source fd, source offset, target fd, target offset, count) copies without touching the data.
        start_writeback: ask the system to begin writing a range to disk; returns at once.
    """

    read_at: Callable[[int, memoryview, int], None]
    write_at: Callable[[int, memoryview, int], None]
    copy_range: Callable[[int, int, int, int, int], None]
    start_writeback: Callable[[int, int, int], None]


def open_read(path: Path) -> int:
    """File descriptor for reading; the caller closes it."""
    return os.open(path, os.O_RDONLY | _BINARY)


def open_write(path: Path) -> int:
    """File descriptor of a new file that must not exist yet, readable too; the caller closes it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)


def open_existing(path: Path) -> int:
    """File descriptor of a file that exists, for writing; the caller closes it."""
    return os.open(path, os.O_RDWR | _BINARY)


def _preadv(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + _MOST_BYTES]], offset + done)
        if not count:
            raise EOFError
        done += count


def _seek_read(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    with _SEEK:
        os.lseek(fd, offset, os.SEEK_SET)
        while done < len(view):
            part = os.read(fd, min(len(view) - done, _BUFFER_BYTES))
            if not part:
                raise EOFError
            view[done : done + len(part)] = part
            done += len(part)


def _pwrite(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _MOST_BYTES], offset + done)


def _seek_write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    with _SEEK:
        os.lseek(fd, offset, os.SEEK_SET)
        while done < len(view):
            done += os.write(fd, view[done : done + _MOST_BYTES])


def _choose_copy(
    read_at: Callable[[int, memoryview, int], None], write_at: Callable[[int, memoryview, int], None]
) -> Callable[[int, int, int, int, int], None]:
    def through_memory(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
        buffer = memoryview(bytearray(min(count, _BUFFER_BYTES)))
        done = 0
        while done < count:
            part = buffer[: min(len(buffer), count - done)]
            try:
                read_at(source, part, source_at + done)
            except OSError as error:
                raise UnreadableError(error.errno, error.strerror) from error
            write_at(target, part, target_at + done)
            done += len(part)

    if not hasattr(os, "copy_file_range"):
        return through_memory

    def in_kernel(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
        done = 0
        while done < count:
            try:
                most = min(count - done, _MOST_BYTES)
                step = os.copy_file_range(source, target, most, source_at + done, target_at + done)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
                step = 0
            if not step:  # either the kernel cannot, or the source ended: the twin does it or says so
                through_memory(source, source_at + done, target, target_at + done, count - done)
                return
            done += step

    return in_kernel


def _choose_writeback() -> Callable[[int, int, int], None]:
    def nothing(fd: int, offset: int, count: int) -> None:
        """Systems without the call write back in their own time."""

    if not sys.platform.startswith("linux") or not hasattr(os, "copy_file_range"):
        return nothing
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return nothing
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def start(fd: int, offset: int, count: int) -> None:
        call(fd, offset, count, _SYNC_FILE_RANGE_WRITE)  # a hint: its failure changes nothing

    return start


def choose() -> Calls:
    """Pick the calls this system offers."""
    read_at = _preadv if hasattr(os, "preadv") else _seek_read
    write_at = _pwrite if hasattr(os, "pwrite") else _seek_write
    return Calls(read_at, write_at, _choose_copy(read_at, write_at), _choose_writeback())


CALLS = choose()
