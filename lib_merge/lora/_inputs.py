"""Opened LoRAs: their pieces, their tensors, and the dtype that a result takes after them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapter_facts import stored_alphas, zero_alphas
from ..adapters import FORMATS, Adapter, Piece
from ..baking import load_part
from ..changes import read_lora
from ..errors import MergeError, Problem, RecipeError
from ..families import Detected, blocks_of, component_of, detect
from ..files.dtypes import DTYPES, is_float
from ..files.source import Source
from ..lazy import torch
from ..lora_strengths import strength_at
from ..recipe import Lora, Recipe, lora_slots
from ..wording import count_of, named
from ._block_weights import block_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Input:
    """One LoRA of a run.

    Attributes:
        slot: `lora1`, `lora2` …
        lora: as the recipe names it, strengths included.
        source: the opened file or folder.
        adapter: what it holds.
        found: the family that it was made for.
        of_block: block -> multiplier of the strength.
        problems: what the user should know of the block weights.
    """

    slot: str
    lora: Lora
    source: Source
    adapter: Adapter
    found: Detected
    of_block: Mapping[str, float] = field(default_factory=dict)
    problems: Sequence[Problem] = ()

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.source.path

    def shapes(self, piece: Piece) -> dict[str, tuple[int, ...]]:
        """Shapes of a piece's parts."""
        return {role: self.source.tensors[key].shape for role, key in piece.keys.items()}

    def parts(self, piece: Piece) -> dict[str, Tensor]:
        """A piece's parts in float32, in float64 where the file has that.

        Raises:
            NumberError: one holds a value that is not finite.
        """
        wide = any(self.source.tensors[key].dtype == "F64" for key in piece.keys.values())
        number = torch.float64 if wide else torch.float32
        parts = {}
        for role, key in piece.keys.items():
            known = self.alphas.get(key) if role == "alpha" else None
            parts[role] = load_part(self.source, key, number) if known is None else torch.tensor(known, dtype=number)
        return parts

    @cached_property
    def alphas(self) -> Mapping[str, float]:
        """Key -> value of the alphas that scale factors."""
        return stored_alphas(self.source, self.adapter.pieces)

    def strength(self, piece: Piece) -> float:
        """The strength on a module, its block weight included."""
        names = blocks_of(next(iter(piece.keys.values())), self.found) if self.of_block else ()
        return strength_at(self.lora, component_of(piece.stem, self.found), names, self.of_block)

    def is_linear(self, piece: Piece) -> bool:
        """Whether the piece is a sum that needs no base to be known."""
        return FORMATS[piece.format].stage == "add"


def open_inputs(recipe: Recipe, sources: Mapping[str, Source]) -> list[Input]:
    """The LoRAs of a recipe, in its order.

    Args:
        recipe: names them.
        sources: slot -> opened file.

    Raises:
        MergeError: one is no adapter, or one that cannot be merged.
    """
    found = []
    for slot, lora in lora_slots(recipe):
        source = sources[slot]
        tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
        adapter, family = read_lora(source, lora), detect(tensors)
        weights = block_weights(lora, source, adapter, family, sources.get("A"))
        found.append(Input(slot, lora, source, adapter, family, *weights))
        _check_parts(found[-1])
    return found


def _check_parts(item: Input) -> None:
    """Refuse a module whose parts do not belong together, before anything is multiplied."""
    for piece in item.adapter.pieces:
        shape_of = FORMATS[piece.format].shape
        try:
            if shape_of:
                shape_of(item.shapes(piece), piece.settings)
        except MergeError as error:
            hint = error.hint or "the file is damaged: get it again from where it came"
            raise RecipeError(error.what, file=item.path, tensor=piece.stem, hint=hint) from error


def told_of(item: Input) -> list[Problem]:
    """What the user should know of a LoRA: its reader's notes, tensors not needed, alphas of 0, block weights."""
    name, file = item.lora.file, str(item.path)
    found = [Problem("note", f"{name}: {text}", file) for text in item.adapter.notes]
    if item.adapter.ignored:
        shown = [f"{key} ({why})" for key, why in item.adapter.ignored]
        found.append(Problem("note", f"{name}: {count_of(shown)} not needed: {named(shown)}", file))
    return [*found, *zero_alphas(name, item.source, item.alphas), *item.problems]


def unused_of(item: Input) -> tuple[str, ...]:
    """Its tensors that no result shows: what belongs to nothing, and what is not needed."""
    return (*item.adapter.leftover, *(key for key, _ in item.adapter.ignored))


def widest(inputs: Iterable[Input]) -> str:
    """The float dtype of the highest rank among the tensors that count; the first one met wins a tie."""
    keys = ((item, key) for item in inputs for piece in item.adapter.pieces for key in _large(piece))
    names = [item.source.tensors[key].dtype for item, key in keys]
    floats = [name for name in names if is_float(name)]
    return max(floats, key=lambda name: DTYPES[name].rank, default="F32")


def _large(piece: Piece) -> Iterable[str]:
    return (key for role, key in piece.keys.items() if role not in ("alpha", "scale", "on_input"))
