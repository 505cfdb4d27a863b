"""Paths behind words that a tool or a wrapping class has put in front: the end of a path that says enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

# The least that tells a module: a name alone, such as `proj_out`, could be anything's.
PARTS = 2


def unwrapped(path: str, heads: re.Pattern[str]) -> Iterator[str]:
    """What may be left of an adapter's path when the words in front are taken off, one by one.

    Args:
        path: dotted or squashed, behind the prefixes that are known.
        heads: matches real paths at their start; nothing is taken off these.
    """
    separator = "." if "." in path else "_"
    parts = path.split(separator)
    for start in range(1, len(parts) - PARTS + 1):
        if parts[start - 1].isdecimal() or heads.match(separator.join(parts[start - 1 :])):
            return
        yield separator.join(parts[start:])


def endings(path: str) -> Iterator[str]:
    """The ends of a model's dotted path with some of its first words, but no numbered list, taken off."""
    parts = path.split(".")
    for start in range(1, len(parts) - PARTS + 1):
        if parts[start - 1].isdecimal():
            return
        yield ".".join(parts[start:])
