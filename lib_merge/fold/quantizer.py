"""How well a rounding reproduces modules of a quantized checkpoint: shares of equal codes, scales and biases."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..catalog import PathLike
from ..errors import MergeError, RecipeError
from ..files.source import Source
from .names import forms
from .plan import Module, Shipped, find_module, open_dense, open_shipped
from .rounding import AUTO, CHOICES, equal_groups
from .work import Worker, read_leaves, tiles_of

_LEAVES = ("codes", "scales", "biases")


@dataclass(frozen=True)
class Reproduced:
    """One module, quantized afresh and compared.

    Attributes:
        module: as it was asked for.
        dense: key of the dense weight.
        shipped: name in the quantized checkpoint.
        storage: how it is stored there.
        rounding: that it was quantized with.
        groups: how many groups it has.
        equal: share of equal `codes`, `scales`, `biases` and whole `groups`, 0 to 1.
    """

    module: str
    dense: str
    shipped: str
    storage: str
    rounding: str
    groups: int
    equal: dict[str, float]

    @property
    def identical(self) -> bool:
        """True when every byte is reproduced."""
        return self.equal["groups"] == 1

    def describe(self) -> str:
        """One line."""
        shares = ", ".join(f"{name} {100 * share:.4f} %" for name, share in self.equal.items())
        name = f"rounding {self.rounding}: " if self.rounding else ""
        return f"{self.shipped} (dense {self.dense}; {self.storage}): {name}{shares} identical of {self.groups} groups"


def quantizer_check(dense: PathLike, shipped: PathLike, *modules: str, rounding: str = AUTO) -> tuple[Reproduced, ...]:
    """Quantize modules of a dense checkpoint and compare them with a quantized one; nothing is written.

    Args:
        dense: the 16- or 32-bit checkpoint.
        shipped: the quantized one.
        *modules: names without `.weight`, in either checkpoint's way of naming.
        rounding: `even`, `away`, `metal`; `auto` shows for each module the one that reproduces it best.

    Raises:
        MergeError: a module is missing, ambiguous or not stored in a way that can be written; says why.
    """
    if not modules:
        raise RecipeError("no module was named", hint="for example model.layers.0.self_attn.q_proj")
    if rounding not in CHOICES:
        raise RecipeError(f"there is no rounding {rounding!r}", hint=f"choose one of: {', '.join(CHOICES)}")
    base, target = open_dense(Path(dense)), open_shipped(Path(shipped))
    try:
        found = [(name, _module(name.removesuffix(".weight"), base, target)) for name in modules]
        made = []
        for name, module in found:
            names: Sequence[str] = module.storage.roundings or ("",)
            tried = names if rounding == AUTO or rounding not in names else (rounding,)
            results = [_compare(name, module, target, Worker(base, target, None, each), each) for each in tried]
            made.append(max(results, key=lambda result: result.equal["groups"]))  # the first of equals
        return tuple(made)
    finally:
        base.close()
        target.source.close()


def _module(name: str, dense: Source, shipped: Shipped) -> Module:
    """The module; names one that is spelled alike where there is none."""
    try:
        return find_module(name, dense, shipped)
    except MergeError as error:
        known = {key.removesuffix(".weight") for key in dense.tensors if key.endswith(".weight")}
        close = [] if {*forms(name)} & known else difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else error.hint
        raise MergeError(error.what, file=error.file, tensor=error.tensor, hint=hint) from error


def _compare(name: str, module: Module, shipped: Shipped, hand: Worker, rounding: str) -> Reproduced:
    equal = dict.fromkeys((*_LEAVES[: len(module.storage.leaves)], "groups"), 0)
    groups = 0
    for rows in tiles_of(module):
        fresh, stored = hand.fresh(rows), read_leaves(shipped, module.storage.leaves, rows)
        same = equal_groups(module, fresh, stored)
        groups += same.numel()
        equal["groups"] += int(same.sum())
        equal["codes"] += int((module.storage.codes(fresh) == module.storage.codes(stored)).sum())
        for leaf, here, there in zip(_LEAVES[1:], fresh[1:], stored[1:], strict=False):
            equal[leaf] += int((here == there).view(same.shape[0], same.shape[1], -1).all(-1).sum())
    counts = dict.fromkeys(equal, groups) | {"codes": module.shape[0] * module.shape[1]}
    shares = {label: count / counts[label] for label, count in equal.items()}
    return Reproduced(name, module.dense, module.name, module.storage.label, rounding, groups, shares)
