"""Several LoRAs' terms of one module to one: sums that are exact, then cut as far as was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..adapters import scale_of
from ..kernels import lowrank
from ._groups import Group, Term
from ._module import Module
from ._ranks import Ranks, reduced
from ._terms import Shape, change, kernel_of, placed, product, rows_of, same_width, whole_shape

if TYPE_CHECKING:
    from torch import Tensor


def combine(group: Group, ranks: Ranks, kernel: Shape | None = None) -> Module:
    """The sum of a group's terms.

    Args:
        group: terms of linear formats.
        ranks: how much is kept.
        kernel: (in, kernel…) where it is known from a base; None takes it from the terms.

    Raises:
        RecipeError: the terms are of different sizes.
        NumberError: a part holds a value that is not finite.
    """
    alone = _alone(group, ranks)
    if alone is not None:
        return alone
    products = [product(term) for term in group.terms]
    if any(pair is None for pair in products):
        return _whole(group)
    rows = rows_of(group, [up.shape[0] for up, _ in filter(None, products)])
    terms = [(placed(up, term, group, rows), down, term.strength) for term, (up, down) in _zip(group, products)]
    same_width(group, [down.shape[1] for _, down, _ in terms])
    before = sum(up.shape[1] for up, _, strength in terms if strength)
    up, down, error = reduced(*lowrank.joined(terms), ranks)
    return _named(group, up=up, down=down, kernel=kernel or kernel_of(group), rank_before=before, error=error)


def _zip(group: Group, products: Sequence[tuple[Tensor, Tensor] | None]) -> list[tuple[Term, tuple[Tensor, Tensor]]]:
    return [(term, pair) for term, pair in zip(group.terms, products, strict=True) if pair is not None]


def _named(group: Group, **fields: object) -> Module:
    return Module(group.stem, group.param, group.style, group.component, **fields)  # type: ignore[arg-type]


def _alone(group: Group, ranks: Ranks) -> Module | None:
    """A single LoRA's own factors, bit for bit, with its strength in alpha; None where that does not do."""
    used = [term for term in group.terms if term.strength]
    if len(used) != 1 or used[0].piece.format != "lora" or used[0].target != group.target:
        return None
    term = used[0]
    rank = term.piece.rank or 1
    if not ranks.everything and (ranks.auto or rank > min(ranks.rank or rank, ranks.max_rank or rank)):
        return None
    if "mid" in term.piece.keys:
        return None
    parts = term.input.parts(term.piece)
    scale = scale_of(parts, term.piece.settings, rank)
    if group.style == "peft" and scale * abs(term.strength) != 1:
        return None
    up, down = parts["up"].reshape(parts["up"].shape[0], -1), parts["down"].reshape(rank, -1)
    alpha = scale * rank * abs(term.strength)
    up = -up if term.strength < 0 else up
    return _named(group, up=up, down=down, alpha=alpha, kernel=kernel_of(group), rank_before=rank)


def _whole(group: Group) -> Module:
    """The sum of changes of which one at least is stored whole."""
    total: Tensor | None = None
    shape = whole_shape(group)
    for term in group.terms:
        delta = change(term, group, shape)
        same_width(group, [delta.shape[1], *([] if total is None else [total.shape[1]])])
        total = delta * term.strength if total is None else total + delta * term.strength
    assert total is not None
    return _named(group, whole=total.reshape(shape), note="stored whole")
