"""Which steps of a run go through compiled loops instead of the methods' own functions; the bytes are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import compiled
from .buffers import Buffer
from .files.dtypes import nbytes
from .kernels.registry import method
from .operands import Operands, Tile
from .steps import Merged, Step, Stored

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .compiled.loops import Loop
    from .compiled.philox import Draws

# Bytes of merged tensors from which a run gains more than it takes to load numba and compile: half a second.
WORTH_BYTES = 256 << 20
# What numba and its loops take, and how much more those of methods that measure whole tensors.
_COMPILER_BYTES, _MEASURING_BYTES = 110 << 20, 60 << 20


class Loops:
    """The loops of one run.

    Args:
        steps: all of them; where they are too few to be worth it, or numba is missing, nothing is fused.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self._loops = compiled.available() if _is_worth_it(steps) else None

    def of(self, step: Step) -> Loop | None:
        """What computes a step's elements; None where its method does."""
        operands = _operands(step)
        if self._loops is None or operands is None:
            return None
        node, stored = operands
        columns, dtypes = node.columns if node.rows else 1, [item.dtype for item in stored]
        found: Loop | None = self._loops.loop(node.method, node.params, dtypes, step.dtype, columns)
        return found


def memory(steps: Sequence[Step]) -> int:
    """Bytes that compiled loops will take; 0 where none will be."""
    if find_spec("numba") is None or not _is_worth_it(steps):
        return 0
    return _COMPILER_BYTES + (_MEASURING_BYTES if any(step.measured for step in steps) else 0)


def _is_worth_it(steps: Iterable[Step]) -> bool:
    return sum(nbytes(step.dtype, step.numel) for step in steps if _operands(step)) >= WORTH_BYTES


def compute(loop: Loop | None, held: Operands, tile: Tile, measures: Sequence[Any]) -> Buffer | None:
    """The stored result of a tile.

    Args:
        loop: of its step.
        held: reads the tile.
        tile: all of a tensor, or a part whose measures are known.
        measures: of the tensor; of a whole one they are taken here.

    Returns:
        None where the step's method must do it: there is no loop, or it met what is not finite.
    """
    if loop is None:
        return None
    operands, draws = _read(loop, held, tile)
    try:
        known = measures or _measures(loop, tile, operands, draws)
    except ArithmeticError:
        return None
    # The whole of a measured tensor takes room enough; others are made faster beside what is read.
    out = held.room_for_result(tile) if tile.step.measured else held.room_beside(tile)
    return out if loop.compute(operands, draws, known, out.array(nbytes(tile.step.dtype, tile.count))) else None


def measure(loop: Loop, held: Operands, tile: Tile, number: int, measures: Sequence[Any]) -> Any:
    """A tile's part of a measure.

    Raises:
        ArithmeticError: an operand is not finite.
    """
    operands, draws = _read(loop, held, tile)
    return loop.measure(number, operands, draws, measures)


def _read(loop: Loop, held: Operands, tile: Tile) -> tuple[list[NDArray[np.uint8]], Draws | None]:
    """The operands' bytes, and the draws of a method that needs any."""
    node = tile.step.node
    assert isinstance(node, Merged)
    held.begin()
    held.read_ahead(tile, drawn=False)
    drawn = method(node.method).needs_draws(node.params)
    return held.stored(tile), loop.draws(node.stream, tile.low) if drawn else None


def _measures(loop: Loop, tile: Tile, operands: Sequence[NDArray[np.uint8]], draws: Draws | None) -> list[Any]:
    """All measures of a tensor that was read whole."""
    node = tile.step.node
    assert isinstance(node, Merged)
    found: list[Any] = []
    for number, wanted in enumerate(method(node.method).needed_measures(node.params)):
        found.append(wanted.combine([loop.measure(number, operands, draws, found)]))
    return found


def _operands(step: Step) -> tuple[Merged, tuple[Stored, ...]] | None:
    """The method of a step and its operands, where they are elements of files and nothing else."""
    node = step.node
    if step.action != "merged" or not isinstance(node, Merged) or node.whole or step.wide or step.numel == 0:
        return None
    stored = tuple(item for item in node.inputs if isinstance(item, Stored))
    return (node, stored) if len(stored) == len(node.inputs) else None


NONE = Loops(())
