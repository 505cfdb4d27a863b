"""Rows of a run to pandas tables, and to CSV, JSON and HTML files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import OutputError
from .files.target import numbered_before
from .report_html import html

if TYPE_CHECKING:
    import pandas as pd

Rows = list[dict[str, Any]]

SUFFIXES = (".csv", ".json", ".html")


def table(rows: Rows) -> pd.DataFrame:
    """Rows as a table: numbers stay numbers, what does not apply is NaN, shapes are text.

    Args:
        rows: of `Result.rows`.
    """
    import pandas as pd

    return pd.DataFrame([{**row, "shape": "×".join(map(str, row["shape"])) or "scalar"} for row in rows])


def numbered(path: Path) -> Path:
    """The path itself, or NAME_1, NAME_2 … : the first that does not exist."""
    return numbered_before(path, path.suffix)


def check_report_path(path: Path, overwrite: bool = False) -> None:
    """Refuse a report name before the run.

    Args:
        path: where the report is to be written.
        overwrite: it may replace a file.

    Raises:
        OutputError: another ending than .csv, .json, .html, no such folder, or the file exists.
    """
    if path.suffix not in SUFFIXES:
        raise OutputError(f"a report ends in {', '.join(SUFFIXES)}", file=path, hint=f"write {path.stem}.csv")
    if not path.parent.is_dir():
        raise OutputError("the report's folder does not exist", file=path, hint=f"make it first: {path.parent}")
    if path.is_dir() or ((path.exists() or path.is_symlink()) and not overwrite):
        raise OutputError("the report exists", file=path, hint="choose another name, or --overwrite, or --number")


def save(rows: Rows, path: Path, title: str, header: Mapping[str, str] | None = None) -> None:
    """Write a report: `.csv` with full precision, `.json`, or `.html` to look at.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.write_text(_TEXT[path.suffix](rows, title, header or {}), "utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"cannot write the report: {error.strerror}", file=path) from error


def _csv(rows: Rows, title: str, header: Mapping[str, str]) -> str:
    return str(table(rows).to_csv(index=False, lineterminator="\n"))


def _json(rows: Rows, title: str, header: Mapping[str, str]) -> str:
    """Strict JSON: NaN becomes null."""
    plain = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    return json.dumps({"title": title, "rows": plain}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


_TEXT = {".csv": _csv, ".json": _json, ".html": html}
