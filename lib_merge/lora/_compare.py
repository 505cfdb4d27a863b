"""How LoRAs relate: their ranks and sizes, and for each pair what they share and whether they pull together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..catalog import PathLike
from ..changes import LoraLike, named_loras
from ..families import Target
from ..recipe import Recipe
from ._combine import combine
from ._groups import Group, grouped
from ._inputs import open_inputs
from ._module import Module
from ._ranks import Ranks
from ._work import opened

if TYPE_CHECKING:
    from torch import Tensor


_Name = tuple[Target, str]


@dataclass(frozen=True)
class Comparison:
    """What `compare_loras` found.

    Attributes:
        loras: one table row for each: file, format, modules, rank_low, rank_high, norm.
        pairs: one for each pair: a, b, shared, cosine, overlap.
    """

    loras: list[dict[str, Any]]
    pairs: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"loras": self.loras, "pairs": self.pairs}


def compare_loras(*loras: LoraLike, lora_alpha: float | None = None) -> Comparison:
    """Compare LoRAs without merging them.

    Args:
        *loras: as for `merge_loras`.
        lora_alpha: alpha of LoRAs that carry none.

    Returns:
        `cosine` is that of the two changes over the modules that both have, −1 … 1: near 0 the two do not touch each
        other, negative they work against each other. `overlap` is the share of the smaller one's norm that lies in
        shared modules, 0 … 1. Only what needs no base is counted.
    """
    given, paths = named_loras(loras, lora_alpha)
    located: dict[str, Path] = {slot: Path(path) for slot, path in _items(paths)}
    with opened(located) as sources:
        inputs = open_inputs(Recipe(task="lora_merge", loras=given), sources)
        skipped = {
            item.slot: [f"{item.slot}/{key}" for piece in item.adapter.pieces if not item.is_linear(piece)
                        for key in piece.keys.values()]
            for item in inputs
        }  # fmt: skip
        left_out = [key for keys in skipped.values() for key in keys]
        products: list[dict[_Name, Module]] = [{} for _ in inputs]
        for group in grouped(inputs, left_out):
            for number, item in enumerate(inputs):
                terms = tuple(term for term in group.terms if term.input is item)
                if terms:
                    name = (group.target, group.param)
                    products[number][name] = combine(_only(group, terms), Ranks())
        rows = [
            _described(item.lora.file, item.adapter.formats, list(found.values()))
            for item, found in zip(inputs, products, strict=True)
        ]
        names = [item.lora.file for item in inputs]
        pairs = [
            {"a": names[one], "b": names[two], **_pair(products[one], products[two])}
            for one in range(len(names))
            for two in range(one + 1, len(names))
        ]
    return Comparison(rows, pairs)


def _items(paths: dict[str, PathLike]) -> list[tuple[str, PathLike]]:
    return list(paths.items())


def _only(group: Group, terms: Sequence[Any]) -> Group:
    return Group(group.stem, group.param, tuple(terms), group.target, group.component)


def _described(file: str, formats: Sequence[str], modules: Sequence[Module]) -> dict[str, Any]:
    ranks = [module.rank for module in modules if module.rank is not None]
    return {
        "file": file,
        "format": ", ".join(formats),
        "modules": len(modules),
        "rank_low": min(ranks, default=None),
        "rank_high": max(ranks, default=None),
        "norm": math.sqrt(sum(module.size() ** 2 for module in modules)),
    }


def _pair(one: dict[_Name, Module], two: dict[_Name, Module]) -> dict[str, Any]:
    shared = [name for name in one if name in two]
    inner = sum(_inner(one[name], two[name]) for name in shared)
    norms = [math.sqrt(sum(side[name].size() ** 2 for name in shared)) for side in (one, two)]
    wholes = [math.sqrt(sum(module.size() ** 2 for module in side.values())) for side in (one, two)]
    shares = [norm / whole if whole else 0.0 for norm, whole in zip(norms, wholes, strict=True)]
    return {
        "shared": len(shared),
        "cosine": inner / (norms[0] * norms[1]) if norms[0] * norms[1] else 0.0,
        "overlap": shares[0] if wholes[0] <= wholes[1] else shares[1],
    }


def _inner(one: Module, two: Module) -> float:
    """⟨ΔW₁, ΔW₂⟩ without dense matrices where both have factors."""
    if one.up is not None and two.up is not None and one.down is not None and two.down is not None:
        left = one.up.double().T @ two.up.double()
        right = one.down.double() @ two.down.double().T
        return float((left * right).sum()) * _scale(one) * _scale(two)
    return float((_dense(one) * _dense(two)).sum())


def _scale(module: Module) -> float:
    return 1.0 if module.alpha is None or not module.rank else module.alpha / module.rank


def _dense(module: Module) -> Tensor:
    if module.up is None or module.down is None:
        assert module.whole is not None
        return module.whole.double().reshape(module.whole.shape[0], -1)
    return module.up.double() @ module.down.double() * _scale(module)
