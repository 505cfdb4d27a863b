"""One loop over the elements of a tile for every compiled method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.scratch import flat_room
from ..lazy import torch
from . import chances, shares, sums
from .formula import Formula, Params, Seen, no_base, powered, product
from .numbers import BEYOND, KEPT_IN, compiled, kept, known, narrow, widen
from .philox import Draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FORMULAS: Mapping[str, Formula] = {**sums.FORMULAS, **shares.FORMULAS, **chances.FORMULAS}

_INFINITE = np.float32(np.inf)

Draws(0, 0).of(slice(0, 1))  # numba loads most of itself at the first call: now, not while a run is timed


@dataclass(frozen=True)
class Loop:
    """A method with its parameters, over operands of some dtypes.

    Attributes:
        formula: the method's.
        params: all parameters.
        dtypes: safetensors dtypes of the operands in order.
        result: that of the result.
        columns: of the matrix that tiles are rows of, for methods that ask for rows.
    """

    formula: Formula
    params: Params
    dtypes: tuple[str, ...]
    result: str
    columns: int

    def draws(self, key: int, first: int) -> Draws:
        """Those of a stream from element `first` on."""
        return Draws(key, first)

    def measure(self, number: int, operands: Sequence[Bytes], draws: Draws | None, measures: Sequence[Any]) -> Any:
        """A tile's part of a measure, as `kernels.registry.Measure.tile` gives it.

        Args:
            number: of the measure.
            operands: stored bytes.
            draws: of the elements, where something is left to chance.
            measures: those before it.

        Raises:
            ArithmeticError: an operand is not finite.
        """
        return self.formula.measures[number](self._seen(operands, draws, measures))

    def compute(self, operands: Sequence[Bytes], draws: Draws | None, measures: Sequence[Any], out: Bytes) -> bool:
        """The stored result; False where it is void: a value is not finite, or `kernels` takes a way of its own.

        Args:
            operands: stored bytes.
            draws: of the elements, where something is left to chance.
            measures: of the whole tensor.
            out: room for the result; may be an operand's whose elements are not smaller.
        """
        constants = self.formula.constants(self.params, measures)
        if constants is None:
            return False
        seen, stored = self._seen(operands, draws, measures), _view(out, self.result)
        beyond, run, is_open = np.float32(BEYOND[self.result]), _loop_of(self.formula), self.formula.gate(measures)
        apart = not any(np.may_share_memory(out, operand) for operand in operands)
        exponent = np.int32(self.formula.exponent(self.params))
        if is_open is not None:
            is_open = np.tile(is_open, min(seen.count, seen.piece) // self.columns)
        for piece, m in powered(self.formula, seen, constants):
            a, b, *more = (operand[piece] for operand in seen.operands)
            # A loop whose result may lie over what it reads is not made of vectors.
            result = (
                stored[piece]
                if apart
                else _view(flat_room("result", stored[piece].nbytes, torch.uint8).numpy(), self.result)
            )
            gate = None if is_open is None else is_open[: a.size]
            if not run(
                a, b, more[0] if more else None, m, gate, seen.drawn(piece), result, beyond, exponent, constants
            ):
                return False
            if not apart:
                stored[piece] = result
        return True

    def _seen(self, operands: Sequence[Bytes], draws: Draws | None, measures: Sequence[Any]) -> Seen:
        views = [_view(operand, dtype) for operand, dtype in zip(operands, self.dtypes, strict=True)]
        return Seen(views, draws, self.columns, self.params, measures)


def _view(raw: Bytes, dtype: str) -> NDArray[Any]:
    found: NDArray[Any] = raw.view(KEPT_IN[dtype])
    return found


def loop(method: str, params: Params, dtypes: Sequence[str], result: str, columns: int) -> Loop | None:
    """The loop of a method; None where there is none. See `Loop` for the arguments."""
    formula = FORMULAS.get(method)
    if formula is None or not {*dtypes, result} <= known() or not formula.fits(params):
        return None
    return Loop(formula, params, tuple(dtypes), result, columns)


# A formula's letters -> it as a function of everything that an element has.
_TAKES: dict[str, Callable[[Any], Any]] = {
    "ab": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, constants),
    "abc": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, c, constants),
    "abd": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, d, constants),
    "abg": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, g, constants),
    "abmd": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, m, d, constants),
    "abmgd": lambda f: lambda a, b, c, m, g, d, constants: f(a, b, m, g, d, constants),
}


@cache
def _loop_of(formula: Formula) -> Any:
    function, base = compiled(_TAKES[formula.takes](compiled(formula.function))), compiled(formula.base or no_base)

    def run(
        a: Any, b: Any, c: Any, m: Any, is_open: Any, draws: Any, out: Any, beyond: Any, exponent: Any, constants: Any
    ) -> Any:
        """What is None is compiled away; `is_open` is of one row."""
        bad = False
        for i in range(out.size):
            x, y = widen(a[i]), widen(b[i])
            z = np.float32(0) if c is None else widen(c[i])
            powered = product(base(x, y, constants), exponent) if m is None else m[i]
            gate = True if is_open is None else is_open[i] != 0
            draw = np.float32(0) if draws is None else np.float32(draws[i])
            value = function(x, y, z, powered, gate, draw, constants)
            bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE and abs(z) < _INFINITE and abs(value) < beyond)
            out[i] = narrow(value, out[i])
        return not bad

    return kept(run, f"{formula.function.__name__} {formula.takes}")
