"""Changes that stay by chance or by size, for one element, and what must be counted of them first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.extending import register_jitable

from ..kernels import dare_enhanced
from ..kernels.random import STEPS, threshold
from ..kernels.scratch import flat_room
from ..kernels.ties import Candidates, Histogram
from ..lazy import torch
from .formula import Constants, Formula, Params, Seen, no_base, powered, product
from .gaps import finite
from .numbers import bits_of, compiled, kept, widen
from .shares import is_measured, largest_gap
from .sums import step_towards

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

f32 = np.float32
_INFINITE = f32(np.inf)
_HALF = 16  # bits below the sign and 15 more
_UPPER_HALVES = 1 << 15
_LAST_ZERO = 3


# Of the enhanced methods constants are: largest change, floor, smoothness, rescale, multiplier, magnitude below which
# changes are trimmed.


def _ratio(a: Any, b: Any, constants: Any) -> Any:
    return abs(a - b) / f32(constants[0])


@register_jitable
def _keep_share(m: Any, draw: Any, constants: Any) -> Any:
    """`dare_enhanced.keep_share`."""
    chance = min(max(m, f32(constants[1])), f32(1))
    if constants[2] == 1:
        return f32(1) if constants[3] != 0 else chance
    if constants[3] != 0:
        chance = max(np.ceil(chance * f32(STEPS) - f32(0.5)), f32(0)) / f32(STEPS)
    kept = f32(1) if (draw + f32(0.5)) / f32(STEPS) < chance else f32(0)
    share = kept if constants[2] == 0 else (chance - kept) * f32(constants[2]) + kept
    return share / max(chance, f32(1 / STEPS)) if constants[3] != 0 else share


@register_jitable
def _added(a: Any, b: Any, change: Any, share: Any, multiplier: float) -> Any:
    """`dare_enhanced.add_shares`."""
    if multiplier == 1 and share == f32(1):
        return b
    return a - (change * f32(multiplier) + f32(0))


def _enhanced(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    share = _keep_share(m, draw, constants)
    return _added(a, b, (a - b) * share, share, constants[4])


def _enhanced_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if not is_measured(measures):
        return None
    return (measures[0], params["beta"], params["gamma"], float(params["rescale"]), params["delta"], 0.0)


def _power_of(name: str) -> Callable[[Params], Callable[[Tensor], Tensor]]:
    def power(params: Params) -> Callable[[Tensor], Tensor]:
        exponent = max(params[name], dare_enhanced.LEAST_POWER)
        return lambda base: dare_enhanced.powered(base, exponent)

    return power


def _exponent_of(name: str) -> Callable[[Params], int]:
    return lambda params: int(params[name]) if params[name] in (1, 2) else 0


# power_up_dare_ties: constants are share, draws below which a change stays, magnitude below which it is trimmed.


def _ties(a: Any, b: Any, draw: Any, constants: Any) -> Any:
    return step_towards(a, b, constants[0]) if draw < f32(constants[1]) and abs(a - b) > f32(constants[2]) else a


def _survivor(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    return abs(a - b) if draw < f32(constants[1]) else f32(0)


def _ties_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    limit = threshold(1 - params["alpha"])
    if limit == 0 or params["beta"] == 1 or params["gamma"] == 0:
        return None
    below = _below(measures[1]) if len(measures) == 2 else -1.0
    return None if below is None else (params["gamma"] * STEPS / limit, float(limit), below)


# power_up_dare_ties_enhanced.


def _ties_enhanced(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    share = _keep_share(m, draw, constants)
    change = (a - b) * share
    return _added(a, b, change, share, constants[4]) if abs(change) > f32(constants[5]) else a


def _kept(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    return abs((a - b) * _keep_share(m, draw, constants))


def _ties_enhanced_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if not is_measured(measures) or (params["beta"] == 0 and params["epsilon"] == 1):
        return None
    below = _below(measures[2]) if len(measures) == 3 else 0.0
    if below is None:
        return None
    return (measures[0], params["epsilon"], params["zeta"], 0.0, params["gamma"], below)


def _below(smallest: int | None) -> float | None:
    """The magnitude before the smallest that stays, given its bits."""
    return None if smallest is None else float(np.array(smallest - 1, np.int32).view(f32))


# Measures: see `ties`.


@kept
def _count(bits: Any, counts: Any) -> None:
    """Upper halves of the bits of numbers; zeros, which are many, go to the last places in turn."""
    for i in range(bits.size):
        counts[bits[i] >> _HALF if bits[i] > 0 else _UPPER_HALVES + (i & _LAST_ZERO)] += 1


@kept
def _share_upper(bits: Any, upper: Any, out: Any) -> None:
    """Which numbers other than 0 have this upper half of their bits."""
    for i in range(bits.size):
        out[i] = bits[i] >> _HALF == upper and bits[i] > 0


@cache
def _bits_loop(formula: Formula, magnitude: Any) -> Any:
    function, base = compiled(magnitude), compiled(formula.base or no_base)

    def run(a: Any, b: Any, m: Any, draws: Any, out: Any, exponent: Any, constants: Any) -> Any:
        bad = False
        for i in range(out.size):
            x, y = widen(a[i]), widen(b[i])
            bad |= not (abs(x) < _INFINITE and abs(y) < _INFINITE)
            powered = product(base(x, y, constants), exponent) if m is None else m[i]
            draw = f32(0) if draws is None else f32(draws[i])
            out[i] = bits_of(function(x, y, powered, draw, constants))
        return bad

    return kept(run, magnitude.__name__)


def _magnitudes(formula: Formula, magnitude: Any, seen: Seen, constants: Constants) -> Iterator[NDArray[np.int32]]:
    """Bits of what the changes of each piece are trimmed by; good until the next one."""
    run, exponent = _bits_loop(formula, magnitude), np.int32(formula.exponent(seen.params))
    for piece, m in powered(formula, seen, constants):
        a, b = (operand[piece] for operand in seen.operands)
        bits = flat_room("bits", a.size, torch.int32).numpy()
        finite((0, run(a, b, m, seen.drawn(piece), bits, exponent, constants)), f32)
        yield bits


def _trimming(formula: Formula, magnitude: Any) -> tuple[Callable[[Seen], Any], Callable[[Seen], Any]]:
    """The measures of a method that trims: the bin of the limit, then its bits.

    Args:
        formula: what takes the power; its constants are asked for with the measures at hand.
        magnitude: (a, b, m, draw, constants) -> what a change is trimmed by, 0 where it does not stay.
    """

    def count(seen: Seen) -> Histogram | None:
        constants = formula.constants(seen.params, seen.measures)
        if constants is None:
            return None
        counts = np.zeros(_UPPER_HALVES + _LAST_ZERO + 1, np.uint32)
        for bits in _magnitudes(formula, magnitude, seen, constants):
            _count(bits, counts)
        used = np.flatnonzero(counts[:_UPPER_HALVES])
        first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        return Histogram(seen.params["beta"], first, counts[first:end])

    def gather(seen: Seen) -> Candidates | None:
        wanted = seen.measures[-1]
        constants = formula.constants(seen.params, seen.measures[:-1])
        if wanted is None or constants is None:
            return None
        found = []
        for bits in _magnitudes(formula, magnitude, seen, constants):
            same = np.empty(bits.size, np.bool_)
            _share_upper(bits, np.int32(wanted.upper), same)
            found.append(bits[np.flatnonzero(same)])
        values, counts = np.unique(np.concatenate(found), return_counts=True)
        return Candidates(wanted.smaller, values, counts.astype(np.uint32))

    return count, gather


_TIES = Formula(_ties, "abd", _ties_constants)
_TIES_ENHANCED = Formula(
    _ties_enhanced,
    "abmd",
    _ties_enhanced_constants,
    base=_ratio,
    power=_power_of("delta"),
    exponent=_exponent_of("delta"),
)
FORMULAS = {
    "power_up_dare_enhanced": Formula(
        _enhanced,
        "abmd",
        _enhanced_constants,
        base=_ratio,
        power=_power_of("alpha"),
        exponent=_exponent_of("alpha"),
        measures=(largest_gap,),
    ),
    "power_up_dare_ties": replace(_TIES, measures=_trimming(_TIES, _survivor)),
    "power_up_dare_ties_enhanced": replace(_TIES_ENHANCED, measures=(largest_gap, *_trimming(_TIES_ENHANCED, _kept))),
}
