"""Rows of a report to what its pictures show: one number per block and layer kind, and one sentence about the whole."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .families import block_names, block_of, detect, kind_of

Row = Mapping[str, Any]

# Layer kinds that are shown one by one; those of the fewest tensors are pooled where a model has more.
KINDS_AT_MOST = 100
# Of so many cells or more, colours end at this share of them where the rest lie far above.
_MANY = 50
_MOST = 0.98
_FAR = 2.0
_DIGITS = 4
_SMALL = 0.001
_OF_DONOR = re.compile(r"rel_diff_[c-z]")


@dataclass(frozen=True)
class Quantity:
    """One number that can be shown for a tensor and for a group of tensors.

    Attributes:
        id: column of the report, or a ratio of columns.
        label: on the page.
        meaning: one sentence.
    """

    id: str
    label: str
    meaning: str


QUANTITIES = (
    Quantity("rel_change", "change ÷ A", "‖out − A‖ ÷ ‖A‖: how far the result is from A, 0 is A itself"),
    Quantity("rel_diff", "difference ÷ A", "‖B − A‖ ÷ ‖A‖: how far B is from A, 0 is equal"),
    Quantity("sign_conflict", "sign conflict", "share of weights that the others push in opposite directions, 0 … 1"),
    Quantity("cosine", "cosine", "of A and B; of B − A and C − A where there are more: 1 same direction, −1 opposite"),
    Quantity("norm_change", "change", "‖out − A‖: length of the change, in units of the weights"),
    Quantity("norm_diff", "difference", "‖B − A‖: length of the difference, in units of the weights"),
    Quantity("max_change", "largest change", "largest |out − A| of a single weight, in units of the weights"),
    Quantity("max_diff", "largest difference", "largest |B − A| of a single weight, in units of the weights"),
)

# Columns of the reports on LoRAs and on folding -> what they say.
DECIDED = {
    "svd_error": "what the rank cannot hold, relative to the whole: 0 … 1",
    "rank": "rank of the result",
    "rank_before": "added ranks of the inputs",
    "n": "number of inputs that change the tensor",
    "conflict_expected": "sign conflict that chance alone would give: 0 … 1",
    "ratio": "length of the largest input over that of the smallest",
    "overlap": "shared part of the spaces that the inputs change: 0 none … 1 all",
    "selfish_share": "share of the weights that one input dominates and that stay as it has them: 0 … 1",
    "density": "share of the weights that were kept: 0 … 1",
    "delta_step_ratio": "size of the change over the distance of two codes",
    "codes_changed": "share of the codes that changed: 0 … 1",
    "correlation": "of the wanted and the achieved change: 1 is all of it",
    "rms_ratio": "RMS error of the result ÷ that of the quantized checkpoint it was folded into: 1 is as good",
    "step": "distance of two codes, in units of the weights",
}
# Of a group of tensors they are the mean, weighted by the number of weights.
MEANS = tuple(Quantity(column, column.replace("_", " "), text) for column, text in DECIDED.items())
_SIGNED = ("cosine", "correlation")
# Those that the sentence tells of.
_SHARES = ("rel_change", "rel_diff", "svd_error")


def finite(row: Row, column: str) -> bool:
    """True when the row holds a number there that is neither NaN nor infinite."""
    value = row.get(column)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def rel_change(row: Row) -> float:
    """‖out − A‖ ÷ ‖A‖ of a row; NaN where it was not measured or A is all zeros."""
    return row["norm_change"] / row["norm_a"] if finite(row, "norm_change") and row.get("norm_a") else math.nan


def measured(row: Row) -> bool:
    """True when the tensor's difference to another model, or what was decided on it, is in the row."""
    return any((name.startswith("norm_diff") or name in DECIDED) and finite(row, name) for name in row)


def quantities(rows: Sequence[Row]) -> list[Quantity]:
    """All that may be shown of some rows; further models of a comparison have distances of their own."""
    more = [name for name in (rows[0] if rows else ()) if _OF_DONOR.fullmatch(name)]
    names = {name: name[-1].upper() for name in more}
    return [
        *QUANTITIES,
        *(
            Quantity(column, f"difference of {slot} ÷ A", f"‖{slot} − A‖ ÷ ‖A‖: how far {slot} is from A, 0 is equal")
            for column, slot in names.items()
        ),
        *MEANS,
    ]


def aggregate(rows: Iterable[Row]) -> dict[str, float]:
    """Every quantity for the tensors of some rows together, as if they were one long tensor; NaN where none applies.

    Norms add as squares. The cosine of two models is exact; of more models, and for sign conflicts, it is the mean
    weighted by the length of the differences and by the number of weights.
    """
    chosen = [row for row in rows if measured(row)]
    donors = [name for name in (chosen[0] if chosen else ()) if _OF_DONOR.fullmatch(name)]
    return {
        "rel_change": _share(chosen, "norm_change"),
        "rel_diff": _share(chosen, "norm_diff"),
        "sign_conflict": _mean((row["sign_conflict"], row["numel"]) for row in chosen if finite(row, "sign_conflict")),
        "cosine": _cosine(chosen),
        "norm_change": _length(chosen, "norm_change"),
        "norm_diff": _length(chosen, "norm_diff"),
        "max_change": _largest(chosen, "max_change"),
        "max_diff": _largest(chosen, "max_diff"),
        **{name: _share(chosen, name.replace("rel", "norm")) for name in donors},
        **{name: _mean((row[name], row["numel"]) for row in chosen if finite(row, name)) for name in DECIDED},
    }


def _share(rows: Sequence[Row], over: str) -> float:
    """A length relative to that of A, of the tensors that have it."""
    known = [row for row in rows if finite(row, over)]
    under = _length(known, "norm_a")
    return _length(known, over) / under if under > 0 else math.nan


def _length(rows: Sequence[Row], name: str) -> float:
    squares = [row[name] ** 2 for row in rows if finite(row, name)]
    return math.sqrt(math.fsum(squares)) if squares else math.nan


def _largest(rows: Sequence[Row], name: str) -> float:
    return max((row[name] for row in rows if finite(row, name)), default=math.nan)


def _mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Weighted mean of (value, weight) pairs."""
    known = list(pairs)
    total = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / total if total else math.nan


def _cosine(rows: Sequence[Row]) -> float:
    known = [row for row in rows if finite(row, "cosine")]
    if any(finite(row, "sign_conflict") for row in known):  # of the differences to A
        return _mean((row["cosine"], row["norm_diff"] ** 2) for row in known)
    product = math.fsum(row["cosine"] * row["norm_a"] * row["norm_b"] for row in known)
    lengths = _length(rows, "norm_a") * _length(rows, "norm_b")
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 else math.nan


def main_quantity(rows: Sequence[Row]) -> Quantity:
    """What the worst tensors are found by: the change, or the difference, or the first that was decided on them."""
    if any(finite(row, "norm_change") for row in rows):
        return QUANTITIES[0]
    if any(finite(row, "rel_diff") for row in rows):
        return QUANTITIES[1]
    return next((item for item in MEANS if any(finite(row, item.id) for row in rows)), QUANTITIES[1])


def worst(rows: Sequence[Row]) -> list[Row]:
    """The rows, those that moved most first; those without a number keep their order at the end."""
    by = main_quantity(rows).id

    def rank(row: Row) -> tuple[int, float]:
        value = rel_change(row) if by == "rel_change" else row.get(by, math.nan)
        if math.isfinite(value):
            return 0, -value
        return (1, -row["norm_diff"]) if finite(row, "norm_diff") else (2, 0.0)  # A is all zeros; not measured

    return sorted(rows, key=rank)


def by_group(rows: Iterable[Row], column: str) -> dict[str, dict[str, float]]:
    """The value in a column (`block`, `component`) -> the quantities of its tensors, with their number as `tensors`."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if measured(row):
            groups[row[column]].append(row)
    return {name: {"tensors": len(group), **aggregate(group)} for name, group in groups.items()}


def grid(rows: Sequence[Row]) -> dict[str, Any]:
    """Plain data of the heatmap and the bars, ready for JSON.

    Returns:
        `blocks` and `kinds`, the names of columns and rows; `counts`, tensors in each cell; `quantities`: those that
        hold any number, each with `id, label, meaning`, `cells` (a list for each kind, None where there is nothing),
        `bars` (one number for each block), `low` and `high`, the values where the colours end.
    """
    tensors = {row["key"]: (row.get("dtype_a") or "F32", tuple(row["shape"])) for row in rows}
    found = detect(tensors)
    shown_rows = [(kind_of(row["key"], found), row) for row in rows if measured(row)]
    usual = dict(Counter(kind for kind, _ in shown_rows).most_common(KINDS_AT_MOST))
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for kind, row in shown_rows:
        cells[kind if kind in usual else "other kinds", row["block"]].append(row)
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    present = dict.fromkeys(block for _, block in cells)
    known = [*block_names(tensors, found), *dict.fromkeys(block_of(key, found) for key in tensors)]
    blocks = list(dict.fromkeys([*(name for name in known if name in present), *present]))
    values = {place: aggregate(group) for place, group in cells.items()}
    bars = {name: aggregate(row for place in cells if place[1] == name for row in cells[place]) for name in blocks}
    shown = []
    for item in quantities(rows):
        matrix = [[_plain(values.get((kind, block), {}).get(item.id)) for block in blocks] for kind in kinds]
        flat = sorted(value for line in matrix for value in line if value is not None)
        if flat:
            low, high = _ends(flat, item.id)
            names = {"id": item.id, "label": item.label, "meaning": item.meaning}
            line = [_plain(bars[block][item.id]) for block in blocks]
            shown.append({**names, "cells": matrix, "bars": line, "low": low, "high": high})
    counts = [[len(cells.get((kind, block), ())) for block in blocks] for kind in kinds]
    return {"blocks": blocks, "kinds": kinds, "counts": counts, "quantities": shown}


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _ends(flat: Sequence[float], quantity: str) -> tuple[float, float]:
    """Where the colours begin and end: not at a few values far away from all others."""
    if quantity in _SIGNED:
        return flat[0], flat[-1]
    most = flat[int(_MOST * (len(flat) - 1))]
    return 0.0, most if len(flat) >= _MANY and 0 < _FAR * most < flat[-1] else flat[-1]


def sentence(rows: Sequence[Row]) -> str:
    """What was done, and where it hurts most."""
    return " ".join(part for part in (_done(rows), _hurts(rows)) if part)


def _done(rows: Sequence[Row]) -> str:
    count = Counter(row["action"] for row in rows)
    if "merged" in count:
        methods = sorted({row["method"] for row in rows if row.get("method")})
        by = f" with {', '.join(methods)}" if methods else ""
        return f"{count['merged']} of {len(rows)} tensors were merged{by}, {len(rows) - count['merged']} copied."
    if "compared" not in count:
        return f"None of {len(rows)} tensors was merged."
    same = sum(row["note"] == "same" for row in rows)
    return f"{count['compared']} of {len(rows)} tensors were compared, {same} of them identical."


def _hurts(rows: Sequence[Row]) -> str:
    quantity = main_quantity(rows)
    if quantity.id not in _SHARES:
        return ""
    blocks = {name: group[quantity.id] for name, group in by_group(rows, "block").items()}
    blocks = {name: value for name, value in blocks.items() if value > 0}
    if not blocks:
        return ""
    total = aggregate(rows)
    top = max(blocks, key=lambda name: blocks[name])
    first = worst(rows)[0]
    if quantity.id == "svd_error":
        return (
            f"What the rank cannot hold is {percent(total[quantity.id])} on average, most in block {top} "
            f"({percent(blocks[top])}); it is largest at {first['key']} ({percent(first[quantity.id])})."
        )
    if quantity.id == "rel_change":
        what, value = f"The result is {percent(total[quantity.id])}", rel_change(first)
    else:
        more = [f"{name[-1].upper()} {percent(total[name])}" for name in total if _OF_DONOR.fullmatch(name)]
        what, value = ", ".join([f"B is {percent(total[quantity.id])}", *more]), first[quantity.id]
    return (
        f"{what} away from A overall, most in block {top} ({percent(blocks[top])}); "
        f"the tensor that moved most is {first['key']} ({percent(value)})."
    )


def percent(share: float) -> str:
    """A share of 0.0312 as `3.1 %`; small ones keep two digits that count."""
    return f"{100 * share:.1f} %" if share >= _SMALL else f"{100 * share:.2g} %"
