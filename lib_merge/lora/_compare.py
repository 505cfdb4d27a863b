"""How LoRAs relate: ranks and sizes, what each two share and whether they pull together, and who goes with whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ..changes import LoraLike, named_loras
from ..choose import Numbers, choose
from ..families import Detected
from ..lazy import torch
from ..recipe import Lora, Recipe
from ._facts import facts_of
from ._groups import Group, grouped
from ._inputs import Input, open_inputs
from ._members import Member, members_of
from ._metrics import Relations, relate
from ._pairs import Pair, pairs_of
from ._work import full, opened

# Two LoRAs that do not work against each other get so much for it; LoRAs of a mean of at least `TOGETHER` go together.
_PEACE, _AGAINST, TOGETHER = 0.1, -0.1, 0.05


@dataclass(frozen=True)
class Comparison:
    """What `compare_loras` found.

    Attributes:
        loras: one table row for each: file, format, modules, rank_low, rank_high, norm.
        pairs: one for each pair: a, b, shared, cosine, overlap, conflict, conflict_expected, compatibility, strategy.
        together: files that can be merged into one LoRA, in the order of the stack; each file is in one of them.
        rows: report, one row for each weight that several change.
        notes: what the user should know of the block weights.
    """

    loras: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    together: list[list[str]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"loras": self.loras, "pairs": self.pairs, "together": self.together, "notes": self.notes}


@dataclass
class _Tally:
    """One LoRA over all its weights."""

    energy: float = 0.0
    modules: int = 0
    ranks: list[int] = field(default_factory=list)

    def add(self, member: Member, norm: float) -> None:
        self.energy += norm * norm
        self.modules += 1
        if member.down is not None:
            self.ranks.append(int(member.down.shape[0]))

    @property
    def norm(self) -> float:
        return math.sqrt(self.energy)


def compare_loras(*loras: LoraLike, lora_alpha: float | None = None) -> Comparison:
    """Compare LoRAs without merging them; strengths do not count, but their signs do, and block weights.

    Args:
        *loras: as for `merge_loras`.
        lora_alpha: alpha of LoRAs that carry none.

    Returns:
        `cosine` is that of the two changes over the weights that both have, −1 … 1: near 0 the two do not touch each
        other, negative they work against each other. `overlap` is the share of the smaller one's norm that lies in
        shared weights, 0 … 1. `conflict` is the share of entries whose signs differ, `conflict_expected` what that
        cosine has by chance: 0.5 for unrelated LoRAs. For `compatibility` see the function. `strategy` is what the
        optimizer would do with the pair. Only what needs no base is counted.
    """
    given, paths = named_loras(loras, lora_alpha)
    located = {slot: Path(path) for slot, path in paths.items()}
    with opened(located) as sources:
        loras_at_1 = tuple(map(_at_full_strength, given))
        inputs = open_inputs(Recipe(task="lora_merge", loras=loras_at_1), sources)
        left_out = [
            f"{item.slot}/{key}" for item in inputs for piece in item.adapter.pieces if not item.is_linear(piece)
            for key in piece.keys.values()
        ]  # fmt: skip
        tallies = {number: _Tally() for number in range(1, len(inputs) + 1)}
        found, rows = [], []
        family = next((item.found for item in inputs if item.found.family), Detected())
        for group in grouped(inputs, left_out):
            members = [member for member in members_of(group) if member.strength]
            if not members:  # block weights of 0 leave it out
                continue
            relations = _strong(relate(group, members))
            for member, norm in zip(members, relations.norms, strict=True):
                tallies[member.number].add(member, norm)
            if len(members) > 1:
                found.append(relations)
                rows.append(_row(group, relations, members, family))
    pairs = [_pair(pair, inputs, tallies) for pair in _all_pairs(found, len(inputs))]
    return Comparison([_described(item, tallies[n]) for n, item in enumerate(inputs, 1)], pairs,
                      _together([item.lora.file for item in inputs], pairs), rows,
                      [problem.what for item in inputs for problem in item.problems])  # fmt: skip


def _at_full_strength(lora: Lora) -> Lora:
    """A LoRA at 1, or −1 where it is meant the other way round; its block weights multiply that."""
    text = None if lora.te_strength is None else math.copysign(1.0, lora.te_strength)
    return structs.replace(lora, strength=math.copysign(1.0, lora.strength), te_strength=text)


def _strong(relations: Relations) -> Relations:
    """The same of changes that have the size of their strengths."""
    sizes = torch.tensor([abs(strength) for strength in relations.strengths], dtype=relations.gram.dtype)
    signs = tuple(math.copysign(1.0, strength) for strength in relations.strengths)
    return replace(relations, gram=relations.gram * sizes * sizes[:, None], strengths=signs)


def _row(group: Group, relations: Relations, members: Sequence[Member], family: Detected) -> dict[str, Any]:
    shape = list(members[0].size)
    told = facts_of(relations, choose(relations.numbers()))
    about = {"key": group.stem, "component": group.component, "action": "compared", "method": "compare"}
    return full({**about, "shape": shape, "numel": math.prod(shape), **told}, family)


def _described(item: Input, tally: _Tally) -> dict[str, Any]:
    return {
        "file": item.lora.file,
        "format": ", ".join(item.adapter.formats),
        "modules": tally.modules,
        "rank_low": min(tally.ranks, default=None),
        "rank_high": max(tally.ranks, default=None),
        "norm": tally.norm,
    }


def _all_pairs(found: Sequence[Relations], count: int) -> list[Pair]:
    """Every two LoRAs, also those that share nothing."""
    there = {(pair.one, pair.two): pair for pair in pairs_of(found)}
    names = [(one, two) for one in range(1, count + 1) for two in range(one + 1, count + 1)]
    return [there.get(name, Pair(*name)) for name in names]


def _pair(pair: Pair, inputs: Sequence[Input], tallies: Mapping[int, _Tally]) -> dict[str, Any]:
    sides = ((pair.energies[0], tallies[pair.one].norm), (pair.energies[1], tallies[pair.two].norm))
    shares = [math.sqrt(energy) / whole if whole else 0.0 for energy, whole in sides]
    numbers = Numbers(2 if pair.shared else 1, pair.cosine, pair.conflict)
    return {
        "a": inputs[pair.one - 1].lora.file,
        "b": inputs[pair.two - 1].lora.file,
        "shared": pair.shared,
        "cosine": pair.cosine,
        "overlap": shares[0] if sides[0][1] <= sides[1][1] else shares[1],
        "conflict": pair.conflict,
        "conflict_expected": pair.expected,
        "compatibility": compatibility(pair.cosine, pair.conflict),
        "strategy": choose(numbers).strategy,
    }


def compatibility(cosine: float, conflict: float) -> float:
    """How well two LoRAs go together, −1 … 1.1: cosine times the share of entries whose signs are as it says.

    That is cosine·(1 − conflict), of a negative cosine cosine·conflict; LoRAs that do not work against each other
    (cosine above −0.1) get 0.1 more.
    """
    return cosine * (1 - conflict if cosine > 0 else conflict) + (_PEACE if cosine > _AGAINST else 0.0)


def _together(files: Sequence[str], pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Groups by average linkage: the two groups of the best mean are joined as long as that is at least `TOGETHER`."""
    places = [(one, two) for one in range(len(files)) for two in range(one + 1, len(files))]
    values = {place: float(pair["compatibility"]) for place, pair in zip(places, pairs, strict=True)}
    groups = [[place] for place in range(len(files))]
    while len(groups) > 1:
        means = {
            (one, two): _mean([values[min(a, b), max(a, b)] for a in groups[one] for b in groups[two]])
            for one in range(len(groups))
            for two in range(one + 1, len(groups))
        }
        (one, two), best = max(means.items(), key=lambda item: item[1])
        if best < TOGETHER:
            break
        groups[one] = sorted(groups[one] + groups.pop(two))
    return [[files[place] for place in group] for group in groups]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
