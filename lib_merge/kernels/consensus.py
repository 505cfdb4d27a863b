"""Merge of deltas that mean nearly the same: large entries count more, the norm is kept, small directions are left out.

Squares of entries stand for their importance; Fisher merging takes gradients for that. The norm is set as in MAGIC
(arXiv:2512.19320), the number of directions is that of MonoSoup (arXiv:2602.09689).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..lazy import torch
from .combinations import mean_norm
from .lowrank import energy
from .svd import svd
from .votes import elementwise

if TYPE_CHECKING:
    from torch import Tensor

# Below this share of the wanted norm a merge has cancelled: what is left is rounding.
_CANCELLED = 1e-9
_NUDGE = 1e-9  # beyond the rounding of e to an entropy: four equal values are 4 directions, not 5


def consensus(gs: Sequence[Tensor], ws: Sequence[float], cleanup: bool = True, recalibrate: bool = True) -> Tensor:
    """Σ w·g³ / Σ w·g² at each position, brought to the norm Σ w·‖g‖ / Σ w, without its small directions.

    Args:
        gs: oriented deltas, all of one shape and dtype.
        ws: their weights, above 0.
        cleanup: leave out small directions; see `spectral_cleanup`.
        recalibrate: set the norm again after that, for it has become shorter.

    Returns:
        A new tensor of the same shape and dtype.
    """
    wanted = mean_norm([math.sqrt(energy(g)) for g in gs], ws)
    merged = _with_norm(elementwise(lambda parts: _by_squares(parts, ws), gs), wanted)
    if not cleanup:
        return merged
    merged = spectral_cleanup(merged)
    return _with_norm(merged, wanted) if recalibrate else merged


def _by_squares(parts: Sequence[Tensor], ws: Sequence[float]) -> Tensor:
    """Σ w·g³ / Σ w·g², each position scaled by its largest |g|, whose cube might be beyond the dtype's range."""
    largest = parts[0].abs()
    for part in parts[1:]:
        torch.maximum(largest, part.abs(), out=largest)
    scale = largest.masked_fill(largest == 0, 1.0)
    upper, lower = torch.zeros_like(scale), torch.zeros_like(scale)
    for part, w in zip(parts, ws, strict=True):
        share = part / scale
        importance = share * share * w
        upper += share * importance
        lower += importance
    return upper.mul_(scale).div_(lower.masked_fill_(lower == 0, 1.0))


def _with_norm(x: Tensor, wanted: float) -> Tensor:
    norm = math.sqrt(energy(x))
    return x * (wanted / norm) if norm > _CANCELLED * wanted else x


def effective_rank(s: Tensor) -> float:
    """exp(−Σ p·ln p) with p = s/Σs (Roy and Vetterli 2007); 0 where all are 0.

    Args:
        s: singular values, 0 or more, [k].
    """
    wide = s.double()
    total = float(wide.sum())
    if not total > 0:
        return 0.0
    p = wide / total
    return math.exp(-float(torch.xlogy(p, p).sum()))


def spectral_cleanup(x: Tensor) -> Tensor:
    """A delta with only its largest singular values, ⌈effective rank⌉ of them.

    Args:
        x: float32 or float64, taken as a matrix [rows, the rest]; of one dimension it stays as it is.

    Raises:
        RuntimeError: see `svd.svd`.
    """
    if x.ndim < 2:
        return x
    matrix = x.flatten(1)
    upright = matrix.shape[0] > matrix.shape[1]
    short = matrix.T if upright else matrix
    vectors, s = _DIRECTIONS[x.element_size()](short)
    kept = vectors[:, : max(1, math.ceil(effective_rank(s) - _NUDGE))]
    cleaned = kept @ (kept.T @ short)
    return (cleaned.T if upright else cleaned).reshape(x.shape)


def _by_eigenvalues(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and all singular values of M from M·Mᵀ in float64: rounding is at 1e-8 of the largest.

    That is finer than float32 itself, and takes half the time of an SVD.
    """
    wide = matrix.double()
    try:
        values, vectors = torch.linalg.eigh(wide @ wide.T)
    except RuntimeError:
        return _by_svd(matrix)
    return vectors.flip(1).to(matrix.dtype), values.flip(0).clamp(min=0).sqrt()


def _by_svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    u, s, _ = svd(matrix)
    return u, s


# Bytes of an element -> singular vectors of the shorter side, and the values.
_DIRECTIONS: dict[int, Callable[[Tensor], tuple[Tensor, Tensor]]] = {4: _by_eigenvalues, 8: _by_svd}
