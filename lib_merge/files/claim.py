"""One run for one output: a small file beside it names the process that writes it; another run is told at once.

`.NAME.lib_merge.lock` holds process number and computer. What a dead process left is taken away by the next run.
"""

from __future__ import annotations

import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path

from ..errors import OutputError
from .publish import output_errors
from .temporary import is_other_live_process, remove, temporary_beside

_NAME = re.compile(r"\..+\.lib_merge\.lock", re.DOTALL)
_TRIES = 3
# A lock is empty between its making and the writing of its two words.
_WRITTEN_WITHIN_S = 0.5
_HELD: set[Path] = set()


class Claim:
    """The right to write an output, until its end; use as a context manager.

    Args:
        target: the output; its folder is there.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._lock = target, _lock_of(target)

    def __enter__(self) -> Claim:
        """Take it.

        Raises:
            OutputError: another run has it; or the folder cannot be written to.
        """
        _sweep(self._lock.parent)
        for _ in range(_TRIES):
            with suppress(FileExistsError), output_errors(self._target, passing=FileExistsError):
                fd = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                _HELD.add(self._lock)
                try:
                    try:
                        os.write(fd, f"{os.getpid()} {platform.node()}".encode())
                    finally:
                        os.close(fd)
                except BaseException:
                    self.__exit__()
                    raise
                return self
            if told := _holder(self._lock):
                raise OutputError(
                    f"another run is writing this output: {told}",
                    file=self._target,
                    hint=f"wait for its end or choose another name; if there is no such run, delete {self._lock}",
                )
            _take_away(self._lock)
        raise OutputError("another run is about to write this output", file=self._target, hint="try again")

    def __exit__(self, *exc: object) -> None:
        _HELD.discard(self._lock)
        remove(self._lock)


def is_claimed(target: Path) -> bool:
    """Whether a run that goes on is going to write this output."""
    lock = _lock_of(target)
    return os.path.lexists(lock) and bool(_holder(lock))


def _lock_of(target: Path) -> Path:
    return Path(os.path.realpath(target.parent)) / f".{target.name}.lib_merge.lock"


def _holder(lock: Path) -> str:
    """Whose a lock is; empty where it is nobody's any more."""
    end = time.monotonic() + _WRITTEN_WITHIN_S
    while not (text := _read(lock)) and os.path.lexists(lock) and time.monotonic() < end:
        time.sleep(0.02)
    number, _, computer = text.partition(" ")
    if not number.isdecimal():
        return ""
    if computer != platform.node():
        return f"process {number} on {computer}"
    own = int(number) == os.getpid()
    alive = lock in _HELD if own else is_other_live_process(int(number))
    return f"process {number}" * alive


def _read(lock: Path) -> str:
    try:
        return lock.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _take_away(lock: Path) -> None:
    """Remove a dead process's lock; one that a live process put there meanwhile is put back."""
    aside = temporary_beside(lock.with_name("lock"))  # a short name, whatever the output is called
    try:
        with suppress(OSError):
            os.rename(lock, aside)
            if _holder(aside):
                os.rename(aside, lock)
    finally:
        remove(aside)


def _sweep(folder: Path) -> None:
    """Take away what dead processes left in a folder."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _NAME.fullmatch(name) and not _holder(folder / name):
                _take_away(folder / name)
