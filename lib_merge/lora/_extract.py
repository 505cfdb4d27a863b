"""The task `lora_extract`: what a tuned model has more than its base, as a LoRA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..baking import load_part
from ..errors import Problem, RecipeError
from ..families import PREFIXES, Names, Written, component_of, detect, never_merged
from ..files.dtypes import is_float
from ..files.source import Source
from ..kernels import lowrank
from ..lazy import torch
from ..matching import finder
from ..quant.coded import HINT as CODED_HINT
from ..quant.coded import coded_tensors
from ..recipe import Recipe, called
from ..wording import count_of, named
from ._module import Module
from ._planned import Planned
from ._rounding import rounded_to
from ._work import Work, dtype_name

if TYPE_CHECKING:
    from torch import Tensor

PARAMS = ("rank", "conv_rank", "keep", "clamp", "exact", "store_diffs", "min_diff")
_RANK, _CONV_RANK = 64, 32
_AT_ONCE = 1 << 20
# Looked up, not multiplied: a product of factors cannot stand for them in any loader.
_TABLES = ("token_embedding", "position_embedding", "positional_embedding", "embed_tokens", "wte", "wpe", "shared")
_PARTS = ("unet", "llm", "te1", "te2", "te3")


@dataclass(frozen=True)
class Wishes:
    """How a difference becomes a LoRA.

    Attributes:
        rank: of matrices and 1×1 convolutions.
        conv_rank: of other convolutions.
        keep: share of the norm that is kept at the smallest rank that does, in place of a fixed rank; None: fixed.
        clamp: quantile of |ΔW| that entries are kept within before; 1: off.
        exact: full singular value decompositions instead of sampled ones.
        store_diffs: what factors cannot hold is stored whole.
        min_diff: modules whose largest change is not above this are left out.
    """

    rank: int
    conv_rank: int
    keep: float | None
    clamp: float
    exact: bool
    store_diffs: bool
    min_diff: float

    @classmethod
    def read(cls, params: Mapping[str, float | bool]) -> Wishes:
        """From a recipe's parameters.

        Raises:
            RecipeError: an unknown one, or a value out of range.
        """
        if other := params.keys() - set(PARAMS):
            raise RecipeError(f"an extraction has no parameter {min(other)!r}", hint=f"it has {', '.join(PARAMS)}")
        keep = params.get("keep")
        given = cls(
            int(params.get("rank", _RANK)), int(params.get("conv_rank", params.get("rank", _CONV_RANK))),
            None if keep is None else float(keep), float(params.get("clamp", 1.0)), bool(params.get("exact")),
            bool(params.get("store_diffs")), float(params.get("min_diff", 0.0)),
        )  # fmt: skip
        for name, value, low, high in (
            ("rank", given.rank, 1, math.inf), ("conv_rank", given.conv_rank, 1, math.inf),
            ("keep", given.keep, 0, 1), ("clamp", given.clamp, 0, 1), ("min_diff", given.min_diff, 0, math.inf),
        ):  # fmt: skip
            if value is not None and not low <= value <= high:
                raise RecipeError(f"{name} must be {low:g} … {high:g}, not {value:g}")
        return given


def extract_work(recipe: Recipe, sources: Mapping[str, Source]) -> Work:
    """Plan an extraction.

    Args:
        recipe: of task `lora_extract`; A is the tuned model, B its base.
        sources: slot -> opened input.

    Raises:
        MergeError: coded weights, nothing in common, or a wrong parameter.
    """
    tuned, base = sources["A"], sources["B"]
    wishes = Wishes.read(recipe.params)
    tensors = {key: (info.dtype, info.shape) for key, info in tuned.tensors.items()}
    for slot, source in (("A", tuned), ("B", base)):
        if detect({key: (info.dtype, info.shape) for key, info in source.tensors.items()}).kind == "adapter":
            what = f"{called(slot)} is a LoRA, not a checkpoint"
            hint = "to take one LoRA from another: lib-merge lora merge A B@-1 -o OUT"
            raise RecipeError(what, file=source.path, hint=hint)
        coded = coded_tensors({key: info.dtype for key, info in source.tensors.items()})
        if coded:
            key = next(iter(coded))
            raise RecipeError(
                f"coded weights ({coded[key]}) have no difference", file=source.path, tensor=key, hint=CODED_HINT
            )
    find = finder(list(tensors), base.tensors.keys(), PREFIXES)
    found = detect(tensors)
    names = Names(tensors, found)
    style = recipe.output.names or ("peft" if found.kind == "llm" else "kohya")
    job = _Difference(tuned, base, names, style, wishes, dtype_name(recipe.output.save_dtype, _widest(tuned, base)), [])
    jobs, problems = [], []
    common: list[tuple[str, str]] = []
    for key, (dtype, shape) in tensors.items():
        other = find(key)
        component = component_of(key, found)
        if other is None or not is_float(dtype) or component not in _PARTS or never_merged(key, dtype, shape, found):
            continue
        if base.tensors[other].shape != shape:
            problems.append(Problem("warning", f"{key} has other shapes in the two models: left out", tensor=key))
            continue
        jobs.append(partial(job, key, other, component))
        common.append((key, component))
    if not jobs:
        hint = "name a model that was tuned and the base it was tuned from"
        raise RecipeError("the two models have no tensors in common", file=tuned.path, hint=hint)
    missing = [key for key in tensors if find(key) is None]
    if missing:
        what = f"{count_of(missing)} of the tuned model not in the base: {named(missing)}"
        problems.append(Problem("warning", what, tensor=missing[0]))
    work = Work(recipe, sources, (), jobs, job.dtype, rows=job.lost, problems=problems, found=found)
    work.unused = tuple(missing)
    work.planned = lambda: [step for key, component in common for step in job.planned(key, component)]
    work.job_bytes = lambda shape, rank: (24 if wishes.exact else 8) * math.prod(shape) + 24 * rank * sum(shape)
    return work


def _widest(tuned: Source, base: Source) -> str:
    """The dtype that most of the tuned model's float tensors have."""
    names = [info.dtype for info in tuned.tensors.values() if is_float(info.dtype)]
    return max(set(names), key=names.count, default="F32")


@dataclass(frozen=True)
class _Difference:
    """Computes one tensor's share of the LoRA.

    Attributes:
        lost: rows of what the LoRA cannot hold; filled on the way.
    """

    tuned: Source
    base: Source
    names: Names
    style: str
    wishes: Wishes
    dtype: str
    lost: list[dict[str, Any]]

    def __call__(self, key: str, other: str, component: str) -> Sequence[Module]:
        """The modules of one tensor; none where nothing changed."""
        wide = "F64" in (self.tuned.tensors[key].dtype, self.base.tensors[other].dtype)
        number = torch.float64 if wide else torch.float32
        change = self._change(key, other, number)
        largest = max(float(change.amax()), -float(change.amin())) if change.numel() else 0.0
        if largest == 0 or largest <= self.wishes.min_diff:
            return []
        written = self.names.write(key, self.style)
        low_rank = _has_factors(key, tuple(change.shape))
        if not written or (not low_rank and not self.wishes.store_diffs):
            self.lost.append(_lost(key, component, change, written))
            return []
        return [self._module(name, change, component, key, low_rank) for name in written]

    def planned(self, key: str, component: str) -> Iterator[Planned]:
        """What comes of a tensor if its two versions differ."""
        shape = self.tuned.tensors[key].shape
        low_rank = _has_factors(key, shape)
        if not low_rank and not self.wishes.store_diffs:
            return
        for name in self.names.write(key, self.style):
            rows = name.rows[1] if name.rows is not None else (shape or (1,))[0]
            matrix = (rows, math.prod(shape[1:]))
            if not low_rank:
                yield Planned(name.name, component, matrix, reason="stored whole")
                continue
            wanted = self._rank(shape[1:] if len(shape) > 2 else ()) if self.wishes.keep is None else min(matrix)
            reason = "if it differs" if self.wishes.keep is None else f"to keep {self.wishes.keep:g}, if it differs"
            yield Planned(
                name.name, component, matrix, (), min(wanted, *matrix), alpha=self.style == "kohya", reason=reason
            )

    def _rank(self, kernel: Sequence[int]) -> int:
        """The rank asked for, of a matrix (no kernel) or of a convolution's (in, kernel…)."""
        return self.wishes.conv_rank if math.prod(kernel[1:]) > 1 else self.wishes.rank

    def _change(self, key: str, other: str, number: torch.dtype) -> Tensor:
        """Tuned minus base, with a few rows of the base in memory at a time."""
        change = load_part(self.tuned, key, number)
        if not change.dim():
            return change - load_part(self.base, other, number)
        step = max(1, _AT_ONCE // max(1, math.prod(change.shape[1:])))
        for first in range(0, len(change), step):
            rows = change[first : first + step]
            rows -= load_part(self.base, other, number, first, len(rows))
        return change

    def _module(self, name: Written, change: Tensor, component: str, key: str, low_rank: bool) -> Module:
        rows = change if name.rows is None else change[name.rows[0] : sum(name.rows)]
        rows = rows.T if name.post == "transpose" else rows
        if name.post == "swap":
            rows = torch.cat([rows[len(rows) // 2 :], rows[: len(rows) // 2]])
        style = "kohya" if self.style == "kohya" else "peft"
        if not low_rank:
            param = "bias" if key.endswith("bias") else "weight"
            return Module(name.name, param, style, component, whole=rows.contiguous(), note="stored whole")
        kernel = tuple(rows.shape[1:]) if rows.dim() > 2 else ()
        matrix = lowrank.clamped(rows.reshape(len(rows), -1).contiguous(), self.wishes.clamp)
        rank = self._rank(kernel)
        up, down = (rounded_to(part, self.dtype, key)[0] for part in self._factors(matrix, rank, key))
        error = lowrank.residual(rows.reshape(matrix.shape), up.to(matrix.dtype), down.to(matrix.dtype))
        return Module(name.name, "weight", style, component, up, down, kernel=kernel, error=error)

    def _factors(self, matrix: Tensor, rank: int, key: str) -> tuple[Tensor, Tensor]:
        """Balanced factors of the rank that was asked for, or of the smallest that keeps the share."""
        full = min(matrix.shape)
        if self.wishes.keep is None:
            return lowrank.whole(matrix) if rank >= full else lowrank.cut(self._spectrum(matrix, rank, key), rank)
        while True:
            found = self._spectrum(matrix, rank, key)
            wanted = lowrank.RULES["frobenius"](found.s, self.wishes.keep, found.total)
            if wanted < len(found.s) or len(found.s) >= full:
                return lowrank.cut(found, wanted)
            rank *= 2

    def _spectrum(self, matrix: Tensor, rank: int, key: str) -> lowrank.Spectrum:
        """Sampled where that is cheaper than all of it."""
        if self.wishes.exact or 4 * rank >= min(matrix.shape):
            return lowrank.dense_spectrum(matrix)
        return lowrank.sampled_spectrum(matrix, rank, 0, key)


def _has_factors(key: str, shape: tuple[int, ...]) -> bool:
    """Whether factors can stand for a tensor's change in every loader."""
    return len(shape) > 1 and not key.endswith("bias") and not any(name in key for name in _TABLES)


def _lost(key: str, component: str, change: Tensor, written: Sequence[Written]) -> dict[str, Any]:
    """A report row for a difference that the LoRA does not hold."""
    why = "no factors can hold it: --store-diffs" if written else "it has no name in LoRAs of this kind"
    return {
        "key": key,
        "component": component,
        "action": "not in LoRA",
        "shape": list(change.shape),
        "numel": change.numel(),
        "norm_diff": math.sqrt(lowrank.energy(change.reshape(-1, 1))),
        "max_change": float(change.abs().amax()),
        "reason": why,
    }
