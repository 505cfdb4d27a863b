"""Block weights of LoRAs that are merged: which of a LoRA's modules they reach, from its names alone."""

from __future__ import annotations

from collections.abc import Mapping

from .. import blocks
from ..adapters import Adapter
from ..errors import Problem
from ..families import Detected, block_names, blocks_of, detect, layer_names
from ..files.source import Source
from ..lora_strengths import multipliers
from ..recipe import Lora


def block_weights(
    lora: Lora, source: Source, adapter: Adapter, found: Detected, base: Source | None
) -> tuple[dict[str, float], list[Problem]]:
    """Block -> multiplier of the strength, and what the user should know.

    A shape (`gradient_up` …) runs over the layers of the base; without one, over those that the LoRA changes.

    Args:
        lora: its block weights are text.
        source: its file.
        adapter: what it holds.
        found: the family that it was made for.
        base: the checkpoint, where there is one.

    Raises:
        RecipeError: weights that cannot be read, or that set something else than a strength.
    """
    weights = blocks.parse(lora.blocks)
    if not weights:
        return {}, []
    used = {key for piece in adapter.pieces for key in piece.keys.values()}
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items() if key in used}
    reached = {name for key in tensors for name in blocks_of(key, found)}
    names = [name for name in block_names(tensors, found, overrides=True) if name in reached]
    layers = [name for name in layer_names(tensors, found) if name in reached]
    problems = _about_shapes(lora, weights, layers) if base is None else []
    if base is not None:
        known = {key: (info.dtype, info.shape) for key, info in base.tensors.items()}
        layers = layer_names(known, detect(known))
    of_block = multipliers(lora, weights, list(dict.fromkeys([*names, *layers])), layers)
    return of_block, problems + _about_idle(lora, weights, names)


def _about_shapes(lora: Lora, weights: blocks.Values, layers: list[str]) -> list[Problem]:
    shapes = [name for name in weights if name in blocks.SHAPES]
    what = f"{', '.join(shapes)} of {lora.file} runs over the blocks that it changes: {', '.join(layers) or 'none'}"
    hint = "with --base CHECKPOINT it runs over those of the checkpoint, as baking does"
    return [Problem("note", what, hint=hint)] if shapes else []


def _about_idle(lora: Lora, weights: Mapping[str, Mapping[str, float]], names: list[str]) -> list[Problem]:
    """Entries that reach no module; of a list of numbers, which names every block there can be, only if all do."""
    named = {name: dict(values) for name, values in weights.items() if name not in blocks.SHAPES}
    idle = [name for name, values in named.items() if not blocks.expand({name: values}, names)]
    is_list = tuple(named) in blocks.LISTS.values()
    if not idle or (is_list and len(idle) < len(named)):
        return []
    what = f"the block weights of {lora.file} name {', '.join(idle)}, where it changes nothing"
    known = f"it changes {', '.join(names)}" if names else "it has no blocks that are known"
    return [Problem("warning", what, hint=known)]
