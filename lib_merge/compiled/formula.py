"""What a compiled method is, what its loops are given, and how a power is taken between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..kernels.scratch import flat_room
from ..lazy import torch
from .numbers import compiled, kept, widen
from .philox import Draws

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

# Elements worked on at a time: few enough for a core's cache.
_PIECE = 1 << 17

Params = Mapping[str, Any]
Constants = tuple[float, ...]


@dataclass(frozen=True)
class Seen:
    """A tile as a loop is given it.

    Attributes:
        operands: stored, flat, in the types of `numbers.KEPT_IN`.
        draws: of its elements; None where nothing is left to chance.
        columns: of the matrix that it is rows of.
        params: all parameters of the method.
        measures: those that are known.
    """

    operands: Sequence[NDArray[Any]]
    draws: Draws | None
    columns: int
    params: Params
    measures: Sequence[Any]

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.operands[0].size)

    @property
    def pair(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """A and B."""
        return self.operands[0], self.operands[1]

    @property
    def piece(self) -> int:
        """Elements of its pieces: whole rows that fit a core's cache."""
        columns = max(1, self.columns)
        return max(1, _PIECE // columns) * columns

    def drawn(self, piece: slice) -> NDArray[np.uint16] | None:
        """Draws of some elements, good until the thread's next call."""
        return None if self.draws is None else self.draws.of(piece)


@dataclass(frozen=True)
class Formula:
    """A method for one element: the same operations in the same order as in `kernels`.

    Every operation is one of IEEE's on float32, or float64 where `kernels` says so; none may be fused with another.

    Attributes:
        function: (what `takes` says …, constants) -> result.
        takes: letters of its arguments: operands `a` `b` `c`, the powered base `m`, whether the column is open `g`, the
            draw `d`.
        constants: (parameters, measures) -> what does not change within a tensor; None where `kernels` takes a way of
            its own.
        fits: parameters -> False where `kernels` takes a way of its own.
        base: (a, b, constants) -> number of which `power` makes m.
        power: parameters -> what raises numbers, in place; its bits are torch's.
        exponent: parameters -> the power of the base where it is 1, 2 or 3 and nothing but products; else 0.
        gate: measures -> which columns are open, one byte each; None: all.
        measures: as the method's in `kernels`, of a tile as `Seen`.
    """

    function: Callable[..., Any]
    takes: str
    constants: Callable[[Params, Sequence[Any]], Constants | None]
    fits: Callable[[Params], bool] = lambda params: True
    base: Callable[..., Any] | None = None
    power: Callable[[Params], Callable[[Tensor], Tensor]] | None = None
    exponent: Callable[[Params], int] = lambda params: 0
    gate: Callable[[Sequence[Any]], NDArray[Any] | None] = lambda measures: None
    measures: tuple[Callable[[Seen], Any], ...] = ()


def powered(formula: Formula, seen: Seen, constants: Constants) -> Iterator[tuple[slice, NDArray[Any] | None]]:
    """Pieces of a tile with m of their elements, good until the next piece; None where the loop itself makes it."""
    plain = formula.base is None and seen.draws is None and not formula.measures
    size = seen.count if plain else seen.piece
    for low in range(0, seen.count, size):
        piece = slice(low, min(low + size, seen.count))
        if formula.base is None or formula.power is None or formula.exponent(seen.params):
            yield piece, None
            continue
        a, b = (operand[piece] for operand in seen.operands)
        base = flat_room("base", a.size, torch.float32)
        _base_loop(formula.base)(a, b, base.numpy(), constants)
        yield piece, formula.power(seen.params)(base).numpy()


@compiled
def product(base: Any, exponent: Any) -> Any:
    """Base to the power 1, 2 or 3."""
    if exponent == 1:
        return base
    return base * base if exponent == 2 else base * (base * base)


def no_base(a: Any, b: Any, constants: Any) -> Any:
    """The base of a formula without one."""
    return a


@cache
def _base_loop(base: Any) -> Any:
    function = compiled(base)

    def run(a: Any, b: Any, out: Any, constants: Any) -> None:
        for i in range(out.size):
            out[i] = function(widen(a[i]), widen(b[i]), constants)

    return kept(run, base.__name__)
