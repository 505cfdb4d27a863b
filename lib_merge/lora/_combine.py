"""Several LoRAs' terms of one module to one: sums that are exact, then cut as far as was asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..adapters import FORMATS, Value, scale_of
from ..errors import RecipeError
from ..kernels import lowrank
from ..lazy import torch
from ._groups import Group, Term
from ._module import Module
from ._ranks import Ranks, reduced

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# Convolutions of a UNet, all 3×3: LoHa and LoKr store them flat.
_3X3 = re.compile(r"(?:[._]conv[12]?|conv_in|conv_out|[._]0[._]op|in_layers[._]2|out_layers[._]3)$")


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
    products = [_product(term) for term in group.terms]
    if any(product is None for product in products):
        return _whole(group)
    rows = _rows(group, [up.shape[0] for up, _ in filter(None, products)])
    terms = [(_placed(up, term, group, rows), down, term.strength) for term, (up, down) in _zip(group, products)]
    _same_width(group, [down.shape[1] for _, down, _ in terms])
    before = sum(up.shape[1] for up, _, strength in terms if strength)
    up, down, error = reduced(*lowrank.joined(terms), ranks)
    return _named(group, up=up, down=down, kernel=kernel or _kernel(group), rank_before=before, error=error)


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
    return _named(group, up=up, down=down, alpha=alpha, kernel=_kernel(group), rank_before=rank)


def _product(term: Term) -> tuple[Tensor, Tensor] | None:
    """A term's factors at strength 1; None where its format has none."""
    format = FORMATS[term.piece.format]
    if format.factors is None:
        return None
    return format.factors(term.input.parts(term.piece), _own_way(term))


def _own_way(term: Term) -> dict[str, Value]:
    """A piece's settings with its factors as PEFT stores them, [out, in], also where the base is stored [in, out]."""
    return {name: value for name, value in term.piece.settings.items() if name != "fan_in_fan_out"}


def _whole(group: Group) -> Module:
    """The sum of changes of which one at least is stored whole."""
    total: Tensor | None = None
    shape = next((shape for term in group.terms if (shape := _shape(term)) and -1 not in shape), ())
    for term in group.terms:
        format = FORMATS[term.piece.format]
        assert format.delta is not None
        delta = format.delta(term.input.parts(term.piece), term.piece.settings, _shape(term) or shape)
        placed = _placed(delta.reshape(delta.shape[0] if delta.dim() else 1, -1), term, group, shape[0] if shape else 1)
        _same_width(group, [placed.shape[1], *([] if total is None else [total.shape[1]])])
        total = placed * term.strength if total is None else total + placed * term.strength
    assert total is not None
    return _named(group, whole=total.reshape(shape), note="stored whole")


def _shape(term: Term) -> Shape | None:
    format = FORMATS[term.piece.format]
    return format.shape(term.input.shapes(term.piece), _own_way(term)) if format.shape else None


def _kernel(group: Group) -> Shape:
    """(in, kernel…) of the first term that tells a convolution; empty where none does."""
    shapes = [shape for term in group.terms if (shape := _shape(term))]
    told = next((shape[1:] for shape in shapes if len(shape) > 2), ())
    if not told and shapes and _3X3.search(group.stem) and shapes[0][1] % 9 == 0:
        return shapes[0][1] // 9, 3, 3
    return told


def _rows(group: Group, counts: Sequence[int]) -> int:
    """Rows of the group's module: those of a term that means all of it."""
    for term, count in zip(group.terms, counts, strict=True):
        if term.target.rows == group.target.rows:
            return count
    raise RecipeError(f"no LoRA holds all of {group.stem}")


def _placed(matrix: Tensor, term: Term, group: Group, rows: int) -> Tensor:
    """Rows of a term where they stand in the group's module."""
    if term.target.post != group.target.post and "transpose" not in (term.target.post, group.target.post):
        half = matrix.shape[0] // 2
        matrix = torch.cat([matrix[half:], matrix[:half]])
    if term.target.rows == group.target.rows:
        if matrix.shape[0] != rows:
            _refuse(group, f"{matrix.shape[0]} rows in one, {rows} in another")
        return matrix
    first, count, of = term.target.rows
    if rows * count % of or matrix.shape[0] != rows * count // of:
        _refuse(group, f"{matrix.shape[0]} rows of {rows} are not the {count}/{of} that the name means")
    full = matrix.new_zeros(rows, matrix.shape[1])
    full[rows * first // of : rows * first // of + matrix.shape[0]] = matrix
    return full


def _same_width(group: Group, widths: Sequence[int]) -> None:
    if len(set(widths)) > 1:
        _refuse(group, f"{' and '.join(map(str, widths))} inputs")


def _refuse(group: Group, what: str) -> None:
    files = ", ".join(dict.fromkeys(term.input.path.name for term in group.terms))
    raise RecipeError(
        f"the LoRAs' sizes differ at {group.stem}: {what}",
        file=files,
        tensor=group.stem,
        hint="LoRAs of different models cannot be merged",
    )
