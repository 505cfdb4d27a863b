"""Carries out a plan's steps into a sink with a few threads; the one path of merging, verifying and comparing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .crew import Crew
from .events import CancelToken, OnProgress, Progress, Stage
from .files.dtypes import nbytes
from .files.source import Source
from .fused import NONE, Loops
from .kernels.registry import Measure, method
from .operands import Tile
from .plan import Plan
from .ports import Sink, Watch
from .steps import Baked, FreshScale, Merged, Step, Stored
from .tiles import MEASURED, PIECE, TILE, cut, keep_elements, kept
from .worker import Worker

_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class Copy:
    """Bytes of an input to be copied as they are, `offset` bytes from the start of the step's tensor."""

    step: Step
    offset: int
    count: int


@dataclass(frozen=True)
class Part:
    """A tile to be measured: number of the measure, number of the tile, and how many tiles the tensor has."""

    tile: Tile
    number: int
    at: int
    count: int


Job = Tile | Copy | Part


@dataclass(frozen=True)
class Options:
    """How a run is carried out; none of it changes a byte of the result, another device at most its last bits.

    Attributes:
        threads: workers.
        tile: elements written at a time; those that are measured or computed at a time are not more.
        device: torch's name of where methods are computed; reading and writing stay on the CPU.
        on_progress: told about ten times a second, from the calling thread.
        cancel: stops the run.
    """

    threads: int
    tile: int = TILE
    device: str = "cpu"
    on_progress: OnProgress = lambda progress: None
    cancel: CancelToken = CancelToken()  # noqa: RUF009 - never set


def carry_out(plan: Plan, sink: Sink, options: Options, stage: Stage, watch: Watch | None = None) -> int:
    """Compute every step of the plan into the sink.

    Args:
        plan: checked plan.
        sink: takes the bytes.
        options: threads, tile, progress, cancel.
        stage: named in progress events.
        watch: sees operands and results.

    Returns:
        How many values were cut to the largest one of fp8.

    Raises:
        NumberError, FileError, OutputError: the first that occurred; work in other threads has ended.
        CancelledError: it was asked for.
    """
    work = _Work(plan, sink, options, watch)
    for jobs in work.phases():
        work.work_through(jobs, stage)
    options.on_progress(Progress(stage, work.total_bytes, work.total_bytes))
    return work.saturated


class _Work:
    """The work lists and what the threads have come to."""

    def __init__(self, plan: Plan, sink: Sink, options: Options, watch: Watch | None) -> None:
        self._plan, self._sink, self._options, self._watch = plan, sink, options, watch
        self._lock = threading.Lock()
        # Half of the threads compute while the others read and write: more would only wait for the interpreter.
        self._turn = threading.Semaphore(max(1, options.threads // 2))
        self._measured_tile = min(options.tile, MEASURED)
        self._measures: dict[str, list[Any]] = {}
        self._parts: dict[str, dict[int, Any]] = {}
        self._key = ""
        self._loops = Loops(plan.steps) if watch is None and options.device == "cpu" else NONE
        self._done_bytes = 0
        self.saturated = 0
        self._big = [step for step in plan.steps if step.measured and not (step.whole or kept(step, options.threads))]
        passes = sum(nbytes(step.dtype, step.numel) * len(_measures_of(step)) for step in self._big)
        self.total_bytes = passes + sum(nbytes(step.dtype, step.numel) for step in plan.steps)

    def phases(self) -> Iterator[Iterator[Job]]:
        """Work lists one after the other: each measure of the tensors too large to keep, then all results."""
        for number in range(max((len(_measures_of(step)) for step in self._big), default=0)):
            yield (
                Part(tile, number, at, -(-tile.step.numel // cut(tile.step.node, self._measured_tile)))
                for step in self._big
                if number < len(_measures_of(step))
                for at, tile in enumerate(_tiles(step, cut(step.node, self._measured_tile)))
            )
        yield work_list(self._plan.steps, self._plan.sources, self._sink, self._options.tile, self._options.threads)

    def work_through(self, jobs: Iterator[Job], stage: Stage) -> None:
        """Do all jobs with a few threads and tell about progress meanwhile."""

        def beat() -> None:
            self._options.on_progress(Progress(stage, self._done_bytes, self.total_bytes, self._key))

        Crew(jobs, self._worker, threads=self._options.threads, beat=beat, cancel=self._options.cancel).run()

    def _worker(self) -> Callable[[Job], None]:
        """What does a job, for one thread."""
        keep, options = keep_elements(self._options.threads), self._options
        worker = Worker(
            self._plan.sources,
            self._sink,
            self._measured_tile,
            keep,
            self._turn,
            self._watch,
            options.device,
            self._loops,
        )
        return lambda job: self._do(worker, job)

    def _do(self, worker: Worker, job: Job) -> None:
        if isinstance(job, Copy):
            node = job.step.node
            assert isinstance(node, Stored)
            self._sink.copy(job.step.key, job.offset, self._plan.sources[node.slot], node.key, job.count)
            self._count(job.step, job.count)
        elif isinstance(job, Part):
            step = job.tile.step
            part = worker.measure(job.tile, job.number, self._measures.get(step.key, ()))
            self._collect(job, part)
            self._count(step, nbytes(step.dtype, job.tile.high - job.tile.low))
        else:
            worker.run(job, self._measures.get(job.step.key, ()))
            self._count(job.step, nbytes(job.step.dtype, job.high - job.low))
            with self._lock:
                self.saturated += worker.results.saturated
            worker.results.saturated = 0

    def _collect(self, job: Part, part: Any) -> None:
        """Keep a tile's part; the last one of a tensor turns them into its measure."""
        key = job.tile.step.key
        with self._lock:
            parts = self._parts.setdefault(key, {})
            parts[job.at] = part
            complete = len(parts) == job.count
        if complete:
            measure = _measures_of(job.tile.step)[job.number].combine([parts[at] for at in range(job.count)])
            with self._lock:
                del self._parts[key]
                self._measures.setdefault(key, []).append(measure)

    def _count(self, step: Step, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            self._key = step.key


def _measures_of(step: Step) -> tuple[Measure, ...]:
    node = step.node
    return method(node.method).needed_measures(node.params) if isinstance(node, Merged) else ()


def _tiles(step: Step, size: int, piece: int = 0) -> Iterator[Tile]:
    return (Tile(step, low, min(low + size, step.numel), piece, step.wide) for low in range(0, step.numel, size))


def work_list(
    steps: Sequence[Step], sources: Mapping[str, Source], sink: Sink, tile: int, threads: int
) -> Iterator[Job]:
    """Jobs in the order of the output file; neighbouring tensors that are copied become one range."""
    run: list[Step] = []
    own = [step for step in steps if not isinstance(step.node, FreshScale)]
    for step in sorted(own, key=lambda step: sink.place(step.key)):
        if run and not (step.verbatim and _follows(run[-1], step, sources, sink)):
            yield from _copies(run)
            run = []
        if step.verbatim:
            run.append(step)
        else:
            if step.whole or kept(step, threads) or step.scale or isinstance(step.node, Baked):
                yield from _tiles(step, max(step.numel, 1))
            else:
                piece = min(tile, MEASURED if step.measured else PIECE)  # measured methods cut for the cache themselves
                yield from _tiles(step, cut(step.node, tile), cut(step.node, piece))
    yield from _copies(run)


def _follows(before: Step, step: Step, sources: Mapping[str, Source], sink: Sink) -> bool:
    """True when the two lie one behind the other both in one input file and in one output file."""
    first, second = before.node, step.node
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    if first.slot != second.slot:
        return False
    here, there = sources[first.slot].tensors[first.key], sources[second.slot].tensors[second.key]
    part, offset = sink.place(before.key)
    return (
        here.file == there.file
        and here.strides is None
        and there.strides is None
        and here.offset + here.nbytes == there.offset
        and sink.place(step.key) == (part, offset + here.nbytes)
    )


def _copies(run: Sequence[Step]) -> Iterator[Copy]:
    total = sum(nbytes(step.dtype, step.numel) for step in run)
    for offset in range(0, total, _COPY_BYTES):
        yield Copy(run[0], offset, min(_COPY_BYTES, total - offset))
