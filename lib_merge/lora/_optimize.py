"""LoRAs merged weight by weight, each by the strategy that its numbers call for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..choose import Choice
from ..errors import CancelledError, Problem
from ..events import Progress
from ..execute import Running
from ..families import Detected
from ..kernels.auto_strength import suggested_max
from ..recipe import ConflictMode
from . import _advice
from ._based import Based
from ._blend import Blended, blend, is_linear, linear_scalars
from ._combine import combine
from ._decide import decide
from ._facts import facts_of
from ._groups import Group
from ._inputs import Input
from ._members import Member, members_of, number_of
from ._metrics import Relations, name_of, relate
from ._module import Module
from ._pairs import pairs_of, strong_sizes
from ._ranks import Ranks
from ._settings import Settings
from ._storing import stored
from ._terms import kernel_of, whole_shape

if TYPE_CHECKING:
    from torch import Tensor


class Optimization:
    """A merge of LoRAs whose way is chosen weight by weight.

    Args:
        groups: what the LoRAs change; emptied of what `key_filter` leaves out.
        inputs: the LoRAs.
        settings: what was asked for.
        ranks: how much is kept.
        base: the checkpoint, where there is one.
    """

    def __init__(
        self, groups: Sequence[Group], inputs: Sequence[Input], settings: Settings, ranks: Ranks, base: Based | None
    ) -> None:
        self._groups, self._settings, self._ranks, self._base = groups, settings, ranks, base
        self._modes: dict[int, ConflictMode] = {n: item.lora.conflict_mode for n, item in enumerate(inputs, 1)}
        self._names = {number: item.lora.file for number, item in enumerate(inputs, 1)}
        self._strengths = [value for item in inputs if (value := item.lora.strength)]
        found = [item.found for item in inputs if item.found.family]
        self._family = found[0] if found else Detected()
        self._cap = _cap(self._family)
        self._found: list[Relations] = []
        self._choices: list[Choice] = []
        self._output = 1.0
        self._norms = [0.0] * len(groups)  # of the results, at an output strength of 1

    def jobs(self) -> list[Callable[[], Sequence[Module]]]:
        """One for each group; to be run after `prepare`."""
        return [partial(self._module, place) for place in range(len(self._groups))]

    def prepare(self, pool: Executor, how: Running) -> None:
        """Measure all groups, decide on each, and find the output strength."""
        total = len(self._groups)
        self._found = []
        for done, relations in enumerate(pool.map(partial(self._measured, how=how), self._groups), 1):
            self._found.append(relations)
            how.on_progress(Progress("comparing", done, total, self._groups[done - 1].stem, "modules"))
        self._choices = decide(self._groups, self._found, self._family, self._settings)
        if self._settings.output_strength is not None:
            self._output = self._settings.output_strength
        else:
            self._output = self._suggested(list(pool.map(self._norm, range(total))))

    def _measured(self, group: Group, how: Running) -> Relations:
        if how.cancel.cancelled:
            raise CancelledError("the run was stopped")
        members = [member for member in members_of(group) if member.counts()]
        return relate(group, members, self._settings.auto_density)

    def _suggested(self, norms: Sequence[float]) -> float:
        return suggested_max(norms, [relations.norms for relations in self._found], self._cap)

    def _norm(self, place: int) -> float:
        """Size of a group's result at an output strength of 1."""
        relations, choice = self._found[place], self._choices[place]
        if len(relations.members) < 2:
            return sum(abs(s) * norm for s, norm in zip(relations.strengths, relations.norms, strict=True))
        if is_linear(choice, self._settings, self._of(relations)):
            return linear_scalars(choice, relations, self._settings)[1]
        return self._blended(place)[0].norm

    def _of(self, relations: Relations) -> list[ConflictMode]:
        return [self._modes[number] for number in relations.members]

    def _blended(self, place: int) -> tuple[Blended, int]:
        """A group's result at an output strength of 1, and the added ranks of its LoRAs."""
        group, relations = self._groups[place], self._found[place]
        members = [member for member in members_of(group) if member.number in relations.members]
        made = blend(
            members, relations, self._choices[place], self._settings, self._of(relations), name_of(group),
            vector=len(whole_shape(group)) == 1,
        )  # fmt: skip
        return made, _added(members)

    def _module(self, place: int) -> list[Module]:
        group, relations = self._groups[place], self._found[place]
        kernel = self._base.kernel(group) if self._base else ()
        if len(relations.members) < 2:
            self._norms[place] = self._norm(place)
            module = combine(_strong(group, relations, self._output), self._ranks, kernel)
            return [replace(module, facts=self._facts(place, Blended(0.0)))]
        made, added = self._blended(place)
        self._norms[place] = made.norm
        shape = () if added else whole_shape(group)
        facts = self._facts(place, made)
        module = stored(
            _scaled(made, self._output), group, kernel or kernel_of(group), shape, added, self._ranks,
            self._settings.lossless, name_of(group), facts,
        )  # fmt: skip
        return [module]

    def _facts(self, place: int, made: Blended) -> dict[str, Any]:
        """Columns of the report."""
        told = facts_of(self._found[place], self._choices[place])
        return {**told, "selfish_share": made.selfish_share, "density": made.density}

    def advise(self, modules: Sequence[Module]) -> list[Problem]:
        """What the user should hear once all is made."""
        pairs = pairs_of(self._found)
        said = [*_advice.opposing(pairs, self._names), *_advice.imbalance(strong_sizes(self._found), self._names)]
        if self._ranks.rank is None or self._ranks.auto:
            said += _advice.missed(modules, self._ranks.max_error)
        found = [Problem("warning", text) for text in said]
        counts: dict[str, int] = {}
        for choice in self._choices:
            counts[choice.strategy] = counts.get(choice.strategy, 0) + 1
        notes = [*_advice.without_effect(counts, self._strengths, self._settings), *self._about_size()]
        return found + [Problem("note", text) for text in notes]

    def _about_size(self) -> list[str]:
        if self._settings.output_strength is None:
            return [f"output strength {self._output:.3g}, the largest one that is advised"]
        if not self._output:
            return []
        largest = self._suggested(self._norms) / abs(self._output)
        return [f"the result can be used at strengths up to about {largest:.2g}"] if largest > 1 else []


# Largest strength that is advised: of models on transformers, whose LoRAs are weak, and of all others.
_CAP, _DIT_CAP = 3.0, 5.0
_WEAKER = ("sd1", "sd2", "sdxl", "sdxl_refiner", "unet", "qwen_image", "unknown")


def _cap(found: Detected) -> float:
    other = found.family is None or found.kind == "llm" or found.family.id in _WEAKER
    return _CAP if other else _DIT_CAP


def _added(members: Sequence[Member]) -> int:
    downs: list[Tensor] = [member.down for member in members if member.down is not None]
    return sum(down.shape[0] for down in downs)


def _scaled(made: Blended, factor: float) -> Blended:
    if factor == 1:
        return made
    down = None if made.down is None else made.down * factor
    whole = None if made.whole is None else made.whole * factor
    return replace(made, norm=made.norm * abs(factor), down=down, whole=whole)


def _strong(group: Group, relations: Relations, factor: float) -> Group:
    """The group with the output strength, and without the LoRAs that change nothing of it."""
    terms = tuple(
        replace(term, strength=term.strength * factor if number_of(term) in relations.members else 0.0)
        for term in group.terms
    )
    return replace(group, terms=terms)
