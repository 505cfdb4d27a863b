"""What a user should hear of LoRAs that are put together: opposing, of unlike strength, distilled, not quite stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import Problem
from ..wording import named
from ._inputs import Input
from ._module import Module
from ._pairs import Pair
from ._settings import Settings

OPPOSING_COSINE = -0.1
IMBALANCE = 3.0

# LoRAs that make a model take few steps: put together with others they lose that, and blur.
_DISTILLED = re.compile(
    r"(?<![a-z])(?:lcm|lightning|turbo|hyper|dmd2?|schnell|causvid|lightx2v)(?![a-z])", re.IGNORECASE
)
# Names of models that hold such a word.
_MODELS = re.compile(r"z[-_ ]?image[-_ ]?turbo|sdxl?[-_ ]?turbo|flux[-_. ]?1?[-_ ]?schnell", re.IGNORECASE)
_TITLES = ("ss_output_name", "modelspec.title", "ss_training_comment")
NORMALIZED = ("weighted_average", "slerp", "consensus", "ties")


def distilled(inputs: Sequence[Input]) -> Iterator[Problem]:
    """Warnings about LoRAs whose name or header says that they make a model take few steps."""
    for item in inputs:
        texts = [Path(item.lora.file).stem, *(item.source.metadata.get(name, "") for name in _TITLES)]
        found = next((hit for text in texts if (hit := _DISTILLED.search(_MODELS.sub("", text)))), None)
        if found and (item.lora.strength or item.lora.te_strength):
            what = (
                f"{item.lora.file} seems to be a distillation LoRA ({found[0]}), which may lose its effect in a merge"
            )
            hint = "leave it out and load it beside the result, or take --scope additive"
            yield Problem("warning", what, str(item.path), hint=hint)


def opposing(pairs: Sequence[Pair], names: Mapping[int, str]) -> Iterator[str]:
    """Pairs that work against each other."""
    for pair in pairs:
        if pair.cosine < OPPOSING_COSINE:
            yield (
                f"{names[pair.one]} and {names[pair.two]} work against each other: cosine {pair.cosine:+.2f} over "
                f"{pair.shared} shared weights"
            )


def imbalance(sizes: Mapping[int, float], names: Mapping[int, str]) -> Iterator[str]:
    """LoRAs of which one is more than three times as strong as another."""
    there = {number: size for number, size in sizes.items() if size > 0}
    if not there:
        return
    large, small = max(there, key=lambda number: there[number]), min(there, key=lambda number: there[number])
    ratio = there[large] / there[small]
    if ratio > IMBALANCE:
        yield (
            f"at these strengths {names[large]} is {ratio:.1f} times as strong as {names[small]}; strengths that are "
            "nearer to each other let both show"
        )


def missed(modules: Sequence[Module], limit: float) -> Iterator[str]:
    """Weights whose result no rank that was allowed holds well enough."""
    over = sorted((m for m in modules if m.error > limit and m.facts), key=lambda m: -m.error)
    if over:
        shown = named([f"{module.stem} ({module.error:.0%})" for module in over])
        yield (
            f"{len(over)} of {len(modules)} weights are not within {limit:.0%} of their result at the rank allowed: "
            f"{shown}; --refinement maximum stores them exactly, --lossless stores them whole"
        )


def without_effect(counts: Mapping[str, int], strengths: Sequence[float], settings: Settings) -> Iterator[str]:
    """Where a factor common to all strengths changes nothing."""
    sized = ("ties",) if settings.count_divisor else ()
    means = sum(counts.get(strategy, 0) for strategy in NORMALIZED if strategy not in sized)
    if means and settings.normalize and any(abs(s) != 1 for s in strengths):
        yield (
            f"{means} weights are means by strength: a factor common to all strengths changes nothing there; "
            "--output-strength does, or --no-normalize"
        )
