"""How much of a product is kept: a fixed rank, the smallest of a given error, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RecipeError
from ..kernels import lowrank
from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_ERROR = 0.05
# Share of the factors' size that is nothing but rounding in float64: what is left of LoRAs that cancel each other.
_NOISE = 1e-13


@dataclass(frozen=True)
class Ranks:
    """What a user asked for.

    Attributes:
        rank: fixed rank; None where it is not fixed.
        auto: the smallest rank with an error of at most `max_error`.
        max_error: relative, in the Frobenius norm.
        max_rank: no module gets more; None: no limit.
    """

    rank: int | None = None
    auto: bool = False
    max_error: float = MAX_ERROR
    max_rank: int | None = None

    @property
    def everything(self) -> bool:
        """True when nothing is to be cut off."""
        return self.rank is None and not self.auto and self.max_rank is None

    def of(self, found: lowrank.Spectrum) -> int:
        """The rank for one module, at least 1."""
        full = max(lowrank.rank_of(found), 1)
        if self.auto:
            wanted = lowrank.RULES["frobenius"](found.s, max(1 - self.max_error**2, 0.0) ** 0.5, found.total)
        else:
            wanted = full if self.rank is None else self.rank
        return max(min(wanted, full, self.max_rank or full), 1)

    @classmethod
    def read(cls, params: Mapping[str, float | bool]) -> Ranks:
        """From a recipe's parameters: rank, auto, max_error, max_rank.

        Raises:
            RecipeError: a number that is no rank or no share.
        """
        for name in ("rank", "max_rank"):
            value = params.get(name)
            if value is not None and (value < 1 or value != int(value)):
                raise RecipeError(f"{name} must be a whole number of at least 1, not {value:g}")
        error = float(params.get("max_error", MAX_ERROR))
        if not 0 <= error < 1:
            raise RecipeError(f"max_error must be 0 … 1, not {error:g}", hint="0.05 keeps all but 5 %")
        rank, most = params.get("rank"), params.get("max_rank")
        auto = bool(params.get("auto")) or (rank is None and "max_error" in params)
        return cls(None if rank is None else int(rank), auto, error, None if most is None else int(most))


def reduced(up: Tensor, down: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, float]:
    """A product cut as asked, and its relative error; one that need not be cut comes back as it is.

    Args:
        up: [m, r].
        down: [r, n].
        ranks: what was asked.
    """
    full = min(up.shape[0], down.shape[1])
    fits = up.shape[1] <= full
    if fits and (ranks.everything or (not ranks.auto and up.shape[1] <= (ranks.rank or ranks.max_rank or 0))):
        return up, down, 0.0
    found = lowrank.spectrum(up.double(), down.double())
    if float(found.s[0]) <= _NOISE * float(up.double().norm()) * float(down.double().norm()):
        return torch.zeros_like(up[:, :1]), torch.zeros_like(down[:1]), 0.0
    rank = ranks.of(found)
    left, right = lowrank.cut(found, rank)
    return left.to(up.dtype), right.to(up.dtype), lowrank.cut_error(found, rank)
