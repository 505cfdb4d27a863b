"""What the patterns of a form's rules and filters reach in a model, line by line; text in, HTML out, no gradio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .. import rule_text
from ..errors import RecipeError
from ..patterns import compiled, split
from .task import Values

# Entries whose lines are patterns -> what happens to the tensors that match.
FILTERS = {"exclude": "kept as in A", "discard": "left out"}
RULES = "rule"
_SHOWN = 3
_LINES = 50


def matches_note(values: Values, names: Sequence[str]) -> str:
    """A list `pattern → N tensors: first names …` of every rule and filter; empty where there are none.

    Args:
        values: what stands in the form.
        names: of the tensors of model A.
    """
    items = list(_items(values, names))
    if not items:
        return ""
    more = f"<li>… and {len(items) - _LINES} more</li>" if len(items) > _LINES else ""
    return f"<div class='lm-note'><ul class='lm-problems'>{''.join(items[:_LINES])}{more}</ul></div>"


def _items(values: Values, names: Sequence[str]) -> Iterator[str]:
    glob = bool(values.get("glob"))
    for number, line in enumerate((values.get(RULES) or "").splitlines(), 1):
        if line.strip():
            try:
                yield _reached(rule_text.parse(line).match, line.rpartition(":")[2].strip(), glob, names)
            except RecipeError as error:
                yield _wrong(f"Rules, line {number}: {error.what}", error.hint)
    for field, done in FILTERS.items():
        said = "merged, alone" if field == "exclude" and values.get("include_mode") else done
        for pattern in split([values.get(field) or ""]):
            try:
                yield _reached(pattern, said, glob, names)
            except RecipeError as error:
                yield _wrong(error.what, error.hint)


def _reached(pattern: str, done: str, glob: bool, names: Sequence[str]) -> str:
    """One pattern's line.

    Raises:
        RecipeError: it is no regular expression.
    """
    found = list(filter(compiled(pattern, glob), names))
    if not found:
        return _wrong(f"{pattern} → no tensor of model A", None)
    first = ", ".join(found[:_SHOWN]) + (" …" if len(found) > _SHOWN else "")
    count = f"{len(found):,} tensor{'s' if len(found) != 1 else ''}"
    return (
        f"<li><code>{escape(pattern)}</code> → {count}, {escape(done)}<br>"
        f"<small class='lm-path'>{escape(first)}</small></li>"
    )


def _wrong(what: str, hint: str | None) -> str:
    told = f"<br><small>{escape(hint)}</small>" if hint else ""
    return f"<li class='lm-error'><b>!</b> {escape(what)}{told}</li>"
