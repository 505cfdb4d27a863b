"""One loop over the elements of a tile for every compiled method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from .formulas import FORMULAS
from .numbers import BEYOND, KEPT_IN, known, narrow, widen

if TYPE_CHECKING:
    from numpy.typing import NDArray

# (stored operands, draws or None, room for the stored result) -> True when all of them are finite; else it is void.
Loop = Callable[[Sequence["NDArray[np.uint8]"], "NDArray[np.uint16] | None", "NDArray[np.uint8]"], bool]

# Never fastmath, and no contraction: those bits differ from processor to processor.
_compiled = numba.njit(nogil=True, error_model="numpy")


def loop(method: str, params: Mapping[str, Any], dtypes: Sequence[str], result: str) -> Loop | None:
    """The loop of a method over operands of some safetensors dtypes; None where there is none.

    Args:
        method: id.
        params: all parameters.
        dtypes: of the operands in order.
        result: dtype to be stored.
    """
    if method not in FORMULAS or not {*dtypes, result} <= known():
        return None
    run, beyond, constants = (
        _loop_of(method, len(dtypes)),
        np.float32(BEYOND[result]),
        FORMULAS[method].constants(params),
    )
    kept, kept_result = [KEPT_IN[dtype] for dtype in dtypes], KEPT_IN[result]

    def over(operands: Sequence[NDArray[np.uint8]], draws: NDArray[np.uint16] | None, out: NDArray[np.uint8]) -> bool:
        views = [operand.view(dtype) for operand, dtype in zip(operands, kept, strict=True)]
        drawn = () if draws is None else (draws,)
        return bool(run(*views, *drawn, out.view(kept_result), beyond, constants))

    return over


@cache
def _loop_of(method: str, operands: int) -> Callable[..., bool]:
    formula = FORMULAS[method]
    found: Callable[..., bool] = _SHAPES[operands, formula.drawn](_compiled(formula.function))
    return found


def _two(formula: Any) -> Any:
    @_compiled
    def run(a: Any, b: Any, out: Any, beyond: Any, constants: Any) -> Any:
        bad = False
        for i in range(out.size):
            x, y = widen(a[i]), widen(b[i])
            value = formula(x, y, constants)
            bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE and abs(value) < beyond)
            out[i] = narrow(value, out[i])
        return not bad

    return run


def _two_drawn(formula: Any) -> Any:
    @_compiled
    def run(a: Any, b: Any, draws: Any, out: Any, beyond: Any, constants: Any) -> Any:
        bad = False
        for i in range(out.size):
            x, y = widen(a[i]), widen(b[i])
            value = formula(x, y, draws[i], constants)
            bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE and abs(value) < beyond)
            out[i] = narrow(value, out[i])
        return not bad

    return run


def _three(formula: Any) -> Any:
    @_compiled
    def run(a: Any, b: Any, c: Any, out: Any, beyond: Any, constants: Any) -> Any:
        bad = False
        for i in range(out.size):
            x, y, z = widen(a[i]), widen(b[i]), widen(c[i])
            value = formula(x, y, z, constants)
            bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE and abs(z) < _INFINITE and abs(value) < beyond)
            out[i] = narrow(value, out[i])
        return not bad

    return run


_INFINITE = np.float32(np.inf)
# (number of operands, drawn) -> what makes the loop of a formula.
_SHAPES: dict[tuple[int, bool], Callable[[Any], Any]] = {
    (2, False): _two,
    (2, True): _two_drawn,
    (3, False): _three,
}
