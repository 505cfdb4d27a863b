"""LoRA of PEFT on parameters that hold all experts of a layer in one tensor (`target_parameters`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MergeError
from ..lazy import torch
from ._algebra import scale_of
from ._config import Config
from ._registry import Format, Parts, Settings, Shape, Shapes, register

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = frozenset({"moe"})
_NEST = ".base_layer"
# PEFT wraps a module's parameters in the order in which the module defines them, the first one innermost; the file
# does not say that order. This is the order of every expert module that we know.
_ORDER = ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "down_proj", "w2")


def parameter(config: Config, stem: str) -> tuple[str, str] | None:
    """The module and the parameter that a stem stands for, or None when the configuration names no parameter of it."""
    targets = config.names("target_parameters")
    if not targets:
        return None
    module = stem
    while module.endswith(_NEST):
        module = module.removesuffix(_NEST)
    depth = (len(stem) - len(module)) // len(_NEST)
    name = config.module(module)
    owners = [target.rpartition(".") for target in targets]
    params = [param for owner, _, param in owners if owner and f".{name}".endswith(f".{owner}")]
    params.sort(key=lambda param: _ORDER.index(param) if param in _ORDER else len(_ORDER))
    return (module, params[-1 - depth]) if depth < len(params) else None


def rank(shapes: Shapes) -> int | None:
    """Unknown without the number of experts, which the weight has."""
    return None


def delta(parts: Parts, settings: Settings, shape: Shape) -> Tensor:
    """γ·B[:, :, e]·A[e] for each expert e, transposed where the weight is stored [experts, in, out].

    A is [experts·r, in], expert by expert; B is [out, r·experts], the expert running fastest.

    Raises:
        MergeError: the weight has not three axes of these sizes.
    """
    down, up = parts["down"], parts["up"]
    if len(shape) != 3 or down.shape[0] % shape[0] or {down.shape[1], up.shape[0]} != set(shape[1:]):
        raise MergeError(f"expert factors {list(down.shape)} and {list(up.shape)} do not fit a weight {list(shape)}")
    rank = down.shape[0] // shape[0]
    per_expert = down.reshape(shape[0], rank, -1)
    product = torch.matmul(up.reshape(up.shape[0], rank, shape[0]).permute(2, 0, 1), per_expert)
    if tuple(product.shape) != shape:
        product = product.transpose(1, 2)
    return product.contiguous() * scale_of(parts, settings, rank)


register(
    Format(
        id="moe",
        label="LoRA on stacked experts",
        stage="add",
        needs=("down", "up"),
        takes=("alpha", "scale"),
        rank=rank,
        delta=delta,
        settings=lambda config, stem, shapes: config.settings(stem),
    )
)
