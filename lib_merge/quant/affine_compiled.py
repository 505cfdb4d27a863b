"""MLX affine codes of a sum in one pass over memory, by numba where it is found; the same bytes as `affine` gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..compiler import compiler
from ..lazy import np, torch
from .affine import ROUNDINGS, Coded, pack, refuse

if TYPE_CHECKING:
    from torch import Tensor

_LANES = 16  # partial extremes, so that the processor can take as many weights at once
_LARGEST_GROUP = 128


def quantize_sum(
    dense: Tensor, change: Tensor, *, bits: int, group: int, rounding: str, dtype: torch.dtype, first_row: int = 0
) -> Coded | None:
    """`affine.quantize` of the float32 nearest to dense + change in float64; None where there is no numba.

    Args:
        dense: [rows, columns], float32, bfloat16 or float16.
        change: float64 of that shape.
        bits: as in `affine.quantize`, like the rest.
        group: 32, 64 or 128.
        rounding: see `affine.ROUNDINGS`.
        dtype: of scales and biases.
        first_row: number of the first row in the whole weight, for errors.

    Raises:
        NumberError: as `affine.quantize`.
    """
    kernel = compiled()
    if kernel is None:
        return None
    rows, columns = dense.shape
    rule, codes = ROUNDINGS[rounding], np.empty((rows, columns), np.uint8)
    lo, hi, scale, bias = (np.empty((rows, columns // group), np.float32) for _ in range(4))
    top = np.float32((1 << bits) - 1)
    kernel(
        dense.float().numpy(), change.numpy(), group, top, rule.half_even, rule.hi_from_zero, lo, hi, scale, bias, codes
    )
    with np.errstate(all="ignore"):  # what goes wrong is found group by group
        stored = [torch.from_numpy(each).to(dtype) for each in (scale, bias)]
        refuse(lo, hi, scale, stored, first_row, group)
    return Coded(torch.from_numpy(pack(codes, bits)), *stored)


@lru_cache(maxsize=1)
def compiled() -> Callable[..., None] | None:
    """The pass, compiled at its first call; None where numba is missing or does not go with this numpy."""
    numba = compiler()
    if numba is None:
        return None
    how = {"nogil": True, "error_model": "numpy"}  # never fastmath: its bits differ
    try:
        found: Callable[..., None] = numba.njit(_code_groups, cache=True, **how)
    except RuntimeError:  # there is no folder that it may keep its code in
        found = numba.njit(_code_groups, **how)
    return found


def _code_groups(  # pragma: no cover: it runs compiled
    dense: Any,
    change: Any,
    group: int,
    top: Any,
    half_even: bool,
    hi_from_zero: bool,
    lo: Any,
    hi: Any,
    scale: Any,
    bias: Any,
    codes: Any,
) -> None:
    """The arithmetic of `affine` for each group, all in float32; lo and hi are NaN where a weight is not finite."""
    zero, half, least = np.float32(0), np.float32(0.5 - 2.0**-25), np.float32(1e-7)
    highest = top if half_even else top + np.float32(0.5)
    values = np.empty(_LARGEST_GROUP, np.float32)
    low, high, bad = (np.empty(_LANES, np.float32), np.empty(_LANES, np.float32), np.empty(_LANES, np.float32))
    for row in range(lo.shape[0]):
        for number in range(lo.shape[1]):
            start = number * group
            for at in range(group):
                values[at] = np.float32(np.float64(dense[row, start + at]) + change[row, start + at])
            for lane in range(_LANES):
                low[lane], high[lane], bad[lane] = values[lane], values[lane], values[lane] * zero
            for at in range(_LANES, group, _LANES):
                for lane in range(_LANES):
                    value = values[at + lane]
                    low[lane] = value if value < low[lane] else low[lane]
                    high[lane] = value if value > high[lane] else high[lane]
                    bad[lane] += value * zero
            for lane in range(1, _LANES):
                low[0] = low[lane] if low[lane] < low[0] else low[0]
                high[0] = high[lane] if high[lane] > high[0] else high[0]
                bad[0] += bad[lane]
            smallest, largest = low[0] + bad[0], high[0] + bad[0]
            lo[row, number], hi[row, number] = smallest, largest
            if hi_from_zero and largest < zero:
                largest = zero
            low_side = abs(smallest) > abs(largest)
            step = (largest - smallest) / top
            if step < least:
                step = least
            if not low_side:
                step = -step
            edge = smallest if low_side else largest
            steps = edge / step
            q0 = np.rint(steps) if half_even else np.trunc(steps + np.copysign(half, steps))
            shift = zero
            if q0 != zero:
                step = edge / q0
                shift = edge
            scale[row, number], bias[row, number] = step, shift
            for at in range(group):
                code = (values[at] - shift) / step
                code = np.rint(code) if half_even else code + half
                code = code if code > zero else zero
                code = code if code < highest else highest
                codes[row, start + at] = np.uint8(np.int32(code))
