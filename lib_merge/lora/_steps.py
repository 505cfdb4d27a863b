"""The steps that look at single entries: masks, split, orthogonalisation, dropping, and the strategy itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..choose import Choice
from ..kernels import combinations, lowrank, sparsify
from ..kernels.consensus import consensus
from ..kernels.random import draws, stream_key
from ..kernels.selfish import shared_mask, tall_split
from ..kernels.votes import Divisor, Score, columnwise, conflict_mask, conflict_mode_masks, ties, trim
from ..recipe import ConflictMode
from ._settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Way:
    """How the LoRAs of one weight are put together.

    Attributes:
        choice: the strategy.
        settings: what was asked for.
        name: of the weight, on which draws depend.
        numbers: of the LoRAs.
        modes: which entries of each take part.
        cosine: mean over pairs.
        density: share of entries kept.
        in_basis: entries are coordinates in a common basis, whose rows are no neurons.
    """

    choice: Choice
    settings: Settings
    name: str
    numbers: Sequence[int]
    modes: Sequence[ConflictMode]
    cosine: float
    density: float
    in_basis: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the steps made of several changes.

    Attributes:
        change: the result.
        selfish_share: share of the positions where one LoRA's own entry was kept as it is; NaN without refinement.
        note: what was left out, and why.
    """

    change: Tensor
    selfish_share: float = math.nan
    note: str = ""


def put_together(deltas: Sequence[Tensor], strengths: Sequence[float], way: Way) -> Outcome:
    """Carry out the steps: conflict modes, split, orthogonalisation, dropping or trim, strategy, what was split off.

    Args:
        deltas: two or more, of one shape and dtype, without their strengths; not overwritten.
        strengths: of each, signed, none 0.
        way: which steps.

    Returns:
        A result of the deltas' shape, at the strengths given.
    """
    gs, ws = combinations.oriented(deltas, strengths)
    masks = conflict_mode_masks(gs, ws, way.modes)
    gs = [g if mask is None else g * mask for g, mask in zip(gs, masks, strict=True)]
    selfish, share = None, math.nan
    shared = None
    if way.settings.refined:
        if way.settings.drop_selfish:
            shared = shared_mask(gs, ws)
            share = 1.0 - float(shared.double().mean())
        else:
            selfish, gs, share = tall_split(gs, ws)
        if way.choice.strategy != "consensus":
            gs, ws, way = _orthogonal(gs, ws, way)
    gs, note = _sparsified(gs, way) if way.settings.sparsified else (gs, "")
    result = _STRATEGIES[way.choice.strategy](gs, ws, way)
    if shared is not None:
        kept = result * shared
        return Outcome(kept, share, "; ".join(filter(None, (note, _smaller(result, kept)))))
    return Outcome(result if selfish is None else result + selfish, share, note)


def _smaller(before: Tensor, after: Tensor) -> str:
    """What taking entries away did to a result's size, at an output strength of 1."""
    sizes = (math.sqrt(lowrank.energy(x)) for x in (before, after))
    return "selfish entries taken away: norm {:.3g} before, {:.3g} after".format(*sizes)


def _orthogonal(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> tuple[list[Tensor], list[float], Way]:
    """The LoRAs made orthogonal; those of which nothing is left fall out.

    What shrank because others make it up already counts for less in a mean: near duplicates must not halve it.
    """
    gram = combinations.gram(gs)
    rows = combinations.orthogonalize_scalars(gram, ws)
    shares = combinations.kept_shares(gram, rows)
    left = [k for k, share in enumerate(shares) if share] or [0]
    sums = way.choice.strategy == "weighted_sum"
    weights = [ws[k] if sums else ws[k] * (shares[k] or 1.0) for k in left]
    made = [combinations.combined(gs, rows[k]) for k in left]
    return made, weights, replace(way, numbers=[way.numbers[k] for k in left])


def _sparsified(gs: Sequence[Tensor], way: Way) -> tuple[list[Tensor], str]:
    kind, _, in_conflict = way.settings.words.sparsify.partition("_")
    drawn = [_draws(g, number, way) for g, number in zip(gs, way.numbers, strict=True)]
    if not in_conflict:
        return [_dropped(kind, g, draw, way) for g, draw in zip(gs, drawn, strict=True)], ""
    made = sparsify.conflict_aware(
        kind,  # type: ignore[arg-type]
        gs, conflict_mask(gs), way.cosine, way.density, drawn, way.settings.dampening, *_variants(way.settings),
    )  # fmt: skip
    note = f"nothing dropped: a conflict of {made.share:.0%} of all entries is no more than chance"
    return made.tensors, note if made.skipped else ""


def _dropped(kind: str, g: Tensor, draw: Tensor, way: Way) -> Tensor:
    law, rule = _variants(way.settings)
    if kind == "dare":
        return sparsify.dare(g, way.density, draw, way.settings.dampening, law)
    return sparsify.della(g, way.density, draw, rule)


def _variants(settings: Settings) -> tuple[sparsify.Law, sparsify.Rule]:
    """Law of DARE's dampening, and rule of DELLA."""
    return "linear" if settings.linear_dampening else "power", "document" if settings.document_della else "window"


def _draws(g: Tensor, number: int, way: Way) -> Tensor:
    """Draws of the weight, the LoRA and the seed alone; the first LoRA's stream has no number."""
    more = () if number == 1 else (str(number),)
    return draws(stream_key(way.settings.seed, way.name, *more), 0, g.numel())


def _sum(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> Tensor:
    return combinations.combined(gs, combinations.weighted_sum_scalars(ws))


def _average(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> Tensor:
    return combinations.combined(gs, combinations.weighted_average_scalars(ws))


def _slerp(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> Tensor:
    return combinations.combined(gs, combinations.slerp_scalars(combinations.gram(gs), ws))


def _consensus(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> Tensor:
    return consensus(gs, ws, cleanup=True, recalibrate=True)


def _ties(gs: Sequence[Tensor], ws: Sequence[float], way: Way) -> Tensor:
    density = 1.0 if way.settings.sparsified else way.density
    divisor: Divisor = "count" if way.settings.count_divisor else "weight"
    if way.settings.refined and not way.in_basis:
        score: Score = "projection" if way.settings.projection_vote else "row_sum"
        return columnwise([trim(g, density) for g in gs], ws, way.choice.vote, divisor, score)
    return ties(gs, ws, density, way.choice.vote, divisor)


_STRATEGIES: dict[str, Callable[[Sequence[Tensor], Sequence[float], Way], Tensor]] = {
    "weighted_sum": _sum,
    "weighted_average": _average,
    "slerp": _slerp,
    "consensus": _consensus,
    "ties": _ties,
}
