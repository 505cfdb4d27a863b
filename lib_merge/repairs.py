"""Known damage of earlier merges, told from headers: what is repaired, and what is only reported."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import Problem
from .files.dtypes import is_float
from .steps import Counting, Node, Step

# Text encoders of the CLIP kind number the places of so many tokens.
_PLACES = 77
REPAIRED = f"floats where whole numbers belong: written as int64 0 … {_PLACES - 1}"


def repaired(key: str, node: Node) -> Counting | None:
    """The table of positions that a damaged one stands for; None where there is nothing to repair."""
    if not _damaged(key, node.dtype) or node.shape not in ((_PLACES,), (1, _PLACES)):
        return None
    return Counting(node.shape)


def position_problems(steps: Sequence[Step]) -> list[Problem]:
    """Notes on repaired tables of positions, warnings about those that are left."""
    found = []
    for step in steps:
        if isinstance(step.node, Counting) and step.reason == REPAIRED:
            found.append(Problem("note", f"{step.key} holds {REPAIRED}", tensor=step.key))
        elif _damaged(step.key, step.dtype):
            found.append(
                Problem(
                    "warning",
                    f"{step.key} holds floats where whole numbers belong: an earlier merge damaged it; "
                    "it is copied as it is",
                    tensor=step.key,
                    hint="take A from a file in which it is int64",
                )
            )
    return found


def _damaged(key: str, dtype: str) -> bool:
    return key.rpartition(".")[2] == "position_ids" and is_float(dtype)
