"""How several low-rank changes of one weight relate: sizes, cosines, shared spaces, signs; no dense matrix is made.

Shapes throughout: N changes up·down with up [out, r] and down [r, rest], each of a rank of its own; R the added ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lazy import np, torch
from .random import raw_draws
from .svd import svd

if TYPE_CHECKING:
    from torch import Tensor

# Up to so many entries, signs are compared at every one.
EXACT = 100_000
# Beyond: at 16 independent grids of rows × columns, 99 856 entries; the error of a share of signs is below 0.0016.
GRIDS, SIDE = 16, 79
# Shared spaces are those of so many of the largest singular values.
BASIS = 8
_NOISE = 1e-12


@dataclass(frozen=True)
class Products:
    """All products of the columns of the ups with each other, and of the rows of the downs.

    Attributes:
        left: upᵀ·up of the ups side by side, float64 [R, R].
        right: down·downᵀ of the downs on top of each other, float64 [R, R].
        ranks: of each change.
    """

    left: Tensor
    right: Tensor
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, ups: Sequence[Tensor], downs: Sequence[Tensor]) -> Products:
        """From the factors of each change."""
        up, down = torch.cat([up.double() for up in ups], 1), torch.cat([down.double() for down in downs], 0)
        return cls(up.T @ up, down @ down.T, tuple(down.shape[0] for down in downs))

    def gram(self) -> Tensor:
        """⟨Δᵢ, Δⱼ⟩ = tr((upᵢᵀ·upⱼ)(downⱼ·downᵢᵀ)), float64 [N, N]."""
        products, places = self.left * self.right, self._places()
        return torch.stack([torch.stack([products[one, two].sum() for two in places]) for one in places])

    def _places(self) -> list[slice]:
        """Where each change stands along an axis of the products."""
        return [slice(sum(self.ranks[:k]), sum(self.ranks[: k + 1])) for k in range(len(self.ranks))]

    def overlap(self) -> Tensor:
        """Shared part of the spaces that each two changes span, float64 [N, N], 0 … 1, 1 on the diagonal.

        ‖QᵢᵀQⱼ‖²/min(kᵢ, kⱼ) with orthonormal bases Q of the first singular vectors (at most 8), the mean of the
        left and the right ones; 0 where a change is zero.
        """
        places = self._places()
        bases = [_bases(self.left[place, place], self.right[place, place]) for place in places]
        found = torch.eye(len(places), dtype=torch.float64)
        for one, first in enumerate(places):
            for two in range(one):
                second = places[two]
                width = min(bases[one][0].shape[1], bases[two][0].shape[1])
                sides = ((self.left, 0), (self.right, 1))
                shared = [
                    float(((bases[one][side].T @ matrix[first, second] @ bases[two][side]) ** 2).sum())
                    for matrix, side in sides
                ]
                found[one, two] = found[two, one] = sum(shared) / (2 * width) if width else 0.0
        return found


def _bases(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Of one change: [r, k] such that up·(first) and downᵀ·(second) are its first k singular vectors."""
    to_left, root_left = _roots(left)
    to_right, root_right = _roots(right)
    u, s, v = svd(root_left @ root_right.T)
    kept = min(BASIS, int((s > 1e-9 * s[0]).sum())) if len(s) and float(s[0]) > 0 else 0
    return to_left @ u[:, :kept], to_right @ v[:kept].T


def _roots(gram: Tensor) -> tuple[Tensor, Tensor]:
    """W and R of a factor F with FᵀF = `gram`: F·W has orthonormal columns and F = (F·W)·R."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _NOISE * values[-1].clamp(min=0)
    root, vectors = values[kept].sqrt(), vectors[:, kept]
    return vectors / root, root[:, None] * vectors.T


def positions(key: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the grids at which entries are looked at, int64 [16, 79] each.

    Args:
        key: of the stream of draws, see `random.stream_key`.
        rows: of the weight.
        columns: of the weight as a matrix.
    """
    count = GRIDS * SIDE
    halves = raw_draws(key, 0, 4 * count).astype(np.uint64).reshape(2, count, 2)
    drawn = (halves[..., 0] << np.uint64(16)) | halves[..., 1]
    places = [(part * np.uint64(size)) >> np.uint64(32) for part, size in zip(drawn, (rows, columns), strict=True)]
    found = [torch.from_numpy(place.astype(np.int64).reshape(GRIDS, SIDE)) for place in places]
    return found[0], found[1]


def entries(up: Tensor, down: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of up·down at the grids, flat [16·79·79]."""
    left = up[rows]  # [16, 79, r]
    right = down[:, columns].movedim(1, 0)  # [16, r, 79]
    return torch.bmm(left, right).reshape(-1)


def sign_counts(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """How often signs differ, and how often both entries are not 0.

    Args:
        samples: entries of each change at the same positions, flat, fewer than 2**24.

    Returns:
        two float64 [N, N] of whole numbers.
    """
    signs = torch.stack([torch.sign(sample).float() for sample in samples])
    there = signs.abs()
    both = (there @ there.T).double()  # whole numbers below 2**24: exact in any order
    return (both - (signs @ signs.T).double()) / 2, both
