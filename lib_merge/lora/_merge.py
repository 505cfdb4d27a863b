"""The task `lora_merge`: several LoRAs into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..adapters import FORMATS, Piece
from ..errors import Problem, RecipeError
from ..files.source import Source
from ..plan import twins
from ..recipe import Optimizer, Recipe
from ..wording import count_of, named, suggestion
from . import _advice
from ._based import Based
from ._combine import combine
from ._compat import COMPATIBLE, compatible_jobs
from ._groups import Group, filtered, grouped, reached
from ._inputs import Input, open_inputs, told_of, unused_of, widest
from ._module import Module
from ._needs import refuse_unheeded
from ._optimize import Optimization
from ._planned import Way, planned_groups
from ._ranks import Ranks
from ._settings import PARAMS, Settings
from ._work import Work, dtype_name

# id -> what it does with the strengths.
METHODS: Mapping[str, str] = {
    "concat": "Σ wᵢ·ΔWᵢ, exactly",
    "weighted_sum": "the same as concat; with the optimizer's options a sum under them",
    "weighted_average": "Σ wᵢ·ΔWᵢ / Σ |wᵢ| in each weight that several LoRAs change",
    "slerp": "along the arc from one change to the next, its size the mean of theirs",
    "consensus": "entries weighted by their squares, small directions left out",
    "ties": "small entries left out, a sign elected at each place, the mean of those that have it",
    "auto": "for each weight whichever of these its numbers call for",
}
RANKS = ("rank", "auto", "max_error", "max_rank")


def merge_work(recipe: Recipe, sources: Mapping[str, Source]) -> Work:
    """Plan a merge of LoRAs.

    Args:
        recipe: of task `lora_merge`; model A, where there is one, is the base.
        sources: slot -> opened input.

    Raises:
        MergeError: an input that cannot be merged, an unknown method or parameter.
    """
    method = recipe.method or "concat"
    if method not in METHODS and method not in COMPATIBLE:
        what = f"there is no LoRA merge method {method!r}"
        raise RecipeError(what, hint=suggestion(method, [*METHODS, *COMPATIBLE]))
    unheeded = refuse_unheeded(recipe)
    known = _params(method)
    if other := recipe.params.keys() - set(known):
        raise RecipeError(f"{method} has no parameter {min(other)!r}", hint=f"it has {', '.join(known) or 'none'}")
    inputs = open_inputs(recipe, sources)
    if not inputs:
        raise RecipeError("there is no LoRA to merge", hint="name at least one file")
    if not any(item.lora.strength or item.lora.te_strength for item in inputs):
        raise RecipeError("every LoRA has strength 0: nothing would be left", hint="give one of them another")
    dtype = dtype_name(recipe.output.save_dtype, widest(inputs))
    problems = [*unheeded, *_notes(inputs)]
    _refuse_experts(inputs)
    if method in COMPATIBLE:
        theirs = compatible_jobs(method, grouped(inputs), recipe)
        work = Work(recipe, sources, inputs, theirs, dtype, unused=_unused(inputs), problems=problems, in_order=True)
        fixed = int(recipe.params.get("rank", 0)) or None
        work.planned = partial(planned_groups, grouped(inputs), Way(Ranks(), fixed=fixed))
        work.job_bytes = _dense_bytes(len(inputs)) if method.endswith("_svd") else work.job_bytes
        return work
    ranks = Ranks.read(recipe.params)
    base = Based(recipe, inputs, sources["A"], ranks) if "A" in sources else None
    if base is None:
        _refuse_bases(inputs)
    groups, idle = reached(grouped(inputs, base.keys if base else ()))
    if idle:
        problems.append(Problem("note", f"block weights of 0 leave {idle} weights out of the result"))
    groups, lost = filtered(groups)
    if lost:
        what = f"key_filter leaves no LoRA for {lost} weights: they are not in the result"
        problems.append(Problem("note", what))
    work = Work(recipe, sources, inputs, [], dtype, unused=_unused(inputs), problems=problems)
    if _is_plain_sum(recipe, inputs):
        work.jobs = [partial(_sum, group, ranks, base) for group in groups]
        work.planned = partial(planned_groups, groups, Way(ranks, summed=True))
    else:
        made = Optimization(groups, inputs, Settings.read(recipe), ranks, base)
        work.jobs, work.prepare, work.advise = made.jobs(), made.prepare, made.advise
        problems += _advice.distilled(inputs)
        refined = recipe.optimizer.refinement != "standard"
        way = Way(ranks, full=refined, lossless=bool(recipe.params.get("lossless")))
        work.planned = partial(planned_groups, groups, way)
        work.job_bytes = _dense_bytes(len(inputs))
    work.jobs = [*work.jobs, *(base.jobs() if base else [])]
    if not work.jobs:
        raise RecipeError("the LoRAs change nothing", file=inputs[0].path)
    problems += base.problems if base else []
    return work


def _dense_bytes(loras: int) -> Callable[[Sequence[int], int], int]:
    """Memory of a job that makes whole matrices of the changes."""
    return lambda shape, rank: 8 * (loras + 1) * math.prod(shape) + 24 * rank * sum(shape)


def _params(method: str) -> tuple[str, ...]:
    if method in COMPATIBLE:
        return tuple(COMPATIBLE[method])
    return RANKS if method == "concat" else (*RANKS, *PARAMS)


def _is_plain_sum(recipe: Recipe, inputs: Sequence[Input]) -> bool:
    """Whether factors need but be put side by side, whatever their numbers."""
    plain = recipe.optimizer == Optimizer() and not recipe.params.keys() & set(PARAMS)
    return recipe.method in (None, "concat", "weighted_sum") and plain and not any(_masked(item) for item in inputs)


def _masked(item: Input) -> bool:
    return item.lora.conflict_mode != "all"


def _sum(group: Group, ranks: Ranks, base: Based | None) -> list[Module]:
    return [combine(group, ranks, base.kernel(group) if base else None)]


def _unused(inputs: Sequence[Input]) -> tuple[str, ...]:
    return tuple(key for item in inputs for key in unused_of(item))


def _notes(inputs: Sequence[Input]) -> list[Problem]:
    """What the user should know of the inputs."""
    found = list(twins({item.slot: item.source for item in inputs}))
    for item in inputs:
        name = item.lora.file
        found += told_of(item)
        if left := item.adapter.leftover:
            what = f"{name}: {count_of(left)} belonging to nothing and not used: {named(left)}"
            found.append(Problem("warning", what, str(item.path), left[0]))
        if not item.lora.strength and not item.lora.te_strength:
            found.append(Problem("note", f"{name} has strength 0: it takes no part", str(item.path)))
    families = {item.found.id: item for item in inputs if item.found.family is not None}
    if len(families) > 1:
        one, other = list(families.values())[:2]
        what = f"{one.lora.file} is for {one.found.name}, {other.lora.file} for {other.found.name}"
        found.append(Problem("error", what, str(other.path), hint="merge LoRAs of one family"))
    return found


def _refuse_experts(inputs: Sequence[Input]) -> None:
    for item in inputs:
        for piece in item.adapter.pieces:
            if piece.format == "moe":
                raise RecipeError(
                    f"{_label(piece)} cannot be merged into one LoRA",
                    file=item.path,
                    tensor=piece.keys["down"],
                    hint="bake the LoRAs into the checkpoint instead",
                )


def _refuse_bases(inputs: Sequence[Input]) -> None:
    """Without a base, only sums can be merged."""
    for item in inputs:
        if item.lora.strength == 0:
            continue
        for piece in item.adapter.pieces:
            if not item.is_linear(piece):
                raise RecipeError(
                    f"{_label(piece)} is no sum: what it does depends on the checkpoint",
                    file=item.path,
                    tensor=next(iter(piece.keys.values())),
                    hint="name the checkpoint it was trained on: --base CHECKPOINT --rank 64",
                )


def _label(piece: Piece) -> str:
    return FORMATS[piece.format].label
