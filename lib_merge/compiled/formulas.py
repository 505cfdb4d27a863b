"""The methods that are compiled, each for one element: the same operations in the same order as in `kernels`.

Every operation is one of IEEE's, on float32; none may be fused with another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ..kernels.differences import TRAIN_GAIN
from ..kernels.random import STEPS, threshold

f32 = np.float32


@dataclass(frozen=True)
class Formula:
    """A method for one element.

    Attributes:
        function: (a, b …, constants) -> result; with draws (a, b, draw, constants).
        constants: parameters -> what does not change within a tensor.
        drawn: the function takes the element's draw.
    """

    function: Callable[..., Any]
    constants: Callable[[Mapping[str, Any]], tuple[float, ...]]
    drawn: bool = False


@register_jitable
def _step_towards(a: Any, b: Any, share: float) -> Any:
    """`arithmetic.step_towards`."""
    if share == 0:
        return a
    if share == 1:
        return b
    if share > 0:
        return a - (a - b) * f32(share)
    return a - (b - a) * f32(-share)


@register_jitable
def _weighted_sum(a: Any, b: Any, constants: Any) -> Any:
    return _step_towards(a, b, constants[0])


@register_jitable
def _add_difference(a: Any, b: Any, c: Any, constants: Any) -> Any:
    alpha = constants[0]
    if alpha == 0:
        return a
    return a - (c - b) * f32(alpha) if alpha > 0 else a - (b - c) * f32(-alpha)


@register_jitable
def _train_difference(a: Any, b: Any, c: Any, constants: Any) -> Any:
    multiplier = f32(constants[0])
    if multiplier == 0:
        return a
    missing, back = abs(b - a), c - b
    return a - (back * (missing / max(abs(back) + missing, f32(constants[1]))) * multiplier + f32(0))


@register_jitable
def _multiply_difference(a: Any, b: Any, constants: Any) -> Any:
    return a if constants[0] == 0 else a * ((b - a) * f32(constants[0]) + f32(1))


@register_jitable
def _subtract_weights(a: Any, b: Any, constants: Any) -> Any:
    return _step_towards(a, (a - b * f32(constants[1])) * f32(constants[2]), constants[0])


@register_jitable
def _triple_sum(a: Any, b: Any, c: Any, constants: Any) -> Any:
    return _step_towards(a, _step_towards(b, c, constants[1]), constants[0])


@register_jitable
def _sum_twice(a: Any, b: Any, c: Any, constants: Any) -> Any:
    if constants[0] == 0 and constants[1] == 0:
        return a
    return _step_towards(a, _step_towards(_step_towards(a, b, constants[0]), c, constants[1]), constants[2])


@register_jitable
def _power_up_dare(a: Any, b: Any, draw: Any, constants: Any) -> Any:
    return _step_towards(a, b, constants[0]) if f32(draw) < f32(constants[1]) else a


def _named(*names: str) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    return lambda params: tuple(float(params[name]) for name in names)


def _dare_constants(params: Mapping[str, Any]) -> tuple[float, ...]:
    limit = threshold(1 - params["alpha"])
    return (params["beta"] * STEPS / limit if limit else 0.0, float(limit))


FORMULAS: dict[str, Formula] = {
    "weighted_sum": Formula(_weighted_sum, _named("alpha")),
    "add_difference": Formula(_add_difference, _named("alpha")),
    "train_difference": Formula(
        _train_difference, lambda params: (TRAIN_GAIN * params["alpha"], float(np.finfo(f32).smallest_subnormal))
    ),
    "multiply_difference": Formula(_multiply_difference, _named("alpha")),
    "subtract_weights": Formula(_subtract_weights, _named("alpha", "beta", "gamma")),
    "triple_sum": Formula(_triple_sum, _named("alpha", "beta")),
    "sum_twice": Formula(_sum_twice, _named("alpha", "beta", "gamma")),
    "power_up_dare": Formula(_power_up_dare, _dare_constants, drawn=True),
}
