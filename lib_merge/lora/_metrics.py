"""A group's LoRAs measured: sizes, cosines and shared spaces from the factors, signs at seeded positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..choose import Numbers, cosine_of, turned
from ..kernels.random import stream_key
from ..kernels.relations import EXACT, Products, entries, positions, sign_counts
from ..lazy import torch
from ._groups import Group
from ._members import Member

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Relations:
    """How the LoRAs of a group relate, without their strengths. Matrices are float64 [N, N].

    Attributes:
        members: numbers of the LoRAs, in the order of the stack.
        strengths: of each, for this weight; none is 0.
        gram: ⟨Δᵢ, Δⱼ⟩, exact.
        opposed: positions where the signs of two differ.
        both: positions where both are not 0.
        overlap: shared part of the spaces, 0 … 1; NaN where changes are stored whole.
        density: share of |strength·Δ| above the noise, 0.1 … 0.9, for TIES; NaN where it was not asked for.
    """

    members: tuple[int, ...]
    strengths: tuple[float, ...]
    gram: Tensor
    opposed: Tensor
    both: Tensor
    overlap: Tensor
    density: float = math.nan

    @property
    def norms(self) -> list[float]:
        """‖Δ‖ of each."""
        return [math.sqrt(max(float(value), 0.0)) for value in self.gram.diagonal()]

    @property
    def energy(self) -> float:
        """Σ‖Δ‖²."""
        return float(self.gram.diagonal().sum())

    def cosine(self, one: int, two: int) -> float:
        """Of the changes as they are stored; 0 where one is zero."""
        return cosine_of(float(self.gram[one, two]), self.norms[one], self.norms[two])

    def oriented(self, one: int, two: int) -> tuple[float, float, float]:
        """(cosine, positions of different signs, positions) with each change turned by its strength's sign."""
        same = self.strengths[one] * self.strengths[two] > 0
        return turned(same, self.cosine(one, two), float(self.opposed[one, two]), float(self.both[one, two]))

    def numbers(self) -> Numbers:
        """What a decision needs of the group."""
        matrices = [matrix.tolist() for matrix in (self.gram, self.opposed, self.both, self.overlap)]
        return Numbers.of(self.strengths, *matrices)


def name_of(group: Group) -> str:
    """The weight by the family's own name, the same whatever the LoRAs call it: what draws depend on."""
    return f"{group.target.slot}.{group.target.native}.{group.param}"


def relate(group: Group, members: Sequence[Member], with_density: bool = False) -> Relations:
    """Measure a group's LoRAs.

    Args:
        group: tells the weight's name, on which the positions depend.
        members: its LoRAs; of one alone, only the size is measured.
        with_density: measure the share of entries above the noise too.
    """
    products = _products(members)
    unknown = torch.full((len(members), len(members)), math.nan, dtype=torch.float64)
    if len(members) < 2:
        gram = products.gram() if products else _dense_gram(members)
        return Relations(*_who(members), gram, unknown, unknown, unknown)
    samples = _samples(group, members)
    opposed, both = sign_counts(samples)
    return Relations(
        *_who(members),
        products.gram() if products else _dense_gram(members),
        opposed,
        both,
        products.overlap() if products else unknown,
        _density(members, samples) if with_density else math.nan,
    )


def _who(members: Sequence[Member]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(member.number for member in members), tuple(member.strength for member in members)


def _products(members: Sequence[Member]) -> Products | None:
    ups = [member.up for member in members if member.up is not None]
    downs = [member.down for member in members if member.down is not None]
    return Products.of(ups, downs) if members and len(ups) == len(members) else None


def _dense_gram(members: Sequence[Member]) -> Tensor:
    if not members:
        return torch.zeros(0, 0, dtype=torch.float64)
    flat = torch.stack([member.matrix().double().reshape(-1) for member in members])
    return flat @ flat.T


def _samples(group: Group, members: Sequence[Member]) -> list[Tensor]:
    """Entries of each change at the same positions: all of a small weight, a seeded sample of a large one."""
    rows, columns = members[0].size
    if rows * columns <= EXACT:
        return [member.matrix().reshape(-1) for member in members]
    at_rows, at_columns = positions(stream_key(0, name_of(group), "signs"), rows, columns)
    return [_entries(member, at_rows, at_columns) for member in members]


def _entries(member: Member, rows: Tensor, columns: Tensor) -> Tensor:
    if member.up is not None and member.down is not None:
        return entries(member.up, member.down, rows, columns)
    return member.matrix()[rows[:, :, None], columns[:, None, :]].reshape(-1)


# Entries below this share of the largest ones (their 0.999 quantile) are noise; the share that is left is kept within.
_NOISE, _LARGEST, _LOWEST, _HIGHEST, _UNKNOWN = 0.10, 0.999, 0.1, 0.9, 0.5


def _density(members: Sequence[Member], samples: Sequence[Tensor]) -> float:
    """Share of |strength·Δ|, all LoRAs together, above a tenth of their 0.999 quantile."""
    pairs = zip(members, samples, strict=True)
    sizes = torch.cat([(sample * member.strength).abs() for member, sample in pairs])
    rank = max(math.ceil(_LARGEST * sizes.numel()), 1)
    largest = float(sizes.kthvalue(rank).values)
    if not largest:
        return _UNKNOWN
    share = float((sizes > _NOISE * largest).double().mean())
    return min(max(share, _LOWEST), _HIGHEST)
