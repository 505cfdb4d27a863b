"""Sums and differences for one element, and those that leave some to chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ..kernels.differences import TRAIN_GAIN
from ..kernels.random import STEPS, threshold
from .formula import Constants, Formula, Params

f32 = np.float32


@register_jitable
def step_towards(a: Any, b: Any, share: float) -> Any:
    """`arithmetic.step_towards`."""
    if share == 0:
        return a
    if share == 1:
        return b
    if share > 0:
        return a - (a - b) * f32(share)
    return a - (b - a) * f32(-share)


def _weighted_sum(a: Any, b: Any, constants: Any) -> Any:
    return step_towards(a, b, constants[0])


def _add_difference(a: Any, b: Any, c: Any, constants: Any) -> Any:
    alpha = constants[0]
    if alpha == 0:
        return a
    return a - (c - b) * f32(alpha) if alpha > 0 else a - (b - c) * f32(-alpha)


def _train_difference(a: Any, b: Any, c: Any, constants: Any) -> Any:
    multiplier = f32(constants[0])
    if multiplier == 0:
        return a
    missing, back = abs(b - a), c - b
    return a - (back * (missing / max(abs(back) + missing, f32(constants[1]))) * multiplier + f32(0))


def _multiply_difference(a: Any, b: Any, constants: Any) -> Any:
    return a if constants[0] == 0 else a * ((b - a) * f32(constants[0]) + f32(1))


def _subtract_weights(a: Any, b: Any, constants: Any) -> Any:
    return step_towards(a, (a - b * f32(constants[1])) * f32(constants[2]), constants[0])


def _triple_sum(a: Any, b: Any, c: Any, constants: Any) -> Any:
    return step_towards(a, step_towards(b, c, constants[1]), constants[0])


def _sum_twice(a: Any, b: Any, c: Any, constants: Any) -> Any:
    if constants[0] == 0 and constants[1] == 0:
        return a
    return step_towards(a, step_towards(step_towards(a, b, constants[0]), c, constants[1]), constants[2])


def _power_up_dare(a: Any, b: Any, draw: Any, constants: Any) -> Any:
    return step_towards(a, b, constants[0]) if draw < f32(constants[1]) else a


def _named(*names: str) -> Callable[[Params, Sequence[Any]], Constants]:
    return lambda params, measures: tuple(float(params[name]) for name in names)


def _train_constants(params: Params, measures: Sequence[Any]) -> Constants:
    return (TRAIN_GAIN * params["alpha"], float(np.finfo(f32).smallest_subnormal))


def _dare_constants(params: Params, measures: Sequence[Any]) -> Constants:
    limit = threshold(1 - params["alpha"])
    return (params["beta"] * STEPS / limit if limit else 0.0, float(limit))


FORMULAS = {
    "weighted_sum": Formula(_weighted_sum, "ab", _named("alpha")),
    "add_difference": Formula(_add_difference, "abc", _named("alpha")),
    "train_difference": Formula(_train_difference, "abc", _train_constants),
    "multiply_difference": Formula(_multiply_difference, "ab", _named("alpha")),
    "subtract_weights": Formula(_subtract_weights, "ab", _named("alpha", "beta", "gamma")),
    "triple_sum": Formula(_triple_sum, "abc", _named("alpha", "beta")),
    "sum_twice": Formula(_sum_twice, "abc", _named("alpha", "beta", "gamma")),
    "power_up_dare": Formula(_power_up_dare, "abd", _dare_constants),
}
