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
_POWER_STEPS = 3
# Rows, or elements, that are looked at at a time, so that no copy of a whole matrix is made.
_ROWS, _BLOCK = 256, 1 << 18
# A sum of products below this share of their sizes is no longer exact in float32.
_CANCELS = 0.1
# Singular values below this share of the largest are rounding of float64.
_NOISE = 1e-13
# Errors below this many times the rounding of a dtype are more rounding of the singular values than what was cut.
_BLURRED = 256


@dataclass(frozen=True)
class Spectrum:
    """U·diag(S)·V, singular values in falling order.

    Attributes:
        u: [m, k].
        s: [k].
        v: [k, n].
        beyond: Σσ² of the singular values that S lacks; 0 where it has all.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    beyond: float = 0.0

    @property
    def total(self) -> float:
        """Σσ² of the whole matrix."""
        return _squares(self.s) + self.beyond


def joined(terms: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Σ wᵢ·upᵢ·downᵢ as one product of the added ranks, exactly: √|wᵢ| on both factors, the sign on up.

    Args:
        terms: (up, down, w); those of w = 0 fall out, unless all do.
    """
    used = [term for term in terms if term[2]] or list(terms[:1])
    rank = sum(up.shape[1] for up, _, _ in used)
    left = used[0][0].new_empty(used[0][0].shape[0], rank)
    right = used[0][1].new_empty(rank, used[0][1].shape[1])
    at = 0
    for up, down, w in used:
        end, root = at + up.shape[1], math.sqrt(abs(w))
        torch.mul(up, math.copysign(root, w), out=left[:, at:end])
        torch.mul(down, root, out=right[at:end])
        at = end
    return left, right


def spectrum(up: Tensor, down: Tensor) -> Spectrum:
    """Singular values of up·down from QR of both factors and the SVD of an r×r matrix."""
    left, left_small = torch.linalg.qr(up)
    right, right_small = torch.linalg.qr(down.T)
    u, s, v = svd(left_small @ right_small.T)
    return Spectrum(left @ u, s, v @ right.T)


def dense_spectrum(matrix: Tensor) -> Spectrum:
    """Full singular value decomposition of a matrix."""
    return Spectrum(*svd(matrix))


def sampled_spectrum(matrix: Tensor, rank: int, seed: int, name: str) -> Spectrum:
    """The first `rank` singular values by a random sample of the range (Halko et al. 2011, arXiv:0909.4061).

    The last two steps are kept side by side, as block Krylov methods do (Musco and Musco 2015, arXiv:1504.05477): for
    the same error, fewer columns are multiplied. The sample depends on the seed and the name alone. Its error is at
    most a little above the best of that rank; who uses it measures the error (`residual`).
    """
    flat = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    rows, columns = flat.shape
    width = min(rank + _OVERSAMPLING, rows)
    numbers = draws(stream_key(seed, name), 0, columns * width).reshape(columns, width)
    sample = flat @ (numbers.to(matrix.dtype) + 0.5 - STEPS / 2)
    last, _ = torch.linalg.qr(sample)
    for _ in range(_POWER_STEPS):
        before = last
        last, _ = torch.linalg.qr(flat @ (flat.T @ before))
    basis, _ = torch.linalg.qr(torch.cat([last, before], 1))
    u, s, v = _wide_spectrum(basis.T @ flat)
    left, s, size = basis @ u[:, :rank], s[:rank], energy(matrix)
    found = Spectrum(left, s, v[:rank], _beyond(flat, left, size - _squares(s), size))
    return found if flat is matrix else Spectrum(found.v.T, found.s, found.u.T, found.beyond)


def _squares(s: Tensor) -> float:
    return float((s.double() ** 2).sum())


def _beyond(matrix: Tensor, u: Tensor, rest: float, size: float) -> float:
    """Σσ² beyond the sampled ones; what is near the rounding of ‖M‖² is measured, as the difference tells nothing."""
    eps = torch.finfo(matrix.dtype).eps
    return rest if rest > _BLURRED * 4 * eps * size else missed(matrix, u)


def missed(matrix: Tensor, u: Tensor) -> float:
    """‖M − Q·Qᵀ·M‖², Q an orthonormal basis of U's columns, in float64: exact however small it is."""
    basis, _ = torch.linalg.qr(u.double())
    coordinates = torch.zeros(basis.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
    starts = range(0, len(matrix), _ROWS)
    for at in starts:
        coordinates += basis[at : at + _ROWS].T @ matrix[at : at + _ROWS].double()
    rest = (matrix[at : at + _ROWS].double() - basis[at : at + _ROWS] @ coordinates for at in starts)
    return math.fsum(energy(rows) for rows in rest)


def _wide_spectrum(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V of a matrix much wider than high, from its product with itself: exact to 1e-8 of the largest value."""
    if matrix.dtype == torch.float64:
        return svd(matrix)
    wide = matrix.double()
    squares, u = torch.linalg.eigh(wide @ wide.T)
    s, u = squares.clamp(min=0).sqrt().flip(0).to(matrix.dtype), u.flip(1).to(matrix.dtype)
    v = (u.T @ matrix) / s.clamp(min=torch.finfo(matrix.dtype).tiny)[:, None]
    return u, s, v


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
    total = found.total
    return math.sqrt((_squares(found.s[rank:]) + found.beyond) / total) if total else 0.0


def error_of(matrix: Tensor, found: Spectrum, rank: int) -> float:
    """Relative error of the cut of a matrix: as `cut_error`, and where that is small measured at the matrix itself.

    Args:
        matrix: [m, n].
        found: its singular values, or the first of them.
        rank: how many are kept.
    """
    error = cut_error(found, rank)
    # What lies beyond all that were found is exact already.
    if rank >= len(found.s) or not found.total or error > _BLURRED * torch.finfo(found.s.dtype).eps:
        return error
    return math.sqrt(missed(matrix, found.u[:, :rank]) / found.total)


def whole(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as a product of full rank, exactly: itself beside the identity, shared out by a power of two."""
    rows, columns = matrix.shape
    largest = float(matrix.abs().amax()) if matrix.numel() else 0.0
    power = 2.0 ** round(math.log2(largest) / 2) if largest else 1.0
    identity = torch.eye(min(rows, columns), dtype=matrix.dtype, device=matrix.device) * power
    return (identity, matrix / power) if rows <= columns else (matrix / power, identity)


def energy(matrix: Tensor) -> float:
    """‖M‖², summed in float64, a block at a time."""
    flat = matrix.reshape(-1)
    blocks = (flat[at : at + _BLOCK] for at in range(0, flat.numel(), _BLOCK))
    return math.fsum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks)


def product_norm(up: Tensor, down: Tensor) -> float:
    """‖up·down‖ from the r×r products of each factor with itself, to 1e-6 of itself.

    Those of halves are taken in float32 where nothing much cancels out, else in float64.
    """
    if up.element_size() <= 2:
        left, right = (wide.T @ wide for wide in (up.float(), down.float().T))
        squares = float((left.double() * right).sum())
        if _CANCELS * float(left.double().norm() * right.double().norm()) < squares < math.inf:
            return math.sqrt(squares)
    left, right = (wide.T @ wide for wide in (up.double(), down.double().T))
    return math.sqrt(max(float((left * right).sum()), 0.0))


def residual(matrix: Tensor, up: Tensor, down: Tensor) -> float:
    """Relative error ‖M − up·down‖/‖M‖; 0 for a zero matrix."""
    size = math.sqrt(energy(matrix))
    starts = range(0, len(matrix), _ROWS)
    rest = (energy(matrix[at : at + _ROWS] - up[at : at + _ROWS] @ down) for at in starts)
    return math.sqrt(math.fsum(rest)) / size if size else 0.0


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
