"""(IA)³: rows or columns of a weight multiplied by learned numbers, as LyCORIS and as PEFT store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._algebra import blend
from ._config import Config, Value
from ._registry import Format, Parts, Settings, Shapes, no_rank, register

if TYPE_CHECKING:
    from torch import Tensor


def _along(vector: Tensor, weight: Tensor, axis: int) -> Tensor:
    """A vector shaped so that it multiplies along one axis of the weight."""
    return vector.reshape(*[-1 if index == axis else 1 for index in range(weight.dim())])


def apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W·(1 + strength·w), along the input axis where `on_input` is set (Liu et al. 2022, arXiv:2205.05638)."""
    axis = 1 if bool(parts["on_input"].item()) else 0
    return weight * (1 + strength * _along(parts["weight"], weight, axis))


register(
    Format(
        id="ia3",
        label="(IA)³ of LyCORIS",
        stage="multiply",
        needs=("on_input", "weight"),
        takes=(),
        rank=no_rank,
        apply=apply,
    )
)


def peft_settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """The axis that is scaled: of outputs [out, 1], where the bias is scaled too, or of inputs [1, in].

    A convolution's numbers lie on axis 1 either way: there the configuration tells.
    """
    shape = shapes["ia3_l"]
    names = config.names("feedforward_modules")
    module = config.module(stem)
    listed = any(module == name or module.endswith(f".{name}") for name in names)
    on_input = listed if len(shape) > 2 else shape[0] == 1
    swapped = config.flag("fan_in_fan_out")
    return {"axis": int(on_input != swapped), "scales_bias": not on_input}


def peft_apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W⊙l along one axis; in between, W + strength·(W' − W). A bias has one axis."""
    axis = int(settings["axis"]) if weight.dim() > 1 else 0
    return blend(weight, weight * _along(parts["ia3_l"], weight, axis), strength)


register(
    Format(
        id="peft_ia3",
        label="(IA)³ of PEFT",
        stage="multiply",
        needs=("ia3_l",),
        takes=(),
        rank=no_rank,
        apply=peft_apply,
        settings=peft_settings,
    )
)
