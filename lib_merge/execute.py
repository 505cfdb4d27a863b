"""Carry out a plan: hash beside the work, stream into a temporary file, check the inputs again, publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .devices import check_device
from .engine import Options, carry_out
from .errors import CancelledError, FileError, MergeError, PlanError, RecipeError
from .events import CancelToken, OnProgress, Progress
from .files.claim import Claim
from .files.hashes import HashCache, legacy_hash
from .files.open import open_model
from .files.sidecar import Sidecar
from .files.sink import FileSink
from .files.temporary import sweep
from .memory import peak_rss_mb
from .metadata import header_metadata
from .plan import Plan, default_threads, wrong_file
from .recipe import files
from .report import Rows
from .tiles import TILE
from .watch import Watcher


@dataclass(frozen=True)
class Running:
    """How a run is carried out; changes no byte of the tensors.

    Attributes:
        overwrite: replace an existing output.
        number: write NAME_1, NAME_2 … where the output exists.
        keep_recipe: store the recipe; without it nothing in the output names its inputs.
        hash: compute the output's sha256.
        fsync: the output is on the disk, not only on its way there, when the run returns.
        threads: workers; None for the cores of this machine, at most 8.
        strict: warnings count as errors.
        dry_run: make the plan and write nothing; the result then tells what would be done.
        report: measure every tensor for the report.
        tile: elements written at a time.
        device: where methods are computed: cpu, or cuda; the results agree but for the last bits of some methods.
        on_progress: told about ten times a second.
        cancel: stops the run from another thread.
        cache: remembered hashes.
    """

    overwrite: bool = False
    number: bool = False
    keep_recipe: bool = True
    hash: bool = False
    fsync: bool = True
    threads: int | None = None
    strict: bool = False
    dry_run: bool = False
    report: bool = False
    tile: int = TILE
    device: str = "cpu"
    on_progress: OnProgress = lambda progress: None
    cancel: CancelToken = field(default_factory=CancelToken)
    cache: HashCache = field(default_factory=HashCache)

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("tile", self.tile)):
            if value is not None and value < 1:
                raise RecipeError(f"{name} must be at least 1, not {value}")
        if self.overwrite and self.number:
            hint = "choose one: replace what is there, or write NAME_1"
            raise RecipeError("overwrite and number exclude each other", hint=hint)
        check_device(self.device)


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        output: file or folder written.
        sha256: of the output, when it was asked for.
        merged, copied, discarded: tensors by what happened to them.
        unused: keys of the other models that have no counterpart in A.
        warnings: what the user should know.
        seconds: wall time of the run.
        peak_rss_mb: peak memory of this process so far.
        saturated: values cut to the largest one of fp8.
        device: where methods were computed.
        plan: the plan that was carried out.
        rows: measured report, when it was asked for.
    """

    output: Path
    merged: int
    copied: int
    discarded: int
    unused: tuple[str, ...]
    warnings: tuple[str, ...]
    plan: Plan
    sha256: str | None = None
    seconds: float = 0.0
    peak_rss_mb: float = 0.0
    saturated: int = 0
    device: str = "cpu"
    rows: Rows | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the command line's `--json`."""
        return {
            "output": str(self.output),
            "sha256": self.sha256,
            "merged": self.merged,
            "copied": self.copied,
            "discarded": self.discarded,
            "unused": list(self.unused),
            "warnings": list(self.warnings),
            "saturated": self.saturated,
            "seconds": round(self.seconds, 3),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
        }


def execute(plan: Plan, target: Path, how: Running) -> Result:
    """Carry out a plan and publish the result.

    Args:
        plan: from `make_plan`.
        target: file or folder to write.
        how: see `Running`.

    Raises:
        PlanError: the plan has errors.
        MergeError: the run failed; nothing stands under the target's name that was not there before.
    """
    plan.check()
    start = time.perf_counter()
    threads = how.threads or default_threads()
    options = Options(threads, how.tile, how.device, how.on_progress, how.cancel)
    watch = Watcher(plan) if how.report else None
    sweep(target.parent)
    try:
        with (
            Claim(target),
            _Hashing(plan, how) as hashing,
            FileSink(target, plan.parts, folder=plan.folder, overwrite=how.overwrite, fsync=how.fsync) as sink,
            Sidecar(None if plan.folder else plan.sidecar, target, overwrite=how.overwrite, fsync=how.fsync) as beside,
        ):
            if plan.folder:
                base = plan.sources[plan.base]
                sink.add_side_files(base.path, base.side_files)
            saturated = carry_out(plan, sink, options, "merging", watch)
            hashes = hashing.wait()
            _check_inputs(plan, hashes)
            how.on_progress(Progress("publishing", plan.output_bytes, plan.output_bytes))
            beside.publish()
            sink.publish(_final_metadata(plan, hashes))
    finally:
        plan.close()
    return replace(
        planned(replace(plan, known_hashes=hashes), target),
        sha256=how.cache.compute_source(open_model(target)) if how.hash else None,
        warnings=tuple(problem.what for problem in plan.warnings()) + _saturation(saturated),
        seconds=time.perf_counter() - start,
        peak_rss_mb=peak_rss_mb(),
        saturated=saturated,
        device=how.device,
        rows=watch.rows() if watch else None,
    )


def planned(plan: Plan, target: Path) -> Result:
    """The result that a plan promises, before anything is written."""
    counts = plan.counts
    return Result(
        output=target,
        merged=counts["merged"],
        copied=counts["copied"],
        discarded=counts["discarded"],
        unused=tuple(key for _, key in plan.unused),
        warnings=tuple(problem.what for problem in plan.warnings()),
        plan=plan,
    )


def _saturation(count: int) -> tuple[str, ...]:
    return (f"{count} values were beyond fp8 and cut to its largest one",) if count else ()


def _final_metadata(plan: Plan, hashes: Mapping[str, str]) -> list[dict[str, str]]:
    if not plan.keep_recipe:
        return [dict(part.metadata) for part in plan.parts]
    legacy = {slot: legacy_hash(source.files[0]) for slot, source in plan.sources.items()}
    inherited = [part.inherited for part in plan.parts]
    return header_metadata(plan.recipe, plan.sources, inherited, hashes, legacy, True, plan.variant)


def _check_inputs(plan: Plan, hashes: Mapping[str, str]) -> None:
    """Inputs must be what they were when planned, and what the recipe says."""
    for source in plan.sources.values():
        if changed := source.changed():
            raise FileError(
                "the file was written to while it was read",
                file=changed,
                hint="start again when nothing else writes to it",
            )
    for slot, model in files(plan.recipe):
        if model.sha256 and hashes.get(slot, model.sha256) != model.sha256:
            raise PlanError([wrong_file(slot, plan.sources[slot].path)])


class _Hashing:
    """Computes the hashes that are not remembered in a thread of its own, beside the merge."""

    def __init__(self, plan: Plan, how: Running) -> None:
        self._plan, self._how = plan, how
        self._hashes = dict(plan.known_hashes)
        asked = {slot for slot, model in files(plan.recipe) if plan.keep_recipe or model.sha256}
        self._missing = sorted(asked - self._hashes.keys())
        self._stop = False
        self._error: MergeError | None = None
        self._thread = threading.Thread(target=self._work, name="lib_merge-hash", daemon=True)

    def _work(self) -> None:
        try:
            for slot in self._missing:
                self._hashes[slot] = self._how.cache.compute_source(self._plan.sources[slot], lambda: self._stop)
        except MergeError as error:
            self._error = error

    def wait(self) -> dict[str, str]:
        """Slot path -> sha256, once all are there."""
        while self._thread.is_alive():
            self._thread.join(0.1)
            self._how.on_progress(Progress("hashing", self._plan.output_bytes, self._plan.output_bytes))
            self._stop = self._stop or self._how.cancel.cancelled
        if self._error:
            raise self._error
        if self._how.cancel.cancelled:
            raise CancelledError("the run was stopped")
        return self._hashes

    def __enter__(self) -> _Hashing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()
