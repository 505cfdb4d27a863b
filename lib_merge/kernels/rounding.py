"""Narrowing in two steps that rounds once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_odd(values: Tensor) -> Tensor:
    """float64 cut to float32, the last bit set where that lost something.

    Torch narrows float64 to 16 and 8 bits by way of float32, which rounds twice. A number cut in this way is never half
    way between two narrower ones, unless it was so before: rounding it gives what one rounding of `values` would.

    Args:
        values: float64, any shape.

    Returns:
        float32, same shape; what is beyond its range becomes its largest number, infinities and NaN stay.
    """
    near = values.float()
    back = near.double()
    bits = near.view(torch.int32)
    bits -= (back.abs() > values.abs()).int()
    bits |= (back != values).int()
    return near
