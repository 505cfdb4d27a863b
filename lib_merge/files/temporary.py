"""Temporary names in the target folder, and the sweep of those whose process is dead.

`.NAME.lib_merge-PID-HEX.part` is an output that is being written. The same with `.old` is an output folder that is
being replaced: it stands aside for the moment between two renames.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"\.(.+)\.lib_merge-([0-9]+)-[0-9a-f]+\.(part|old)", re.DOTALL)
_ACTIVE: set[str] = set()


def temporary_beside(target: Path, suffix: Literal["part", "old"] = "part") -> Path:
    """A new name `.NAME.lib_merge-PID-HEX.part` in the target's folder; this process counts it as in use."""
    path = target.parent / f".{target.name}.lib_merge-{os.getpid()}-{secrets.token_hex(4)}.{suffix}"
    _ACTIVE.add(path.name)
    return path


def replace_folder(new: Path, target: Path) -> None:
    """Give `new` the name of a folder that is there, and delete that one; what cuts this short leaves one of them.

    Raises:
        OSError: it could not be renamed; the old folder has its name.
    """
    old, doomed = temporary_beside(target, "old"), temporary_beside(target)
    try:
        os.rename(target, old)
        os.rename(new, target)
    finally:
        if os.path.lexists(target):
            try:
                with suppress(OSError):  # while it is deleted it must not be called .old: a sweep could put a half back
                    os.rename(old, doomed)
            finally:
                remove(doomed)
                remove(old)
        else:
            os.rename(old, target)
        _ACTIVE.discard(old.name)


def remove(path: Path) -> None:
    """Delete a temporary file or folder if it is there, and forget its name. Never fails; a sweep comes later."""
    try:
        for _ in range(2):  # other programs that look into new files make the first attempt fail now and then
            with suppress(OSError):
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                elif os.path.lexists(path):
                    os.unlink(path)
    finally:
        _ACTIVE.discard(path.name)


def sweep(folder: Path) -> list[Path]:
    """Delete what dead runs left in a folder, and put back a folder whose replacement never got its name.

    Returns:
        what was deleted. Never raises.
    """
    swept = []
    try:
        items = [folder / name for name in os.listdir(folder)]
    except OSError:
        return []
    for item in items:
        match = _NAME.fullmatch(item.name)
        if not match or item.name in _ACTIVE or is_other_live_process(int(match[2])):
            continue
        name = folder / match[1]
        if match[3] == "old" and not os.path.lexists(name):
            with suppress(OSError):
                os.rename(item, name)
            continue
        remove(item)
        if not os.path.lexists(item):
            swept.append(item)
    return swept


def is_other_live_process(pid: int) -> bool:
    """True when another process of that number runs (our own number, not in use here, is an earlier life's)."""
    if pid == os.getpid():
        return False
    if sys.platform == "win32":
        return _windows_alive(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """True for a process that has ended, but whose parent has not asked for its exit status yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(") ")[2][:1] in ("Z", "X")
    except OSError:  # a system without /proc
        return False


def _windows_alive(pid: int) -> bool:
    """`os.kill(pid, 0)` would send Ctrl-C on Windows, so the process is opened instead."""
    import ctypes

    query_limited_information, still_active = 0x1000, 259
    kernel = ctypes.windll.kernel32  # type: ignore[attr-defined, unused-ignore]
    handle = kernel.OpenProcess(query_limited_information, False, pid)
    if not handle:
        return False
    code = ctypes.c_ulong()
    alive = bool(kernel.GetExitCodeProcess(handle, ctypes.byref(code))) and code.value == still_active
    kernel.CloseHandle(handle)
    return alive
