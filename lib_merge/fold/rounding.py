"""Which rounding made a quantized checkpoint: dense weights are quantized with each and compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RecipeError
from ..lazy import torch
from ..quant.affine import ROUNDINGS
from .plan import FoldPlan, Module
from .work import PORTION, Rows, Worker, read_leaves, tiles_of

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"
CHOICES = (AUTO, *ROUNDINGS)

_SAMPLED = 1 << 23
_FEWEST = 1 << 16


@dataclass(frozen=True)
class Choice:
    """The rounding to fold with, and how well it reproduces the quantized checkpoint from the dense one.

    Attributes:
        rounding: see `quant.affine.ROUNDINGS`; empty where the storage knows only one.
        asked: it was asked for by name, not found out.
        groups: how many groups were compared.
        equal: share of them that came out equal, by rounding.
    """

    rounding: str
    asked: bool
    groups: int
    equal: dict[str, float]

    @property
    def share(self) -> float:
        """Share of the compared groups that the chosen rounding reproduces, 0 to 1."""
        return self.equal[self.rounding]

    def describe(self) -> str:
        """One sentence."""
        meaning = f" ({ROUNDINGS[self.rounding].meaning})" if self.rounding in ROUNDINGS else ""
        name = f"rounding {self.rounding}{meaning}" if self.rounding else "quantizing the dense weights"
        others = ", ".join(f"{name} {100 * share:.4g} %" for name, share in self.equal.items() if name != self.rounding)
        return (
            f"{name}: reproduces {100 * self.share:.6g} % of {self.groups} groups of the quantized checkpoint"
            + (f"; {others}" if others else "")
            + ("; asked for" if self.asked else "")
        )

    def warnings(self) -> list[str]:
        """What should be known where the quantized checkpoint is not reproduced."""
        if self.share == 1:
            return []
        if self.share < 0.5:
            return [
                f"only {100 * self.share:.3g} % of the groups of the quantized checkpoint come out of the dense one: "
                "it may not be the one that it was made from, or an old converter made it"
            ]
        return [
            f"{100 * (1 - self.share):.2g} % of the groups of the quantized checkpoint do not come out of the dense "
            "one by the rounding used: another converter made it, and an adapter without effect would change them"
        ]


def choose(plan: FoldPlan, asked: str = AUTO) -> Choice:
    """The rounding that reproduces the quantized checkpoint best, on rows from the middle of every module to fold.

    Args:
        plan: the inputs.
        asked: `auto`, or the rounding to use whatever is found; it is compared all the same.

    Raises:
        RecipeError: there is no such rounding.
        NumberError: dense weights that no code can stand for.
    """
    if asked not in CHOICES:
        close = ", ".join(CHOICES)
        raise RecipeError(f"there is no rounding {asked!r}", hint=f"choose one of: {close}")
    names = [*ROUNDINGS] if any(module.storage.roundings for module in plan.modules) else [""]
    wanted = [asked] if asked != AUTO and asked in names else names
    equal, groups = dict.fromkeys(wanted, 0), 0
    workers = {name: Worker(plan.dense, plan.shipped, None, name) for name in wanted}
    for rows in _sample(plan.modules):
        shipped = read_leaves(plan.shipped, rows.module.storage.leaves, rows)
        dense = next(iter(workers.values())).dense(rows)
        for name, worker in workers.items():
            same = equal_groups(rows.module, worker.encode(rows, dense.to(torch.float32, copy=True)), shipped)
            equal[name] += int(same.sum())
        groups += same.numel()
    shares = {name: count / groups for name, count in equal.items()}
    best = max(shares, key=lambda name: shares[name])  # the first of equals
    return Choice(best, asked in names, groups, shares)


def _sample(modules: Sequence[Module]) -> Iterator[Rows]:
    """Some rows from the middle of each module."""
    quota = max(_FEWEST, _SAMPLED // max(1, len(modules)))
    for module in modules:
        rows, columns = module.shape
        count = min(rows, max(1, quota // max(1, columns)))
        low = (rows - count) // 2
        yield from tiles_of(module, PORTION, low, low + count)


def equal_groups(module: Module, one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Which groups [rows, groups] agree in every byte of their codes, scale and bias."""
    rows, groups = one[0].shape[0], max(1, module.shape[1] // module.storage.unit)
    if all(map(torch.equal, one, other)):  # as it should be, and much faster to tell
        return torch.ones(rows, groups, dtype=torch.bool)
    same = None
    for here, there in zip(one, other, strict=True):
        equal = (here == there).view(rows, groups, -1).all(-1)
        same = equal if same is None else same & equal
    assert same is not None
    return same
