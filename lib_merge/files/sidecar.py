"""The `.yaml` beside a checkpoint, which tells hosts what the weights do not: it is published with the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError, Problem
from . import calls
from .publish import name_file, output_errors
from .temporary import remove, temporary_beside

SUFFIX = ".yaml"


def sidecar_name(model: Path) -> Path:
    """What the config of a model file is called."""
    return model.with_suffix(SUFFIX)


def sidecar_of(model: Path) -> Path | None:
    """The config beside a model; None where there is none, and for folders."""
    beside = sidecar_name(model) if model.name and not model.is_dir() else model
    return beside if beside != model and beside.is_file() else None


def taken(sidecar: Path | None, target: Path) -> bool:
    """True when a config's name beside the target belongs to something else."""
    place = sidecar_name(target)
    return sidecar is not None and os.path.lexists(place) and not _same(sidecar, place)


def compared_sidecar(sidecar: Path | None, target: Path) -> str:
    """How the config beside a finished model is to A's: `same`, `different`, `missing`; empty where A has none."""
    place = sidecar_name(target)
    if sidecar is None or target.is_dir():
        return ""
    return ("same" if _same(sidecar, place) else "different") if os.path.lexists(place) else "missing"


def sidecar_problems(sidecar: Path | None, target: Path, overwrite: bool) -> Iterator[Problem]:
    """What is to be said of the config beside an output file.

    Args:
        sidecar: A's config, or None.
        target: output file.
        overwrite: an existing config may be replaced.
    """
    place = sidecar_name(target)
    if sidecar is None:
        if os.path.lexists(place):
            what = f"{place.name} lies beside the output, and A has no such config: hosts will use it for the result"
            yield Problem("warning", what, str(place), hint="move it away, unless it is meant for the result")
    elif taken(sidecar, target) and not overwrite:
        hint = "choose another name, or --overwrite, or --number"
        yield Problem(
            "error", "the config beside the output exists, with other contents than A's", str(place), hint=hint
        )
    elif os.path.lexists(place) and _same(sidecar, place):
        yield Problem("note", f"A's config lies beside the output already: {place.name}", str(sidecar))
    else:
        yield Problem("note", f"A's config {sidecar.name} is copied to {place.name}", str(sidecar))


def _same(one: Path, other: Path) -> bool:
    """True when both are one file, or hold the same."""
    try:
        return os.path.samefile(one, other) or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


class Sidecar:
    """A config on its way to its place beside a model.

    Use as a context manager around the work: an error takes back what `publish` did.
    """

    def __init__(self, sidecar: Path | None, target: Path, *, overwrite: bool, fsync: bool) -> None:
        self._sidecar, self._place, self._overwrite, self._fsync = sidecar, sidecar_name(target), overwrite, fsync
        self._before: bytes | None = None
        self._published = False

    def publish(self) -> None:
        """Give the config its place, whole; just before the model gets its name.

        Raises:
            FileError: A's config cannot be read.
            OutputError: it cannot be written, or its name was taken meanwhile.
        """
        if self._sidecar is None:
            return
        contents = _contents(self._sidecar)
        with output_errors(self._place):
            if os.path.lexists(self._place):
                if _same(self._sidecar, self._place):
                    return
                self._before = self._place.read_bytes() if self._overwrite else None
            self._write(contents, self._overwrite)
        self._published = True

    def _write(self, contents: bytes, overwrite: bool) -> None:
        temporary = temporary_beside(self._place)
        try:
            fd = calls.open_write(temporary)
            try:
                calls.CALLS.write_at(fd, memoryview(contents), 0)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            name_file(temporary, self._place, overwrite)
        finally:
            remove(temporary)

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not self._published:
            return
        if self._before is None:
            remove(self._place)
        else:
            self._write(self._before, overwrite=True)


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
