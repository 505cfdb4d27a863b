"""Rules as text, `PATTERN: NAME=VALUE …`, and back: on the command line one an option, in the tab one a line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import RecipeError
from .kernels.registry import Value
from .recipe import Rule

HOW = 'write it as "PATTERN: alpha=0.3 beta=0.1"'
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\s*=\s*([^\s,]+)")


class UnreadableError(RecipeError):
    """A text that is no rule, or no NAME=VALUE."""


def parse(text: str) -> Rule:
    """Read `PATTERN: NAME=VALUE …`; the pattern may hold colons itself.

    Raises:
        UnreadableError: the text is no rule.
        RecipeError: a parameter is given twice.
    """
    pattern, colon, values = text.rpartition(":")
    if not colon or not pattern.strip():
        raise UnreadableError(f"{text!r} is not a rule", hint=HOW)
    return Rule(match=pattern.strip(), params=assignments(values))


def assignments(text: str, *, exactly: int | None = None) -> dict[str, Value]:
    """Read `NAME=VALUE NAME=VALUE …`, at least one, or so many.

    Raises:
        UnreadableError: it is something else, or a value is neither a number nor true or false.
        RecipeError: a parameter is given twice.
    """
    found = _ASSIGNMENT.findall(text)
    rest = _ASSIGNMENT.sub("", text).strip(" ,")
    if rest or not found or (exactly is not None and len(found) != exactly):
        raise UnreadableError(f"{text!r} is not NAME=VALUE")
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"{name} is given twice in {text!r}", hint="give each parameter once")
    return {name: _value(name, value) for name, value in found}


def _value(name: str, text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        raise UnreadableError(f"{name}={text}: neither a number nor true or false") from None


def read(text: str) -> tuple[Rule, ...]:
    """The rules of a text, one a line; empty lines do not count.

    Raises:
        RecipeError: a line is no rule; says which.
    """
    found = []
    for number, line in enumerate((text or "").splitlines(), 1):
        if line.strip():
            try:
                found.append(parse(line))
            except RecipeError as error:
                raise RecipeError(f"line {number}: {error.what}", hint=error.hint) from error
    return tuple(found)


def write(rules: Sequence[Rule]) -> str:
    """Rules as lines that `read` takes back.

    Raises:
        RecipeError: a rule that no line can hold.
    """
    text = "\n".join(f"{rule.match}: {' '.join(map(_written, rule.params.items()))}" for rule in rules)
    try:
        same = read(text) == tuple(rules)
    except RecipeError:
        same = False
    if not same:
        raise RecipeError("a rule of the recipe cannot be written in one line", hint="run it with lib-merge run")
    return text


def _written(item: tuple[str, Value]) -> str:
    name, value = item
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    short = f"{value:g}"
    return f"{name}={short if float(short) == value else repr(value)}"
