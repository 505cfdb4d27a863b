"""What one LoRA's piece does to a group's module: its factors or its whole change, where they stand there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..adapters import FORMATS, Value
from ..errors import RecipeError
from ..lazy import torch
from ._groups import Group, Term

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

# Convolutions of a UNet, all 3×3: LoHa and LoKr store them flat.
_3X3 = re.compile(r"(?:[._]conv[12]?|conv_in|conv_out|[._]0[._]op|in_layers[._]2|out_layers[._]3)$")


def product(term: Term) -> tuple[Tensor, Tensor] | None:
    """A term's factors at strength 1; None where its format has none."""
    format = FORMATS[term.piece.format]
    if format.factors is None:
        return None
    return format.factors(term.input.parts(term.piece), _own_way(term))


def _own_way(term: Term) -> dict[str, Value]:
    """A piece's settings with its factors as PEFT stores them, [out, in], also where the base is stored [in, out]."""
    return {name: value for name, value in term.piece.settings.items() if name != "fan_in_fan_out"}


def shape_of(term: Term) -> Shape | None:
    """Shape of the weight as the term's format sees it; None where its parts do not tell."""
    format = FORMATS[term.piece.format]
    return format.shape(term.input.shapes(term.piece), _own_way(term)) if format.shape else None


def whole_shape(group: Group) -> Shape:
    """Shape of the weight, as the first term tells that knows all of it; empty where none does."""
    return next((shape for term in group.terms if (shape := shape_of(term)) and -1 not in shape), ())


def change(term: Term, group: Group, shape: Shape) -> Tensor:
    """A term's change at strength 1 as a matrix [out, rest], where it stands in the group's module.

    Args:
        term: one of the group's.
        group: tells the module.
        shape: of the weight, where the term itself does not tell.
    """
    format = FORMATS[term.piece.format]
    assert format.delta is not None
    delta = format.delta(term.input.parts(term.piece), term.piece.settings, shape_of(term) or shape)
    return placed(delta.reshape(delta.shape[0] if delta.dim() else 1, -1), term, group, shape[0] if shape else 1)


def kernel_of(group: Group) -> Shape:
    """(in, kernel…) of the first term that tells a convolution; empty where none does."""
    shapes = [shape for term in group.terms if (shape := shape_of(term))]
    told = next((shape[1:] for shape in shapes if len(shape) > 2), ())
    if not told and shapes and _3X3.search(group.stem) and shapes[0][1] % 9 == 0:
        return shapes[0][1] // 9, 3, 3
    return told


def rows_of(group: Group, counts: Sequence[int]) -> int:
    """Rows of the group's module: those of a term that means all of it."""
    for term, count in zip(group.terms, counts, strict=True):
        if term.target.rows == group.target.rows:
            return count
    raise RecipeError(f"no LoRA holds all of {group.stem}")


def placed(matrix: Tensor, term: Term, group: Group, rows: int) -> Tensor:
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


def same_width(group: Group, widths: Sequence[int]) -> None:
    """Refuse terms of different numbers of inputs."""
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
