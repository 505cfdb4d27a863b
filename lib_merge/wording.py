"""Tensors in sentences: how many, and which."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED_AT_MOST = 8


def count_of(keys: Sequence[object]) -> str:
    """`1 tensor`, `3 tensors`."""
    return f"{len(keys)} tensor{'s' if len(keys) != 1 else ''}"


def named(keys: Sequence[str]) -> str:
    """The names, the first few of many."""
    more = f" and {len(keys) - _NAMED_AT_MOST} more" if len(keys) > _NAMED_AT_MOST else ""
    return ", ".join(keys[:_NAMED_AT_MOST]) + more
