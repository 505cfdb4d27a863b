"""Patterns over tensor names: regular expressions or shell globs, both matching anywhere in the name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from .errors import RecipeError

Match = Callable[[str], bool]


def split(patterns: Iterable[str]) -> list[str]:
    """Patterns one by one: white space separates them (names have none), empty ones are dropped."""
    return [word for text in patterns for word in text.split()]


def compiled(pattern: str, glob: bool) -> Match:
    """A test for names.

    Args:
        pattern: one pattern. As a regular expression it is searched for; as a glob (`*`, `?`, `[…]`, case-sensitive
            everywhere) it may stand anywhere in the name too.
        glob: which of the two.

    Raises:
        RecipeError: not a regular expression.
    """
    source = "(?s:.*)" + fnmatch.translate(f"{pattern}*") if glob else pattern
    try:
        expression = re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        globs = "with --glob, * and ? are wildcards"
        hint = globs if "*" in pattern else "write \\ before [ ( + and their like to mean them"
        raise RecipeError(f"the pattern {pattern!r} is not a regular expression: {error}", hint=hint) from error
    if glob:
        return lambda key: expression.match(key) is not None
    return lambda key: expression.search(key) is not None


class Patterns:
    """Several patterns; a name matches when one of them does."""

    def __init__(self, patterns: Sequence[str], glob: bool) -> None:
        self.texts = split(patterns)
        self._tests = [compiled(text, glob) for text in self.texts]

    def match(self, key: str) -> bool:
        """True when any pattern matches."""
        return any(test(key) for test in self._tests)

    def unmatched(self, keys: Iterable[str]) -> list[str]:
        """The patterns that match none of the names."""
        names = list(keys)
        return [text for text, test in zip(self.texts, self._tests, strict=True) if not any(map(test, names))]
