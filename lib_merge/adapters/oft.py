"""Orthogonal fine-tuning of LyCORIS and kohya: diag-OFT, COFT and BOFT, which rotate the rows of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import MergeError
from ..lazy import torch
from ._algebra import eye_like
from ._registry import Format, Parts, Settings, Shape, Shapes, no_rank, register

if TYPE_CHECKING:
    from torch import Tensor


def _rotations(blocks: Tensor, limit: float) -> Tensor:
    """Cayley's (I+Q)(I−Q)⁻¹ of Q = B − Bᵀ, block by block; ‖Q‖ over all blocks is kept to `limit` where that is > 0.

    Args:
        blocks: [..., b, b].
        limit: largest norm of Q.
    """
    skew = blocks - blocks.transpose(-1, -2)
    norm = float(torch.linalg.vector_norm(skew))
    if 0 < limit < norm:
        skew = skew * (limit / norm)
    one = eye_like(skew)
    turned: Tensor = torch.linalg.solve(one - skew, one + skew, left=False)
    return turned


def _partly(rotations: Tensor, strength: float) -> Tensor:
    """strength·R + (1−strength)·I."""
    return strength * rotations + (1 - strength) * eye_like(rotations)


def _limit(parts: Parts, rows: int) -> float:
    """The constraint per output row, which is what alpha means here, times the rows; no scale."""
    return float(parts["alpha"].item()) * rows if "alpha" in parts else 0.0


def _rescaled(rows: Tensor, parts: Parts, strength: float) -> Tensor:
    if "rescale" not in parts:
        return rows
    return rows * (1 + strength * (parts["rescale"].reshape(-1, 1) - 1))


def apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """Rᵀ on each block of rows, R taken as strength·R + (1−strength)·I, then the rows' lengths likewise.

    `oft_diag` holds R itself (Qiu et al. 2023, arXiv:2306.07280).
    """
    if strength == 0:
        return weight
    if "oft_diag" in parts:
        rotations = parts["oft_diag"]
    else:
        rotations = _rotations(parts["oft_blocks"], _limit(parts, weight.shape[0]))
    count, size = rotations.shape[0], rotations.shape[-1]
    rows = weight.reshape(count, size, -1)
    turned = torch.einsum("knm,knp->kmp", _partly(rotations, strength), rows)
    return _rescaled(turned.reshape(weight.shape[0], -1), parts, strength).reshape(weight.shape)


def boft_apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """One rotation of row blocks after another, rows shuffled in between (Liu et al. 2024, arXiv:2311.06243).

    Stage i pairs rows 2^i·b/2 apart. Each stage is taken as strength·R + (1−strength)·I.
    """
    if strength == 0:
        return weight
    rotations = _rotations(parts["oft_blocks"], _limit(parts, weight.shape[0]))
    size = rotations.shape[-1]
    rows = weight.reshape(weight.shape[0], -1)
    for index, stage in enumerate(_partly(rotations, strength)):
        gap = 2**index * size // 2
        shuffled = rows.reshape(-1, 2, gap, rows.shape[1]).transpose(1, 2)
        turned = torch.matmul(stage, shuffled.reshape(-1, size, rows.shape[1]))
        rows = turned.reshape(-1, gap, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return _rescaled(rows, parts, strength).reshape(weight.shape)


def shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, any): blocks × block size."""
    count, size = shapes["oft_diag" if "oft_diag" in shapes else "oft_blocks"][-3:-1]
    return count * size, -1


def boft_shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, any): blocks × block size, which the stages must be able to pair.

    Raises:
        MergeError: there are more stages than the rows can be paired in.
    """
    stages, count, block = shapes["oft_blocks"][:3]
    if block % 2 or (count * block) % (2 ** (stages - 1) * block):
        raise MergeError(f"its {stages} stages of {count} blocks of {block} rows cannot be paired")
    return count * block, -1


def _blocks(axes: int) -> Callable[[Shapes], bool]:
    """Whether `oft_blocks` has that many axes: 3 in diag-OFT, 4 in BOFT, which has stages."""
    return lambda shapes: len(shapes.get("oft_blocks", ())) == axes


_diag_blocks = _blocks(3)

register(
    Format(
        id="oft",
        label="diag-OFT",
        stage="multiply",
        needs=(),
        takes=("oft_blocks", "oft_diag", "rescale", "alpha"),
        rank=no_rank,
        linear=False,
        apply=apply,
        shape=shape,
        complete=lambda shapes: "oft_diag" in shapes or _diag_blocks(shapes),
    )
)
register(
    Format(
        id="boft",
        label="BOFT",
        stage="multiply",
        needs=("oft_blocks",),
        takes=("rescale", "alpha"),
        rank=no_rank,
        linear=False,
        apply=boft_apply,
        shape=boft_shape,
        complete=_blocks(4),
    )
)
