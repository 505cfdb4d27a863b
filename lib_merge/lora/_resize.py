"""The task `lora_resize`: every module of a LoRA to a smaller rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..adapters import FORMATS
from ..baking import load_part
from ..errors import Problem, RecipeError
from ..files.dtypes import DTYPES
from ..files.source import Source
from ..kernels import lowrank
from ..lazy import torch
from ..recipe import Recipe
from ..wording import count_of, named, suggestion
from ._combine import combine
from ._compat import kohya_rank
from ._groups import Group, grouped
from ._inputs import Input, open_inputs, told_of, widest
from ._module import Module
from ._needs import refuse_unheeded
from ._planned import Way, planned_groups
from ._ranks import Ranks
from ._work import Work, dtype_name

# Method -> parameters.
METHODS: Mapping[str, tuple[str, ...]] = {
    "rank": ("rank",),
    **dict.fromkeys(lowrank.RULES, ("keep", "max_rank")),
    "kohya_resize": ("rank", "ratio", "cumulative", "frobenius"),
}


@dataclass(frozen=True)
class _Share:
    """The smallest rank that reaches a share; takes the place of `Ranks`."""

    rule: str
    keep: float
    most: int | None

    def of(self, found: lowrank.Spectrum) -> int:
        wanted = lowrank.RULES[self.rule](found.s, self.keep, found.total)
        return max(min(wanted, max(lowrank.rank_of(found), 1), self.most or len(found.s)), 1)


def resize_work(recipe: Recipe, sources: Mapping[str, Source]) -> Work:
    """Plan a resize.

    Args:
        recipe: of task `lora_resize` with one LoRA.
        sources: slot -> opened input.

    Raises:
        MergeError: the file is no LoRA, or a parameter is wrong.
    """
    method = recipe.method or "rank"
    if method not in METHODS:
        raise RecipeError(f"there is no rule {method!r}", hint=suggestion(method, list(METHODS)))
    refuse_unheeded(recipe)
    if other := recipe.params.keys() - set(METHODS[method]):
        raise RecipeError(f"{method} has no parameter {min(other)!r}", hint=f"it has {', '.join(METHODS[method])}")
    inputs = open_inputs(recipe, sources)
    if len(inputs) != 1:
        raise RecipeError("a resize takes one LoRA")
    (item,) = inputs
    left = [piece for piece in item.adapter.pieces if FORMATS[piece.format].factors is None]
    keys = [key for piece in left for key in piece.keys.values()] + list(item.adapter.leftover)
    kept = {key: (item.source.tensors[key].dtype, _as_stored(item, key)) for key in dict.fromkeys(keys)}
    groups = grouped(inputs, [f"{item.slot}/{key}" for key in kept])
    if not groups:
        raise RecipeError("the LoRA has no low-rank modules that could be resized", file=item.path)
    rank_of = _rule(method, recipe.params)
    problems = told_of(item)
    if unknown := item.adapter.leftover:
        what = f"{count_of(unknown)} belonging to nothing, handed on as they are: {named(unknown)}"
        problems.append(Problem("note", what, str(item.path)))
    if left:
        kinds = ", ".join(sorted({FORMATS[piece.format].label for piece in left}))
        names = named([piece.stem for piece in left])
        what = f"{len(left)} modules have no rank and stay as they are ({kinds}): {names}"
        problems.append(Problem("note", what, str(item.path)))
    dtype = dtype_name(recipe.output.save_dtype, widest(inputs))
    work = Work(
        recipe, sources, inputs, [partial(_resized, group, rank_of) for group in groups], dtype, kept, problems=problems
    )
    work.unused = tuple(key for key, _ in item.adapter.ignored)
    limit = recipe.params.get("rank", recipe.params.get("max_rank"))
    work.planned = partial(planned_groups, groups, Way(Ranks(max_rank=None if limit is None else int(limit))))
    work.job_bytes = lambda shape, rank: 80 * rank * sum(shape)
    return work


def _as_stored(item: Input, key: str) -> torch.Tensor:
    """A tensor in its own dtype."""
    info = item.source.tensors[key]
    return load_part(item.source, key, torch.float64).to(getattr(torch, DTYPES[info.dtype].torch))


def _rule(method: str, params: Mapping[str, float | bool]) -> _Share | Ranks | _Kohya:
    if method == "kohya_resize":
        return _Kohya(dict(params))
    if method == "rank":
        if "rank" not in params:
            raise RecipeError("the rank is missing", hint="--rank 16, or --keep 0.9 --rule frobenius")
        return Ranks.read(params)
    if "keep" not in params:
        raise RecipeError("the share is missing", hint="--keep 0.9")
    keep = float(params["keep"])
    if not 0 < keep <= 1:
        raise RecipeError(f"keep must be more than 0 and at most 1, not {keep:g}")
    most = params.get("max_rank")
    return _Share(method, keep, None if most is None else int(most))


def _resized(group: Group, rule: _Share | Ranks | _Kohya) -> Sequence[Module]:
    """One module at its new rank; unchanged where that is not smaller."""
    whole = combine(group, Ranks())
    assert whole.up is not None
    assert whole.down is not None
    before = whole.down.shape[0]
    scale = 1.0 if whole.alpha is None else whole.alpha / before
    up = whole.up.double() * scale
    found = lowrank.spectrum(up, whole.down.double())
    if isinstance(rule, _Kohya):
        return [rule.module(group, whole, scale, found)]
    rank = rule.of(found)
    if rank >= before:
        return [whole]
    left, right = lowrank.cut(found, rank)
    number = whole.down.dtype
    error = lowrank.cut_error(found, rank)
    return [Module(group.stem, group.param, group.style, group.component, left.to(number), right.to(number),
                   kernel=whole.kernel, rank_before=before, error=error)]  # fmt: skip


@dataclass(frozen=True)
class _Kohya:
    """kohya's resize, faults included: it keeps one rank more than the rule asks for, U·S beside V, alpha scaled."""

    params: Mapping[str, float | bool]

    def module(self, group: Group, whole: Module, scale: float, found: lowrank.Spectrum) -> Module:
        """One module as kohya's script writes it."""
        assert whole.up is not None
        assert whole.down is not None
        plain = lowrank.spectrum(whole.up.double(), whole.down.double())
        rank = kohya_rank(plain.s, self.params)
        number = whole.down.dtype
        up, down = plain.u[:, :rank] * plain.s[:rank], plain.v[:rank]
        return Module(group.stem, group.param, group.style, group.component, up.to(number), down.to(number),
                      alpha=scale * rank, kernel=whole.kernel, rank_before=whole.down.shape[0],
                      error=lowrank.cut_error(plain, rank))  # fmt: skip
