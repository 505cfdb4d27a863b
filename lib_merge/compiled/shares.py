"""Blends for one element whose share of B follows from how similar A and B are there, or in its column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.extending import register_jitable

from ..kernels.interpolate import MeanPart, band
from ..kernels.measure import BLOCK
from ..kernels.random import STEPS
from ..kernels.selective import GatePart, is_limited
from ..kernels.similarity import exponent_of, needs_wide, raised
from ..lazy import torch
from .formula import Constants, Formula, Params, Seen
from .gaps import column_gaps, gap_blocks, largest_of, widest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

f32 = np.float32


@register_jitable
def _similarity(a: Any, b: Any, largest: float, wide: float) -> Any:
    """`similarity.similarities`."""
    if wide != 0:
        return f32(abs(np.float64(a) - np.float64(b)) / -largest + 1.0)
    return abs(a - b) / f32(-largest) + f32(1)


@register_jitable
def _difference(a: Any, b: Any, largest: float, wide: float) -> Any:
    if wide != 0:
        return f32(abs(np.float64(a) - np.float64(b)) / largest)
    return abs(a - b) / f32(largest)


@register_jitable
def _blended(a: Any, b: Any, m: Any, draw: Any, smoothness: float) -> Any:
    """`similarity.blend`."""
    share = m
    if smoothness != 1:
        chosen = draw - (m * f32(STEPS) - f32(0.5)) < f32(0)
        if smoothness == 0:
            return b if chosen else a
        part = f32(smoothness)
        share = m * part + (f32(1) - part if chosen else f32(0))
    return b if share >= f32(1) else a - ((a - b) * share + f32(0))


# comparative_interpolation: constants are largest, wide, smoothness, beta.


def _comparative_base(a: Any, b: Any, constants: Any) -> Any:
    if constants[3] == 0:
        return _similarity(a, b, constants[0], constants[1])
    return _difference(a, b, constants[0], constants[1])


def _comparative(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    return _blended(a, b, m, draw, constants[2])


def _comparative_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if not is_measured(measures):
        return None
    return (measures[0], float(needs_wide(params["alpha"])), params["gamma"], params["beta"])


# enhanced_auto_interp: constants are largest, wide, smoothness, lowest and highest similarity inside the band.


def _auto_base(a: Any, b: Any, constants: Any) -> Any:
    return _similarity(a, b, constants[0], constants[1])


def _auto(a: Any, b: Any, m: Any, draw: Any, constants: Any) -> Any:
    similarity = _similarity(a, b, constants[0], constants[1])
    inside = f32(constants[3]) <= similarity and similarity <= f32(constants[4])
    return _blended(a, b, m if inside else f32(0), draw, constants[2])


def _auto_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if not measures or not is_measured(measures[0]):
        return None
    limits = band(measures[0].similarity, params["beta"], torch.float32)
    if limits is None:
        return None
    lowest, highest = (float(limit) for limit in np.array(limits, np.int32).view(f32))
    return (measures[0].largest, float(needs_wide(params["alpha"])), params["gamma"], lowest, highest)


# enhanced_man_interp: constants are largest, wide, smoothness.


def _manual(a: Any, b: Any, m: Any, is_open: Any, draw: Any, constants: Any) -> Any:
    return _blended(a, b, m if is_open else f32(0), draw, constants[2])


def _manual_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if params["alpha"] == 1 or not measures or not is_measured(measures[0]) or measures[0].closed:
        return None
    return (measures[0].largest, float(needs_wide(params["alpha"])), params["delta"])


# weight_sum_cutoff: constants are alpha, and whether there is a limit.


def _cutoff(a: Any, b: Any, is_open: Any, constants: Any) -> Any:
    if constants[0] == 1:
        return b if is_open else a
    back = (a - b) * f32(constants[0])
    return a - (back if constants[1] != 0 else back + f32(0)) if is_open else a


def _cutoff_constants(params: Params, measures: Sequence[Any]) -> Constants | None:
    if params["alpha"] == 0 or params["gamma"] >= params["beta"]:
        return None
    if measures and (measures[0].closed or math.isinf(measures[0].largest)):
        return None
    return (params["alpha"], float(bool(measures)))


def is_measured(measures: Sequence[Any]) -> bool:
    """False where the largest difference is missing, 0 or infinite: then there is nothing to blend."""
    return bool(measures) and measures[0] != 0 and not math.isinf(measures[0])


def _open_columns(measures: Sequence[Any]) -> NDArray[Any] | None:
    is_open = measures[0].open if measures else None
    return None if is_open is None else is_open.numpy().view(np.uint8)


def _exponent(params: Params) -> int:
    exponent = exponent_of(params["alpha"])
    return int(exponent) if exponent in (1, 2, 3) else 0


def _power(params: Params) -> Callable[[Tensor], Tensor]:
    exponent = exponent_of(params["alpha"])
    return (lambda base: base.fill_(1)) if exponent == 0 else (lambda base: raised(base, exponent))


# Measures.


def largest_gap(seen: Seen) -> float:
    """Largest |A − B| of a tile, by float32."""
    return largest_of(*seen.pair)


def _largest(seen: Seen) -> float:
    return widest_of(*seen.pair) if needs_wide(seen.params["alpha"]) else largest_gap(seen)


def _mean(seen: Seen) -> MeanPart:
    wide = needs_wide(seen.params["alpha"])
    found = [(largest, float(gaps.sum())) for largest, gaps in gap_blocks(*seen.pair, BLOCK, wide)]
    count = seen.operands[0].size
    return MeanPart(max((largest for largest, _ in found), default=0.0), [total for _, total in found], count)


def _columns(low: str, high: str, wide_of: Callable[[float], bool]) -> Callable[[Seen], GatePart]:
    """The measure of columns; see `selective`."""

    def part(seen: Seen) -> GatePart:
        lower, upper, wide = seen.params[low], seen.params[high], wide_of(seen.params["alpha"])
        rows = seen.count // seen.columns if seen.columns else 0
        if is_limited(lower, upper):
            largest, sums = column_gaps(*seen.pair, seen.columns, wide)
            return GatePart(largest, sums, rows, lower, upper, torch.float32)
        largest = widest_of(*seen.pair) if wide else largest_gap(seen)
        return GatePart(largest, None, rows, lower, upper, torch.float32)

    return part


FORMULAS = {
    "comparative_interpolation": Formula(
        _comparative,
        "abmd",
        _comparative_constants,
        fits=lambda params: params["beta"] in (0, 1),
        base=_comparative_base,
        power=_power,
        exponent=_exponent,
        measures=(_largest,),
    ),
    "enhanced_auto_interp": Formula(
        _auto, "abmd", _auto_constants, base=_auto_base, power=_power, exponent=_exponent, measures=(_mean,)
    ),
    "enhanced_man_interp": Formula(
        _manual,
        "abmgd",
        _manual_constants,
        base=_auto_base,
        power=_power,
        exponent=_exponent,
        gate=_open_columns,
        measures=(_columns("beta", "gamma", needs_wide),),
    ),
    "weight_sum_cutoff": Formula(
        _cutoff,
        "abg",
        _cutoff_constants,
        gate=_open_columns,
        measures=(_columns("gamma", "beta", lambda alpha: False),),
    ),
}
