"""DARE whose chance to keep a change grows with the change's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..lazy import torch
from .arithmetic import as_bits, chosen_or, step_towards
from .random import STEPS
from .registry import Measure, Param, merge_method
from .scratch import room, scalar
from .similarity import gaps

if TYPE_CHECKING:
    from torch import Tensor

# A smaller exponent counts as this one, as in the tool in which the method became known.
LEAST_POWER = 0.001


def as_mask(truth: Tensor) -> Tensor:
    """Mask for `arithmetic.chosen_or`: all bits set where `truth` is not 0; overwrites it.

    Args:
        truth: integers of the size of the elements to be masked.
    """
    return truth.ne_(0).neg_()


def largest_change(a: Tensor, b: Tensor, **_: Any) -> float:
    """Largest |B − A|, 0 for no elements: a tile's part of a measure."""
    return float(gaps(a, b, wide=False).amax()) if a.numel() else 0.0


def largest(parts: list[float]) -> float:
    """Of the tiles' parts, the largest."""
    return max(parts, default=0.0)


def keep_share(
    change: Tensor,
    largest: float,
    draws: Tensor | None,
    power: float,
    floor: float,
    smoothness: float,
    *,
    rescale: bool = False,
) -> Tensor:
    """Share of each change that stays: chance at smoothness 0, the probability itself at 1, a mix between.

    Args:
        change: B − A or A − B, float32 or float64.
        largest: its largest magnitude in the whole tensor, not 0.
        draws: int32, same shape; needed where smoothness < 1.
        power: exponent of |change|/largest, which gives the probability.
        floor: least probability.
        smoothness: 0 … 1.
        rescale: divide by the probability, so that the expected share is 1 (0 where no draw is below the probability).

    Returns:
        Same shape and dtype; exactly 1 for the largest change. Good until this thread's next call.
    """
    ratio = torch.abs(change, out=room("chance", change)).div_(scalar(largest, change))
    chance = powered(ratio, max(power, LEAST_POWER)).clamp_(floor, 1.0)
    if smoothness == 1:
        return chance.fill_(1.0) if rescale else chance
    assert draws is not None
    if rescale:  # the probability in effect, for draws are multiples of 1/65536
        chance.mul_(STEPS).sub_(0.5).ceil_().clamp_(min=0.0).div_(STEPS)
    kept = room("kept", chance).copy_(draws).add_(scalar(0.5, chance)).div_(scalar(STEPS, chance)).lt_(chance)
    if smoothness == 0:
        share = kept
    else:
        share = torch.sub(chance, kept, out=room("share", chance)).mul_(scalar(smoothness, chance)).add_(kept)
    return share.div_(chance.clamp_(min=1 / STEPS)) if rescale else share


def powered(ratio: Tensor, power: float) -> Tensor:
    """ratio**power; overwrites `ratio`, which is 0 … 1. torch's own pow depends on a tile's length."""
    if power == 1:
        return ratio
    return ratio.mul_(ratio) if power == 2 else ratio.log_().mul_(scalar(power, ratio)).exp_()


def add_shares(
    a: Tensor, b: Tensor, change: Tensor, share: Tensor, multiplier: float, chosen: Tensor | None = None
) -> Tensor:
    """A − multiplier·change; B bit for bit where share·multiplier is 1, A bit for bit where nothing is added.

    Args:
        a: overwritten.
        b: overwritten.
        change: share·(A − B); overwritten.
        share: overwritten.
        multiplier: any finite number.
        chosen: mask; elements outside it keep A. None is everywhere.
    """
    exact = as_mask(as_bits(share.eq_(1))) if multiplier == 1 else None
    change.mul_(scalar(multiplier, change)).add_(
        scalar(0.0, change)
    )  # turns −0.0 into 0.0, and A − 0.0 has the bits of A
    if chosen is not None:
        as_bits(change).bitwise_and_(chosen)
        exact = None if exact is None else exact.bitwise_and_(chosen)
    a.sub_(change)
    return a if exact is None else chosen_or(a, b, exact)


@merge_method(
    "power_up_dare_enhanced",
    label="Power-up enhanced (DARE)",
    inputs="AB",
    strength="delta",
    params=(
        Param("alpha", 2.0, "power: the higher, the fewer of the smaller changes stay", 0.0, slider=(0.0, 4.0)),
        Param("beta", 0.01, "floor: least probability that a change stays", 0.0, 1.0),
        Param("gamma", 0.0, "smoothness: 0 keeps or drops each change by chance, 1 scales it instead", 0.0, 1.0),
        Param("delta", 1.0, "multiplier of the changes that stay", slider=(-1.0, 4.0)),
        Param("rescale", False, "divide what stays by its probability, so that the whole keeps its expected size"),
    ),
    formula="A + delta·k·(B − A), k = keep + gamma·(p − keep), keep = 1 with probability p, else 0, "
    "p = (|B − A|/max|B − A|)^alpha, at least beta (alpha below 0.001 counts as 0.001); "
    "rescale: k is divided by p, so that the expected result is A + delta·(B − A)",
    measures=(Measure(largest_change, largest, needed=lambda params: params["delta"] != 0 and params["beta"] < 1),),
    random="element",
    settled="gamma",
    exact_a="delta = 0",
    exact_b="beta = 1 and delta = 1",
)
def power_up_dare_enhanced(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float,
    beta: float,
    gamma: float,
    delta: float,
    rescale: bool,
    measures: Sequence[float],
    draws: Tensor | None = None,
) -> Tensor:
    """Add a part of what B changed: the larger a change, the likelier it stays.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: power, 0 or more.
        beta: floor, 0 … 1.
        gamma: smoothness, 0 … 1.
        delta: any finite number.
        rescale: divide by the probability.
        measures: max |B − A| of the whole tensor.
        draws: int32, same shape, needed where gamma < 1; see `kernels.random.draws`.

    Returns:
        The sum, same shape and dtype.
    """
    if delta == 0 or beta == 1:
        return step_towards(a, b, delta)
    if measures[0] == 0:
        return a
    change = torch.sub(a, b, out=room("change", a))
    share = keep_share(change, measures[0], draws, alpha, beta, gamma, rescale=rescale)
    return add_shares(a, b, change.mul_(share), share, delta)
