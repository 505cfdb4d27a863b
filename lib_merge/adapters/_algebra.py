"""Small pieces of algebra that several formats share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import MergeError
from ..lazy import torch
from ._registry import Parts, Settings, Shape

if TYPE_CHECKING:
    from torch import Tensor


def flat(tensor: Tensor) -> Tensor:
    """[d0, …] as a matrix [d0, rest]; a vector as one column."""
    return tensor.reshape(tensor.shape[0], -1)


def fold_mid(mid: Tensor, down: Tensor) -> Tensor:
    """Σ_j mid[i, j, …]·down[j, q] as a matrix [i, q·…]: the right half of a Tucker product.

    Args:
        mid: [r, r, k…].
        down: [r, in].
    """
    product = torch.tensordot(mid, down, dims=([1], [0]))  # [i, k…, q]
    return torch.movedim(product, -1, 1).reshape(mid.shape[0], -1)


def kron(left: Tensor, right: Tensor) -> Tensor:
    """Kronecker product of two matrices; torch's own refuses some transposed columns."""
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])


def scale_of(parts: Parts, settings: Settings, rank: int) -> float:
    """What multiplies the product of the factors at strength 1: the stored `scale`, or alpha/r.

    alpha is the tensor of that name (0 counts as r, as its trainer does), else the config's (0 means no effect), else
    r, so that the scale is 1. A config with `rslora` asks for alpha/√r.
    """
    if "scale" in parts:
        return float(parts["scale"].item())
    if "alpha" in parts:
        alpha = float(parts["alpha"].item()) or float(rank)
    else:
        alpha = float(settings.get("alpha", rank))
    return alpha / (math.sqrt(rank) if settings.get("rslora") else rank)


def blend(weight: Tensor, changed: Tensor, strength: float) -> Tensor:
    """W + strength·(W' − W), with W itself at 0 and W' itself at 1."""
    if strength == 0:
        return weight
    return changed if strength == 1 else weight + strength * (changed - weight)


def shaped(delta: Tensor, shape: Shape) -> Tensor:
    """A change in the shape of its weight: 1×1 convolutions and matrices may stand for each other.

    Raises:
        MergeError: it has another number of entries.
    """
    if delta.numel() != math.prod(shape):
        raise MergeError(f"a change of shape {list(delta.shape)} does not fit a weight of shape {list(shape)}")
    return delta.reshape(shape)


def eye_like(matrix: Tensor) -> Tensor:
    """The identity in the size, dtype and place of the last two axes."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def size(shape: Shape) -> int:
    """Entries per row of a part: everything but the first axis."""
    return math.prod(shape[1:])
