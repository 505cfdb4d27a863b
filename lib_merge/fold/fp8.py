"""Modules of scaled fp8 checkpoints: codes are computed anew under the scales that are there, which stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import NumberError
from ..files.header import TensorInfo
from ..files.source import Source
from ..kernels.measure import all_finite
from ..lazy import torch
from ..quant.fp8 import FORMATS, scaled, scales_of
from .storage import Leaf
from .values import read_values

if TYPE_CHECKING:
    from torch import Tensor


# Up to here the nearest number of the format is its largest one.
_ROUNDS_TO_LARGEST = {"F8_E4M3": 464.0, "F8_E5M2": 61440.0}


@dataclass(frozen=True)
class ScaledFp8:
    """A module coded as fp8 with a scale; see `Storage`.

    A weight that its scale cannot reach becomes the largest code; the error that this makes is in the report.
    """

    leaves: tuple[Leaf, ...]
    format: str
    shape: tuple[int, int]
    scale_key: str
    source: Source = field(repr=False, compare=False)
    unit: int = 1
    dtype: str = ""
    roundings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"scaled {self.format}"

    @cached_property
    def scale(self) -> Tensor:
        """The stored scale, float32."""
        return read_values(self.source, self.scale_key).float()

    def encode(self, values: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...]:
        """See `Storage`; rounded to the nearest code, ties to even, beyond the largest cut to it."""
        if not all_finite(values):
            raise NumberError(f"a sum in the rows from {first_row} on is not finite")
        name, largest = FORMATS[self.format]
        factors = scaled(torch.ones(values.numel()), self.scale, self.shape, first_row * self.shape[1])
        codes = values.view(-1).div_(factors).clamp_(-largest, largest).to(getattr(torch, name))
        return (codes.view(values.shape).view(torch.uint8),)

    def encode_sum(self, dense: Tensor, change: Tensor, rounding: str, first_row: int) -> None:
        """See `Storage`."""
        return

    def beyond(self, values: Tensor, first_row: int) -> int:
        """See `Storage`: weights that are beyond the largest code by more than rounding."""
        factors = scaled(torch.ones(values.numel()), self.scale, self.shape, first_row * self.shape[1])
        return int((values.view(-1).abs() > factors.mul_(_ROUNDS_TO_LARGEST[self.format])).sum())

    def decode(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        codes = raw[0].view(getattr(torch, FORMATS[self.format][0])).float()
        return scaled(codes.view(-1), self.scale, self.shape, first_row * self.shape[1]).view(raw[0].shape)

    def codes(self, raw: Sequence[Tensor]) -> Tensor:
        """See `Storage`."""
        return raw[0]

    def steps(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`: distance to the next larger code, of every weight."""
        name = FORMATS[self.format][0]
        codes = raw[0] & 0x7F
        largest = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}[self.format]
        low = codes.clamp(max=largest - 1)
        gap = (low + 1).view(getattr(torch, name)).float() - low.view(getattr(torch, name)).float()
        return scaled(gap.view(-1), self.scale, self.shape, first_row * self.shape[1]).view(codes.shape)


def scaled_fp8(
    module: str, tensors: Mapping[str, TensorInfo], shape: Sequence[int], source: Source
) -> ScaledFp8 | None:
    """The layout of a module, None where it is none of scaled fp8 or its shape is another.

    Args:
        module: name in the quantized checkpoint.
        tensors: of the quantized checkpoint.
        shape: of the dense weight.
        source: the quantized checkpoint.
    """
    near = {key: (info.dtype, info.shape) for key, info in tensors.items() if key.startswith(f"{module}.")}
    key = f"{module}.weight"
    scale = scales_of(near).get(key)
    if scale is None or near[key][1] != tuple(shape):
        return None
    info = tensors[key]
    leaf = Leaf(key, info.file, info.offset, info.nbytes // shape[0], shape[0])
    return ScaledFp8((leaf,), info.dtype, (shape[0], shape[1]), scale, source)
