"""What a LoRA task is going to write, from headers alone: modules, their ranks, bytes and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..adapters import FORMATS
from ..errors import Problem
from ..files.dtypes import nbytes
from ._groups import Group, Term
from ._ranks import Ranks
from ._terms import shape_of

# Resident once torch is loaded, and what stays mapped of tensors that wait for the end.
_BASE_BYTES, _WAITING_BYTES = 262 << 20, 192 << 20


@dataclass(frozen=True)
class Planned:
    """One module of the result.

    Attributes:
        key: its name.
        component: unet, te1 …
        shape: (out, in·k) of the weight; empty where headers do not tell.
        ranks: of what goes in, one for each part; empty where nothing that goes in has a rank.
        rank: that it gets at most; None where it is stored whole, or nothing tells.
        whole: it may be stored whole instead.
        exact: the rank is what it gets, whatever the numbers.
        alpha: it is stored with an alpha.
        reason: what is done.
    """

    key: str
    component: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    rank: int | None = None
    whole: bool = False
    exact: bool = False
    alpha: bool = False
    reason: str = ""

    def bytes(self, dtype: str) -> int:
        """Of its tensors at most, 0 where its shape is not known.

        Args:
            dtype: safetensors name of the result's.
        """
        factors = 0 if self.rank is None else self.rank * sum(self.shape)
        numel = max(factors, math.prod(self.shape)) if self.whole or self.rank is None else factors
        return (nbytes(dtype, numel) if self.shape else 0) + (4 if self.alpha else 0)


@dataclass(frozen=True)
class LoraPlan:
    """A LoRA task before it is carried out.

    Attributes:
        steps: one for each module of the result; a run may leave out those that turn out to be without change.
        copied: tensors that are handed on as they are.
        unused: tensors of the inputs that the result does not show.
        problems: warnings and notes.
        dtype: safetensors name of the result's.
        output_bytes: of all tensors; exact where every rank is, else the most there can be.
        peak_bytes: expected peak resident memory of the process, torch included; a rough figure.
    """

    steps: Sequence[Planned]
    copied: int
    unused: int
    problems: Sequence[Problem]
    dtype: str
    output_bytes: int
    peak_bytes: int

    @property
    def exact(self) -> bool:
        """Whether ranks and bytes are what will be written, not only a limit."""
        return all(step.exact for step in self.steps)


def expected_peak(output_bytes: int, largest_job: int, threads: int) -> int:
    """Peak resident memory, as far as sizes tell it.

    Args:
        output_bytes: of the result, which waits in a file.
        largest_job: bytes that one worker needs at most.
        threads: workers.
    """
    return _BASE_BYTES + min(output_bytes, _WAITING_BYTES) + threads * largest_job


@dataclass(frozen=True)
class Way:
    """How a task comes to its ranks, as far as that is known before numbers are.

    Attributes:
        ranks: how much is kept.
        summed: factors are put side by side wherever several LoRAs meet; else their numbers decide.
        full: where several meet, a result may have the full rank and not only the added one.
        fixed: rank that every module gets, whatever goes in; None: none is fixed.
        lossless: where several meet, a result may be stored whole.
    """

    ranks: Ranks
    summed: bool = False
    full: bool = False
    fixed: int | None = None
    lossless: bool = False


def planned_groups(groups: Iterable[Group], way: Way) -> list[Planned]:
    """The modules that come of what LoRAs change."""
    return [_planned(group, way) for group in groups]


def _planned(group: Group, way: Way) -> Planned:
    used = [term for term in group.terms if term.strength] or list(group.terms[:1])
    shape = _matrix(group.terms)
    told = tuple(term.piece.rank for term in used if term.piece.rank is not None)
    if any(FORMATS[term.piece.format].factors is None for term in group.terms):
        return Planned(group.stem, group.component, shape, told, None, exact=bool(shape), reason="stored whole")
    loras = len({term.input.slot for term in used})
    plain = all(term.piece.format == "lora" for term in used)
    most = min(shape) if shape else None
    added = sum(told) if plain else most
    own = way.fixed or (most if way.full and loras > 1 else added)
    wanted = None if way.ranks.auto else way.ranks.rank
    rank = min((number for number in (own, most, wanted, way.ranks.max_rank) if number is not None), default=None)
    exact = plain and (way.summed or loras == 1) and rank == added and not way.ranks.auto and way.fixed is None
    return Planned(group.stem, group.component, shape, told, rank, way.lossless and loras > 1, exact,
                   group.style == "kohya", "one LoRA alone" if loras == 1 else f"{loras} LoRAs")  # fmt: skip


def _matrix(terms: Sequence[Term]) -> tuple[int, ...]:
    """(out, in·k) as the first term tells it that knows; the first one means the whole module."""
    shape = shape_of(terms[0])
    if not shape or -1 in shape:
        return ()
    return shape[0], math.prod(shape[1:])
