"""What was measured of pairs of tensors, as the rows and the summary of a comparison."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from .contrast import Sums
from .families import Detected, block_of, component_of
from .files.source import Source
from .pairs import Pair
from .report_charts import aggregate, by_group, finite, worst
from .wording import named

if TYPE_CHECKING:
    from .report import Rows

_LISTED_AT_MOST = 20


def difference_row(
    pair: Pair, sums: Sums, sources: Mapping[str, Source], families: Mapping[str, Detected]
) -> dict[str, Any]:
    """The row of a tensor; numbers that do not apply are NaN.

    Args:
        pair: the tensor.
        sums: what was measured of it.
        sources: slot -> model.
        families: slot -> what the model is.
    """
    donors = [slot for slot in sources if slot != "A"]
    home = next(iter(pair.keys))
    info = sources[home].tensors[pair.keys[home]]
    dtypes = {slot: sources[slot].tensors[key].dtype for slot, key in pair.keys.items()}
    row: dict[str, Any] = {
        "key": pair.key,
        "component": component_of(pair.key, families[home]),
        "block": block_of(pair.key, families[home]),
        "action": pair.action,
        **{f"dtype_{slot.lower()}": dtypes.get(slot, "") for slot in sources},
        "shape": list(info.shape),
        "numel": info.numel,
        "norm_a": next((n for slot in donors if not math.isnan(n := _norm(sums, "aa", slot))), math.nan),
    }
    for slot in donors:
        end = "" if slot == "B" else f"_{slot.lower()}"
        row[f"norm_{slot.lower()}"] = _norm(sums, "bb", slot)
        row[f"norm_diff{end}"] = _norm(sums, "dd", slot)
        row[f"rel_diff{end}"] = _ratio(row[f"norm_diff{end}"], row["norm_a"])
        known = not math.isnan(row[f"norm_diff{end}"])
        row[f"max_diff{end}"] = sums.largest[slot] if known else math.nan
    row["cosine"], row["sign_conflict"] = _agreement(sums, donors)
    return row | {"reason": pair.reason, "note": _note(pair, sums, row)}


def _agreement(sums: Sums, donors: Sequence[str]) -> tuple[float, float]:
    """Cosine and sign conflict: of A and B, or over all pairs of donors that the tensor could be measured for."""
    if len(donors) == 1:
        return _cosine(*(sums.total(name, "B") for name in ("ab", "aa", "bb"))), math.nan
    known = [two for two in combinations(donors, 2) if not math.isnan(sums.total("de", *two))]
    cosines = [_cosine(sums.total("de", *two), *(sums.total("dd", slot) for slot in two)) for two in known]
    sound = [value for value in cosines if not math.isnan(value)]
    conflicts, both = (math.fsum(sums.total(name, *two) for two in known) for name in ("conflicts", "both"))
    return math.fsum(sound) / len(sound) if sound else math.nan, _ratio(conflicts, both)


def _norm(sums: Sums, name: str, slot: str) -> float:
    return math.sqrt(sums.total(name, slot))


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan


def _cosine(product: float, one: float, other: float) -> float:
    """From the product and the squares of two lengths; NaN where one of them is 0."""
    lengths = math.sqrt(one) * math.sqrt(other)
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 else math.nan


def _note(pair: Pair, sums: Sums, row: Mapping[str, Any]) -> str:
    """`same`, `differs`, and which model is damaged; names the models where there are several."""
    compared = [*sums.same, *pair.unequal]
    same = [slot for slot, equal in sums.same.items() if equal]
    differing = [slot for slot in (*pair.bits, *pair.unequal) if slot not in same]
    notes = []
    for word, slots in (("same", same), ("differs", differing)):
        if slots:
            notes.append(word if len(slots) == len(compared) else f"{word} in {', '.join(slots)}")
    if not notes and row["norm_diff"] == 0 and len(compared) == 1:
        notes.append("same values")
    if sums.damaged:
        notes.append(f"values that are not finite in {', '.join(sorted(sums.damaged))}")
    elif pair.numbers and math.isnan(row["norm_a"]):
        notes.append("values too large to be measured")
    return "; ".join(notes)


def summary(rows: Rows, sums: Sequence[Sums], slots: Sequence[str]) -> dict[str, Any]:
    """Counts, the numbers of all tensors together, and those by component, block and pair of donors.

    Args:
        rows: of all tensors.
        sums: of the same tensors.
        slots: the models, A first.
    """
    actions = Counter(row["action"] for row in rows)
    identical = sum(row["note"] == "same" for row in rows)
    pairs = {f"{one}, {other}": _of_pair(sums, one, other) for one, other in combinations(slots[1:], 2)}
    together = aggregate(rows)
    for name in ("cosine", "sign_conflict") if pairs else ():  # exactly, not from the rows
        known = [pair[name] for pair in pairs.values() if not math.isnan(pair[name])]
        together[name] = math.fsum(known) / len(known) if known else math.nan
    return {
        "tensors": len(rows),
        "compared": actions["compared"],
        "identical": identical,
        "differing": actions["compared"] - identical,
        "missing": actions["missing"],
        "extra": actions["extra"],
        "shape_differs": actions["shape differs"],
        "excluded": actions["excluded"],
        "not_finite": sum("not finite" in row["note"] for row in rows),
        "all_identical": all(row["note"] == "same" for row in rows if row["action"] != "excluded"),
        **{name: together[name] for name in _OVERALL},
        "pairs": pairs,
        "components": _groups(rows, "component"),
        "blocks": _groups(rows, "block"),
        "most_different": [
            {name: row[name] for name in ("key", "block", "rel_diff", "max_diff", "cosine")}
            for row in worst(rows)[:_LISTED_AT_MOST]
            if finite(row, "rel_diff") and row["rel_diff"] > 0
        ],
    }


_OVERALL = ("rel_diff", "norm_diff", "cosine", "sign_conflict", "max_diff")


def _groups(rows: Rows, column: str) -> dict[str, dict[str, float]]:
    return {name: {key: group[key] for key in ("tensors", *_OVERALL)} for name, group in by_group(rows, column).items()}


def _of_pair(sums: Sequence[Sums], one: str, other: str) -> dict[str, float]:
    """Cosine and sign conflict of two donors' differences to A, over all tensors that both could be measured for."""
    known = [item for item in sums if not math.isnan(item.total("de", one, other))]
    de, both, conflicts = (math.fsum(item.total(name, one, other) for item in known) for name in _TWO)
    squares = (math.fsum(item.total("dd", slot) for item in known) for slot in (one, other))
    return {"cosine": _cosine(de, *squares), "sign_conflict": _ratio(conflicts, both)}


_TWO = ("de", "both", "conflicts")


def warnings(rows: Rows) -> list[str]:
    """What should not be overlooked: tensors that could not be compared, and damaged ones."""
    keys = defaultdict(list)
    for row in rows:
        if row["action"] == "shape differs":
            keys["have another shape"].append(f"{row['key']} ({row['reason']})")
        elif row["action"] in ("missing", "extra") or "missing in" in row["reason"]:
            keys[f"are {row['reason']}"].append(row["key"])
        if "not finite" in row["note"]:
            keys["hold values that are not finite"].append(row["key"])
    return [f"{len(names)} tensors {what}: {named(names)}" for what, names in keys.items()]
