"""LoRA on an embedding, whose weight is stored [vocabulary, width]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._algebra import scale_of, shaped
from ._registry import Format, Parts, Settings, Shape, Shapes, length, register

if TYPE_CHECKING:
    from torch import Tensor


def rank(shapes: Shapes) -> int:
    """First axis of A."""
    return length(shapes, "embedding_down")


def factors(parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """γ·Aᵀ [vocabulary, r] and Bᵀ [r, width]."""
    down, up = parts["embedding_down"], parts["embedding_up"]
    return down.T * scale_of(parts, settings, down.shape[0]), up.T


def delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·(B·A)ᵀ for A [r, vocabulary] and B [width, r]."""
    up, down = factors(parts, settings)
    return shaped(up @ down, shape)


register(
    Format(
        id="embedding",
        label="LoRA on an embedding",
        stage="add",
        needs=("embedding_down", "embedding_up"),
        takes=("alpha", "scale"),
        rank=rank,
        factors=factors,
        delta=delta,
        shape=lambda shapes, settings: (shapes["embedding_down"][1], shapes["embedding_up"][0]),
        settings=lambda config, stem, shapes: config.settings(stem),
    )
)
