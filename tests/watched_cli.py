"""Runs command lines in this process, one after the other, and tells what each read, printed and imported.

Arguments: a folder; a JSON file with a list of command lines. Prints a JSON list. Every way Python code has to read a
file is replaced before lib_merge is imported: `open` in all its forms (by a recording FileIO below the usual buffers),
reads on descriptors, kernel copies and mmap. So the furthest byte that any of them touched is known for each file of
the folder, buffers included.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import mmap
import os
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
FURTHEST: dict[str, int] = {}


def saw(path: str, end: int) -> None:
    if path.startswith(str(ROOT)):
        FURTHEST[path] = max(FURTHEST.get(path, 0), end)


class Recording(io.FileIO):
    """Notes how far each read went."""

    def readinto(self, buffer):
        count = super().readinto(buffer)
        saw(os.path.realpath(self.name), self.tell())
        return count

    def read(self, size=-1):
        data = super().read(size)
        saw(os.path.realpath(self.name), self.tell())
        return data

    def readall(self):
        data = super().readall()
        saw(os.path.realpath(self.name), self.tell())
        return data


def recording_open(original):
    def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *args, **kwargs):
        plain = isinstance(file, (str, os.PathLike)) and set(mode) <= set("rbt")
        if not plain or not os.path.realpath(file).startswith(str(ROOT)):
            return original(file, mode, buffering, encoding, errors, newline, *args, **kwargs)
        raw = Recording(os.fspath(file), "r")
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def by_descriptor(name, end):
    """Replace a call of `os`; `end(result, *args)` tells where its read ended."""
    original = getattr(os, name)

    def call(fd, *args, **kwargs):
        path = os.path.realpath(f"/proc/self/fd/{fd}")
        at = os.lseek(fd, 0, os.SEEK_CUR) if name in ("read", "readv") else 0
        result = original(fd, *args, **kwargs)
        saw(path, end(at, result, *args))
        return result

    setattr(os, name, call)


def refuse_mapping(*args, **kwargs):
    raise AssertionError("a file was mapped")


def watch() -> None:
    io.open = builtins.open = recording_open(io.open)
    by_descriptor("read", lambda at, data, *args: at + len(data))
    by_descriptor("readv", lambda at, count, *args: at + count)
    by_descriptor("pread", lambda at, data, size, offset: offset + len(data))
    by_descriptor("preadv", lambda at, count, buffers, offset, *args: offset + count)
    copy = os.copy_file_range

    def copied(source, target, count, source_at=None, *args):
        saw(os.path.realpath(f"/proc/self/fd/{source}"), (source_at or 0) + count)
        return copy(source, target, count, source_at, *args)

    send = os.sendfile

    def sent(target, source, offset, count, *args):
        saw(os.path.realpath(f"/proc/self/fd/{source}"), (offset or 0) + count)
        return send(target, source, offset, count, *args)

    os.copy_file_range, os.sendfile, mmap.mmap = copied, sent, refuse_mapping


def listing() -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in ROOT.rglob("*") if path.is_file()}


def main() -> None:
    commands = json.loads(Path(sys.argv[2]).read_text("utf-8"))
    watch()
    from lib_merge.cli import main as run

    results = []
    for words in commands:
        FURTHEST.clear()
        before = listing()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run(words)
        results.append(
            {
                "status": status,
                "out": out.getvalue(),
                "err": err.getvalue(),
                "torch": "torch" in sys.modules,
                "furthest": dict(FURTHEST),
                "changed": listing() != before,
            }
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
