"""LoKr: the Kronecker product of two matrices, each whole or low-rank, the second with a Tucker core or without."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import MergeError
from ..lazy import torch
from ._algebra import flat, fold_mid, kron, scale_of, shaped, size
from ._registry import Format, Parts, Settings, Shape, Shapes, register

if TYPE_CHECKING:
    from torch import Tensor


def rank(shapes: Shapes) -> int | None:
    """Rank of the low-rank side, the second where both are; None where both are whole."""
    for role in ("lokr_w2_b", "lokr_w1_b"):
        if role in shapes:
            return shapes[role][0]
    return None


def shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, in·k)."""
    out1, in1 = _matrix_shape(shapes, 1)
    out2, in2 = _matrix_shape(shapes, 2)
    return out1 * out2, in1 * in2


def _matrix_shape(shapes: Shapes, number: int) -> Shape:
    whole, left, right, core = (shapes.get(f"lokr_{name}") for name in _names(number))
    if whole is not None:
        return whole[0], size(whole)
    if left is None or right is None:  # `complete` saw to it
        raise MergeError(f"LoKr without its part w{number}")
    if core is not None:
        return left[1], right[1] * math.prod(core[2:])
    return left[0], size(right)


def _names(number: int) -> tuple[str, ...]:
    return f"w{number}", f"w{number}_a", f"w{number}_b", f"t{number}"


def _scale(parts: Parts, settings: Settings) -> float:
    """alpha/r; 1 where both sides are whole, unless a configuration gives both numbers (PEFT)."""
    found = rank({role: tuple(part.shape) for role, part in parts.items()})
    if found is None:
        given = "alpha" in settings and "rank" in settings
        return scale_of({}, settings, int(settings["rank"])) if given else 1.0
    return scale_of(parts, settings, found)


def _split(parts: Parts, number: int) -> tuple[Tensor, Tensor]:
    """Left and right factor of one side; a whole one beside the identity on its shorter axis."""
    whole, left, right, core = (parts.get(f"lokr_{name}") for name in _names(number))
    if whole is not None:
        whole = flat(whole)
        rows, columns = whole.shape
        identity = torch.eye(min(rows, columns), dtype=whole.dtype, device=whole.device)
        return (identity, whole) if rows <= columns else (whole, identity)
    if left is None or right is None:  # `complete` saw to it
        raise MergeError(f"LoKr without its part w{number}")
    return (left.T, fold_mid(core, right)) if core is not None else (left, flat(right))


def _side(parts: Parts, number: int) -> Tensor:
    whole = parts.get(f"lokr_w{number}")
    if whole is not None:
        return flat(whole)
    left, right = _split(parts, number)
    return left @ right


def delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·w1⊗w2 (Edalati et al. 2022, arXiv:2212.10650); a kernel stays with the columns of w2."""
    return shaped(kron(_side(parts, 1), _side(parts, 2)) * _scale(parts, settings), shape)


def rows(parts: Parts, settings: Settings, first: int, count: int) -> Tensor:
    """Rows of γ·w1⊗w2: row i is row i // p of w1 times row i % p of w2, p rows of w2."""
    one, two = _side(parts, 1) * _scale(parts, settings), _side(parts, 2)
    index = torch.arange(first, first + count, device=one.device)
    left, right = one[index // len(two)], two[index % len(two)]
    return (left[:, :, None] * right[:, None, :]).reshape(count, -1)


def factors(parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """(a·b)⊗(c·d) = (a⊗c)·(b⊗d): exact, of the product of both ranks."""
    (left1, right1), (left2, right2) = _split(parts, 1), _split(parts, 2)
    up = kron(left1, left2) * _scale(parts, settings)
    return up, kron(right1, right2)


def complete(shapes: Shapes) -> bool:
    """Each side is there, whole or as two factors."""
    return all(f"lokr_w{n}" in shapes or {f"lokr_w{n}_a", f"lokr_w{n}_b"} <= shapes.keys() for n in (1, 2))


register(
    Format(
        id="lokr",
        label="LoKr",
        stage="add",
        needs=(),
        takes=("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha", "scale"),
        rank=rank,
        factors=factors,
        delta=delta,
        rows=rows,
        shape=shape,
        complete=complete,
        settings=lambda config, stem, shapes: config.settings(stem),
    )
)
