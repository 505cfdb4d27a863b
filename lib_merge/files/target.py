"""What can be known about an output path before any work: name, folder, room, and whether it is an input."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import Problem
from .claim import is_claimed
from .folders import WEIGHTS
from .open import OUTPUT_SUFFIX

# `.NAME.lib_merge-PID-HEX.part` must fit into one directory entry too.
_LONGEST_NAME_BYTES = 255 - len("..lib_merge-4194304-01234567.part")


def is_taken(target: Path) -> bool:
    """Whether something has this name, or a run that goes on will give it to its output."""
    return os.path.lexists(target) or is_claimed(target)


def numbered(target: Path, taken: Callable[[Path], bool] = is_taken) -> Path:
    """The target itself, or NAME_1, NAME_2 … : the first that is not taken."""
    # the dot in a folder's `sdxl-v1.0` begins no suffix
    return numbered_before(target, OUTPUT_SUFFIX if target.suffix == OUTPUT_SUFFIX else "", taken)


def numbered_before(target: Path, suffix: str, taken: Callable[[Path], bool] = is_taken) -> Path:
    """As `numbered`; the number stands before this suffix."""
    stem = target.name.removesuffix(suffix)
    candidate, count = target, 0
    while taken(candidate):
        count += 1
        candidate = target.with_name(f"{stem}_{count}{suffix}")
    return candidate


def target_problems(
    target: Path,
    *,
    folder: bool,
    overwrite: bool,
    inputs: Mapping[str, Path],
    size_bytes: int,
    suffix: str = OUTPUT_SUFFIX,
) -> Iterator[Problem]:
    """Everything that would keep a run from publishing at `target`.

    Args:
        target: output file, or folder when `folder`.
        folder: the output is a model folder.
        overwrite: an existing output may be replaced.
        inputs: slot name -> input path.
        size_bytes: bytes that will be written.
        suffix: what the name of a file must end in.
    """

    def error(what: str, hint: str | None = None) -> Problem:
        return Problem("error", what, file=str(target), hint=hint)

    if target.name in ("", "..") or "\0" in target.name:
        yield error("the output has no name that a file can have", "give a file name after -o")
        return
    if not folder and target.suffix != suffix:
        name = target.stem if target.suffix.lower() in WEIGHTS else target.name
        yield error(f"the output's name must end in {suffix}", f"write {name}{suffix}")
    if folder and target.suffix == OUTPUT_SUFFIX:
        yield error("the model is a folder, so the output is a folder too", f"write {target.stem}")
    if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
        yield error(f"the output's name is longer than {_LONGEST_NAME_BYTES} bytes", "choose a shorter name")
    for slot, path in inputs.items():
        if _touches(target, path):
            yield error(f"the output would replace input {slot} or lie inside it", "choose another name or folder")
    if os.path.lexists(target) and not overwrite:
        yield error("the output exists", "choose another name, or --overwrite, or --number")
    if os.path.exists(target) and os.path.isdir(target) != folder:
        kind = "folder" if os.path.isdir(target) else "file"
        yield error(f"the output exists and is a {kind}", "choose another name")
    if not os.path.isdir(target.parent):
        yield error("the output's folder does not exist", f"make it first: {target.parent}")
        return
    if not os.access(target.parent, os.W_OK):
        yield error("the output's folder cannot be written to", "choose another folder or change its permissions")
        return
    free = shutil.disk_usage(target.parent).free
    if free < size_bytes:
        yield error(
            f"not enough room: {size_bytes / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free",
            "free some space or choose a folder on another disk",
        )


def _touches(target: Path, path: Path) -> bool:
    """True when the two are one file, or one lies in the other and would be replaced with it."""
    if not os.path.exists(path):
        return False
    if os.path.exists(target) and os.path.samefile(target, path):
        return True
    here, there = Path(os.path.realpath(target.parent)) / target.name, Path(os.path.realpath(path))
    return here in there.parents or there in here.parents
