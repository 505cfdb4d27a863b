"""The task `lora_merge`: several LoRAs into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from ..adapter_facts import stored_alphas, zero_alphas
from ..adapters import FORMATS, Piece
from ..errors import Problem, RecipeError
from ..files.source import Source
from ..recipe import Lora, Recipe
from ..wording import suggestion
from ._based import Based
from ._combine import combine
from ._compat import COMPATIBLE, compatible_jobs
from ._groups import Group, grouped
from ._inputs import Input, open_inputs, widest
from ._module import Module
from ._ranks import Ranks
from ._work import Work, dtype_name

# id -> what it does with the strengths.
METHODS: Mapping[str, str] = {
    "concat": "Σ wᵢ·ΔWᵢ, exactly",
    "weighted_sum": "the same as concat",
    "weighted_average": "Σ wᵢ·ΔWᵢ / Σ wᵢ",
}
PARAMS = ("rank", "auto", "max_error", "max_rank")


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
    known = PARAMS if method in METHODS else COMPATIBLE[method]
    if other := recipe.params.keys() - set(known):
        raise RecipeError(f"{method} has no parameter {min(other)!r}", hint=f"it has {', '.join(known) or 'none'}")
    inputs = _weighted(open_inputs(recipe, sources), method)
    if not inputs:
        raise RecipeError("there is no LoRA to merge", hint="name at least one file")
    dtype = dtype_name(recipe.output.save_dtype, widest(inputs))
    problems = _notes(inputs)
    _refuse_experts(inputs)
    if method in COMPATIBLE:
        made = compatible_jobs(method, grouped(inputs), recipe)
        return Work(recipe, sources, inputs, made, dtype, unused=_unused(inputs), problems=problems, in_order=True)
    ranks = Ranks.read(recipe.params)
    base = Based(_with_strengths(recipe, inputs), inputs, sources["A"], ranks) if "A" in sources else None
    if base is None:
        _refuse_bases(inputs)
    groups = grouped(inputs, base.keys if base else ())
    jobs: list[Callable[[], Sequence[Module]]] = [partial(_sum, group, ranks, base) for group in groups]
    jobs += base.jobs() if base else []
    if not jobs:
        raise RecipeError("the LoRAs change nothing", file=inputs[0].path)
    problems += base.problems if base else []
    return Work(recipe, sources, inputs, jobs, dtype, unused=_unused(inputs), problems=problems)


def _sum(group: Group, ranks: Ranks, base: Based | None) -> list[Module]:
    return [combine(group, ranks, base.kernel(group) if base else None)]


def _weighted(inputs: Sequence[Input], method: str) -> list[Input]:
    """The LoRAs with the strengths that the method works with."""
    if method != "weighted_average":
        return list(inputs)
    total = sum(item.lora.strength for item in inputs)
    if total == 0:
        raise RecipeError("the strengths add up to 0: there is no average", hint="use concat")
    return [Input(i.slot, _scaled(i.lora, 1 / total), i.source, i.adapter, i.found) for i in inputs]


def _with_strengths(recipe: Recipe, inputs: Sequence[Input]) -> Recipe:
    return replace(recipe, loras=tuple(item.lora for item in inputs))


def _scaled(lora: Lora, factor: float) -> Lora:
    own = None if lora.te_strength is None else lora.te_strength * factor
    return replace(lora, strength=lora.strength * factor, te_strength=own)


def _unused(inputs: Sequence[Input]) -> tuple[str, ...]:
    return tuple(key for item in inputs for key in item.adapter.leftover)


def _notes(inputs: Sequence[Input]) -> list[Problem]:
    """What the user should know of the inputs."""
    found = []
    for item in inputs:
        name = item.lora.file
        found += [Problem("note", f"{name}: {text}", str(item.path)) for text in item.adapter.notes]
        if item.adapter.leftover:
            what = f"{name}: {len(item.adapter.leftover)} tensors belong to nothing and are not used"
            found.append(Problem("warning", what, str(item.path), item.adapter.leftover[0]))
        found += zero_alphas(name, item.source, stored_alphas(item.source, item.adapter.pieces))
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
