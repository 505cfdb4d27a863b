"""Options of LoRAs that take effect only with others: the refusal of one that would go unheeded, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Level, Problem, RecipeError
from ..recipe import Optimizer, Recipe
from ._compat import COMPATIBLE
from ._settings import AUTO, STRATEGIES

Test = Callable[[Recipe], bool]

_MEANS = ("weighted_average", "slerp", "consensus", "ties")


@dataclass(frozen=True)
class Need:
    """An option that does nothing unless others are as it needs them.

    Attributes:
        option: what users call it: the command line's option without dashes, the argument in Python.
        needs: what it takes, to be read after `takes effect only …`.
        given: whether the recipe asks for it.
        met: whether it takes effect there.
        level: `error`, or `note` for what does no harm.
    """

    option: str
    needs: str
    given: Test
    met: Test
    level: Level = "error"


def _word(name: str) -> Test:
    usual = getattr(Optimizer(), name)
    return lambda recipe: bool(getattr(recipe.optimizer, name) != usual)


def _param(name: str) -> Test:
    """Whether a parameter is given, and on, of LoRAs that are put together here, not as another program does it."""
    return lambda recipe: recipe.method not in COMPATIBLE and recipe.params.get(name, False) is not False


def _beyond_zero(name: str) -> Test:
    """Whether a parameter is given that is off at 0."""
    return lambda recipe: _param(name)(recipe) and recipe.params[name] != 0


def _without(*names: str) -> Test:
    return lambda recipe: not any(_param(name)(recipe) for name in names)


def _chosen(recipe: Recipe) -> bool:
    return recipe.method in (AUTO, *STRATEGIES)


def _decides(recipe: Recipe) -> bool:
    """Whether numbers decide about strategies."""
    return recipe.method == AUTO and recipe.optimizer.scope != "additive"


def _sparsified(recipe: Recipe) -> bool:
    return _chosen(recipe) and recipe.optimizer.sparsify != "none"


def _masked(recipe: Recipe) -> bool:
    return any(lora.conflict_mode != "all" for lora in recipe.loras)


def _averages(recipe: Recipe) -> bool:
    return recipe.method in _MEANS or _decides(recipe)


def _votes(recipe: Recipe) -> bool:
    return recipe.method == "ties" or _decides(recipe)


def _has_means(recipe: Recipe) -> bool:
    """Whether some results do not grow with a common factor of the strengths."""
    return _averages(recipe) and not (recipe.method == "ties" and _param("count_divisor")(recipe))


def _drops(kind: str) -> Test:
    """Whether entries are dropped by chance by `dare`, or by `della`."""
    return lambda recipe: _sparsified(recipe) and recipe.optimizer.sparsify.startswith(kind)


def _fills(recipe: Recipe) -> bool:
    """Whether a result may be no product of small factors."""
    if recipe.optimizer.refinement == "maximum":
        return False
    entries = recipe.method in ("consensus", "ties") or _decides(recipe) or _masked(recipe)
    return entries or _sparsified(recipe) or recipe.optimizer.refinement != "standard"


def _is_random(recipe: Recipe) -> bool:
    return _sparsified(recipe) or "dare" in (recipe.method or "")


def _limits(recipe: Recipe) -> bool:
    return "rank" not in recipe.params or recipe.params["rank"] <= recipe.params["max_rank"]


_BY_STRATEGY = "with method auto, weighted_sum, weighted_average, slerp, consensus or ties"
_DECIDED = "with method auto and a scope other than additive"
_DENSITY = "with method ties, with method auto, or with sparsify"

MERGING = (
    Need("scope", "with method auto; global with ties too, on whose vote it decides", _word("scope"),
         lambda recipe: recipe.method == AUTO or (recipe.method == "ties" and recipe.optimizer.scope == "global")),
    Need("profile", _DECIDED, _word("profile"), _decides),
    Need("rules", _DECIDED, _word("rules"), _decides),
    Need("smoothing", "with method auto or ties, and scope per_prefix", _beyond_zero("smoothing"),
         lambda recipe: recipe.method in (AUTO, "ties") and recipe.optimizer.scope == "per_prefix"),
    Need("refinement", _BY_STRATEGY, _word("refinement"), _chosen),
    Need("sparsify", _BY_STRATEGY, _word("sparsify"), _chosen),
    Need("density", _DENSITY, _param("density"), lambda recipe: _votes(recipe) or _sparsified(recipe)),
    Need("density auto", _DENSITY, _param("auto_density"), lambda recipe: _votes(recipe) or _sparsified(recipe)),
    Need("dampening", "with sparsify dare or dare_conflict", _beyond_zero("dampening"), _drops("dare")),
    Need("linear_dampening", "with dampening", _param("linear_dampening"), _beyond_zero("dampening")),
    Need("document_della", "with sparsify della or della_conflict", _param("document_della"), _drops("della")),
    Need("count_divisor", "with method ties, or with method auto", _param("count_divisor"), _votes),
    Need("projection_vote", "with method ties or auto, and refinement enhanced", _param("projection_vote"),
         lambda recipe: _votes(recipe) and recipe.optimizer.refinement == "enhanced"),
    Need("drop_selfish", "with refinement enhanced or maximum", _param("drop_selfish"),
         lambda recipe: _chosen(recipe) and recipe.optimizer.refinement != "standard"),
    Need("auto-strength", _BY_STRATEGY, _param("auto_strength"), _chosen),
    Need("output-strength", _BY_STRATEGY, _param("output_strength"), _chosen),
    Need("output-strength auto", _BY_STRATEGY, _param("auto_output_strength"), _chosen),
    Need("no-normalize", "with method auto, weighted_average, slerp, consensus or ties",
         lambda recipe: recipe.params.get("normalize") is False, _averages),
    Need("no-normalize", "without count_divisor, where all is TIES",
         lambda recipe: _averages(recipe) and recipe.params.get("normalize") is False, _has_means),
    Need("lossless", _BY_STRATEGY, _param("lossless"), _chosen),
    Need("lossless", "where factors are not exact already: with method auto, consensus or ties, refinement enhanced or "
         "sparsify, and no refinement maximum", _param("lossless"), _fills, "note"),
    Need("lossless", "without rank, max-rank and max-error, which cut",
         _param("lossless"), _without("rank", "auto", "max_rank", "max_error")),
    Need("rank", "as a number or as auto, not both", _param("rank"), _without("auto")),
    Need("max-error", "without a fixed rank", _param("max_error"),
         lambda recipe: "rank" not in recipe.params or bool(recipe.params.get("auto"))),
    Need("max-rank", "without a fixed rank above it", _param("max_rank"), _limits),
    Need("conflict_modes and key_filters", "with a method of this program, not with another one's",
         lambda recipe: any((lora.conflict_mode, lora.key_filter) != ("all", "all") for lora in recipe.loras),
         lambda recipe: recipe.method not in COMPATIBLE),
    Need("base", "with a method of this program, not with another one's",
         lambda recipe: "A" in recipe.models, lambda recipe: recipe.method not in COMPATIBLE),
    Need("seed", "with sparsify, or with a method of another program that has dare in its name",
         lambda recipe: recipe.seed != 0, _is_random, "note"),
)  # fmt: skip

RESIZING = (
    Need("rank", "without keep and rule, which find the rank; max-rank limits what they find",
         lambda recipe: "rank" in recipe.params, lambda recipe: recipe.method in ("rank", "kohya_resize")),
    Need("max-rank", "with keep", lambda recipe: "max_rank" in recipe.params, lambda recipe: "keep" in recipe.params),
)  # fmt: skip

NEEDS: Mapping[str, Sequence[Need]] = {"lora_merge": MERGING, "lora_resize": RESIZING}


def refuse_unheeded(recipe: Recipe) -> list[Problem]:
    """Say which options of a recipe would change nothing.

    Args:
        recipe: of a LoRA task.

    Returns:
        notes about those that do no harm.

    Raises:
        RecipeError: one that its user counts on.
    """
    found = list(_unheeded(recipe))
    for problem in found:
        if problem.level == "error":
            raise RecipeError(problem.what, hint=problem.hint)
    return found


def _unheeded(recipe: Recipe) -> Iterator[Problem]:
    method = recipe.method or "concat"
    for need in NEEDS.get(recipe.task, ()):
        if need.given(recipe) and not need.met(recipe):
            what = f"{need.option} {'take' if ' and ' in need.option else 'takes'} effect only {need.needs}"
            here = f"; the method here is {method}" if "method" in need.needs else ""
            yield Problem(need.level, what + here, hint=f"leave {need.option} out, or give what it needs")


def needs_table() -> str:
    """The options of `lora merge` and `lora resize` and what they need, as a table in Markdown."""
    rows = [
        f"| {task.removeprefix('lora_')} | {_shown(need.option)} | {need.needs} |"
        for task, needs in NEEDS.items()
        for need in needs
    ]
    return "\n".join(["| lora | option | takes effect only |", "|---|---|---|", *rows])


def _shown(option: str) -> str:
    """An option as the command line, or where that has none Python, spells it."""
    return " and ".join(f"`{name}`" if "_" in name else f"`--{name}`" for name in option.split(" and "))
