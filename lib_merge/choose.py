"""A group's numbers -> how its LoRAs are put together, and why. No tensors.

A group is one weight that several LoRAs change. Two LoRAs that have nothing to do with each other disagree in sign at
half of all positions, by chance alone: for normally distributed changes the share is arccos(cosine)/π. So the tests
come in a fixed order, and unrelated LoRAs are told before conflict is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal, get_args

from .errors import RecipeError
from .wording import suggestion

Scope = Literal["per_prefix", "global", "additive"]
Profile = Literal["v1.2", "no_slerp", "classic"]
Rules = Literal["ordered", "document"]
Refinement = Literal["standard", "enhanced", "maximum"]
Sparsify = Literal["none", "dare", "della", "dare_conflict", "della_conflict"]
Strategy = Literal["weighted_sum", "weighted_average", "slerp", "consensus", "ties"]
Vote = Literal["frequency", "total"]
Matrix = Sequence[Sequence[float]]

# What newer versions of such tools call the same thing -> its name here.
OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "profile": {"full": "v1.2", "basic": "classic"},
    "refinement": {"none": "standard", "refine": "enhanced", "full": "maximum"},
    "scope": {"weighted_sum_only": "additive"},
    "sparsify": {"disabled": "none"},
    "rules": {"seed": "document"},
}
WORDS: Mapping[str, tuple[str, ...]] = {
    "scope": get_args(Scope),
    "profile": get_args(Profile),
    "refinement": get_args(Refinement),
    "sparsify": get_args(Sparsify),
    "rules": get_args(Rules),
}

# Ordered rules.
ALIKE_COSINE, ALIKE_CONFLICT = 0.5, 0.15
UNRELATED_COSINE, UNRELATED_CONFLICT = 0.25, 0.60
CONFLICT = 0.25
# The thresholds of the optimizer's documentation.
DOCUMENT_ALIKE_COSINE, DOCUMENT_UNRELATED_COSINE = 0.7, 0.3
# From this ratio of sizes on, a vote counts sizes instead of heads.
VOTE_BY_SIZE = 2.0
SMOOTHING = 0.25


@dataclass(frozen=True)
class Numbers:
    """What is known of a group.

    Attributes:
        n: LoRAs that change the weight.
        cos: mean cosine over their pairs, −1 … 1, each change turned by the sign of its strength.
        conflict: share of positions, both not 0, where signs differ, 0 … 1, over all pairs.
        expected: the conflict of normally distributed changes of these cosines: arccos(cos)/π, mean over pairs.
        ratio: largest of the changes' norms, times strength, over the smallest, at least 1.
        overlap: shared part of the spaces that the changes span, 0 … 1; NaN where it is not known.
        norms: of the changes as stored, without strength.
    """

    n: int
    cos: float = 0.0
    conflict: float = 0.0
    expected: float = 0.0
    ratio: float = 1.0
    overlap: float = math.nan
    norms: tuple[float, ...] = field(default=())

    @classmethod
    def of(
        cls, strengths: Sequence[float], gram: Matrix, opposed: Matrix, both: Matrix, overlap: Matrix | None = None
    ) -> Numbers:
        """From what was measured of changes without their strengths.

        Args:
            strengths: one for each change; none is 0.
            gram: [N][N] inner products of the changes.
            opposed: [N][N] positions where the signs of two differ.
            both: [N][N] positions where both are not 0.
            overlap: [N][N] shared part of the spaces, 0 … 1; None where it is not known.
        """
        norms = [math.sqrt(max(gram[k][k], 0.0)) for k in range(len(strengths))]
        pairs = list(combinations(range(len(strengths)), 2))
        if not pairs:
            return cls(len(strengths), norms=tuple(norms))
        cosines, opposing, there = [], 0.0, 0.0
        for one, two in pairs:
            cosine = cosine_of(gram[one][two], norms[one], norms[two])
            same = strengths[one] * strengths[two] > 0
            cosine, differing, counted = turned(same, cosine, opposed[one][two], both[one][two])
            cosines.append(cosine)
            opposing, there = opposing + differing, there + counted
        sizes = [abs(s) * norm for s, norm in zip(strengths, norms, strict=True) if norm > 0]
        return cls(
            n=len(strengths),
            cos=sum(cosines) / len(pairs),
            conflict=opposing / there if there else 0.0,
            expected=sum(map(expected_conflict, cosines)) / len(pairs),
            ratio=max(sizes) / min(sizes) if sizes else 1.0,
            overlap=math.nan if overlap is None else sum(overlap[one][two] for one, two in pairs) / len(pairs),
            norms=tuple(norms),
        )


def cosine_of(product: float, norm: float, other: float) -> float:
    """Cosine from an inner product and two norms; 0 where one is 0."""
    size = norm * other
    return max(-1.0, min(1.0, product / size)) if size else 0.0


def turned(same: bool, cosine: float, opposed: float, both: float) -> tuple[float, float, float]:
    """(cosine, positions of different signs, positions) of two changes, each turned by its strength's sign.

    Args:
        same: both strengths have one sign.
        cosine: of the changes as they are.
        opposed: positions where their signs differ.
        both: positions where both are not 0.
    """
    return (cosine, opposed, both) if same else (-cosine, both - opposed, both)


def expected_conflict(cosine: float) -> float:
    """Share of positions where two normally distributed changes of this cosine differ in sign: arccos(cosine)/π."""
    return math.acos(max(-1.0, min(1.0, cosine))) / math.pi


@dataclass(frozen=True)
class Choice:
    """What is done with a group.

    Attributes:
        strategy: how its LoRAs are put together.
        reason: for the report.
        vote: how TIES elects signs.
    """

    strategy: Strategy
    reason: str
    vote: Vote = "frequency"


def word(name: str, value: str) -> str:
    """A setting's word as it is called here.

    Args:
        name: `scope`, `profile`, `refinement`, `sparsify` or `rules`.
        value: as given; what newer versions of such tools say counts too.

    Raises:
        RecipeError: there is no such word.
    """
    found = OTHER_WORDS[name].get(value, value)
    if found not in WORDS[name]:
        hint = suggestion(value, WORDS[name])
        raise RecipeError(f"there is no {name} {value!r}", hint=hint)
    return found


def choose(numbers: Numbers, rules: Rules = "ordered", profile: Profile = "v1.2") -> Choice:
    """Choose how a group's LoRAs are put together.

    Args:
        numbers: of the group, smoothed or not.
        rules: `ordered`: alike, then unrelated, then in conflict; `document`: the thresholds of the optimizer's
            documentation taken literally, which know hardly anything but TIES and consensus.
        profile: `v1.2`: all; `no_slerp`: averages instead of SLERP and consensus; `classic`: sum, average and TIES.
    """
    if numbers.n <= 1:
        return Choice("weighted_sum", "one LoRA alone changes it")
    strategy, reason = _RULES[rules](numbers, profile)
    return Choice(strategy, reason, vote_of(numbers))


def vote_of(numbers: Numbers) -> Vote:
    """How TIES elects signs: by size where one LoRA is more than twice as strong as another, else by number."""
    return "total" if numbers.ratio > VOTE_BY_SIZE else "frequency"


def _ordered(numbers: Numbers, profile: Profile) -> tuple[Strategy, str]:
    cos, conflict = numbers.cos, numbers.conflict
    blend = _blend(profile)
    if profile == "v1.2" and cos > ALIKE_COSINE and conflict < ALIKE_CONFLICT:
        return "consensus", f"alike: cosine {cos:.2f} > {ALIKE_COSINE}, conflict {conflict:.0%} < {ALIKE_CONFLICT:.0%}"
    if profile != "classic" and abs(cos) < UNRELATED_COSINE and conflict < UNRELATED_CONFLICT:
        return blend, f"unrelated: cosine {cos:+.2f} within ±{UNRELATED_COSINE}"
    if conflict > CONFLICT:
        return "ties", f"conflict {conflict:.0%} > {CONFLICT:.0%}"
    return blend, f"little conflict: {conflict:.0%} ≤ {CONFLICT:.0%}"


def _document(numbers: Numbers, profile: Profile) -> tuple[Strategy, str]:
    cos, conflict = numbers.cos, numbers.conflict
    if conflict > CONFLICT:
        return "ties", f"conflict {conflict:.0%} > {CONFLICT:.0%}"
    if profile != "classic" and cos > DOCUMENT_ALIKE_COSINE:
        return "consensus", f"cosine {cos:.2f} > {DOCUMENT_ALIKE_COSINE}"
    if abs(cos) < DOCUMENT_UNRELATED_COSINE:
        return _blend(profile), f"cosine {cos:+.2f} within ±{DOCUMENT_UNRELATED_COSINE}"
    return "weighted_average", f"little conflict: {conflict:.0%} ≤ {CONFLICT:.0%}"


_RULES = {"ordered": _ordered, "document": _document}


def _blend(profile: Profile) -> Strategy:
    return "slerp" if profile == "v1.2" else "weighted_average"


def smooth(
    numbers: Sequence[Numbers], blocks: Sequence[str], energies: Sequence[float], share: float = SMOOTHING
) -> list[Numbers]:
    """Draw each group's numbers towards the mean of its block: (1 − share)·own + share·mean.

    Groups that one LoRA alone changes have no say in it: their conflict of 0 means nothing.

    Args:
        numbers: one for each group.
        blocks: the block of each.
        energies: added squared norms of each group's changes, its weight in the mean.
        share: 0 (nothing) … 1 (the block's mean alone).
    """
    members: dict[str, list[int]] = defaultdict(list)
    for place, (one, block) in enumerate(zip(numbers, blocks, strict=True)):
        if one.n > 1:
            members[block].append(place)
    found = list(numbers)
    for places in members.values():
        total = math.fsum(energies[place] for place in places)
        if not total or not share:
            continue
        means = {
            name: math.fsum(energies[place] * getattr(numbers[place], name) for place in places) / total
            for name in ("cos", "conflict", "expected", "ratio")
        }
        for place in places:
            own = numbers[place]
            drawn = {name: (1 - share) * getattr(own, name) + share * mean for name, mean in means.items()}
            found[place] = replace(own, **drawn)
    return found
