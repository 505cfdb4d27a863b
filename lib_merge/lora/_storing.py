"""A weight's result to the module that is stored: its factors, a cut within an error, or the whole change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kernels import lowrank
from ._blend import Blended
from ._groups import Group
from ._module import Module
from ._ranks import Ranks, reduced

if TYPE_CHECKING:
    from torch import Tensor

# Up to this share of the full rank, singular values are sampled instead of computed all.
_SAMPLED = 0.5


def stored(
    made: Blended,
    group: Group,
    kernel: tuple[int, ...],
    shape: tuple[int, ...],
    added: int,
    ranks: Ranks,
    lossless: bool,
    name: str,
    facts: Mapping[str, Any],
) -> Module:
    """The module of a result.

    Args:
        made: the result, output strength included.
        group: tells names.
        kernel: (in, kernel…) of a convolution; empty: a matrix.
        shape: of the weight where its LoRAs store whole changes; empty where they have factors.
        added: added ranks of the LoRAs, the largest rank that a cut takes by itself.
        ranks: how much is kept.
        lossless: what is no product is stored whole.
        name: of the weight, on which sampling depends.
        facts: for the report.
    """
    module = Module(
        group.stem, group.param, group.style, group.component, kernel=kernel, rank_before=added or None,
        note=made.note, facts=facts,
    )  # fmt: skip
    if made.whole is None:
        assert made.up is not None
        assert made.down is not None
        cut = reduced if made.balanced else balanced
        up, down, error = cut(made.up, made.down, ranks)
        return replace(module, up=up, down=down, error=error)
    if shape or lossless:
        full = shape or (made.whole.shape[0], *(kernel or (made.whole.shape[1],)))
        return replace(
            module, whole=made.whole.reshape(full), rank_before=None, note=_joined(made.note, "stored whole")
        )
    return _cut(module, made.whole, added, ranks, name)


def balanced(up: Tensor, down: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, float]:
    """A product with its size shared out between both factors, cut as asked, and its relative error."""
    found = lowrank.spectrum(up.double(), down.double())
    rank = ranks.of(found)
    left, right = lowrank.cut(found, rank)
    error = lowrank.cut_error(found, rank) if rank < lowrank.rank_of(found) else 0.0
    return left.to(up.dtype), right.to(up.dtype), error


def _cut(module: Module, matrix: Tensor, added: int, ranks: Ranks, name: str) -> Module:
    full = min(matrix.shape)
    fixed = ranks.rank is not None and not ranks.auto
    most = max(1, min((ranks.rank if fixed else None) or full, ranks.max_rank or added or full, full))
    try:
        if most <= _SAMPLED * full:
            found = lowrank.sampled_spectrum(matrix, most, 0, name)
        else:
            found = lowrank.dense_spectrum(matrix)
    except RuntimeError:  # every way to singular values failed
        shape = (matrix.shape[0], *(module.kernel or (matrix.shape[1],)))
        return replace(module, whole=matrix.reshape(shape), note=_joined(module.note, "stored whole: no SVD"))
    wanted = Ranks(ranks.rank, not fixed, ranks.max_error, most)
    rank = wanted.of(found)
    up, down = lowrank.cut(found, rank)
    return replace(module, up=up, down=down, error=lowrank.error_of(matrix, found, rank))


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
