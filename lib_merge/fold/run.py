"""Fold an adapter into a quantized checkpoint: plan, find the rounding, code each named module anew, copy the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..catalog import PathLike
from ..crew import Crew
from ..errors import FileError, OutputError, PlanError, Problem
from ..events import Progress
from ..execute import Running
from ..files.claim import Claim
from ..files.open import OUTPUT_SUFFIX
from ..files.patched import PatchedCopy, Range
from ..files.publish import is_empty_folder
from ..files.source import Source
from ..files.target import numbered_before, target_problems
from ..files.temporary import sweep
from ..memory import peak_rss_mb
from ..plan import default_threads
from ..report import Rows as ReportRows
from ..tiles import TILE as MERGE_TILE
from .measure import Gathered, lost_effect, rows, sums
from .plan import FoldPlan, Module, make_fold_plan, open_shipped
from .rounding import AUTO, CHOICES, Choice, choose
from .work import TILE, Factors, Rows, Worker, joined, read_leaves, row_tiles

_BASE_BYTES = 230_000_000  # of a process that has loaded torch
_COMPILER_BYTES = 110_000_000  # of numba
_TILE_BYTES = 48 << 20  # that one thread works with


@dataclass(frozen=True)
class Folded:
    """What a fold did.

    Attributes:
        output: folder or file written.
        folded: modules that were computed anew.
        copied: tensors that were copied byte for byte.
        rounding: how codes were rounded, and how well that reproduces the quantized checkpoint; None of a plan.
        warnings: what the user should know.
        notes: what else may be of interest.
        sha256: of the output, when it was asked for.
        seconds: wall time of the run.
        peak_rss_mb: peak memory of this process so far.
        output_bytes: size of the output.
        rows: the report, when it was asked for.
        expected_peak_bytes: of memory, as it was planned.
        problems: of a plan that was only made, not carried out.
        modules: names of the folded modules, in the quantized checkpoint.
    """

    output: Path
    folded: int
    copied: int
    rounding: Choice | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sha256: str | None = None
    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    output_bytes: int = 0
    rows: ReportRows | None = None
    expected_peak_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    modules: tuple[Module, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the command line's `--json`."""
        return {
            "output": str(self.output),
            "sha256": self.sha256,
            "merged": self.folded,
            "copied": self.copied,
            "discarded": 0,
            "unused": [],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "rounding": self.rounding.rounding if self.rounding else None,
            "reproduced": self.rounding.share if self.rounding else None,
            "seconds": round(self.seconds, 3),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
        }


def fold(
    dense: PathLike,
    adapter: PathLike,
    out: PathLike,
    *,
    quantize: PathLike,
    rounding: str = AUTO,
    round_dense: bool = False,
    lora_alpha: float | None = None,
    **running: Any,
) -> Folded:
    """Fold an adapter into a quantized checkpoint by way of the dense one that it was made from.

    Each module that the adapter names is computed from the dense weights, dense + scale · up · down with the sum over
    the rank in float64 and in order, and quantized anew as `quantize` stores it. Every other byte is copied.

    Args:
        dense: the 16- or 32-bit checkpoint that `quantize` was made from.
        adapter: folder of a PEFT or mlx-lm LoRA, or its weights file.
        out: folder (file, where `quantize` is one) to write.
        quantize: the quantized checkpoint; bits, groups, names and all other bytes come from it.
        rounding: `auto` (the one that reproduces `quantize`), `even`, `away` or `metal`.
        round_dense: round the sum to the dense dtype first, as "merge with PEFT, then convert" does.
        lora_alpha: alpha of every module, instead of the adapter's own.
        **running: fields of `Running`; `keep_recipe` does not apply.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    how, start = Running(**running), time.perf_counter()
    if rounding not in CHOICES:
        raise PlanError([Problem("error", f"there is no rounding {rounding!r}", hint=f"choose {', '.join(CHOICES)}")])
    plan = make_fold_plan(Path(dense), Path(adapter), Path(quantize), lora_alpha)
    suffix = plan.shipped.suffix
    target = numbered_before(Path(out), suffix) if how.number and not is_empty_folder(Path(out)) else Path(out)
    with closing(plan):
        problems = tuple(_target_problems(plan, target, how))
        promised = _promised(plan, target, problems, how)
        if how.dry_run:
            return promised
        if problems:
            raise PlanError(problems)
        sweep(target.parent)
        with Claim(target):
            choice = choose(plan, rounding)
            gathered = _carry_out(plan, target, choice, round_dense, how)
        warnings = (*choice.warnings(), *lost_effect(plan, gathered))
    return replace(
        promised,
        rounding=choice,
        warnings=warnings,
        rows=rows(plan, gathered) if how.report else None,
        sha256=how.cache.compute_source(open_shipped(target).source) if how.hash else None,
        seconds=time.perf_counter() - start,
        peak_rss_mb=peak_rss_mb(),
    )


def _tile(how: Running) -> int:
    """Weights worked on at a time; a tile that was asked for stays in proportion."""
    return how.tile * TILE // MERGE_TILE


def _target_problems(plan: FoldPlan, target: Path, how: Running) -> Iterator[Problem]:
    inputs = {"DENSE": plan.dense.path, "ADAPTER": plan.adapter.source.path, "SHIPPED": plan.shipped.source.path}
    overwrite = how.overwrite or is_empty_folder(target)
    yield from target_problems(
        target,
        folder=plan.shipped.folder,
        overwrite=overwrite,
        inputs=inputs,
        size_bytes=plan.shipped.nbytes,
        suffix=plan.shipped.suffix or OUTPUT_SUFFIX,
    )


def _promised(plan: FoldPlan, target: Path, problems: tuple[Problem, ...], how: Running) -> Folded:
    leaves = sum(len(module.storage.leaves) for module in plan.modules)
    return Folded(
        output=target,
        folded=len(plan.modules),
        copied=len(plan.shipped.source.tensors) - leaves,
        notes=plan.notes,
        output_bytes=plan.shipped.nbytes,
        expected_peak_bytes=_peak_bytes(plan, how.threads),
        problems=problems,
        modules=plan.modules,
    )


def _peak_bytes(plan: FoldPlan, threads: int | None) -> int:
    """Expected peak resident memory of the process, torch included."""
    count = threads or default_threads()
    factors = max(8 * module.change.rank * sum(module.change.shape) for module in plan.modules if module.change)
    base = _BASE_BYTES + (_COMPILER_BYTES if find_spec("numba") else 0)
    return base + count * _TILE_BYTES + (count + 1) * factors


def _carry_out(plan: FoldPlan, target: Path, choice: Choice, round_dense: bool, how: Running) -> Gathered:
    """Write the output and publish it."""
    threads = how.threads or default_threads()
    factors = Factors(plan.adapter.source, threads + 1)
    shipped, gathered = plan.shipped, Gathered()
    total = shipped.nbytes
    done = [0]

    def beat(stage: Any = "merging") -> None:
        how.on_progress(Progress(stage, min(done[0], total), total))

    with PatchedCopy(
        shipped.files,
        shipped.names,
        target,
        plan.holes,
        folder=shipped.folder,
        overwrite=how.overwrite,
        fsync=how.fsync,
    ) as copy:

        def worker() -> Any:
            hand = Worker(plan.dense, shipped, factors, choice.rounding, round_dense)

            def do(job: Range | Rows) -> None:
                if isinstance(job, Range):
                    copy.copy(job)
                    done[0] += job.count
                else:
                    done[0] += _fold_rows(hand, job, copy, plan, gathered, how.report)

            return do

        jobs = iter([*row_tiles(plan.modules, _tile(how)), *copy.pieces()])
        Crew(jobs, worker, threads=threads, beat=beat, cancel=how.cancel).run()
        for source in (plan.dense, plan.adapter.source):
            if changed := source.changed():
                hint = "start again when nothing else writes to it"
                raise FileError("the file was written to while it was read", file=changed, hint=hint)
        _check_headers(copy, shipped.source)
        if how.strict and (said := [*choice.warnings(), *lost_effect(plan, gathered)]):
            raise PlanError([Problem("error", text, str(shipped.source.path)) for text in said])
        beat("publishing")
        copy.publish()
    return gathered


def _fold_rows(hand: Worker, job: Rows, copy: PatchedCopy, plan: FoldPlan, gathered: Gathered, report: bool) -> int:
    """Code some rows, write them, measure them where that is asked for; returns the bytes written."""
    module, parts = job.module, []
    leaves = module.storage.leaves
    for portion in hand.portions(job):
        parts.append(portion.fresh)
        if report or portion.rows.low == 0:  # without a report, the first rows of a module speak for it
            shipped = read_leaves(plan.shipped, leaves, portion.rows)
            gathered.add(module, portion.rows.low, sums(portion, shipped, hand.scratch))
        gathered.cut(module, portion.cut)
    written = 0
    for leaf, raw in zip(leaves, joined(parts), strict=True):
        view = raw.view(-1).numpy().data
        copy.write(leaf.file, leaf.offset + job.low * leaf.row_bytes, view, leaf.key)
        written += len(view)
    return written


def _check_headers(copy: PatchedCopy, shipped: Source) -> None:
    """The copy must read back with the same tensors at the same places."""
    written = open_shipped(copy.temporary).source
    if written.tensors != shipped.tensors:
        raise OutputError("what was written does not read back as planned", file=copy.target)
