"""MLX affine codes: groups of weights in a row share a scale and a bias; weight ≈ scale · code + bias.

The arithmetic is that of MLX 0.23.2 and later (`mx.quantize`, mode affine), for a group of `group` weights, all in
float32 with true division, n = 2^bits − 1 and R the rounding to whole numbers:

    scale = max((hi − lo)/n, 1e-7), negative where |lo| ≤ |hi|; edge = whichever of lo and hi is farther from 0
    q0 = R(edge/scale); where q0 ≠ 0: scale = edge/q0, bias = edge; else bias = 0
    code = clamp(R((weight − bias)/scale), 0, n), from the unrounded scale and bias

Scale and bias are then rounded once to the dtype they are stored in. Codes of a row are one stream of bits, lowest bit
first, in little-endian 32-bit words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NumberError
from ..lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
SCALE_DTYPES = ("BF16", "F16", "F32")

_SMALLEST_SCALE = 1e-7
# One step below 1/2: adding it and cutting off the fraction rounds halves away from zero, and nothing else up.
_HALF = 0.5 - 2.0**-25
_PER_WORD = 8  # codes that are packed together: 8 codes fill `bits` bytes


@dataclass(frozen=True)
class Rule:
    """How one kind of MLX build rounds.

    Attributes:
        half_even: halves go to the even neighbour; else away from zero.
        hi_from_zero: the largest weight of a group counts as at least 0, so that all-negative groups get a wider range.
        meaning: for people.
    """

    half_even: bool
    hi_from_zero: bool
    meaning: str


ROUNDINGS: Mapping[str, Rule] = {
    "even": Rule(True, False, "halves to even, as MLX does on a CPU"),
    "away": Rule(
        False, False, "halves away from zero, as MLX does on Metal and CUDA, with the true minimum and maximum"
    ),
    "metal": Rule(False, True, "halves away from zero and the maximum from 0, exactly as MLX does on Metal and CUDA"),
}


@dataclass(frozen=True)
class Coded:
    """Codes of some rows.

    Attributes:
        words: uint8 [rows, columns·bits/8], the bytes of the 32-bit words.
        scales: [rows, columns/group], in the dtype they are stored in.
        biases: as `scales`.
    """

    words: Tensor
    scales: Tensor
    biases: Tensor


def quantize(
    values: Tensor, *, bits: int, group: int, rounding: str, dtype: torch.dtype | None = None, first_row: int = 0
) -> Coded:
    """Code some rows of a weight.

    Args:
        values: float32 [rows, columns], contiguous, columns a multiple of `group`; overwritten.
        bits: of a code, one of `BITS`.
        group: weights that share a scale, one of `GROUPS`.
        rounding: see `ROUNDINGS`.
        dtype: of scales and biases: bfloat16, float16 or float32 (the default).
        first_row: number of the first row in the whole weight, for errors.

    Raises:
        NumberError: a weight that is not finite, a range beyond float32, a scale that becomes 0, or a scale or bias
            beyond `dtype`; names the group.
    """
    rows, columns = values.shape
    rule, top = ROUNDINGS[rounding], (1 << bits) - 1
    grouped = values.view(rows, columns // group, group)
    lo, hi = torch.amin(grouped, -1).numpy(), torch.amax(grouped, -1).numpy()
    with np.errstate(all="ignore"):  # what goes wrong is found below, group by group
        scale, bias = _scale_and_bias(lo, hi, np.float32(top), rule)
        stored = [torch.from_numpy(each).to(dtype or torch.float32) for each in (scale, bias)]
        refuse(lo, hi, scale, stored, first_row, group)
    grouped.sub_(torch.from_numpy(bias).unsqueeze(-1)).div_(torch.from_numpy(scale).unsqueeze(-1))
    if rule.half_even:
        values.round_()
    else:
        values.add_(float(_HALF))
    values.clamp_(0.0, top + 0.5)  # the cast cuts off the fraction
    codes = np.empty((rows, columns), np.uint8)
    np.copyto(codes, values.numpy(), casting="unsafe")
    return Coded(torch.from_numpy(pack(codes, bits)), *stored)


def dequantize(coded: Coded, *, bits: int, group: int) -> Tensor:
    """Weights that codes stand for: scale · code + bias in float32.

    Args:
        coded: see `Coded`.
        bits: of a code.
        group: weights that share a scale.

    Returns:
        float32 [rows, columns].
    """
    codes = unpack(coded.words.numpy(), bits)
    rows, columns = codes.shape
    values = torch.from_numpy(codes).float().view(rows, columns // group, group)
    scaled = values.mul_(coded.scales.float().unsqueeze(-1)).add_(coded.biases.float().unsqueeze(-1))
    return scaled.view(rows, columns)


def _scale_and_bias(
    lo: NDArray[np.float32], hi: NDArray[np.float32], top: np.float32, rule: Rule
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unrounded scale and bias of each group, from its smallest and largest weight."""
    if rule.hi_from_zero:
        hi = np.maximum(hi, np.float32(0))
    low_side = np.abs(lo) > np.abs(hi)
    scale = np.maximum((hi - lo) / top, _SMALLEST_SCALE)
    np.negative(scale, out=scale, where=~low_side)
    edge = np.where(low_side, lo, hi)
    steps = edge / scale
    q0 = np.rint(steps) if rule.half_even else np.trunc(steps + np.copysign(_HALF, steps))
    on_grid = q0 != 0
    np.divide(edge, q0, out=scale, where=on_grid)
    edge[~on_grid] = 0
    return scale, edge


def refuse(
    lo: NDArray[np.float32],
    hi: NDArray[np.float32],
    scale: NDArray[np.float32],
    stored: list[Tensor],
    first_row: int,
    group: int,
) -> None:
    """Raise for the first group that no codes can stand for.

    Args:
        lo: smallest weight of each group [rows, groups].
        hi: largest.
        scale: unrounded.
        stored: scale and bias as they are stored.
        first_row: number of the first row in the whole weight.
        group: weights that share a scale.

    Raises:
        NumberError: names the group, and what is wrong with it.
    """
    beyond = ~(torch.isfinite(stored[0]) & torch.isfinite(stored[1])).numpy()
    bad = beyond | (scale == 0)
    if not bad.any() and math.isfinite(float(hi.max(initial=0))) and math.isfinite(float(lo.min(initial=0))):
        return
    name = str(stored[0].dtype).removeprefix("torch.")
    faults = (
        (~(np.isfinite(lo) & np.isfinite(hi)), "a weight is not finite"),
        (~np.isfinite(hi - lo), "the range of the weights is beyond float32"),
        (scale == 0, "the scale becomes 0: the weights are too large for their range"),
        (beyond, f"the scale or the bias is beyond {name}"),
    )
    for mask, what in faults:
        if mask.any():
            row, number = (int(at) for at in np.argwhere(mask)[0])
            place = f"row {first_row + row}, columns {number * group} to {number * group + group - 1}"
            raise NumberError(
                f"group {number} of row {first_row + row} cannot be quantized: {what} ({place})",
                hint="look for what made such weights in the adapter or in the dense model",
            )


@dataclass(frozen=True)
class _Doubling:
    """Two slots of a 64-bit word become one: what is in `low` keeps its place, the rest moves down into `high`."""

    shift: int
    low: int
    high: int


def _doublings(bits: int) -> tuple[_Doubling, ...]:
    """How eight codes, each in a byte of its own, move together in three steps."""
    steps = []
    for slot in (8, 16, 32):
        used = bits * slot // 8
        ones = sum(((1 << used) - 1) << at for at in range(0, 64, 2 * slot))
        steps.append(_Doubling(slot - used, ones, ones << used))
    return tuple(steps)


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes as a stream of bits, lowest first.

    Args:
        codes: [rows, columns], columns a multiple of 8, each below 2^bits; overwritten.
        bits: of a code.

    Returns:
        bytes [rows, columns·bits/8].
    """
    rows, columns = codes.shape
    if bits == 4:  # the common case: the byte below and the byte above meet in the lower one
        pairs, packed = codes.view("<u2"), np.empty((rows, columns // 2), np.uint8)
        pairs |= pairs >> 4
        np.copyto(packed, pairs, casting="unsafe")
        return packed
    words = codes.view("<u8")
    room = np.empty_like(words)
    for step in _doublings(bits) if bits < 8 else ():
        np.right_shift(words, np.uint64(step.shift), out=room)
        room &= np.uint64(step.high)
        words &= np.uint64(step.low)
        words |= room
    return codes.reshape(rows, columns // _PER_WORD, _PER_WORD)[:, :, :bits].reshape(rows, columns * bits // 8)


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of `pack`: bytes [rows, columns·bits/8] to codes [rows, columns]."""
    rows, count = packed.shape
    if bits == 4:
        pairs = packed.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        return pairs.view(np.uint8)
    wide = np.zeros((rows, count // bits, _PER_WORD), np.uint8)
    wide[:, :, :bits] = packed.reshape(rows, count // bits, bits)
    words = wide.reshape(rows, -1).view("<u8")
    for step in reversed(_doublings(bits)):
        words = (words & np.uint64(step.low)) | ((words & np.uint64(step.high)) << np.uint64(step.shift))
    return words.view(np.uint8)
