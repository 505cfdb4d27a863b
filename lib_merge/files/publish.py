"""Giving a finished output its name by one rename, and errors of the system as errors that name file and tensor."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import OutputError
from .temporary import remove, replace_folder


class output_errors:  # noqa: N801 - used as a function
    """Turns OSError into an OutputError that names file and tensor; of the kind `passing` it goes through."""

    def __init__(self, path: Path, tensor: str | None = None, passing: type[OSError] | tuple[()] = ()) -> None:
        self.path, self.tensor, self.passing = path, tensor, passing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, self.passing):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "the disk is full" if full else f"cannot write: {error.strerror or error}"
            hint = "free some space or choose a folder on another disk" if full else None
            raise OutputError(what, file=self.path, tensor=self.tensor, hint=hint) from error


def give_name(temporary: Path, target: Path, *, folder: bool, overwrite: bool, fsync: bool) -> None:
    """Rename a finished file or folder to its target; an empty folder of that name is replaced.

    Raises:
        OutputError: it could not be renamed. It is complete under its temporary name then, and should be kept.
    """
    try:
        if folder:
            _name_folder(temporary, target, overwrite)
        else:
            name_file(temporary, target, overwrite)
    except OSError as error:
        raise OutputError(
            f"the finished output could not be given its name: {error.strerror or error}",
            file=target,
            hint=f"it is complete and stands at {temporary}: rename it by hand, before a next run clears it away",
        ) from error
    if fsync:
        sync_folder(target.parent)


def is_empty_folder(path: Path) -> bool:
    """True for a folder, not a link to one, that holds nothing."""
    try:
        return not os.path.islink(path) and not os.listdir(path)
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Make the rename itself durable where a folder can be synced (not on Windows)."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def name_file(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename a finished file to its target.

    Raises:
        OSError: the name is taken and may not be replaced, or it cannot be given.
    """
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)  # fails where the name was taken meanwhile: nothing is overwritten
    except FileExistsError:
        raise
    except (OSError, AttributeError, NotImplementedError):  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "the name was taken meanwhile", str(target)) from None
        os.rename(temporary, target)
    else:
        remove(temporary)  # the other name of the same file: where this fails, a later sweep does it


def _name_folder(temporary: Path, target: Path, overwrite: bool) -> None:
    if is_empty_folder(target):
        if sys.platform == "win32":  # elsewhere the rename itself replaces it, and fails if it is no longer empty
            os.rmdir(target)
        os.rename(temporary, target)
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    elif overwrite:
        replace_folder(temporary, target)
    else:
        raise FileExistsError(errno.EEXIST, "the name was taken meanwhile", str(target))
