"""Singular value decomposition that does not give up at the first failure.

Drivers fail to converge on some matrices and devices, and devices run out of memory: the next way is another algorithm
on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    Triple = tuple[Tensor, Tensor, Tensor]
    Way = Callable[[Tensor], Triple]


def as_it_is(matrix: Tensor) -> Triple:
    """The driver of the matrix's own device."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, v


def in_main_memory(matrix: Tensor) -> Triple:
    """In float64 on the CPU."""
    return as_it_is(matrix.to("cpu", torch.float64))


def by_gram(matrix: Tensor) -> Triple:
    """From the eigenvectors of the smaller of M·Mᵀ and Mᵀ·M, in float64 on the CPU.

    Singular values below about 1e-8 of the largest are rounding, as are the longer side's vectors that belong to them.
    """
    wide = matrix.to("cpu", torch.float64)
    if wide.shape[0] > wide.shape[1]:
        u, s, v = by_gram(wide.T)
        return v.T, s, u.T
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    u = vectors.flip(1)
    rows = u.T @ wide
    s = torch.linalg.vector_norm(rows, dim=1)
    order = torch.sort(s, descending=True, stable=True).indices
    s = s[order]
    return u[:, order], s, rows[order] / s.masked_fill(s == 0, 1.0)[:, None]


WAYS: tuple[Way, ...] = (as_it_is, in_main_memory, by_gram)


def svd(matrix: Tensor, ways: Sequence[Way] = WAYS) -> Triple:
    """U, S, V with M = U·diag(S)·V, singular values falling, by the first way that succeeds.

    Args:
        matrix: float32 or float64, [m, n].
        ways: tried in this order.

    Returns:
        [m, k], [k], [k, n] with k = min(m, n); dtype and device of the matrix.

    Raises:
        RuntimeError: every way failed, as they do on numbers that are not finite. Keep the matrix dense.
    """
    *others, last = ways
    for way in others:
        try:
            return _like(matrix, way(matrix))
        except RuntimeError:  # no convergence, no memory, no driver: torch raises kinds of this for all of them
            continue
    return _like(matrix, last(matrix))


def _like(matrix: Tensor, found: Triple) -> Triple:
    u, s, v = (part.to(matrix.device, matrix.dtype) for part in found)
    return u, s, v
