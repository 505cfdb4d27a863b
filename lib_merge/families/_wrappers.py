"""Paths behind words that a tool or a wrapping class has put in front: the end of a path that says enough."""

from __future__ import annotations

from collections.abc import Collection, Iterator

# The least that tells a module: a name alone, such as `proj_out`, could be anything's.
PARTS = 2


def unwrapped(stem: str, heads: Collection[str]) -> Iterator[str]:
    """What may be left of an adapter's stem when the words in front are taken off, one by one.

    Args:
        stem: dotted or squashed.
        heads: first words of real paths; nothing is taken off these.
    """
    separator = "." if "." in stem else "_"
    parts = stem.split(separator)
    for start in range(1, len(parts) - PARTS + 1):
        left = separator.join(parts[start - 1 :])
        if parts[start - 1].isdecimal() or _starts(left.replace(".", "_"), heads):
            return
        yield separator.join(parts[start:])


def _starts(squashed: str, heads: Collection[str]) -> bool:
    return any(squashed.startswith(f"{head}_") for head in heads if head)


def endings(path: str) -> Iterator[str]:
    """The ends of a model's dotted path with some of its first words, but no numbered list, taken off."""
    parts = path.split(".")
    for start in range(1, len(parts) - PARTS + 1):
        if parts[start - 1].isdecimal():
            return
        yield ".".join(parts[start:])
