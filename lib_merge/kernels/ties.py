"""Drop, then trim: of the changes that chance leaves, the smallest go (TIES, arXiv:2306.01708).

The limit below which changes go is an exact order statistic of a whole tensor of any size. Magnitudes are compared by
their bits: a first pass counts them by their upper half, a second one looks into the one bin where the limit lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..lazy import np, torch
from .arithmetic import as_bits, chosen_or, mask_below, step_towards
from .dare_enhanced import add_shares, keep_share, largest, largest_change
from .random import STEPS, threshold
from .registry import Measure, Param, Value, merge_method
from .scratch import room
from .similarity import gaps

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    # Bits of the magnitudes of a tile's changes, and which of some of them (slice or indices) are kept and not 0.
    Changes = tuple[NDArray[Any], Callable[[Any], NDArray[np.bool_]]]

_NUDGE = 1 + 2**-50  # beyond the rounding of quantile times count: 0.29 of 100 is 29


class Bin(NamedTuple):
    """Upper half of the limit's bits, and how many smaller magnitudes share it."""

    upper: int
    smaller: int


class Histogram(NamedTuple):
    """How many magnitudes of a tile have each upper half, from `first` on; `quantile` of all are to be trimmed."""

    quantile: float
    first: int
    counts: NDArray[np.uint32]


class Candidates(NamedTuple):
    """The different magnitudes of a tile that lie in the limit's bin, and how often each occurs."""

    smaller: int
    bits: NDArray[np.signedinteger[Any]]
    counts: NDArray[np.uint32]


def _shift(bits: NDArray[Any]) -> int:
    """Bits below the sign and 15 more: the lower half of a float32 pattern, 48 of a float64 one."""
    return bits.itemsize * 8 - 16


def _find_bin(parts: list[Histogram | None]) -> Bin | None:
    """Where the smallest magnitude lies that stays; None where nothing can be trimmed."""
    known = [part for part in parts if part is not None]
    counts = np.zeros(max((part.first + part.counts.size for part in known), default=0), dtype=np.int64)
    for part in known:
        counts[part.first : part.first + part.counts.size] += part.counts
    upto, survivors = np.cumsum(counts), int(counts.sum())
    if survivors == 0:
        return None
    trimmed = min(math.floor(known[0].quantile * survivors * _NUDGE), survivors - 1)
    upper = int(np.searchsorted(upto, trimmed, side="right"))
    return Bin(upper, trimmed - int(upto[upper] - counts[upper]))


def _find_limit(parts: list[Candidates | None]) -> int | None:
    """Bits of the smallest magnitude that stays."""
    if not (known := [part for part in parts if part is not None]):
        return None
    bits = np.concatenate([part.bits for part in known])
    order = np.argsort(bits, kind="stable")
    upto = np.cumsum(np.concatenate([part.counts for part in known])[order], dtype=np.int64)
    return int(bits[order[np.searchsorted(upto, known[0].smaller, side="right")]])


def _limit_measures(
    changes_of: Callable[..., Changes | None], needed: Callable[[Mapping[str, Value]], bool]
) -> tuple[Measure, Measure]:
    """Two measures: the bin of the limit, then its bits.

    Args:
        changes_of: takes what the method takes; gives the changes it makes before trimming, None where it makes none.
        needed: parameters -> whether something is trimmed.
    """

    def count(*operands: Tensor, **settings: Any) -> Histogram | None:
        if (changes := changes_of(*operands, **settings)) is None:
            return None
        bits, kept = changes
        upper = bits.compress(kept(slice(None))) >> _shift(bits)
        first = int(upper.min()) if upper.size else 0
        return Histogram(settings["beta"], first, np.bincount(upper - first).astype(np.uint32))

    def gather(*operands: Tensor, measures: Sequence[Any], **settings: Any) -> Candidates | None:
        wanted: Bin | None = measures[-1]
        if wanted is None or (changes := changes_of(*operands, measures=measures, **settings)) is None:
            return None
        bits, kept = changes
        at = np.flatnonzero(bits >> _shift(bits) == wanted.upper)
        found, counts = np.unique(bits[at[kept(at)]], return_counts=True)
        return Candidates(wanted.smaller, found, counts.astype(np.uint32))

    steps = ((count, _find_bin), (gather, _find_limit))
    first, second = (Measure(tile, combine, drawn=True, needed=needed) for tile, combine in steps)
    return first, second


def _trims(params: Mapping[str, Value]) -> bool:
    return 0 < params["beta"] < 1 and params["gamma"] != 0 and threshold(1 - params.get("alpha", 0)) > 0


def _survivors(a: Tensor, b: Tensor, alpha: float, draws: Tensor, **_: Any) -> Changes:
    limit = threshold(1 - alpha)
    bits, drawn = as_bits(gaps(a, b, wide=False)).reshape(-1).cpu().numpy(), draws.reshape(-1).cpu().numpy()
    return bits, lambda at: (bits[at] > 0) & (drawn[at] < limit)


@merge_method(
    "power_up_dare_ties",
    label="Power-up (DARE + TIES)",
    inputs="AB",
    strength="gamma",
    params=(
        Param("alpha", 0.7, "drop rate: share of B's changes that are left out at random", 0.0, 1.0),
        Param("beta", 0.2, "trim quantile: share of the remaining changes, the smallest, that go too", 0.0, 1.0),
        Param("gamma", 1.0, "multiplier of the changes that stay", slider=(-1.0, 4.0)),
    ),
    formula="A + gamma·keep·trim·(B − A)/(1 − alpha), keep = 1 with probability 1 − alpha, else 0; of the n changes "
    "kept that are not 0, trim = 0 for the beta·n smallest (rounded down; those equal to the next one stay), else 1",
    measures=_limit_measures(_survivors, _trims),
    random="element",
    exact_arithmetic=True,
    exact_a="alpha = 1, beta = 1 or gamma = 0",
    exact_b="alpha = 0, beta = 0 and gamma = 1",
)
def power_up_dare_ties(
    a: Tensor, b: Tensor, *, alpha: float, beta: float, gamma: float, draws: Tensor, measures: Sequence[Any]
) -> Tensor:
    """Add a random part of what B changed, without its smallest changes, scaled up for what chance left out.

    Nothing is scaled up for what is trimmed. One donor leaves no disagreement about signs to settle.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: drop rate, 0 … 1.
        beta: trim quantile, 0 … 1.
        gamma: any finite number.
        draws: int32, same shape; see `kernels.random.draws`; overwritten.
        measures: the limit's bin, and the bits of the limit.

    Returns:
        The sum, same shape and dtype; what is dropped or trimmed has the bits of A.
    """
    limit = threshold(1 - alpha)
    if limit == 0 or beta == 1 or gamma == 0:
        return a
    share = gamma * STEPS / limit
    chosen = None if limit == STEPS else mask_below(draws, limit, a)
    if beta == 0:
        return step_towards(a, b, share, chosen)
    if (smallest := measures[1]) is None:
        return a
    if share == 1:
        large = as_bits(torch.sub(b, a).abs_()).ge_(smallest).neg_()
        return chosen_or(a, b, large if chosen is None else large.bitwise_and_(chosen))
    back = torch.sub(a, b, out=b) if share > 0 else b.sub_(a)
    if chosen is not None:
        as_bits(back).bitwise_and_(chosen)
    below = float(as_bits(back.new_zeros(1)).add_(smallest - 1).view(back.dtype))
    return a.sub_(torch.hardshrink(back, below, out=back).mul_(abs(share)))


def _kept_change(a: Tensor, b: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Share·(A − B) and the share; good until this thread's next call."""
    change = torch.sub(a, b, out=room("change", a))
    power, floor, smoothness = settings["delta"], settings["epsilon"], settings["zeta"]
    share = keep_share(change, settings["measures"][0], settings["draws"], power, floor, smoothness)
    return change.mul_(share), share


def _kept(a: Tensor, b: Tensor, **settings: Any) -> Changes | None:
    if settings["measures"][0] == 0:
        return None
    bits = as_bits(_kept_change(a, b, **settings)[0].abs_()).reshape(-1).cpu().numpy()
    return bits, lambda at: bits[at] > 0


@merge_method(
    "power_up_dare_ties_enhanced",
    label="Power-up enhanced (DARE + TIES)",
    inputs="AB",
    strength="gamma",
    params=(
        Param("beta", 0.2, "trim quantile: share of the remaining changes, the smallest, that go too", 0.0, 1.0),
        Param("gamma", 1.0, "multiplier of the changes that stay", slider=(-1.0, 4.0)),
        Param("delta", 2.0, "power: the higher, the fewer of the smaller changes stay", 0.0, slider=(0.0, 4.0)),
        Param("epsilon", 0.01, "floor: least probability that a change stays", 0.0, 1.0),
        Param("zeta", 0.0, "smoothness: 0 keeps or drops each change by chance, 1 scales it instead", 0.0, 1.0),
    ),
    formula="A + gamma·trim·k·(B − A), k = keep + zeta·(p − keep), keep = 1 with probability p, else 0, "
    "p = (|B − A|/max|B − A|)^delta, at least epsilon (delta below 0.001 counts as 0.001); trim = 0 for the beta·n "
    "smallest (rounded down; those equal to the next one stay) of the n products k·(B − A) that are not 0, else 1",
    measures=(
        Measure(
            largest_change,
            largest,
            needed=lambda params: (
                params["gamma"] != 0 and params["beta"] < 1 and (params["beta"] > 0 or params["epsilon"] < 1)
            ),
        ),
        *_limit_measures(_kept, _trims),
    ),
    random="element",
    settled="zeta",
    exact_a="beta = 1 or gamma = 0",
    exact_b="beta = 0, gamma = 1 and epsilon = 1",
)
def power_up_dare_ties_enhanced(
    a: Tensor,
    b: Tensor,
    *,
    beta: float,
    gamma: float,
    delta: float,
    epsilon: float,
    zeta: float,
    measures: Sequence[Any],
    draws: Tensor | None = None,
) -> Tensor:
    """Add a part of what B changed, the larger changes likelier than the smaller, without the smallest that stayed.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        beta: trim quantile, 0 … 1.
        gamma: any finite number.
        delta: power, 0 or more.
        epsilon: floor, 0 … 1.
        zeta: smoothness, 0 … 1.
        measures: max |B − A| of the whole tensor, the limit's bin, and the bits of the limit.
        draws: int32, same shape, needed where zeta < 1; see `kernels.random.draws`.

    Returns:
        The sum, same shape and dtype; what is dropped or trimmed has the bits of A.
    """
    if gamma == 0 or beta == 1:
        return a
    if beta == 0 and epsilon == 1:
        return step_towards(a, b, gamma)
    smallest = 1 if beta == 0 else measures[2]
    if measures[0] == 0 or smallest is None:
        return a
    change, share = _kept_change(a, b, delta=delta, epsilon=epsilon, zeta=zeta, draws=draws, measures=measures)
    chosen = as_bits(change.abs()).ge_(smallest).neg_()
    return add_shares(a, b, change, share, gamma, chosen)
