"""The method that looks at each tensor's changes first and then chooses how they are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..choose import Choice, Numbers, Profile, choose
from . import combinations, votes
from .consensus import consensus
from .measure import BLOCK, dot
from .registry import Columns, Param, merge_method
from .relations import sign_counts
from .similarity import undefined

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """What is done with a tensor.

    Attributes:
        acting: numbers of the donors that change it, and have a strength.
        strengths: of these.
        gram: [N][N] inner products of their changes.
        numbers: what the choice follows from.
        choice: strategy, reason, and how TIES votes.
    """

    acting: tuple[int, ...]
    strengths: tuple[float, ...]
    gram: list[list[float]]
    numbers: Numbers
    choice: Choice


def decide(a: Tensor, donors: Sequence[Tensor], strengths: Sequence[float], profile: Profile) -> Decision:
    """Measure the changes of a tensor and choose; the tensors stay as they are.

    Args:
        a: the base, float32 or float64, any shape.
        donors: same shape and dtype.
        strengths: of each donor; those with 0, and those that change nothing, have no say.
        profile: see `choose.choose`.
    """
    gram, opposed, both = _sums(a, donors)
    acting = tuple(k for k, strength in enumerate(strengths) if strength and gram[k][k] != 0)
    parts = [[[matrix[i][j] for j in acting] for i in acting] for matrix in (gram, opposed, both)]
    chosen = tuple(strengths[k] for k in acting)
    numbers = Numbers.of(chosen, *parts)
    choice = choose(numbers, profile=profile)
    if len(acting) < 2:
        choice = Choice("weighted_sum", "one model alone changes it" if acting else "no model changes it")
    return Decision(acting, chosen, parts[0], numbers, choice)


def _sums(a: Tensor, donors: Sequence[Tensor]) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Inner products of the changes, positions where two have different signs, and where both are not 0.

    Float64, over fixed blocks, added exactly: neither threads nor the order of the blocks matter.
    """
    count = len(donors)
    products: dict[tuple[int, int], list[float]] = {(i, j): [] for i in range(count) for j in range(i, count)}
    opposed, both = ([[0.0] * count for _ in range(count)] for _ in range(2))
    flat, *others = (tensor.reshape(-1) for tensor in (a, *donors))
    for low in range(0, flat.numel(), BLOCK):
        base = flat[low : low + BLOCK].double()
        changes = [other[low : low + BLOCK].double() - base for other in others]
        for (i, j), parts in products.items():
            parts.append(dot(changes[i], changes[j]))
        for total, found in zip((opposed, both), sign_counts(changes), strict=True):
            for i, row in enumerate(found.tolist()):
                total[i] = [x + y for x, y in zip(total[i], row, strict=True)]
    sums = {pair: _sum(parts) for pair, parts in products.items()}
    gram = [[sums[min(i, j), max(i, j)] for j in range(count)] for i in range(count)]
    return gram, opposed, both


def _sum(parts: list[float]) -> float:
    """The exact sum, rounded once; NaN where squares are beyond float64."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):
        return math.nan


def _profile(slerp: bool, classic: bool) -> Profile:
    return "classic" if classic else "v1.2" if slerp else "no_slerp"


def told(
    a: Tensor,
    *donors: Tensor,
    strengths: Sequence[float],
    alpha: float,
    density: float,
    slerp: bool,
    classic: bool,
) -> Columns:
    """What the report says of a tensor: the choice, its reason, and the numbers that it follows from."""
    if alpha == 0:
        return {"strategy": "", "n": 0.0}
    found = decide(a, donors, strengths, _profile(slerp, classic))
    numbers, choice = found.numbers, found.choice
    columns: Columns = {"strategy": choice.strategy, "reason": choice.reason, "n": float(numbers.n)}
    if numbers.n > 1:
        columns |= {"cosine": numbers.cos, "sign_conflict": numbers.conflict}
        columns |= {"conflict_expected": numbers.expected, "ratio": numbers.ratio}
    return columns | ({"density": density} if choice.strategy == "ties" else {})


@merge_method(
    "auto",
    label="Auto: chosen tensor by tensor",
    inputs="ABC",
    more=True,
    strength="alpha",
    params=(
        Param("alpha", 1.0, "multiplier of the merged change: 0 is A", slider=(0.0, 2.0)),
        Param("density", 0.5, "TIES: share of each model's change that is kept, its largest entries", 0.0, 1.0),
        Param("slerp", True, "false: averages instead of SLERP and consensus (the profile no_slerp)"),
        Param("classic", False, "true: average and TIES alone (the profile classic)"),
    ),
    formula="A + alpha·merge(d₁, d₂, …), d = B − A, C − A … with strengths s; by each tensor's mean cosine and sign "
    "conflict the first that fits: cosine > 0.5 and conflict < 15 %: consensus, Σs·d³/Σs·d² at norm Σs·‖d‖/Σs; "
    "|cosine| < 0.25 and conflict < 60 %: SLERP at that norm; conflict > 25 %: TIES of the share density; else SLERP; "
    "without slerp: averages Σs·d/Σs for SLERP and no consensus; classic: nor a test for |cosine| < 0.25; a change "
    "that is alone: s·d",
    kind="whole",
    exact_a="alpha = 0, and where no other model differs from A",
    explain=told,
)
def auto(
    a: Tensor,
    *donors: Tensor,
    strengths: Sequence[float],
    alpha: float,
    density: float,
    slerp: bool,
    classic: bool,
) -> Tensor:
    """Put what any number of models changed in a base together, tensor by tensor in the way that fits them.

    Where one model alone changes a tensor, its change comes at full strength. The others' mean cosine and sign conflict
    tell whether their changes are alike, unrelated or at odds.

    Args:
        a: the base, a whole tensor, float32 or float64; overwritten.
        donors: two or more of the same shape and dtype; overwritten.
        strengths: one for each donor; a negative one turns its change round.
        alpha: multiplier of the result's change.
        density: share kept by TIES, 0 … 1.
        slerp: SLERP and consensus may be chosen.
        classic: average and TIES alone may be chosen.

    Returns:
        The merge, same shape and dtype.
    """
    if alpha == 0:
        return a
    found = decide(a, donors, strengths, _profile(slerp, classic))
    if not found.acting:
        return a
    if not all(map(math.isfinite, found.numbers.norms)):
        return undefined(a)
    changes = [donors[k].sub_(a) for k in found.acting]
    return a.add_(_STRATEGIES[found.choice.strategy](changes, found, density).mul_(alpha))


def _voted(changes: Sequence[Tensor], found: Decision, density: float) -> Tensor:
    gs, ws = _oriented(changes, found.strengths)
    return votes.ties(gs, ws, density, found.choice.vote)


def _agreed(changes: Sequence[Tensor], found: Decision, density: float) -> Tensor:
    """Without the spectral cleanup, which takes minutes for each large weight of a checkpoint."""
    gs, ws = _oriented(changes, found.strengths)
    return consensus(gs, ws, cleanup=False)


def _oriented(changes: Sequence[Tensor], strengths: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """As `combinations.oriented`, in place."""
    gs = [change if s > 0 else change.neg_() for change, s in zip(changes, strengths, strict=True)]
    return gs, [abs(s) for s in strengths]


def _summed(changes: Sequence[Tensor], found: Decision, density: float) -> Tensor:
    return combinations.combined(changes, combinations.weighted_sum_scalars(found.strengths))


def _averaged(changes: Sequence[Tensor], found: Decision, density: float) -> Tensor:
    return combinations.combined(changes, combinations.weighted_average_scalars(found.strengths))


def _along_the_arc(changes: Sequence[Tensor], found: Decision, density: float) -> Tensor:
    signs = [math.copysign(1.0, s) for s in found.strengths]
    rows = zip(found.gram, signs, strict=True)
    gram = [[x * own * other for x, other in zip(row, signs, strict=True)] for row, own in rows]
    return combinations.combined(changes, combinations.slerp_scalars(gram, found.strengths))


_STRATEGIES: dict[str, Callable[[Sequence[Tensor], Decision, float], Tensor]] = {
    "weighted_sum": _summed,
    "weighted_average": _averaged,
    "slerp": _along_the_arc,
    "ties": _voted,
    "consensus": _agreed,
}
