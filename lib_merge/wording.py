"""Words for messages: how many tensors, which, and what an unknown name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_NAMED_AT_MOST = 8
_ALIKE = 0.6


def count_of(keys: Sequence[object]) -> str:
    """`1 tensor`, `3 tensors`."""
    return f"{len(keys)} tensor{'s' if len(keys) != 1 else ''}"


def named(keys: Sequence[str]) -> str:
    """The names, the first few of many."""
    more = f" and {len(keys) - _NAMED_AT_MOST} more" if len(keys) > _NAMED_AT_MOST else ""
    return ", ".join(keys[:_NAMED_AT_MOST]) + more


def suggestion(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name: the known one most like it in spelling or words, or all of them."""
    wanted = name.replace("-", "_").lower()

    def likeness(other: str) -> float:
        spelling = difflib.SequenceMatcher(None, wanted, other).ratio()
        words = set(wanted.split("_"))
        return spelling + len(words & set(other.split("_"))) / len(words)

    nearest = max(known, key=likeness)
    return f"did you mean {nearest}?" if likeness(nearest) >= _ALIKE else f"choose one of: {', '.join(known)}"
