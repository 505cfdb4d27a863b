"""LoRA on linear and convolution weights, with LoCon's Tucker core and A1111's sparse residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MergeError
from ..lazy import torch
from ._algebra import flat, fold_mid, scale_of, shaped, size
from ._config import Config, Value
from ._registry import Format, Parts, Settings, Shape, Shapes, length, register

if TYPE_CHECKING:
    from torch import Tensor


def rank(shapes: Shapes) -> int:
    """First axis of `down`."""
    return length(shapes, "down")


def shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, in, kernel…) as the parts tell it: the kernel is that of `mid`, else of `down`."""
    kernel = shapes["mid"][2:] if "mid" in shapes else shapes["down"][2:]
    out, in_ = shapes["up"][0], shapes["down"][1]
    joint = shapes.get("mid", (shapes["down"][0], shapes["down"][0]))
    if (shapes["up"][1], shapes["down"][0]) != tuple(joint[:2]):
        raise MergeError(f"its parts have different ranks: up {shapes['up'][1]}, down {shapes['down'][0]}")
    return (in_, out) if settings.get("fan_in_fan_out") else (out, in_, *kernel)


def settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """The alpha of the configuration, and whether the base stores the weight as [in, out]."""
    found = config.settings(stem)
    if config.flag("fan_in_fan_out"):
        found["fan_in_fan_out"] = True
    return found


def factors(parts: Parts, settings: Settings) -> tuple[Tensor, Tensor]:
    """γ·flat(up) and flat(down), the latter with the Tucker core folded in; swapped for weights stored [in, out]."""
    up, down = flat(parts["up"]), flat(parts["down"])
    up = up * scale_of(parts, settings, down.shape[0])
    if "mid" in parts:
        down = fold_mid(parts["mid"], down)
    return (down.T, up.T) if settings.get("fan_in_fan_out") else (up, down)


def delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·up·down, γ = alpha/r (Hu et al. 2021, arXiv:2106.09685)."""
    up, down = factors(parts, settings)
    return shaped(up @ down, shape)


register(
    Format(
        id="lora",
        label="LoRA",
        stage="add",
        needs=("down", "up"),
        takes=("mid", "alpha", "scale", "reshape"),
        rank=rank,
        factors=factors,
        delta=delta,
        shape=shape,
        settings=settings,
    )
)


def sparse_delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·(up·down + R), R given by its entries in a matrix [out, in·k]; γ multiplies both, as A1111 does."""
    up, down = flat(parts["up"]), flat(parts["down"])
    total = up @ down
    row, column = (line.to(torch.int64) for line in parts["bias_indices"])
    total.index_put_((row, column), parts["bias_values"].reshape(-1), accumulate=True)
    return shaped(total * scale_of(parts, settings, down.shape[0]), shape)


def sparse_shape(shapes: Shapes, settings: Settings) -> Shape:
    """(out, in·k)."""
    return shapes["up"][0], size(shapes["down"])


register(
    Format(
        id="sparse",
        label="LoRA with a sparse residual",
        stage="add",
        needs=("down", "up", "bias_indices", "bias_values"),
        takes=("bias_size", "alpha", "scale"),
        rank=rank,
        delta=sparse_delta,
        shape=sparse_shape,
        settings=settings,
    )
)
