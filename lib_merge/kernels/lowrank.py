"""Algebra of low-rank matrices: sums, singular values and cuts of up·down without ever making the dense matrix.

Shapes throughout: up [m, r], down [r, n]; results balanced, so that neither factor leaves the range of a small dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lazy import torch
from .random import STEPS, draws, stream_key
from .svd import svd

if TYPE_CHECKING:
    from torch import Tensor

_OVERSAMPLING = 16
_POWER_STEPS = 4
# Singular values below this share of the largest are rounding of float64.
_NOISE = 1e-13


@dataclass(frozen=True)
class Spectrum:
    """U·diag(S)·V, singular values in falling order.

    Attributes:
        u: [m, k].
        s: [k].
        v: [k, n].
        total: Σσ² of the whole matrix, of which S may be the beginning.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    total: float


def joined(terms: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Σ wᵢ·upᵢ·downᵢ as one product of the added ranks, exactly: √|wᵢ| on both factors, the sign on up.

    Args:
        terms: (up, down, w); those of w = 0 fall out, unless all do.
    """
    used = [term for term in terms if term[2]] or list(terms[:1])
    ups = [up * math.copysign(math.sqrt(abs(w)), w) for up, _, w in used]
    downs = [down * math.sqrt(abs(w)) for _, down, w in used]
    return torch.cat(ups, 1), torch.cat(downs, 0)


def spectrum(up: Tensor, down: Tensor) -> Spectrum:
    """Singular values of up·down from QR of both factors and the SVD of an r×r matrix."""
    left, left_small = torch.linalg.qr(up)
    right, right_small = torch.linalg.qr(down.T)
    u, s, v = svd(left_small @ right_small.T)
    return Spectrum(left @ u, s, v @ right.T, float((s * s).sum()))


def dense_spectrum(matrix: Tensor) -> Spectrum:
    """Full singular value decomposition of a matrix."""
    u, s, v = svd(matrix)
    return Spectrum(u, s, v, energy(matrix))


def sampled_spectrum(matrix: Tensor, rank: int, seed: int, name: str) -> Spectrum:
    """The first `rank` singular values by a random sample of the range (Halko et al. 2011, arXiv:0909.4061).

    The sample depends on the seed and the name alone. Its error is at most a little above the best of that rank; who
    uses it measures the error (`residual`).
    """
    rows, columns = matrix.shape
    width = min(rank + _OVERSAMPLING, rows, columns)
    numbers = draws(stream_key(seed, name), 0, columns * width).reshape(columns, width)
    basis, _ = torch.linalg.qr(matrix @ (numbers.to(matrix.dtype) + 0.5 - STEPS / 2))
    for _ in range(_POWER_STEPS):
        basis, _ = torch.linalg.qr(matrix.T @ basis)
        basis, _ = torch.linalg.qr(matrix @ basis)
    u, s, v = svd(basis.T @ matrix)
    return Spectrum(basis @ u[:, :rank], s[:rank], v[:rank], energy(matrix))


def cut(found: Spectrum, rank: int) -> tuple[Tensor, Tensor]:
    """The best product of that rank: U·√S and √S·V, the largest entry of each column of U positive."""
    rank = min(rank, len(found.s))
    u, s, v = found.u[:, :rank], found.s[:rank], found.v[:rank]
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(u.dtype)
    root = s.sqrt()
    return u * sign * root, v * sign.T * root[:, None]


def cut_error(found: Spectrum, rank: int) -> float:
    """Relative error ‖M − M_r‖/‖M‖ of the cut, from the singular values; 0 for a zero matrix."""
    if not found.total:
        return 0.0
    s = found.s.double()
    rest = float((s[rank:] ** 2).sum()) + max(found.total - float((s**2).sum()), 0.0)
    return math.sqrt(rest / found.total)


def whole(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as a product of full rank, exactly: itself beside the identity, shared out by a power of two."""
    rows, columns = matrix.shape
    largest = float(matrix.abs().amax()) if matrix.numel() else 0.0
    power = 2.0 ** round(math.log2(largest) / 2) if largest else 1.0
    identity = torch.eye(min(rows, columns), dtype=matrix.dtype, device=matrix.device) * power
    return (identity, matrix / power) if rows <= columns else (matrix / power, identity)


def energy(matrix: Tensor) -> float:
    """‖M‖², summed in float64."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2


def product_norm(up: Tensor, down: Tensor) -> float:
    """‖up·down‖ from the r×r products of each factor with itself, in float64."""
    up, down = up.double(), down.double()
    return math.sqrt(max(float(((up.T @ up) * (down @ down.T)).sum()), 0.0))


def residual(matrix: Tensor, up: Tensor, down: Tensor) -> float:
    """Relative error ‖M − up·down‖/‖M‖; 0 for a zero matrix."""
    size = math.sqrt(energy(matrix))
    return math.sqrt(energy(matrix - up @ down)) / size if size else 0.0


def clamped(matrix: Tensor, share: float) -> Tensor:
    """Entries kept within ± the `share` quantile of their sizes (nearest rank); share 1 changes nothing."""
    if share >= 1 or not matrix.numel():
        return matrix
    sizes = matrix.abs().reshape(-1)
    limit = float(sizes.kthvalue(max(math.ceil(share * sizes.numel()), 1)).values)
    return matrix.clamp(-limit, limit)


def rank_by_ratio(s: Tensor, share: float, total: float) -> int:
    """How many singular values exceed `share` of the largest."""
    return int((s > share * s[0]).sum()) if len(s) else 0


def rank_by_sum(s: Tensor, share: float, total: float) -> int:
    """The fewest singular values whose sum is `share` of the sum of all."""
    return _fewest(s.double(), share * float(s.double().sum()))


def rank_by_energy(s: Tensor, share: float, total: float) -> int:
    """The fewest singular values whose Σσ² is share² of the whole: an error of at most √(1 − share²)."""
    return _fewest(s.double() ** 2, share**2 * total)


def _fewest(values: Tensor, wanted: float) -> int:
    sums = values.cumsum(0)
    return min(int((sums < wanted * (1 - _NOISE)).sum()) + 1, len(values))


# Rule -> (singular values, share, Σσ² of the whole) -> smallest rank that reaches it.
RULES: dict[str, Callable[[Tensor, float, float], int]] = {
    "ratio": rank_by_ratio,
    "cumulative": rank_by_sum,
    "frobenius": rank_by_energy,
}


def rank_of(found: Spectrum) -> int:
    """Numerical rank: singular values above the rounding of their dtype."""
    if not len(found.s):
        return 0
    limit = torch.finfo(found.s.dtype).eps * max(found.u.shape[0], found.v.shape[1])
    return int((found.s > limit * found.s[0]).sum())
