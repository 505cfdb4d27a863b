"""Leave out part of a delta by chance and scale up the rest: DARE (arXiv:2311.03099) and DELLA (arXiv:2406.11617).

Draws come from `kernels.random`: 16 bits, u = (draw + ½)/65536. Probabilities are rounded to what such draws can give,
and what stays is divided by the rounded one: the mean over all draws is the delta exactly. Nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..lazy import np, torch
from .measure import row_block
from .random import STEPS, threshold

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Law = Literal["power", "linear"]
Rule = Literal["window", "document"]
Kind = Literal["dare", "della"]

_HALF_WIDTH = 0.15
# Of unrelated deltas half of all positions conflict by chance: that says nothing about where they disturb each other.
_CHANCE_CONFLICT = 0.4
_UNRELATED = 0.25


def dare(x: Tensor, density: float, draws: Tensor, dampening: float = 0.0, law: Law = "power") -> Tensor:
    """Each entry stays with probability `density`, multiplied by a factor; else it is 0.

    Args:
        x: float32 or float64, any shape.
        density: 0 (nothing stays) … 1 (all does).
        draws: int32, 0 … 65535, as many; see `kernels.random.draws`.
        dampening: 0 divides by the density, which keeps the mean; 1 leaves entries as they are. DAREx
            (arXiv:2410.09344) divides by a number between the two.
        law: how it goes between them; see `rescale_factor`.
    """
    limit = threshold(density)
    if limit == STEPS:
        return x
    kept = (draws.reshape(x.shape) < limit).to(x.device)
    return x * kept * (rescale_factor(limit / STEPS, dampening, law) if limit else 0.0)


def rescale_factor(density: float, dampening: float, law: Law = "power") -> float:
    """What DARE multiplies by: `power` density^−(1 − dampening), `linear` 1/(density + dampening·(1 − density)).

    Args:
        density: above 0, up to 1.
        dampening: 0 … 1.
        law: one of the two.
    """
    return _LAWS[law](density, dampening)


_LAWS: dict[Law, Callable[[float, float], float]] = {
    "power": lambda density, dampening: float(density ** -(1.0 - dampening)),
    "linear": lambda density, dampening: 1.0 / (density + dampening * (1.0 - density)),
}


def della(x: Tensor, density: float, draws: Tensor, rule: Rule = "window") -> Tensor:
    """DARE with a probability for each rank of size within a row, each entry divided by its own.

    Args:
        x: float32 or float64, any shape; rows are the first dimension, of one dimension all is one row.
        density: mean probability to stay, 0 … 1; 1 changes nothing.
        draws: int32, 0 … 65535, as many; see `kernels.random.draws`.
        rule: `window`: larger entries stay more likely, the mean is the density; at
            0.15 and below the smallest of a row never stays. `document`: as the optimizer's
            document has it, literally: larger entries go more likely, (1 − density)·rank/n, so that about half as
            many go as the density says.
    """
    if density >= 1:
        return x
    rows = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
    drawn = draws.reshape(rows.shape).to(x.device)
    by_rank = keep_limits(rows.shape[1], density, rule)
    out, size = torch.empty_like(rows), row_block(rows.shape[1])
    for low in range(0, len(rows), size):
        some = rows[low : low + size]
        limits = _by_size(some, by_rank).to(x.device)
        factors = STEPS / limits.clamp(min=1).to(x.dtype)
        torch.mul(some * factors, drawn[low : low + size] < limits, out=out[low : low + size])
    return out.reshape(x.shape)


def keep_limits(count: int, density: float, rule: Rule = "window") -> Tensor:
    """How many of the 65536 draws keep an entry, by its rank in a row, the smallest first: int32, [count].

    Args:
        count: entries in a row.
        density: 0 … 1.
        rule: see `della`.
    """
    ranks = torch.arange(count, dtype=torch.float64)
    probabilities = _RULES[rule](ranks, count, density)
    return (probabilities * STEPS - 0.5).ceil().clamp(0, STEPS).to(torch.int32)


def _window(ranks: Tensor, count: int, density: float) -> Tensor:
    """From density − e for the smallest to density + e for the largest; e leaves no probability outside 0 … 1."""
    reach = min(_HALF_WIDTH, density, 1 - density)
    return density + reach * (2 * ranks / max(count - 1, 1) - 1) if count > 1 else ranks + density


def _document(ranks: Tensor, count: int, density: float) -> Tensor:
    return 1 - (1 - density) * (ranks + 1) / count


_RULES: dict[Rule, Callable[[Tensor, int, float], Tensor]] = {"window": _window, "document": _document}


def _by_size(rows: Tensor, by_rank: Tensor) -> Tensor:
    """For each entry the number of its rank by size within its row; of equal ones the first ranks lower."""
    sizes = rows.detach().abs().cpu().numpy()
    order = torch.from_numpy(_ORDERS[sizes.itemsize](sizes))
    return torch.empty(order.shape, dtype=by_rank.dtype).scatter_(1, order, by_rank.expand_as(order))


def _narrow_order(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Of float32: bits of the size above, place below, sorted as one number; 5 to 10 times faster than an argsort."""
    keys = sizes.view(np.int32).astype(np.int64) << 32 | np.arange(sizes.shape[1])
    keys.sort(axis=1)
    return keys & 0xFFFFFFFF


def _wide_order(sizes: NDArray[Any]) -> NDArray[np.int64]:
    return np.argsort(sizes, axis=1, kind="stable")


# Bytes of an element -> places in a row from the smallest size to the largest.
_ORDERS: dict[int, Callable[[NDArray[Any]], NDArray[np.int64]]] = {4: _narrow_order, 8: _wide_order}


class Sparsified(NamedTuple):
    """Deltas after a sparsification where they conflict.

    Attributes:
        tensors: new deltas, or the old ones where it was skipped.
        skipped: nothing was done, for so much conflict is no more than chance.
        share: of positions in conflict, 0 … 1.
    """

    tensors: list[Tensor]
    skipped: bool
    share: float


def conflict_aware(
    kind: Kind,
    xs: Sequence[Tensor],
    mask: Tensor,
    cosine: float,
    density: float,
    draws: Sequence[Tensor],
    dampening: float = 0.0,
    law: Law = "power",
    rule: Rule = "window",
) -> Sparsified:
    """Sparsify only where deltas conflict; what they do not dispute stays whole.

    Where more than 40 % of all positions conflict and |cosine| is below 0.25, the deltas are unrelated, and nothing is
    done.

    Args:
        kind: which sparsification.
        xs: deltas, all of one shape and dtype.
        mask: bool, positions in conflict; see `votes.conflict_mask`.
        cosine: mean of the pairs' cosines, of the oriented deltas.
        density: 0 … 1, inside the mask.
        draws: int32, 0 … 65535, for each delta.
        dampening: of DARE; DELLA has none.
        law: of the dampening, see `rescale_factor`.
        rule: of DELLA, see `della`.
    """
    share = float(mask.double().mean()) if mask.numel() else 0.0
    if share > _CHANCE_CONFLICT and abs(cosine) < _UNRELATED:
        return Sparsified(list(xs), True, share)
    made = []
    for x, drawn in zip(xs, draws, strict=True):
        sparse = dare(x, density, drawn, dampening, law) if kind == "dare" else della(x, density, drawn, rule)
        made.append(torch.where(mask, sparse, x))
    return Sparsified(made, False, share)
