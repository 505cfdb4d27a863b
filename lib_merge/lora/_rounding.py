"""The one rounding of what was computed to the dtype that is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import NumberError
from ..files.dtypes import DTYPES, Dtype
from ..kernels.measure import bits_finite
from ..kernels.rounding import to_odd
from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def rounded_to(tensor: Tensor, dtype: str, key: str) -> tuple[Tensor, int]:
    """A tensor in another dtype, and how many values were cut to the largest one of fp8.

    Raises:
        NumberError: a value is not finite, or does not fit.
    """
    target = DTYPES[dtype]
    if target.rank > 1:  # of these a value beyond the largest becomes infinite, which is seen in the result
        stored = _cast(tensor, target)
        if bits_finite(stored.reshape(-1).view(torch.uint8).numpy(), target.bits, target.unbounded):
            return stored, 0
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    if not largest < float("inf"):
        raise NumberError("a value of the result is not finite", tensor=key)
    if target.rank > 1:
        raise NumberError(
            f"a value of {largest:g} does not fit {target.option}, which ends at {target.largest:g}",
            tensor=key,
            hint="--save-dtype bf16 or fp32",
        )
    beyond = int((tensor.abs() > target.largest).sum()) if largest > target.largest else 0
    return _cast(tensor.clamp(-target.largest, target.largest) if beyond else tensor, target), beyond


def _cast(tensor: Tensor, target: Dtype) -> Tensor:
    narrow = tensor.dtype == torch.float64 and target.bits < 32
    return (to_odd(tensor) if narrow else tensor).to(getattr(torch, target.torch)).contiguous()
