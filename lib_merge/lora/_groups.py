"""What several LoRAs do to the same module, whatever each trainer called it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..adapters import Piece
from ..errors import RecipeError
from ..families import Target, component_of, target_of
from ._inputs import Input


@dataclass(frozen=True)
class Term:
    """One LoRA's piece of a module.

    Attributes:
        input: the LoRA.
        piece: what it does.
        strength: the user's, with the text encoders' own where it is one, and the block weight.
        target: the module that is meant, with the share of its rows.
    """

    input: Input
    piece: Piece
    strength: float
    target: Target


@dataclass(frozen=True)
class Group:
    """Everything that is done to one parameter of one module.

    Attributes:
        stem: the module's name in the result.
        param: which parameter.
        terms: in the order of the LoRAs.
        target: what the result's module stands for.
        component: unet, te1 …
    """

    stem: str
    param: str
    terms: tuple[Term, ...]
    target: Target
    component: str

    @property
    def style(self) -> str:
        """How the parts are called: as in the first LoRA, `kohya` where that has no low-rank parts."""
        if self.terms[0].piece.format == "embedding":
            return "embedding"
        ends = [key for key in self.terms[0].piece.keys.values() if key.endswith(_PEFT_ENDS)]
        return "peft" if ends else "kohya"


_PEFT_ENDS = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_A",
    ".lora_B",
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)


def grouped(inputs: Sequence[Input], left_out: Iterable[str] = ()) -> list[Group]:
    """The pieces of all LoRAs by what they change.

    Modules have the names of the first LoRA that has them. Where one LoRA has a fused module and another its parts,
    the fused one stands for both.

    Args:
        inputs: the LoRAs.
        left_out: keys of pieces that are handled elsewhere, as `slot/key`.

    Raises:
        RecipeError: two LoRAs cut a module in ways that do not fit each other.
    """
    skipped = frozenset(left_out)
    families = [item.found for item in inputs if item.found.family is not None]
    modules: dict[tuple[str, str, str], list[Term]] = defaultdict(list)
    for item in inputs:
        found = item.found if item.found.family is not None else (families or [item.found])[0]
        for piece in item.adapter.pieces:
            if any(f"{item.slot}/{key}" in skipped for key in piece.keys.values()):
                continue
            target = target_of(piece.stem, found)
            modules[target.slot, target.native, piece.param].append(Term(item, piece, item.strength(piece), target))
    return [group for terms in modules.values() for group in _split(terms)]


def _split(terms: list[Term]) -> list[Group]:
    """One group where somebody means the whole module, else one for each share of it."""
    shares: dict[tuple[int, int, int], list[Term]] = defaultdict(list)
    for term in terms:
        shares[term.target.rows].append(term)
    whole = shares.get((0, 1, 1))
    if whole and len(shares) > 1:
        return [_group(terms, whole[0])]
    _refuse_overlaps(shares)
    return [_group(share, share[0]) for share in shares.values()]


def _group(terms: Sequence[Term], named: Term) -> Group:
    component = component_of(named.piece.stem, named.input.found)
    ordered = sorted(terms, key=lambda term: term is not named)  # the first one gives names and shapes
    return Group(named.piece.stem, named.piece.param, tuple(ordered), named.target, component)


def _refuse_overlaps(shares: dict[tuple[int, int, int], list[Term]]) -> None:
    spans = [((start / of, (start + count) / of), terms[0]) for (start, count, of), terms in shares.items()]
    ends = sorted(spans, key=lambda span: span[0])
    for (first, one), (second, other) in pairwise(ends):
        if second[0] < first[1] - 1e-9:
            raise RecipeError(
                f"{one.piece.stem} and {other.piece.stem} mean parts of one module that do not fit each other",
                file=other.input.path,
                hint="convert one of the LoRAs to the other's names first",
            )


def reached(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """Groups without those that block weights of 0 switch off for every LoRA, and how many these are."""
    kept = [
        group
        for group in groups
        if any(term.strength for term in group.terms) or not any(term.input.of_block for term in group.terms)
    ]
    return kept, len(groups) - len(kept)


def filtered(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """Groups without the LoRAs whose `key_filter` leaves them out, and how many weights no LoRA is left for.

    A LoRA that takes part in shared weights alone is left out where no other of a strength changes the weight; one
    that takes part in its own alone is left out where another does.
    """
    found, lost = [], 0
    for group in groups:
        there = {term.input.slot for term in group.terms if term.strength}
        terms = tuple(term if _takes_part(term, len(there)) else replace(term, strength=0.0) for term in group.terms)
        if there and not any(term.strength for term in terms):
            lost += 1
        else:
            found.append(replace(group, terms=terms))
    return found, lost


def _takes_part(term: Term, loras: int) -> bool:
    wanted = term.input.lora.key_filter
    return wanted == "all" or (loras > 1) == (wanted == "shared_only")
