"""GLoRA: a low-rank change beside one that the weight itself goes through, in both orders of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MergeError
from ._algebra import flat, fold_mid, scale_of, size
from ._config import Config, Value
from ._registry import Format, Parts, Settings, Shape, Shapes, register

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("a1", "a2", "b1", "b2")
_PAIRS = (("glora_a1", "glora_a2"), ("glora_b1", "glora_b2"))


def _is_old(shapes: Shapes) -> bool:
    """Old files multiply the other way round: their `a1` is [r, in], which is wider than high."""
    rows, columns = shapes["glora_a1"][:2]
    return rows < columns


def rank(shapes: Shapes) -> int:
    """The short axis of `a1`."""
    return min(shapes["glora_a1"][:2])


def settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """The alpha of the configuration; LyCORIS writes the alpha of rank-stabilised files without the root."""
    found = config.settings(stem)
    if config.network.get("rs_lora"):
        found["rslora"] = True
    return found


def apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W + strength·γ·(b1·b2 + W·a1·a2), γ = alpha/r; a kernel's taps go through a1·a2 one by one.

    Chavan et al. 2023, arXiv:2306.07967.
    """
    if strength == 0:
        return weight
    shapes = {role: tuple(part.shape) for role, part in parts.items()}
    a1, a2, b1, b2 = (parts[f"glora_{name}"] for name in _NAMES)
    if _is_old(shapes):
        a1, a2, b1, b2 = a2, a1, b2, b1
    b2 = fold_mid(parts["glora_bm"], flat(b2)) if "glora_bm" in parts else flat(b2)
    through = flat(a1) @ flat(a2)  # [in, in]
    taps = weight.reshape(*weight.shape[:2], -1)
    moved = (taps.transpose(1, 2) @ through).transpose(1, 2).reshape(weight.shape)
    change = (flat(b1) @ b2).reshape(weight.shape) + moved
    return weight + (strength * scale_of(parts, settings, rank(shapes))) * change


def shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, any).

    Raises:
        MergeError: two parts that are multiplied have different ranks.
    """
    for left, right in (("glora_a2", "glora_a1"), ("glora_b2", "glora_b1")) if _is_old(shapes) else _PAIRS:
        joint = shapes["glora_bm"][:2] if "glora_bm" in shapes and right == "glora_b2" else None
        inner = joint or (shapes[right][0], shapes[right][0])
        if (size(shapes[left]), shapes[right][0]) != tuple(inner):
            raise MergeError(
                f"its parts {left} {list(shapes[left])} and {right} {list(shapes[right])} do not fit together"
            )
    return shapes["glora_b2" if _is_old(shapes) else "glora_b1"][0], -1


register(
    Format(
        id="glora",
        label="GLoRA",
        stage="multiply",
        needs=tuple(f"glora_{name}" for name in _NAMES),
        takes=("glora_bm", "alpha", "scale"),
        rank=rank,
        apply=apply,
        shape=shape,
        settings=settings,
    )
)
