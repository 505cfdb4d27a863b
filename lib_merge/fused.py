"""Which steps of a run go through compiled loops instead of the methods' own functions; the bytes are the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import compiled
from .files.dtypes import nbytes
from .steps import Merged, Step, Stored

if TYPE_CHECKING:
    from .compiled.loops import Loop

# Bytes of merged tensors from which a run gains more than it takes to load numba and compile: half a second.
WORTH_BYTES = 256 << 20


class Loops:
    """The loops of one run.

    Args:
        steps: all of them; where they are too few to be worth it, or numba is missing, nothing is fused.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        fusible = [step for step in steps if _operands(step)]
        worth = sum(nbytes(step.dtype, step.numel) for step in fusible) >= WORTH_BYTES
        self._loops = compiled.available() if worth else None

    def of(self, step: Step) -> Loop | None:
        """What computes a step's elements; None where its method does."""
        operands = _operands(step)
        if self._loops is None or operands is None:
            return None
        node, stored = operands
        found: Loop | None = self._loops.loop(node.method, node.params, [item.dtype for item in stored], step.dtype)
        return found


NONE = Loops(())


def _operands(step: Step) -> tuple[Merged, tuple[Stored, ...]] | None:
    """The method of a step and its operands, where they are elements of files and nothing else."""
    node = step.node
    if step.action != "merged" or not isinstance(node, Merged) or node.whole or node.measured or step.wide:
        return None
    stored = tuple(item for item in node.inputs if isinstance(item, Stored))
    return (node, stored) if len(stored) == len(node.inputs) else None
