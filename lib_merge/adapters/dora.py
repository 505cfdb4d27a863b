"""DoRA: a change of another format whose result is brought to learned lengths along one axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import torch
from ._algebra import blend
from ._registry import Format, Parts, Settings, Shape, Shapes, all_formats, register

if TYPE_CHECKING:
    from torch import Tensor


def rank(shapes: Shapes) -> int | None:
    """Known to the format inside, not here."""
    return None


def axis_of(role: str, shape: Shape, inner: str, fan_in_fan_out: bool) -> int:
    """The axis of the stored weight that keeps its length under the norm: 0 or 1.

    PEFT's vector belongs to output features, which an embedding and a weight stored [in, out] have on axis 1. A
    `dora_scale` stands on the axis where it is longer than 1; a plain vector on axis 0.
    """
    if role == "peft_magnitude":
        return int(inner == "embedding" or fan_in_fan_out)
    return int(len(shape) > 1 and shape[0] == 1 and shape[1] > 1)


def apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W + strength·(W' − W), W' = (W+ΔW)·m/‖W+ΔW‖ along one axis (Liu et al. 2024, arXiv:2402.09353).

    A row that is all zero stays so.
    """
    if strength == 0:
        return weight
    delta = all_formats()[str(settings["inner"])].delta
    if delta is None:
        raise ValueError(f"{settings['inner']} has no change of its own")
    moved = (weight + delta(parts, settings, tuple(weight.shape))).transpose(0, int(settings["axis"]))
    norm = torch.linalg.vector_norm(moved.reshape(moved.shape[0], -1), dim=1)
    factor = torch.where(norm == 0, torch.zeros_like(norm), parts["magnitude"].reshape(-1) / norm)
    changed = moved * factor.reshape(-1, *[1] * (moved.dim() - 1))
    return blend(weight, changed.transpose(0, int(settings["axis"])).contiguous(), strength)


def shape(shapes: Shapes, settings: Settings) -> Shape | None:
    """As the format inside sees it."""
    inner = all_formats()[str(settings["inner"])].shape
    return inner(shapes, settings) if inner else None


register(
    Format(
        id="dora",
        label="DoRA",
        stage="dora",
        needs=("magnitude",),
        takes=(),
        rank=rank,
        linear=False,
        apply=apply,
        shape=shape,
    )
)
