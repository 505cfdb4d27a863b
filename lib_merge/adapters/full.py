"""Changes stored whole: differences, norm differences, values that replace a parameter, full copies, up-biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._algebra import blend, scale_of, shaped
from ._config import Config, Value
from ._registry import Format, Parts, Settings, Shape, Shapes, no_rank, register

if TYPE_CHECKING:
    from torch import Tensor


def diff(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """The stored difference itself."""
    return shaped(parts["diff"], shape)


def set_value(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """The stored value, whatever the strength; strength 0 leaves the weight."""
    return weight if strength == 0 else shaped(parts["value"], tuple(weight.shape)).clone()


def copy(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """The stored copy; in between, on the line from the weight to the copy."""
    return blend(weight, shaped(parts["value"], tuple(weight.shape)), strength)


def up_bias(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·b with γ of the factors beside it, 1 where they have no alpha."""
    return shaped(parts["up_bias"] * scale_of(parts, settings, int(settings.get("rank", 1))), shape)


def up_bias_settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """The alpha of the configuration and the rank of the factors beside it."""
    rank = {"rank": shapes["down"][0]} if "down" in shapes else {}
    return {**config.settings(stem), **rank}


for _id, _label in (("diff", "full difference"), ("norm", "norm difference")):
    register(
        Format(
            id=_id,
            label=_label,
            stage="add",
            needs=("diff",),
            takes=(),
            rank=no_rank,
            delta=diff,
            shape=lambda shapes, settings: shapes["diff"],
            by_rows=lambda roles: ("diff",),
        )
    )

for _id, _label, _apply in (("set", "replacing value", set_value), ("full", "full copy", copy)):
    register(
        Format(
            id=_id,
            label=_label,
            stage="replace",
            needs=("value",),
            takes=(),
            rank=no_rank,
            linear=False,
            apply=_apply,
            shape=lambda shapes, settings: shapes["value"],
            by_rows=lambda roles: ("value",),
        )
    )

register(
    Format(
        id="up_bias",
        label="bias of a LoRA",
        stage="add",
        needs=("up_bias",),
        takes=("alpha", "scale"),
        rank=no_rank,
        delta=up_bias,
        param="bias",
        shape=lambda shapes, settings: shapes["up_bias"],
        settings=up_bias_settings,
    )
)
