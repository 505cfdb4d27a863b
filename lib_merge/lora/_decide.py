"""What is done with every group: each on its own, one decision for all, or sums everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..choose import Choice, Numbers, choose, smooth, vote_of
from ..families import Detected, block_of
from ._groups import Group
from ._metrics import Relations
from ._pairs import pooled
from ._settings import AUTO, Settings


def decide(groups: Sequence[Group], found: Sequence[Relations], family: Detected, settings: Settings) -> list[Choice]:
    """One choice for each group.

    Args:
        groups: of any number of LoRAs each.
        found: their numbers, in the same order.
        family: tells the blocks over which numbers are smoothed.
        settings: what was asked for.
    """
    choices = _SCOPES[settings.words.scope](groups, found, family, settings)
    return [
        choose(Numbers(1)) if len(relations.members) < 2 else choice
        for choice, relations in zip(choices, found, strict=True)
    ]


def is_text(group: Group) -> bool:
    """Whether the weight belongs to a text encoder: that branch is judged by itself."""
    return group.component.startswith("te")


def _each(groups: Sequence[Group], found: Sequence[Relations], family: Detected, settings: Settings) -> list[Choice]:
    blocks = [f"{group.component} {block_of(group.stem, family)}" for group in groups]
    own = [relations.numbers() for relations in found]
    smoothed = smooth(own, blocks, [relations.energy for relations in found], settings.smoothing)
    return [_chosen(numbers, settings) for numbers in smoothed]


def _all_alike(
    groups: Sequence[Group], found: Sequence[Relations], family: Detected, settings: Settings
) -> list[Choice]:
    """One decision for the denoiser, one for the text encoders."""
    choices = {}
    for text in (False, True):
        branch = [
            relations
            for group, relations in zip(groups, found, strict=True)
            if is_text(group) == text and len(relations.members) > 1
        ]
        choice = _chosen(pooled(branch), settings)
        name = "text encoders" if text else "denoiser"
        choices[text] = replace(choice, reason=f"all of the {name}: {choice.reason}")
    return [choices[is_text(group)] for group in groups]


def _sums(groups: Sequence[Group], found: Sequence[Relations], family: Detected, settings: Settings) -> list[Choice]:
    return [Choice("weighted_sum", "sums were asked for (scope additive)")] * len(groups)


_SCOPES: dict[str, Callable[[Sequence[Group], Sequence[Relations], Detected, Settings], list[Choice]]] = {
    "per_prefix": _each,
    "global": _all_alike,
    "additive": _sums,
}


def _chosen(numbers: Numbers, settings: Settings) -> Choice:
    if settings.method == AUTO:
        return choose(numbers, settings.words.rules, settings.words.profile)
    return Choice(settings.method, "asked for", vote_of(numbers))  # type: ignore[arg-type]
