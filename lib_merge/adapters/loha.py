"""LoHa: the entrywise product of two low-rank matrices, each with a Tucker core or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._algebra import fold_mid, scale_of, shaped, size
from ._registry import Format, Parts, Settings, Shape, Shapes, length, register

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def rank(shapes: Shapes) -> int:
    """First axis of `hada_w1_b`."""
    return length(shapes, "hada_w1_b")


def shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, in·k), or (out, in, kernel…) with a core."""
    if "hada_t1" in shapes:
        return shapes["hada_w1_a"][1], shapes["hada_w1_b"][1], *shapes["hada_t1"][2:]
    return shapes["hada_w1_a"][0], size(shapes["hada_w1_b"])


def _halves(parts: Parts, number: int) -> tuple[Tensor, Tensor]:
    """[out, r] and [r, in·k] of one of the two matrices; with a core the parts are (r, out) and (r, in)."""
    left, right = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"]
    core = parts.get(f"hada_t{number}")
    return (left, right) if core is None else (left.T, fold_mid(core, right))


def delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·(w1a·w1b)⊙(w2a·w2b), γ = alpha/r (Hyeon-Woo et al. 2022, arXiv:2108.06098)."""
    (up1, down1), (up2, down2) = _halves(parts, 1), _halves(parts, 2)
    scale = scale_of(parts, settings, parts["hada_w1_b"].shape[0])
    return shaped((up1 @ down1) * (up2 @ down2) * scale, shape)


def factors(parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """The same change as one product of rank r1·r2: columns u1ᵢ⊙u2ⱼ against rows d1ᵢ⊙d2ⱼ."""
    (up1, down1), (up2, down2) = _halves(parts, 1), _halves(parts, 2)
    scale = scale_of(parts, settings, parts["hada_w1_b"].shape[0])
    up = (up1[:, :, None] * up2[:, None, :]).reshape(up1.shape[0], -1)
    down = (down1[:, None, :] * down2[None, :, :]).reshape(-1, down1.shape[1])
    return up * scale, down


def by_rows(roles: frozenset[str]) -> tuple[str, ...]:
    """Rows of the change come from rows of the left halves, which stand on end beside a core."""
    return () if "hada_t1" in roles else ("hada_w1_a", "hada_w2_a")


register(
    Format(
        id="loha",
        label="LoHa",
        stage="add",
        needs=_PARTS,
        takes=("hada_t1", "hada_t2", "alpha", "scale"),
        rank=rank,
        factors=factors,
        delta=delta,
        shape=shape,
        by_rows=by_rows,
        settings=lambda config, stem, shapes: config.settings(stem),
    )
)
