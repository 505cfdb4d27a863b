"""Pairs of LoRAs over all the weights that both change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..choose import Numbers, expected_conflict
from ._metrics import Relations


@dataclass
class Pair:
    """Two LoRAs, each change turned by the sign of its strength; sums over weights.

    Attributes:
        one: number of the first LoRA, from 1.
        two: of the second.
        shared: weights that both change.
        dot: Σ⟨Δ₁, Δ₂⟩.
        energies: Σ‖Δ‖² of each.
        opposed: positions looked at where the signs differ.
        both: positions looked at where both are not 0.
        overlap: Σ of the shared part of the spaces, weighted by the product of the norms; NaN left out.
        weight: Σ of these products.
    """

    one: int
    two: int
    shared: int = 0
    dot: float = 0.0
    energies: tuple[float, float] = (0.0, 0.0)
    opposed: float = 0.0
    both: float = 0.0
    overlap: float = 0.0
    weight: float = 0.0

    @property
    def cosine(self) -> float:
        """Over all shared weights, −1 … 1; 0 where there are none."""
        size = math.sqrt(self.energies[0] * self.energies[1])
        return max(-1.0, min(1.0, self.dot / size)) if size else 0.0

    @property
    def conflict(self) -> float:
        """Share of positions whose signs differ, 0 … 1."""
        return self.opposed / self.both if self.both else 0.0

    @property
    def expected(self) -> float:
        """The conflict that this cosine has by chance."""
        return expected_conflict(self.cosine)

    @property
    def space(self) -> float:
        """Mean shared part of the spaces, 0 … 1; 0 where it is not known."""
        return self.overlap / self.weight if self.weight else 0.0


def pairs_of(found: Iterable[Relations]) -> list[Pair]:
    """All pairs that share a weight, in the order of the stack."""
    pairs: dict[tuple[int, int], Pair] = {}
    for relations in found:
        norms = relations.norms
        for one, two in combinations(range(len(relations.members)), 2):
            names = relations.members[one], relations.members[two]
            pair = pairs.setdefault(names, Pair(*names))
            cosine, opposed, both = relations.oriented(one, two)
            pair.shared += 1
            pair.dot += cosine * norms[one] * norms[two]
            pair.energies = pair.energies[0] + norms[one] ** 2, pair.energies[1] + norms[two] ** 2
            pair.opposed, pair.both = pair.opposed + opposed, pair.both + both
            overlap = float(relations.overlap[one, two])
            if not math.isnan(overlap):
                pair.overlap += overlap * norms[one] * norms[two]
                pair.weight += norms[one] * norms[two]
    return [pairs[names] for names in sorted(pairs)]


def pooled(found: Sequence[Relations]) -> Numbers:
    """One set of numbers for many weights.

    Conflicts are pooled by counts; cosines are means over pairs of what each pair has over all its weights; the
    ratio is that of the LoRAs' strength-scaled sizes over these weights.
    """
    pairs = pairs_of(found)
    if not pairs:
        return Numbers(1)
    sizes = list(filter(None, strong_sizes(found).values()))
    both = sum(pair.both for pair in pairs)
    return Numbers(
        n=max(len(relations.members) for relations in found),
        cos=sum(pair.cosine for pair in pairs) / len(pairs),
        conflict=sum(pair.opposed for pair in pairs) / both if both else 0.0,
        expected=sum(pair.expected for pair in pairs) / len(pairs),
        ratio=max(sizes) / min(sizes) if sizes else 1.0,
        overlap=sum(pair.space for pair in pairs) / len(pairs),
    )


def strong_sizes(found: Iterable[Relations]) -> dict[int, float]:
    """Number of each LoRA -> √Σ(strength·‖Δ‖)² over all weights."""
    sums: dict[int, float] = {}
    for relations in found:
        for number, strength, norm in zip(relations.members, relations.strengths, relations.norms, strict=True):
            sums[number] = sums.get(number, 0.0) + (strength * norm) ** 2
    return {number: math.sqrt(value) for number, value in sums.items()}
