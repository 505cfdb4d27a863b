"""A report as what its page shows: pictures, a table of the worst, files to download. Knows no gradio."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from .. import report as reports
from ..report_charts import Row, finite, grid, main_quantity, rel_change, sentence

SHOWN = 100
ALL = "(all)"
_DIGITS = 4
_COLUMNS_AT_MOST = 7
_BINS = 60
# Read in light and in dark: plots have no background of their own.
_INK, LINE, _ACCENT = "#787880", "rgba(128,128,136,0.35)", "#d97706"
_NO_PLOTLY = (
    "The pictures need the Python package plotly (pip install plotly, then restart); the table has the numbers."
)


@dataclass(frozen=True)
class View:
    """One report, ready to be shown.

    Attributes:
        title: what it is about.
        header: name -> text.
        rows: one for each tensor.
    """

    title: str
    header: Mapping[str, str]
    rows: reports.Rows

    @cached_property
    def charts(self) -> dict[str, Any]:
        """Numbers by block and layer kind, as `report_charts.grid` gives them."""
        return grid(self.rows)

    @cached_property
    def sentence(self) -> str:
        """What was done, and where it hurts most."""
        return sentence(self.rows)

    @property
    def quantities(self) -> dict[str, str]:
        """Label -> id of what can be shown, the one that the worst are found by first."""
        main = main_quantity(self.rows).id
        known = {item["label"]: item["id"] for item in self.charts["quantities"]}
        return dict(sorted(known.items(), key=lambda pair: pair[1] != main))

    @property
    def blocks(self) -> list[str]:
        """Blocks that the table can be narrowed to."""
        return [ALL, *dict.fromkeys(str(row.get("block", "")) for row in self.rows if row.get("block"))]

    @property
    def chosen(self) -> dict[str, str]:
        """Block -> the strategies that its weights got and how often, the most frequent first; empty without any."""
        counts: dict[str, Counter[str]] = {}
        for row in self.rows:
            if strategy := row.get("strategy"):
                counts.setdefault(str(row.get("block") or "(none)"), Counter())[str(strategy)] += 1
        return {block: ", ".join(f"{n} {id}" for id, n in found.most_common()) for block, found in counts.items()}

    def quantity(self, id: str) -> Mapping[str, Any] | None:
        """The numbers of one quantity; None where there is nothing of it."""
        return next((item for item in self.charts["quantities"] if item["id"] == id), None)

    def worst(self, id: str, block: str = ALL) -> list[Row]:
        """The `SHOWN` rows that stand out by a quantity: the largest, of a cosine or a correlation the smallest."""
        rows: list[Row] = [row for row in self.rows if block in (ALL, row.get("block"))]
        sign = 1 if id in ("cosine", "correlation", "density") else -1
        known = [(sign * value, row) for row in rows if math.isfinite(value := number(row, id))]
        return [row for _, row in sorted(known, key=lambda pair: pair[0])[:SHOWN]] or rows[:SHOWN]

    def table(self, id: str, block: str = ALL) -> pd.DataFrame:
        """The worst rows: what they are about, their numbers, what was chosen and why; numbers stay numbers."""
        rows = self.worst(id, block)
        numbers = [id, *(other for other in self.quantities.values() if other != id)][:_COLUMNS_AT_MOST]
        texts = [name for name in ("strategy", "method", "reason", "note") if any(row.get(name) for row in rows)]
        return pd.DataFrame(
            [
                {
                    "key": row["key"],
                    "block": row.get("block", ""),
                    **{name: _short(number(row, name)) for name in numbers},
                    **{name: row.get(name, "") for name in texts},
                }
                for row in rows
            ],
            columns=["key", "block", *numbers, *texts],
        )

    def csv(self) -> Path:
        """All rows with full precision, in a temporary file."""
        return self._written(".csv")

    def page(self) -> Path:
        """The report as one HTML file that needs nothing else, in a temporary folder."""
        return self._written(".html")

    def _written(self, suffix: str) -> Path:
        name = "".join(letter if letter.isalnum() or letter in " .+-_()" else "_" for letter in self.title)
        path = Path(tempfile.mkdtemp(prefix="lib_merge-")) / f"{name[:80].strip(' .') or 'report'}{suffix}"
        reports.save(self.rows, path, self.title, self.header)
        return path


def number(row: Row, id: str) -> float:
    """A quantity of one row; NaN where it has none."""
    if id == "rel_change":
        return rel_change(row)
    return float(row[id]) if finite(row, id) else math.nan


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


# Pictures


def drawing_problem() -> str:
    """Why there are no pictures; empty where there are."""
    try:
        import plotly.graph_objects  # noqa: F401 - only whether it is there
    except ImportError:
        return _NO_PLOTLY
    return ""


def figure(data: list[dict[str, Any]], height: int, title: str, **layout: Any) -> Any:
    """A plotly figure; None where plotly is not installed."""
    if drawing_problem():
        return None
    import plotly.graph_objects as go

    look = {
        "height": height,
        "title": {"text": escape(title, quote=False), "font": {"size": 13}},
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _INK, "size": 12},
        "showlegend": False,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _INK},
    }
    return go.Figure({"data": data, "layout": {**look, **layout}})


def _names(names: Sequence[str]) -> list[str]:
    """Names as plotly's texts, which read a little HTML."""
    return [escape(name, quote=False) for name in names]


def heatmap(view: View, id: str) -> Any:
    """A quantity by layer kind (rows) and block (columns); a hollow cell has no such layer. None without plotly."""
    item = view.quantity(id)
    if item is None:
        return None
    blocks, kinds = view.charts["blocks"], view.charts["kinds"]
    trace = {
        "type": "heatmap",
        "x": _names(blocks),
        "y": _names(kinds),
        "z": item["cells"],
        "customdata": view.charts["counts"],
        "colorscale": "Cividis",
        "zmin": item["low"],
        "zmax": item["high"],
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "colorbar": {"thickness": 12, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{x}<br>%{z} (%{customdata} tensors)<extra></extra>",
        # With many cells numbers would be too small to be read; the hover and the table have them.
        **({"texttemplate": "%{z:.2g}"} if len(blocks) <= _COLUMNS_AT_MOST else {}),
    }
    return figure(
        [trace],
        150 + 16 * len(kinds),
        f"{item['label']}: {item['meaning']}",
        xaxis={"type": "category", "tickangle": -60, "automargin": True, "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "automargin": True, "dtick": 1, "showgrid": False},
    )


def bars(view: View, id: str) -> Any:
    """A quantity of each block as a whole. None without plotly."""
    item = view.quantity(id)
    if item is None:
        return None
    trace = {
        "type": "bar",
        "x": _names(view.charts["blocks"]),
        "y": item["bars"],
        "marker": {"color": _ACCENT},
        "hovertemplate": "%{x}: %{y}<extra></extra>",
    }
    return figure(
        [trace],
        240,
        f"{item['label']} of each block",
        xaxis={"type": "category", "tickangle": -60, "automargin": True, "showgrid": False},
        yaxis={"automargin": True, "nticks": 5, "gridcolor": LINE, "zerolinecolor": LINE},
    )


def distribution(view: View, id: str, key: str) -> Any:
    """How a quantity is spread over all tensors, and where one of them stands. None without plotly."""
    item = view.quantity(id)
    values = [value for row in view.rows if math.isfinite(value := number(row, id))]
    mine = next((number(row, id) for row in view.rows if row["key"] == key), math.nan)
    if item is None or not values:
        return None
    edges, counts = _histogram(values)
    trace = {
        "type": "bar",
        "x": [low + (edges[1] - edges[0]) / 2 for low in edges[:-1]],
        "y": counts,
        "width": edges[1] - edges[0],
        "marker": {"color": _INK},
        "hovertemplate": "%{x:.4g}: %{y} tensors<extra></extra>",
    }
    mark: list[Any] = []
    if math.isfinite(mine):
        line = {"color": _ACCENT, "width": 3}
        mark = [{"type": "line", "x0": mine, "x1": mine, "y0": 0, "y1": 1, "yref": "paper", "line": line}]
    shown = f"{mine:.4g}" if math.isfinite(mine) else "none"
    return figure(
        [trace],
        240,
        f"{item['label']} of all tensors; the line is {key}: {shown}",
        bargap=0,
        shapes=mark,
        xaxis={"automargin": True, "showgrid": False, "zeroline": False},
        yaxis={"automargin": True, "nticks": 5, "gridcolor": LINE, "title": "tensors"},
    )


def _histogram(values: Sequence[float]) -> tuple[list[float], list[int]]:
    """Edges and counts of `_BINS` equal steps between the smallest and the largest value."""
    low, high = min(values), max(values)
    width = (high - low) / _BINS or max(abs(low), 1.0) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - low) / width), _BINS - 1)] += 1
    return [low + width * step for step in range(_BINS + 1)], counts
