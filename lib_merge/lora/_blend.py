"""The LoRAs of one weight to one change: exactly in their factors where the way is linear, else entry by entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..choose import Choice
from ..kernels import combinations, lowrank
from ..kernels.auto_strength import auto_scale
from ..kernels.knots import shared_basis
from ..recipe import ConflictMode
from ._members import Member
from ._metrics import Relations
from ._settings import AUTO, Settings
from ._steps import Way, put_together

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Blended:
    """One weight's result, the output strength left out.

    Attributes:
        norm: its size.
        up: [out, R], where the result is a product, exactly.
        down: [R, rest].
        whole: the result as a matrix [out, rest], where it is none.
        balanced: the factors are of like sizes already.
        density: share of entries kept; NaN where none were dropped.
        selfish_share: see `Outcome`.
        note: for the report.
    """

    norm: float
    up: Tensor | None = None
    down: Tensor | None = None
    whole: Tensor | None = None
    balanced: bool = True
    density: float = math.nan
    selfish_share: float = math.nan
    note: str = ""


def is_linear(choice: Choice, settings: Settings, modes: Sequence[ConflictMode]) -> bool:
    """Whether the result is a sum of the LoRAs with a number each."""
    return (
        choice.strategy in _SCALARS
        and not settings.refined
        and not settings.sparsified
        and all(mode == "all" for mode in modes)
    )


def linear_scalars(choice: Choice, relations: Relations, settings: Settings) -> tuple[list[float], float]:
    """A number for each LoRA of a linear way, and the size of the result.

    Args:
        choice: of a linear strategy.
        relations: tell inner products and strengths.
        settings: tell what the result's size is to be.
    """
    strengths = list(relations.strengths)
    signs = [math.copysign(1.0, s) for s in strengths]
    raw = relations.gram.tolist()
    oriented = [[a * b * value for b, value in zip(signs, row, strict=True)] for a, row in zip(signs, raw, strict=True)]
    scalars = _SCALARS[choice.strategy](oriented, strengths)
    norm = _norm(raw, scalars)
    factor = gain(choice, relations, settings, norm)
    return [factor * scalar for scalar in scalars], abs(factor) * norm


# Strategy -> (Gram matrix of the oriented changes, strengths) -> a number for each change.
_SCALARS: dict[str, Callable[[list[list[float]], list[float]], list[float]]] = {
    "weighted_sum": lambda gram, strengths: combinations.weighted_sum_scalars(strengths),
    "weighted_average": lambda gram, strengths: combinations.weighted_average_scalars(strengths),
    "slerp": lambda gram, strengths: combinations.slerp_scalars(gram, strengths),
}


def _norm(gram: list[list[float]], scalars: list[float]) -> float:
    square = math.fsum(
        a * value * b for a, row in zip(scalars, gram, strict=True) for value, b in zip(row, scalars, strict=True)
    )
    return math.sqrt(max(square, 0.0))


def gain(choice: Choice, relations: Relations, settings: Settings, norm: float) -> float:
    """What a merged change is multiplied by.

    Without `normalize`, means get the size of the strengths back: Σs²/Σ|s|. With `auto_strength` the result is no
    larger than the largest input at its strength.
    """
    strengths = [abs(s) for s in relations.strengths]
    sums = choice.strategy == "weighted_sum"
    sized = sums or (choice.strategy == "ties" and settings.count_divisor)  # the strengths count already
    factor = 1.0 if sized or settings.normalize else sum(s * s for s in strengths) / sum(strengths)
    on = settings.auto_strength
    if on or (on is None and sums and settings.method == AUTO):
        sizes = [s * size for s, size in zip(strengths, relations.norms, strict=True)]
        factor *= auto_scale(sizes, factor * norm)
    return factor


def blend(
    members: Sequence[Member],
    relations: Relations,
    choice: Choice,
    settings: Settings,
    modes: Sequence[ConflictMode],
    name: str,
    vector: bool = False,
) -> Blended:
    """Put the LoRAs of a weight together.

    Args:
        members: two or more, those that `relations` measured.
        relations: their numbers.
        choice: the strategy.
        settings: what was asked for.
        modes: which entries of each LoRA take part.
        name: of the weight, on which draws depend.
        vector: the weight has one dimension.
    """
    if is_linear(choice, settings, modes):
        return _linear(members, relations, choice, settings)
    density = settings.kept(relations.density)
    thinned = settings.sparsified or choice.strategy == "ties"
    wants_basis = settings.words.refinement == "maximum"
    in_basis = wants_basis and members[0].up is not None
    way = Way(choice, settings, name, relations.members, modes, relations.numbers().cos, density, in_basis)
    ups = [member.up for member in members if member.up is not None]
    downs = [member.down for member in members if member.down is not None]
    if in_basis:
        up, spread = shared_basis(ups, downs)
    else:
        spread = [member.matrix().reshape(-1) if vector else member.matrix() for member in members]
    made = put_together(spread, relations.strengths, way)
    norm = math.sqrt(lowrank.energy(made.change))
    factor = gain(choice, relations, settings, norm)
    change = made.change * factor if factor != 1 else made.change
    change = change.reshape(-1, 1) if vector else change
    note = "; ".join(filter(None, (made.note, _NO_BASIS if wants_basis and not in_basis else "")))
    told = density if thinned else math.nan, made.selfish_share, note
    if in_basis:
        return Blended(abs(factor) * norm, up, change, None, False, *told)
    return Blended(abs(factor) * norm, None, None, change, True, *told)


_NO_BASIS = "no common basis: a LoRA stores whole changes here"


def _linear(members: Sequence[Member], relations: Relations, choice: Choice, settings: Settings) -> Blended:
    scalars, norm = linear_scalars(choice, relations, settings)
    terms = [
        (member.up, member.down, scalar)
        for member, scalar in zip(members, scalars, strict=True)
        if member.up is not None and member.down is not None
    ]
    if len(terms) == len(members):
        up, down = lowrank.joined(terms)
        return Blended(norm, up, down)
    total = combinations.combined([member.matrix() for member in members], scalars)
    return Blended(norm, whole=total)
