"""Several LoRAs in one orthonormal basis, where their deltas can be compared entry by entry (KnOTS, arXiv:2410.19735).

A merge of the coordinates, mapped back, has the rank of the basis at most: even TIES is stored exactly as a LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..lazy import torch
from .svd import svd

if TYPE_CHECKING:
    from torch import Tensor

# Directions shorter than this share of the longest are rounding.
_NOISE = 1e-7


def shared_basis(ups: Sequence[Tensor], downs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The left singular vectors U of [d₁ | … | d_N], dₖ = upₖ·downₖ, and the coordinates Cₖ = Uᵀ·dₖ.

    From QR of the factors and the SVD of a small matrix, in float64; the dense deltas are never made. U·Cₖ = dₖ, and
    norms and inner products of coordinates are those of the deltas.

    Args:
        ups: [out, rₖ], alpha/rank and the like already multiplied in.
        downs: [rₖ, rest], of the same dtype.

    Returns:
        U [out, R] and the Cₖ [R, rest], in the factors' dtype; 1 ≤ R ≤ Σ rₖ, and R ≤ out.
    """
    dtype = ups[0].dtype
    q, left = torch.linalg.qr(torch.cat([up.double() for up in ups], 1))
    blocks = left.split([up.shape[1] for up in ups], 1)
    wide = [down.double() for down in downs]
    # Q of each down is the same on both sides of M·Mᵀ: R alone has the left singular vectors.
    small = [block @ torch.linalg.qr(down.T, mode="r").R.T for block, down in zip(blocks, wide, strict=True)]
    vectors, s, _ = svd(torch.cat(small, 1))
    turn = vectors[:, : max(1, int((s > _NOISE * s[0]).sum()))]
    coords = [(turn.T @ block) @ down for block, down in zip(blocks, wide, strict=True)]
    return (q @ turn).to(dtype), [coord.to(dtype) for coord in coords]
