"""Adapters that are no sums, merged by way of a base: bake them, take the difference, cut it to a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..adapters import FORMATS
from ..baking import Baking, load_part
from ..changes import Matched, match
from ..errors import Problem, RecipeError
from ..families import Detected, Names, component_of, detect
from ..files.source import Source
from ..kernels import lowrank
from ..lazy import torch
from ..recipe import Recipe
from ..steps import Baked, Stored
from ._groups import Group
from ._inputs import Input
from ._module import Module
from ._ranks import Ranks


class Based:
    """The modules that a base must decide on.

    Args:
        recipe: names the LoRAs, with the strengths to work with.
        inputs: the LoRAs.
        base: the checkpoint.
        ranks: how much of a difference is kept.

    Attributes:
        keys: `slot/key` of the pieces that are handled here.
        problems: what the user should know.
    """

    def __init__(self, recipe: Recipe, inputs: Sequence[Input], base: Source, ranks: Ranks) -> None:
        self._base, self._ranks = base, ranks
        self._inputs = {item.slot: item for item in inputs}
        tensors = {key: (info.dtype, info.shape) for key, info in base.tensors.items()}
        self._tensors = tensors
        self._found: Detected = detect(tensors)
        self._names = Names(tensors, self._found)
        sources = {item.slot: item.source for item in inputs}
        matched: Matched = match(recipe, tensors, self._found, sources)
        self.problems: list[Problem] = list(matched.problems)
        self._matched = {
            key: changes
            for key, changes in matched.changes.items()
            if any(FORMATS[change.format].stage != "add" for change in changes)
        }
        self.keys = {
            f"{change.slot}/{key}"
            for changes in self._matched.values()
            for change in changes
            for key in change.keys.values()
        }
        if self._matched and ranks.everything:
            raise RecipeError(
                f"{len(self._matched)} modules are no sums and must be cut to a rank",
                file=base.path,
                tensor=next(iter(self._matched)),
                hint="--rank 64, or --rank auto --max-error 0.01",
            )

    def kernel(self, group: Group) -> tuple[int, ...]:
        """(in, kernel…) of a group's weight where it is a convolution; empty where not."""
        places = self._names.find(group.stem, group.param)
        shape = self._tensors[places[0].key][1] if places else ()
        return shape[1:] if len(shape) > 2 else ()

    def jobs(self) -> list[Callable[[], Sequence[Module]]]:
        """One for each tensor of the base."""
        return [partial(self._difference, key) for key in self._matched]

    def _difference(self, key: str) -> list[Module]:
        """What all LoRAs together do to a tensor, as modules of the names that the base has in kohya's style."""
        info = self._base.tensors[key]
        number = torch.float64
        weight = load_part(self._base, key, number)
        matrix = weight.reshape(weight.shape[0], -1).clone()
        node = Baked(Stored("A", key, info.dtype, info.shape), self._matched[key], info.dtype)
        sources = {slot: item.source for slot, item in self._inputs.items()}
        Baking(node, sources, number).apply(matrix, 0)
        change = matrix - weight.reshape(matrix.shape)
        component = component_of(key, self._found)
        written = self._names.write(key, "kohya") or self._names.write(key, "peft")
        if weight.dim() < 2 or not written:
            raise RecipeError("a LoRA cannot hold this change", file=self._base.path, tensor=key)
        modules = []
        for name in written:
            rows = change if name.rows is None else change[name.rows[0] : sum(name.rows)]
            rows = rows.T if name.post == "transpose" else rows
            found = lowrank.dense_spectrum(rows)
            rank = self._ranks.of(found)
            up, down = lowrank.cut(found, rank)
            style = "peft" if name.name.startswith("base_model.") else "kohya"
            kernel = tuple(info.shape[1:]) if len(info.shape) > 2 else ()
            error = lowrank.error_of(rows, found, rank)
            modules.append(Module(name.name, "weight", style, component, up, down, kernel=kernel, error=error))
        return modules
