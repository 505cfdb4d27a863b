"""Orthogonal adapters of PEFT, which turn the input columns of a weight: OFT, BOFT and Householder reflections."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..lazy import torch
from ._algebra import blend, eye_like, flat
from ._config import Config, Value
from ._registry import Format, Parts, Settings, Shape, Shapes, no_rank, register

if TYPE_CHECKING:
    from torch import Tensor

_TERMS = 5


def settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """How the rotation is made: by a truncated series of so many terms, or exactly."""
    terms = config.number("num_cayley_neumann_terms")
    return {
        "terms": int(_TERMS if terms is None else terms),
        "exact": config.values.get("use_cayley_neumann") is False,
        "fan_in_fan_out": config.flag("fan_in_fan_out"),
    }


def block_size(entries: int) -> int:
    """The b of b·(b−1)/2 stored entries."""
    return (1 + math.isqrt(1 + 8 * entries)) // 2


def skew(packed: Tensor) -> Tensor:
    """[n, b·(b−1)/2] -> [n, b, b]: the upper triangles, row by row, and their negatives below."""
    size = block_size(packed.shape[-1])
    full = packed.new_zeros(packed.shape[0], size, size)
    row, column = torch.triu_indices(size, size, 1, device=packed.device)
    full[:, row, column] = packed
    return full - full.transpose(-1, -2)


def series(skews: Tensor, terms: int) -> Tensor:
    """I + 2Q + 2Q² + … + 2Qⁿ⁻² + Qⁿ⁻¹ for n terms, as PEFT cuts Cayley's series; 3 terms give what 4 give."""
    if terms < 3:
        return eye_like(skews) + (2 * skews if terms == 2 else 0 * skews)
    last = max(terms - 1, 3)
    total, power = eye_like(skews) + 2 * skews, skews
    for exponent in range(2, last + 1):
        power = power @ skews
        total = total + (power if exponent == last else 2 * power)
    return total


def cayley(skews: Tensor) -> Tensor:
    """(I − Q)(I + Q)⁻¹: PEFT turns the other way here than in its series."""
    one = eye_like(skews)
    turned: Tensor = torch.linalg.solve(one + skews, one - skews, left=False)
    return turned


def _columns(weight: Tensor, settings: Settings) -> Tensor:
    """[out, in·k] with inputs as columns."""
    return flat(weight.T if settings.get("fan_in_fan_out") else weight)


def _back(columns: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    return columns.T.contiguous() if settings.get("fan_in_fan_out") else columns.reshape(weight.shape)


def apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W·blockdiag(R)ᵀ over input columns; one block stands for all. In between, W + strength·(W' − W)."""
    if strength == 0:
        return weight
    skews = skew(parts["oft_r"])
    rotations = cayley(skews) if settings["exact"] else series(skews, int(settings["terms"]))
    columns = _columns(weight, settings)
    blocks = columns.reshape(columns.shape[0], -1, rotations.shape[-1])
    turned = torch.einsum("onk,nck->onc", blocks, rotations.expand(blocks.shape[1], -1, -1))
    return blend(weight, _back(turned.reshape(columns.shape), weight, settings), strength)


def boft_apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """Stages of rotated blocks of inputs, half-blocks shuffled before and put back after, then outputs times s.

    In between, W + strength·(W' − W) (Liu et al. 2024, arXiv:2311.06243).
    """
    if strength == 0:
        return weight
    stages = parts["boft_r"]
    size = stages.shape[-1]
    rows = _columns(weight, settings).T
    skews = (stages - stages.transpose(-1, -2)) / 2
    for index, rotation in enumerate(cayley(skews)):
        pairs = rows.reshape(-1, 2, 2**index, size // 2, rows.shape[1]).transpose(1, 2)
        turned = torch.matmul(rotation, pairs.reshape(-1, size, rows.shape[1]))
        rows = turned.reshape(pairs.shape).transpose(1, 2).reshape(rows.shape)
    changed = rows.T * parts["boft_s"].reshape(-1, 1)
    return blend(weight, _back(changed, weight, settings), strength)


def hra_settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    """Whether the reflections are made orthogonal to each other first."""
    return {"orthogonal": config.flag("apply_GS")}


def hra_apply(weight: Tensor, parts: Parts, settings: Settings, strength: float) -> Tensor:
    """W·∏(I − 2·u·uᵀ) over the unit columns u (Yuan et al. 2024, arXiv:2405.17484)."""
    if strength == 0:
        return weight
    vectors = parts["hra_u"]
    if settings["orthogonal"]:
        vectors = _gram_schmidt(vectors)
    changed = flat(weight)
    for unit in (vectors / torch.linalg.vector_norm(vectors, dim=0)).T:
        changed = changed - 2 * torch.outer(changed @ unit, unit)
    return blend(weight, changed.reshape(weight.shape), strength)


def _gram_schmidt(vectors: Tensor) -> Tensor:
    units: list[Tensor] = []
    for vector in vectors.T:
        for unit in units:
            vector = vector - (unit @ vector) * unit
        units.append(vector / torch.linalg.vector_norm(vector))
    return torch.stack(units, dim=1)


def shape(shapes: Shapes, settings: Settings) -> Shape | None:
    """(any, in·k): blocks × block size where the blocks are not shared."""
    count, entries = shapes["oft_r"]
    return None if count == 1 else (-1, count * block_size(entries))


register(
    Format(
        id="peft_oft",
        label="OFT of PEFT",
        stage="multiply",
        needs=("oft_r",),
        takes=(),
        rank=no_rank,
        linear=False,
        apply=apply,
        shape=shape,
        settings=settings,
    )
)
register(
    Format(
        id="peft_boft",
        label="BOFT of PEFT",
        stage="multiply",
        needs=("boft_r", "boft_s"),
        takes=(),
        rank=no_rank,
        linear=False,
        apply=boft_apply,
        shape=lambda shapes, settings: (shapes["boft_s"][0], shapes["boft_r"][1] * shapes["boft_r"][2]),
        settings=lambda config, stem, shapes: {"fan_in_fan_out": config.flag("fan_in_fan_out")},
    )
)
register(
    Format(
        id="hra",
        label="Householder reflections",
        stage="multiply",
        needs=("hra_u",),
        takes=(),
        rank=no_rank,
        linear=False,
        apply=hra_apply,
        shape=lambda shapes, settings: (-1, shapes["hra_u"][0]),
        settings=hra_settings,
    )
)
