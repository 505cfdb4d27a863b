"""The values of one stored tensor: read in bounded pieces, summed up, and counted into a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import FileError
from .files.dtypes import DTYPES
from .files.source import Source
from .lazy import np, torch
from .quant.coded import coded_tensors
from .quant.fp8 import scaled, scales_of

if TYPE_CHECKING:
    Floats = np.ndarray[Any, np.dtype[np.float64]]
    from torch import Tensor

BINS = 64
# Elements that are read of a tensor; of a larger one, so many pieces of equal length, evenly spaced.
READ = 1 << 22
PIECES = 64
# Beyond this the difference of two values may be beyond float64.
_HUGE = 1e300


@dataclass(frozen=True)
class Summary:
    """What the values of a tensor are like; NaN where none of them is finite.

    Attributes:
        total: elements of the tensor.
        read: elements that the numbers below are about.
        broken: of these, how many are not finite; they count in nothing else.
        low: smallest value.
        high: largest value.
        mean: of the values.
        deviation: standard deviation, of the values as the whole population.
        zeros: share of zeros, 0 to 1.
    """

    total: int
    read: int
    broken: int
    low: float
    high: float
    mean: float
    deviation: float
    zeros: float


@dataclass(frozen=True)
class Values:
    """Finite values of a tensor, float64 and flat, with their summary."""

    summary: Summary
    finite: Floats


def read_values(source: Source, key: str) -> Values:
    """The values of a tensor as numbers: at most `READ` of them; scaled fp8 with its scale.

    Args:
        source: the model.
        key: a tensor of it.

    Raises:
        FileError: it cannot be read, has no values, or is stored as codes that are no numbers by themselves.
    """
    info = source.tensors[key]
    scales = scales_of({name: (tensor.dtype, tensor.shape) for name, tensor in source.tensors.items()})
    coded = coded_tensors({name: tensor.dtype for name, tensor in source.tensors.items()})
    if DTYPES[info.dtype].kind == "coded" or (key in coded and key not in scales):
        storage = coded.get(key, info.dtype)
        raise FileError(
            f"stored as codes ({storage}), which are no numbers by themselves", file=source.path, tensor=key
        )
    if not info.numel:
        raise FileError("the tensor has no values", file=source.path, tensor=key)
    scale = _numbers(source, scales[key], 0, source.tensors[scales[key]].numel) if key in scales else None
    parts = []
    for start, count in pieces(info.numel):
        part = _numbers(source, key, start, count)
        parts.append(part if scale is None else _decoded(part, scale, source, key, scales[key], start))
    read = np.concatenate(parts)
    finite = read[np.isfinite(read)]
    return Values(_summary(finite, info.numel, read.size), finite)


def pieces(numel: int) -> list[tuple[int, int]]:
    """(first element, number) of what is read: the whole tensor, or the first piece, the last, and some between."""
    if numel <= READ:
        return [(0, numel)]
    length = READ // PIECES
    return [(number * (numel - length) // (PIECES - 1), length) for number in range(PIECES)]


def histogram(finite: Floats, low: float, high: float) -> list[int]:
    """How many values lie in each of `BINS` equal steps from `low` to `high`, of which the last holds `high` too.

    Args:
        finite: values within these bounds.
        low: smallest value.
        high: largest value; where it is `low`, all values count into the first step.
    """
    if high == low:
        return [finite.size] + [0] * (BINS - 1)
    share = 0.25 if max(-low, high) > _HUGE else 1.0
    steps = (finite * share - low * share) / (high * share - low * share) * BINS
    return [int(count) for count in np.bincount(np.minimum(steps.astype(np.int64), BINS - 1), minlength=BINS)]


def _numbers(source: Source, key: str, start: int, count: int) -> Floats:
    """Elements of a tensor as they are stored, float64."""
    dtype = DTYPES[source.tensors[key].dtype]
    size = dtype.bits // 8
    raw = np.empty(count * size, np.uint8)
    source.read_into(key, start * size, raw.data)
    if dtype.kind == "integer":  # older versions of torch lack most unsigned ones
        return raw.view(dtype.torch).astype(np.float64)
    found: Floats = torch.from_numpy(raw).view(getattr(torch, dtype.torch)).double().numpy()
    return found


def _decoded(codes: Floats, scale: Floats, source: Source, key: str, scale_key: str, start: int) -> Floats:
    """Codes of fp8 times their scale."""
    factors: Tensor = torch.from_numpy(scale).float().reshape(source.tensors[scale_key].shape)
    found: Floats = scaled(torch.from_numpy(codes).float(), factors, source.tensors[key].shape, start).double().numpy()
    return found


def _summary(finite: Floats, total: int, read: int) -> Summary:
    if not finite.size:
        return Summary(total, read, read, *[math.nan] * 5)
    low, high = float(finite.min()), float(finite.max())
    share = 0.25 if max(-low, high) > _HUGE else 1.0
    with np.errstate(over="ignore"):  # a deviation beyond float64 is told as infinite
        mean, deviation = float((finite * share).mean()) / share, float(finite.std())
    zeros = float((finite == 0).mean())
    return Summary(total, read, read - int(finite.size), low, high, mean, deviation, zeros)
