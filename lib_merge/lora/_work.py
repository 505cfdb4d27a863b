"""The way from a recipe to a result that all LoRA tasks share: open, plan, compute module by module, write."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CancelledError, FileError, PlanError, Problem, RecipeError
from ..events import Progress
from ..execute import Running
from ..families import Detected, block_of
from ..files.claim import Claim
from ..files.dtypes import BY_OPTION, DTYPES
from ..files.open import open_model
from ..files.source import Source
from ..lazy import torch
from ..memory import peak_rss_mb
from ..plan import default_threads
from ..recipe import Recipe, SaveDtype, files
from . import _metadata, _output
from ._inputs import Input
from ._module import Module, added_by_rounding
from ._planned import LoraPlan, Planned, expected_peak
from ._spool import Keep, Spool

if TYPE_CHECKING:
    from torch import Tensor

Job = Callable[[], Sequence[Module]]


@dataclass
class Work:
    """What a task is going to do.

    Attributes:
        recipe: complete.
        sources: slot -> opened input.
        inputs: the LoRAs among them.
        jobs: each computes some modules; independent of each other.
        dtype: safetensors name of the result's float dtype.
        merged: jobs that merge or extract something; the others hand tensors on.
        kept: key -> (dtype, tensor) that go into the result as they are.
        unused: keys of the inputs that the result does not show.
        rows: what the report says beside the modules.
        problems: warnings and notes.
        nbytes: expected size of the result, 0 where it is not known before.
        found: the family that the result is for.
        in_order: jobs must run one after the other (random draws of other programs).
        prepare: looks at all inputs before the first job; is given the workers.
        advise: what the user should hear once modules are made.
        planned: the modules that come of it, from headers.
        job_bytes: memory of one job: (out, in·k), rank -> bytes.
    """

    recipe: Recipe
    sources: Mapping[str, Source]
    inputs: Sequence[Input]
    jobs: Sequence[Job]
    dtype: str
    kept: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    nbytes: int = 0
    found: Detected = field(default_factory=Detected)
    in_order: bool = False
    prepare: Callable[[Executor, Running], None] | None = None
    advise: Callable[[Sequence[Module]], Sequence[Problem]] | None = None
    planned: Callable[[], Sequence[Planned]] = tuple
    job_bytes: Callable[[Sequence[int], int], int] = lambda shape, rank: 24 * rank * sum(shape)


@dataclass(frozen=True)
class LoraResult:
    """What a LoRA task did.

    Attributes:
        output: file or folder written.
        sha256: of the output, when it was asked for.
        modules: modules in the result.
        copied: tensors handed on as they were.
        unused: keys of the inputs that the result does not show.
        warnings: what the user should know; `notes` what may interest.
        error: relative error of the whole change that cutting left, in the Frobenius norm.
        worst: (module, its relative error), the largest one.
        rounding: relative error of the whole change that rounding to the stored dtype adds, in the Frobenius norm;
            None where it was not measured, which it is for fp8, and for others if the report was asked for.
        ranks: rank -> number of modules.
        strategies: how LoRAs were put together -> number of modules; empty for other tasks.
        rows: report, one row for each module, with its norm if the report was asked for or something
            was cut, and one for each difference that the result cannot hold.
        seconds: wall time.
        peak_rss_mb: peak memory of this process so far.
        output_bytes: of the result's tensors.
        plan: of a dry run alone.
    """

    output: Path
    modules: int
    copied: int
    unused: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    error: float
    worst: tuple[str, float]
    ranks: Mapping[int, int]
    rows: Sequence[Mapping[str, Any]]
    strategies: Mapping[str, int] = field(default_factory=dict)
    rounding: float | None = None
    sha256: str | None = None
    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    output_bytes: int = 0
    plan: LoraPlan | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the command line's `--json`."""
        return {
            "output": str(self.output),
            "sha256": self.sha256,
            "merged": self.modules,
            "copied": self.copied,
            "discarded": 0,
            "unused": list(self.unused),
            "warnings": list(self.warnings),
            "error": self.error,
            "worst": {"module": self.worst[0], "error": self.worst[1]},
            "rounding": self.rounding,
            "ranks": {str(rank): count for rank, count in sorted(self.ranks.items())},
            "strategies": dict(self.strategies),
            "seconds": round(self.seconds, 3),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
        }


# Modules looked at before their pages are given back.
_MEASURED_AT_ONCE = 16


@contextmanager
def opened(located: Mapping[str, Path]) -> Iterator[dict[str, Source]]:
    """Slot -> opened input; closed at the end.

    Raises:
        FileError: one cannot be opened.
    """
    with ExitStack() as stack:
        sources = {}
        for slot, path in located.items():
            sources[slot] = open_model(path)
            stack.callback(sources[slot].close)
        yield sources


def carry_out(work: Work, target: Path, how: Running) -> LoraResult:
    """Compute and publish.

    Args:
        work: what is to be done.
        target: file or folder to write.
        how: see `Running`.

    Raises:
        MergeError: the run failed; nothing stands under the target's name that was not there before.
    """
    start = time.perf_counter()
    if work.inputs:
        work.found = next((item.found for item in work.inputs if item.found.family), work.inputs[0].found)
    if how.device != "cpu":
        work.problems.append(Problem("warning", f"LoRAs are made on the CPU; {how.device} is not used"))
    _refuse(work, how)
    paths = {slot: source.path for slot, source in work.sources.items()}
    _output.check_target(target, paths, work.nbytes, how, lambda: [step.key for step in work.planned()])
    if how.dry_run:
        plan = _plan(work, how)
        return replace(_result(work, target, [], how), plan=plan, output_bytes=plan.output_bytes)
    with Claim(target), Spool(target) as spool:
        told = _published(work, target, how, spool)
    sha256 = how.cache.compute_source(open_model(target)) if how.hash else None
    return replace(told, sha256=sha256, seconds=time.perf_counter() - start)


def _plan(work: Work, how: Running) -> LoraPlan:
    steps = work.planned()
    kept = sum(tensor.numel() * tensor.element_size() for _, tensor in work.kept.values())
    size = kept + sum(step.bytes(work.dtype) for step in steps)
    largest = max((work.job_bytes(step.shape, step.rank or 0) for step in steps), default=0)
    threads = 1 if work.in_order else min(how.threads or default_threads(), max(len(work.jobs), 1))
    peak = expected_peak(size, largest, threads)
    return LoraPlan(steps, len(work.kept), len(work.unused), tuple(work.problems), work.dtype, size, peak)


def _published(work: Work, target: Path, how: Running, spool: Spool) -> LoraResult:
    modules, saturated = compute(work, how, spool.keep)
    if not modules and not work.kept:
        raise RecipeError("there is no difference to store: the inputs are equal, or changes are below min_diff")
    if modules and not work.kept and all(module.is_zero for module in modules):
        hint = "look at the strengths, and at whether one LoRA is another one turned round"
        raise RecipeError("nothing is left to store: the result is zero everywhere", hint=hint)
    work.problems += work.advise(modules) if work.advise else []
    result = _output.stored(modules, work.dtype, work.kept, saturated, _swapped(work))
    if how.strict and (late := [*_warnings(work), *_late(work, result)]):
        raise PlanError([Problem("error", text) for text in late])
    hashes = _hashes(work, how)
    metadata = _metadata.build(work.recipe, work.inputs, modules, result, work.sources, hashes, how.keep_recipe)
    _check_unchanged(work.sources)
    how.on_progress(Progress("publishing", result.nbytes, result.nbytes))
    _output.write(target, result, metadata, how, spool.forget)
    return _result(work, target, modules, how, result, spool.forget)


def compute_stored(work: Work, how: Running) -> _output.Stored:
    """The tensors of the result, without writing them."""
    _refuse(work, how)
    modules, saturated = compute(work, how)
    return _output.stored(modules, work.dtype, work.kept, saturated, _swapped(work))


def _swapped(work: Work) -> bool:
    """Whether the LoRAs are for a base that stores its weights as [in, out]."""
    return any(piece.settings.get("fan_in_fan_out") for item in work.inputs for piece in item.adapter.pieces)


def compute(work: Work, how: Running, keep: Keep = lambda tensor: tensor) -> tuple[list[Module], int]:
    """Run the jobs, a few at a time; the result does not depend on how many.

    Args:
        work: what is to be done.
        how: threads, progress, cancel.
        keep: takes a finished tensor and hands it back, wherever it waits.

    Returns:
        the modules, rounded, and how many values were cut to the largest one of fp8.
    """
    threads = 1 if work.in_order else min(how.threads or default_threads(), max(len(work.jobs), 1))
    before = torch.get_num_threads()
    modules: list[Module] = []
    saturated = 0
    pool = ThreadPoolExecutor(threads, "lib_merge", initializer=torch.set_num_threads, initargs=(1,))
    try:
        if work.prepare:
            work.prepare(pool, how)
        waiting = [pool.submit(_rounded, job, work.dtype, how, keep) for job in work.jobs]
        for done, future in enumerate(waiting, 1):
            found, beyond = future.result()
            modules, saturated = modules + found, saturated + beyond
            how.on_progress(Progress("merging", done, len(waiting), found[0].stem if found else "", "modules"))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # torch hands a worker's setting on to threads that start later
    return modules, saturated


def _rounded(job: Job, dtype: str, how: Running, keep: Keep) -> tuple[list[Module], int]:
    """What a job makes, rounded at once: a result waits in its own dtype."""
    if how.cancel.cancelled:
        raise CancelledError("the run was stopped")
    # For others than fp8 it takes as long as half of an exact sum, and is far below what anybody sees.
    measured = how.report or DTYPES[dtype].bits == 8
    pairs = [module.rounded(dtype, measured) for module in job()]
    return [module.moved(keep) for module, _ in pairs], sum(beyond for _, beyond in pairs)


def _refuse(work: Work, how: Running) -> None:
    errors = [problem for problem in work.problems if problem.level == "error"]
    if how.strict:
        errors += [problem for problem in work.problems if problem.level == "warning"]
    if errors:
        raise PlanError(errors)


def _hashes(work: Work, how: Running) -> dict[str, str]:
    """sha256 of each input that the recipe is going to name."""
    asked = {slot for slot, model in files(work.recipe) if how.keep_recipe or model.sha256}
    found = {slot: how.cache.compute_source(work.sources[slot], lambda: how.cancel.cancelled) for slot in sorted(asked)}
    for slot, model in files(work.recipe):
        if model.sha256 and found.get(slot, model.sha256) != model.sha256:
            raise FileError("this is another file than the recipe was made with", file=work.sources[slot].path)
    return found


def _check_unchanged(sources: Mapping[str, Source]) -> None:
    for source in sources.values():
        if changed := source.changed():
            hint = "start again when nothing else writes to it"
            raise FileError("the file was written to while it was read", file=changed, hint=hint)


def _result(
    work: Work,
    target: Path,
    modules: Sequence[Module],
    how: Running,
    result: Any = None,
    forget: Callable[[], None] = lambda: None,
) -> LoraResult:
    # Sizes take as long as half of an exact sum: only where somebody looks at them.
    measured = how.report or any(module.error for module in modules)
    sizes = []
    for at, module in enumerate(modules):
        sizes.append(module.size() if measured else math.nan)
        if measured and at % _MEASURED_AT_ONCE == 0:
            forget()
    rows = [_row(module, work, size) for module, size in zip(modules, sizes, strict=True)]
    # The cut part is orthogonal to what is left: ‖M‖² = ‖M_r‖²/(1 − e²).
    wholes: list[float] = [
        size**2 / (1 - module.error**2) if module.error < 1 else 0.0
        for size, module in zip(sizes, modules, strict=True)
    ]
    lost = math.fsum(whole * module.error**2 for whole, module in zip(wholes, modules, strict=True))
    worst = max(modules, key=lambda module: module.error, default=None)
    counts: dict[int, int] = {}
    for module in modules:
        if module.rank is not None:
            counts[module.rank] = counts.get(module.rank, 0) + 1
    strategies = Counter(str(module.facts["strategy"]) for module in modules if "strategy" in module.facts)
    return LoraResult(
        output=target,
        modules=len(modules) if result is not None else len(work.jobs),
        copied=len(work.kept),
        unused=work.unused,
        warnings=(*_warnings(work), *_late(work, result)),
        notes=tuple(problem.what for problem in work.problems if problem.level == "note"),
        error=math.sqrt(lost / math.fsum(wholes)) if measured and any(wholes) else 0.0,
        worst=(worst.stem, worst.error) if worst and worst.error else ("", 0.0),
        ranks=counts,
        strategies=dict(sorted(strategies.items())),
        rounding=added_by_rounding(modules),
        rows=[*rows, *(full(row, work.found) for row in sorted(work.rows, key=lambda row: str(row["key"])))],
        peak_rss_mb=peak_rss_mb(),
        output_bytes=result.nbytes if result is not None else work.nbytes,
    )


def _warnings(work: Work) -> list[str]:
    return [problem.what for problem in work.problems if problem.level == "warning"]


def _late(work: Work, result: Any) -> Iterator[str]:
    """Warnings that only the run itself could give."""
    lost = sorted(work.rows, key=lambda row: -float(row["norm_diff"]))
    if lost:
        size = math.sqrt(sum(float(row["norm_diff"]) ** 2 for row in lost))
        yield (
            f"{len(lost)} differences are not in the LoRA, of norm {size:.4g} in all, the largest at {lost[0]['key']}: "
            f"{lost[0]['reason']}"
        )
    if result is not None and result.saturated:
        yield f"{result.saturated} values were beyond fp8 and cut to its largest one"


def _row(module: Module, work: Work, size: float) -> dict[str, Any]:
    """A report row of a module."""
    tensors = module.tensors()
    return full(
        {
            "key": module.stem,
            "component": module.component,
            "action": "merged",
            "method": work.recipe.method or work.recipe.task,
            "dtype_out": work.dtype,
            "shape": list(next(iter(tensors.values())).shape),
            "numel": sum(tensor.numel() for tensor in tensors.values()),
            "norm_out": size,
            "rank": math.nan if module.rank is None else module.rank,
            "rank_before": math.nan if module.rank_before is None else module.rank_before,
            "svd_error": module.error,
            "note": module.note,
            **module.facts,
        },
        work.found,
    )


_NUMBERS = ("norm_a", "norm_b", "norm_diff", "rel_diff", "cosine", "norm_out", "norm_change", "max_change",
            "sign_conflict", "rank", "rank_before", "svd_error")  # fmt: skip
_TEXTS = ("component", "block", "action", "method", "dtype_a", "dtype_b", "dtype_out")


def full(row: Mapping[str, Any], found: Detected) -> dict[str, Any]:
    """A row with every column of a report: what does not apply is NaN or empty."""
    full = {"key": "", **dict.fromkeys(_TEXTS, ""), "shape": [], "numel": 0, **dict.fromkeys(_NUMBERS, math.nan)}
    block = block_of(str(row["key"]), found)
    return {**full, "reason": "", "note": "", "block": block, **row}


def dtype_name(asked: SaveDtype, widest: str) -> str:
    """The result's float dtype: as asked, else the widest of the inputs."""
    return widest if asked in ("auto", "keep") else BY_OPTION[asked].name
