"""A report as one HTML file that needs nothing else: a sentence, a heatmap, bars per block, every row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from .report_charts import DECIDED, Row, grid, main_quantity, rel_change, sentence, worst

_TENSOR = {
    "key": "full name of the tensor",
    "component": "part of the model: unet (any denoiser), te1 … te4 (text encoders), vae, llm, other",
    "block": "block of the model that the tensor belongs to",
    "action": "what was done with the tensor",
    "method": "merge method",
    "dtype_a": "how model A stores it",
    "dtype_b": "how model B stores it; empty where B lacks it",
    "dtype_out": "how the result stores it",
    "shape": "length of each axis",
    "numel": "number of weights",
    "reason": "why it was treated so",
    "note": "what else should be known",
}
_MEASURED = {
    "norm_a": "‖A‖ = √Σa²: length of A's tensor, in units of the weights",
    "norm_b": "‖B‖: length of B's tensor, in units of the weights",
    "norm_diff": "‖B − A‖: length of the difference, in units of the weights",
    "rel_diff": "‖B − A‖ ÷ ‖A‖: 0 is equal, 1 is as far as A is long",
    "cosine": "of A and B; of B − A and C − A where there are more models: 1 same direction, 0 unrelated, −1 opposite",
    "norm_out": "‖out‖: length of the result, in units of the weights",
    "norm_change": "‖out − A‖: length of the change, in units of the weights",
    "rel_change": "‖out − A‖ ÷ ‖A‖: 0 is A itself",
    "max_change": "largest |out − A| of a single weight, in units of the weights",
    "max_diff": "largest |B − A| of a single weight, in units of the weights",
    "sign_conflict": "share of the weights, both pushed, that B and C push in opposite directions: 0 … 1",
}
_CHOSEN = {
    "strategy": "how the group was merged",
    "norms_in": "lengths of the inputs' changes at their strengths, in units of the weights",
}
MEANINGS = {**_TENSOR, **_MEASURED, **_CHOSEN, **DECIDED}

_SAFE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_WITHOUT_PLOTLY = "Drawn without plotly; where plotly is installed, the chart can be zoomed and saved."


def html(rows: Sequence[Row], title: str, header: Mapping[str, str]) -> str:
    """The page.

    Args:
        rows: of a merge or a comparison.
        title: of the page.
        header: name -> text, shown at the top: method, models, versions.
    """
    charts = grid(rows)
    library = _plotly() if charts["quantities"] else ""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_SAFE}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_file('report_page.css')}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(sentence(rows))}</p>',
            _about(header),
            "<noscript><p>The charts and the sorting need JavaScript; all numbers are in the table.</p></noscript>",
            _charts(charts["quantities"], bool(library)),
            _table(rows),
            f'<script type="application/json" id="data">{_json(charts)}</script>',
            f"<script>{library}</script>" if library else "",
            f"<script>\n{_file('report_page.js')}</script>",
            "</body>",
            "</html>\n",
        )
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _plotly() -> str:
    """The drawing library's script; empty where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return str(get_plotlyjs())


def _json(data: Any) -> str:
    """JSON that can stand inside a script element: no name can end it or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _about(header: Mapping[str, str]) -> str:
    lines = [f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in header.items()]
    return f'<table class="about"><tbody>{"".join(lines)}</tbody></table>' if lines else ""


def _charts(quantities: Sequence[Mapping[str, Any]], plotly: bool) -> str:
    if not quantities:
        return ""
    options = "".join(f"<option>{escape(item['label'])}</option>" for item in quantities)
    return "\n".join(
        (
            "<h2>By block and layer kind</h2>",
            f'<div class="bar"><label for="quantity">Show</label><select id="quantity">{options}</select></div>',
            '<p id="meaning" role="status"></p>',
            '<div id="chart" role="img"></div>',
            "" if plotly else f'<p class="note">{_WITHOUT_PLOTLY}</p>',
        )
    )


def _table(rows: Sequence[Row]) -> str:
    """All rows, those that moved most first; columns that are empty in all of them are left out."""
    rows = worst(rows)
    main = main_quantity(rows).id
    if main == "rel_change":
        rows = [_with_change(row) for row in rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    used = [name for name in columns if any(_text(row, name) for row in rows)]
    numeric = {name for name in used if all(_is_number(row.get(name, math.nan)) for row in rows)}
    names = sorted(used, key=lambda name: _place(name, main, name in numeric))
    meanings = {name: meaning(name) for name in names}
    heads = "".join(
        f'<th scope="col"{_class(name in numeric)}{_sorted(name == main)} title="{escape(meanings[name])}">'
        f'<button type="button">{escape(name)}</button></th>'
        for name in names
    )
    lines = "\n".join(f"<tr>{''.join(_cell(row, name, name in numeric) for name in names)}</tr>" for row in rows)
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in meanings.items() if text)
    return "\n".join(
        (
            "<h2>Tensors</h2>",
            '<div class="bar"><label for="filter">Find</label>'
            '<input type="search" id="filter" placeholder="words of a name, a block, a reason" autocomplete="off">'
            '<label><input type="checkbox" id="all"> show all</label>'
            '<span id="count" class="soft" role="status"></span></div>',
            '<p class="note">A click on a column sorts by it, a second click turns the order round.</p>',
            f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>",
            '<div class="scroll" tabindex="0" role="region" aria-label="Tensors">',
            f'<table id="rows" class="first"><thead><tr>{heads}</tr></thead>',
            f"<tbody>\n{lines}\n</tbody></table></div>",
        )
    )


def _place(name: str, main: str, number: bool) -> int:
    """Where a column stands: what it is about and what was measured come before how it is stored."""
    first = ("key", "block", main)
    last = ("reason", "note")
    if name in first:
        return first.index(name)
    if name in last:
        return 5 + last.index(name)
    return 3 if number and name != "numel" else 4


def _with_change(row: Row) -> Row:
    """The row with `rel_change` behind the change it is made of."""
    made: dict[str, Any] = {}
    for name, value in row.items():
        made[name] = value
        if name == "norm_change":
            made["rel_change"] = rel_change(row)
    return made


def meaning(column: str) -> str:
    """What a column says, for its tooltip; `norm_diff_c` is to C what `norm_diff` is to B."""
    if column in MEANINGS:
        return MEANINGS[column]
    if found := re.fullmatch(r"(\w+)_([c-z])", column):
        alike = MEANINGS.get(found[1]) or MEANINGS.get(f"{found[1]}_b") or ""
        return re.sub(r"\bB\b", found[2].upper(), alike)
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, (list, tuple)):
        return "×".join(map(str, value)) or "scalar"
    if isinstance(value, float):
        return f"{value:.5g}" if math.isfinite(value) else ""
    return "" if value is None else str(value)


def _class(number: bool) -> str:
    return ' class="n"' if number else ""


def _sorted(here: bool) -> str:
    return ' aria-sort="descending"' if here else ""


def _cell(row: Row, name: str, number: bool) -> str:
    text = escape(_text(row, name))
    if name == "key":
        return f'<th scope="row">{text}</th>'
    return f"<td{_class(number)}>{text}</td>"
