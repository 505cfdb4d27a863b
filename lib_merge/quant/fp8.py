"""Scaled fp8: which tensors belong together, codes to numbers, and numbers to codes with a fresh scale.

A number is its code times a scale. There is one scale for the weight (shape [] or [1]), one for each row ([out] or
[out, 1]), one for each of several equal pieces of a row ([out, pieces, 1]), or one for each square of 128 × 128
([⌈out/128⌉, ⌈in/128⌉]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# Dtypes of codes: torch's name, largest number.
FORMATS = {"F8_E4M3": ("float8_e4m3fn", 448.0), "F8_E5M2": ("float8_e5m2", 57344.0)}
# What stands in place of `weight` in the names of a weight's scale, and of tensors that only a quantized run needs.
SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
# One of these says of which kind the codes are.
FORMAT_SIDE = "comfy_quant"
SIDES = ("scale_input", "input_scale", FORMAT_SIDE)
# Last name of an empty tensor that says of a whole model that its fp8 weights have scales.
MARKER = "scaled_fp8"
SQUARE = 128
_SCALE_DTYPES = ("F64", "F32", "F16", "BF16")
_WEIGHT = "weight"


def scales_of(tensors: Mapping[str, tuple[str, Shape]]) -> dict[str, str]:
    """The weights that `scaled` can decode.

    Args:
        tensors: key -> (safetensors dtype, shape), of a whole model.

    Returns:
        key of the codes -> key of their scale.
    """
    found = {}
    for key, (dtype, shape) in tensors.items():
        if dtype not in FORMATS or key.rpartition(".")[2] != _WEIGHT:
            continue
        names = [key.removesuffix(_WEIGHT) + ending for ending in SCALES]
        scales = [name for name in names if name in tensors]
        if len(scales) == 1 and tensors[scales[0]][0] in _SCALE_DTYPES and is_layout(shape, tensors[scales[0]][1]):
            found[key] = scales[0]
    return found


def sides_of(tensors: Mapping[str, tuple[str, Shape]], scales: Mapping[str, str]) -> set[str]:
    """The tensors that say nothing any more once those weights are numbers: scales, and what goes with them."""
    stems = {key.removesuffix(_WEIGHT) for key in scales}
    sides = {stem + ending for stem in stems for ending in (*SCALES, *SIDES)} & tensors.keys()
    markers = {key for key in tensors if key.rpartition(".")[2] == MARKER} if scales else set()
    return sides | markers


def is_layout(shape: Shape, scale: Shape) -> bool:
    """True when a scale of that shape fits a weight of this one; see the module's text."""
    return 0 not in shape and (_pieces(shape, scale) or _squares(shape, scale))


def _pieces(shape: Shape, scale: Shape) -> bool:
    """One scale for each of some equal runs of elements, in row-major order."""
    if math.prod(scale) == 1:
        return True
    if not shape or scale[:1] != shape[:1]:
        return False
    if math.prod(scale[1:]) == 1:
        return True
    return len(scale) == 3 and len(shape) == 2 and scale[2] == 1 and scale[1] > 0 and shape[1] % scale[1] == 0


def _squares(shape: Shape, scale: Shape) -> bool:
    return len(shape) == 2 and scale == tuple(-(-size // SQUARE) for size in shape)


def scaled(codes: Tensor, scale: Tensor, shape: Shape, start: int = 0) -> Tensor:
    """Codes times their scale, in place.

    Args:
        codes: the values of the codes without the scale, float32 or float64, flat: a part of a weight or all of it.
        scale: float32, in one of the layouts.
        shape: of the whole weight.
        start: element of the weight that `codes` starts at.

    Returns:
        `codes`.
    """
    return codes.mul_(_factors(scale, shape, start, codes.numel())) if codes.numel() else codes


def _factors(scale: Tensor, shape: Shape, start: int, count: int) -> Tensor:
    """The scale of each of so many elements, or the one of all."""
    if scale.numel() == 1:
        return scale.reshape(())
    if _pieces(shape, tuple(scale.shape)):
        length = math.prod(shape) // scale.numel()
        first, last = start // length, (start + count - 1) // length
        repeated = scale.reshape(-1)[first : last + 1].repeat_interleave(length)
        return repeated[start - first * length :][:count]
    columns = shape[1]
    top, bottom = start // columns, -(-(start + count) // columns)
    across, down = (
        torch.arange(low, high, device=scale.device) // SQUARE for low, high in ((0, columns), (top, bottom))
    )
    return scale[down][:, across].reshape(-1)[start - top * columns :][:count]


def widen(reach: Tensor, values: Tensor, shape: Shape, start: int = 0) -> None:
    """Raise the largest magnitude under each scale, in place, to that of some more rows.

    Args:
        reach: so far, zeros at first; of the values' dtype, in one of the layouts.
        values: whole rows of the matrix [first axis, rest], flat, finite.
        shape: of the whole weight.
        start: element of the weight that `values` starts at.
    """
    if not values.numel():
        return
    magnitudes = values.abs()
    if reach.numel() == 1:
        reach.copy_(torch.maximum(reach, magnitudes.max()))
        return
    columns = math.prod(shape[1:])
    rows, first = magnitudes.view(-1, columns), start // columns
    if _pieces(shape, tuple(reach.shape)):
        part = rows.view(len(rows), -1, math.prod(shape) // reach.numel()).amax(2)
        so_far = reach.view(shape[0], -1)[first : first + len(rows)]
        so_far.copy_(torch.maximum(so_far, part))
        return
    padded = torch.nn.functional.pad(rows, (0, -columns % SQUARE))
    part = padded.view(len(rows), -1, SQUARE).amax(2)
    for down in range(first // SQUARE, -(-(first + len(rows)) // SQUARE)):
        here = part[max(0, down * SQUARE - first) : (down + 1) * SQUARE - first]
        reach[down] = torch.maximum(reach[down], here.amax(0))


def fresh_scale(reach: Tensor, dtype: str) -> Tensor:
    """The scale, float32, by which the largest magnitudes become the format's largest number; 1 where all is 0."""
    scale = reach.to(torch.float32).div(FORMATS[dtype][1])
    scale[scale == 0] = 1.0
    return scale


def in_units(values: Tensor, scale: Tensor, dtype: str, shape: Shape, start: int = 0) -> Tensor:
    """Numbers divided by their scale and cut to the format's range; rounded to the format they are the codes.

    Args:
        values: flat, float32 or float64, finite: a part of a weight or all of it.
        scale: float32, in one of the layouts.
        dtype: `F8_E4M3` or `F8_E5M2`.
        shape: of the whole weight.
        start: element of the weight that `values` starts at.
    """
    largest = FORMATS[dtype][1]
    return values.div(_factors(scale, shape, start, values.numel())).clamp_(-largest, largest)


def encode(values: Tensor, dtype: str, scale_shape: Shape = ()) -> tuple[Tensor, Tensor]:
    """Codes and a fresh scale: the largest magnitude under each scale becomes the largest number of the format.

    Args:
        values: a whole weight, float32, finite.
        dtype: `F8_E4M3` or `F8_E5M2`.
        scale_shape: one of the layouts.

    Returns:
        Codes of the weight's shape, rounded to the nearest (ties to even), and the scale, float32; 1 where all is 0.
    """
    shape = tuple(values.shape)
    if not is_layout(shape, scale_shape):
        raise ValueError(f"a scale of shape {list(scale_shape)} does not fit a weight of shape {list(shape)}")
    flat, reach = values.reshape(-1), values.new_zeros(scale_shape)
    widen(reach, flat, shape)
    scale = fresh_scale(reach, dtype)
    return in_units(flat, scale, dtype, shape).to(getattr(torch, FORMATS[dtype][0])).reshape(shape), scale
