"""What each LoRA of a group does on its own: all its terms together, at strength 1."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels import lowrank
from ._groups import Group, Term
from ._terms import change, placed, product, rows_of, same_width, whole_shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Member:
    """One LoRA's change of a group's weight.

    Attributes:
        number: the LoRA's place in the stack, from 1.
        strength: the user's for this weight.
        up: [out, r]; None where the group has LoRAs whose changes are stored whole.
        down: [r, rest].
        whole: the change as a matrix [out, rest], where there are no factors.
    """

    number: int
    strength: float
    up: Tensor | None = None
    down: Tensor | None = None
    whole: Tensor | None = None

    def counts(self) -> bool:
        """False where nothing was trained: a factor, or the change, is all zeros."""
        parts = (self.up, self.down) if self.whole is None else (self.whole,)
        return all(bool(part.any()) for part in parts if part is not None)

    def matrix(self) -> Tensor:
        """The change as a dense matrix [out, rest]."""
        if self.whole is not None:
            return self.whole
        assert self.up is not None
        assert self.down is not None
        return self.up @ self.down

    @property
    def size(self) -> tuple[int, int]:
        """(out, rest)."""
        if self.whole is not None:
            return self.whole.shape[0], self.whole.shape[1]
        assert self.up is not None
        assert self.down is not None
        return self.up.shape[0], self.down.shape[1]


def number_of(term: Term) -> int:
    """A term's LoRA by its place in the stack, from 1."""
    return int(term.input.slot.removeprefix("lora"))


def members_of(group: Group) -> list[Member]:
    """The LoRAs that change a group's weight, in the order of the stack; those of strength 0 fall out.

    Raises:
        RecipeError: the LoRAs are of different sizes.
        NumberError: a part holds a value that is not finite.
    """
    terms = [term for term in group.terms if term.strength]
    pairs = {id(term): product(term) for term in group.terms}
    if any(pair is None for pair in pairs.values()):
        return _whole(group, terms)
    rows = rows_of(group, [pair[0].shape[0] for pair in pairs.values() if pair is not None])
    factors: dict[int, list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
    strengths = _strengths(terms)
    for term in terms:
        pair = pairs[id(term)]
        assert pair is not None
        up, down = placed(pair[0], term, group, rows), pair[1]
        factors[number_of(term)].append((up, down, term.strength / strengths[number_of(term)]))
    same_width(group, [down.shape[1] for parts in factors.values() for _, down, _ in parts])
    return [Member(number, strengths[number], *_joined(factors[number])) for number in sorted(factors)]


def _joined(parts: list[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    return lowrank.joined(parts)


def _strengths(terms: list[Term]) -> dict[int, float]:
    """Number of the LoRA -> strength of its first term here."""
    found: dict[int, float] = {}
    for term in terms:
        found.setdefault(number_of(term), term.strength)
    return found


def _whole(group: Group, terms: list[Term]) -> list[Member]:
    shape, strengths = whole_shape(group), _strengths(terms)
    totals: dict[int, Tensor] = {}
    for term in terms:
        number = number_of(term)
        part = change(term, group, shape) * (term.strength / strengths[number])
        totals[number] = totals[number] + part if number in totals else part
    same_width(group, [total.shape[1] for total in totals.values()])
    return [Member(number, strengths[number], whole=totals[number]) for number in sorted(totals)]
