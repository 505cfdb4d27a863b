"""The last runs: what, when, how long and what came of it, one line of JSON each, and the reports of the newest."""

from __future__ import annotations

import gzip
import json
import re
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from .files.userdata import data_folder, locked, write_whole
from .recipe import Recipe, from_json
from .report import Rows

KEPT = 50
REPORTS_KEPT = 20
# A line or a report beyond this is not read: nobody's history is that long.
LARGEST_LINE = 4 << 20
LARGEST_REPORT = 256 << 20

_ID = re.compile(r"[0-9a-f]{12}")

State = Literal["done", "failed", "stopped"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        id: twelve hex digits.
        task: of the recipe.
        state: how it ended.
        started: seconds since the epoch.
        seconds: how long it took.
        kind: which models the result belongs to: checkpoint, lora or vae.
        output: file or folder, relative to the folder of that kind, with `/`; empty where there is none.
        said: one line: what was made, or why not.
        recipe: as canonical JSON.
        has_report: every tensor was measured.
    """

    id: str
    task: str
    state: State
    started: float
    seconds: float
    kind: Literal["checkpoint", "lora", "vae"]
    output: str
    said: str
    recipe: str
    has_report: bool = False

    def read_recipe(self) -> Recipe:
        """The recipe of the run.

        Raises:
            RecipeError: it cannot be read.
        """
        return from_json(self.recipe)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured in a run.

    Attributes:
        title: what it is about.
        header: name -> text, shown above it.
        rows: one for each tensor.
    """

    title: str
    header: dict[str, str]
    rows: Rows


def new_id() -> str:
    """An id for an entry."""
    return uuid.uuid4().hex[:12]


class History:
    """The runs that a folder remembers; damaged lines are passed over, and several processes may write.

    Args:
        folder: where it lies; None for `data_folder()`. It is made with the first entry.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_folder()
        self.path = self.folder / "history.jsonl"
        self._reports = self.folder / "reports"

    def entries(self) -> list[Entry]:
        """The last `KEPT` runs, newest first; none where nothing can be read."""
        try:
            with self.path.open("rb") as stream:
                lines = stream.read(KEPT * LARGEST_LINE).splitlines()
        except OSError:
            return []
        known: dict[str, Entry] = {}
        for line in lines:
            if (entry := _read(line)) is not None:
                known[entry.id] = entry
        return list(reversed(known.values()))[:KEPT]

    def get(self, id: str) -> Entry | None:
        """The run of that id; None when it is not remembered."""
        return next((entry for entry in self.entries() if entry.id == id), None)

    def add(self, entry: Entry, report: Report | None = None) -> None:
        """Remember a run, and forget those beyond the last `KEPT`; nothing happens where it cannot be written.

        A history that cannot be kept must not fail a run whose result is there.
        """
        with suppress(OSError), locked(self.folder / "history.lock"), suppress(Exception):
            if report is not None:
                packed = gzip.compress(json.dumps(msgspec.to_builtins(report)).encode(), 5)
                write_whole(self._report_path(entry.id), packed, overwrite=True)
            entries = [entry, *self.entries()][:KEPT]
            lines = [msgspec.json.encode(each) + b"\n" for each in reversed(entries)]
            write_whole(self.path, b"".join(lines), overwrite=True)
            self._forget_reports(entries)

    def report(self, id: str) -> Report | None:
        """What was measured in a run; None where there is nothing, or not any more, or it cannot be read."""
        if not _ID.fullmatch(id):
            return None
        try:
            unpacking = zlib.decompressobj(wbits=31)
            text = unpacking.decompress(self._report_path(id).read_bytes(), LARGEST_REPORT)
            return msgspec.convert(json.loads(text), Report)
        except (OSError, ValueError, zlib.error):  # msgspec's errors are ValueErrors
            return None

    def with_reports(self) -> list[Entry]:
        """The runs whose report is still there, newest first."""
        return [entry for entry in self.entries() if entry.has_report and self._report_path(entry.id).is_file()]

    def clear(self) -> None:
        """Forget all runs and their reports.

        Raises:
            OSError: the folder cannot be written.
        """
        with locked(self.folder / "history.lock"):
            self.path.unlink(missing_ok=True)
            self._forget_reports([])

    def _report_path(self, id: str) -> Path:
        return self._reports / f"{id}.json.gz"

    def _forget_reports(self, entries: Sequence[Entry]) -> None:
        """Delete reports but those of the newest runs that have one."""
        kept = {f"{entry.id}.json.gz" for entry in [e for e in entries if e.has_report][:REPORTS_KEPT]}
        for path in self._reports.glob("*.json.gz"):
            if path.name not in kept:
                with suppress(OSError):
                    path.unlink()


def _read(line: bytes) -> Entry | None:
    try:
        entry = msgspec.json.decode(line, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return entry if _ID.fullmatch(entry.id) else None
