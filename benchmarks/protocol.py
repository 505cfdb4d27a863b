"""The protocol of all benchmarks: floor and job alternate in fresh processes, foreign load noted beside."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measure import Measured

MEMORY_FOLDER = Path("/dev/shm")
MARGIN = 2 << 30
OUT = "{out}"
MAX_FLOOR_SPREAD = 0.30


@dataclass(frozen=True)
class Job:
    """A command that prints one JSON line of `Measured`; `OUT` in it stands for the output file.

    Attributes:
        name: as the table shows it.
        command: arguments of the child.
        before: called before each run, untimed.
    """

    name: str
    command: Sequence[str]
    before: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Place:
    """Where outputs go; on a disk, dirty pages are written back before each run."""

    folder: Path
    in_memory: bool


@dataclass(frozen=True)
class Row:
    """One job's rounds, each with the floor that ran just before it.

    Attributes:
        name: the job's.
        floors, runs: one per round.
        repeats: rounds that were run again because the floor wavered.
    """

    name: str
    floors: tuple[Measured, ...]
    runs: tuple[Measured, ...]
    repeats: int = 0

    @property
    def ratio(self) -> float:
        """Median wall time over that of the floor."""
        return median(self.runs, "seconds") / median(self.floors, "seconds")

    @property
    def cpu_ratio(self) -> float:
        """Median CPU time over that of the floor."""
        return median(self.runs, "cpu_seconds") / median(self.floors, "cpu_seconds")


def median(runs: Sequence[Measured], field: str) -> float:
    """Median of one field."""
    return float(statistics.median(getattr(run, field) for run in runs))


def spread(runs: Sequence[Measured]) -> float:
    """(max − min) / median of the wall times."""
    seconds = [run.seconds for run in runs]
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def memory_available() -> int:
    """Bytes that can be had without swapping; the page cache counts as available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def output_place(output_bytes: int, input_bytes: int, disk: Path, on_disk: bool = False) -> Place:
    """Memory-backed storage where the output fits beside the cached inputs, else the folder `disk`."""
    room = MEMORY_FOLDER.is_dir() and min(
        shutil.disk_usage(MEMORY_FOLDER).free - output_bytes,
        memory_available() - output_bytes - input_bytes,
    )
    in_memory = not on_disk and room > MARGIN
    return Place(MEMORY_FOLDER if in_memory else disk, in_memory)


def run_once(job: Job, place: Place, env: Mapping[str, str]) -> Measured:
    """One fresh process with a fresh output folder, which is removed afterwards.

    Raises:
        RuntimeError: the child failed; what it said on stderr is shown.
    """
    job.before()
    with tempfile.TemporaryDirectory(prefix="lib_merge_bench_", dir=place.folder) as folder:
        if not place.in_memory:
            os.sync()
        command = [part.replace(OUT, f"{folder}/out.safetensors") for part in job.command]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.name} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def alternate(
    floor: Job,
    jobs: Sequence[Job],
    place: Place,
    *,
    rounds: int = 5,
    warmup: int = 1,
    max_repeats: int = 5,
    env: Mapping[str, str] | None = None,
) -> list[Row]:
    """Run floor, job, floor, next job … for some rounds, the first `warmup` of which do not count.

    While the floors of one job spread over more than 30 %, the round whose floor is farthest from their median
    is run again in its place. Only the floor decides that; the job's own time is not looked at.
    """

    def pair(job: Job) -> tuple[Measured, Measured]:
        print(f"  {job.name} …", end="", file=sys.stderr, flush=True)
        below, run = run_once(floor, place, env or {}), run_once(job, place, env or {})
        print(f" floor {below.seconds:.2f} s, job {run.seconds:.2f} s", file=sys.stderr)
        return below, run

    for job in list(jobs) * warmup:
        pair(job)
    every = [[pair(job) for job in jobs] for _ in range(rounds)]
    rows = [
        Row(job.name, tuple(floor for floor, _ in pairs), tuple(run for _, run in pairs))
        for job, pairs in zip(jobs, zip(*every, strict=True), strict=True)
    ]
    for index, job in enumerate(jobs):
        while spread(rows[index].floors) > MAX_FLOOR_SPREAD and rows[index].repeats < max_repeats:
            rows[index] = repeated(rows[index], *pair(job))
    return rows


def repeated(row: Row, floor: Measured, run: Measured) -> Row:
    """The row with its outermost floor, and the run beside it, replaced by a new round."""
    middle = median(row.floors, "seconds")
    worst = max(range(len(row.floors)), key=lambda index: abs(row.floors[index].seconds - middle))
    floors, runs = list(row.floors), list(row.runs)
    floors[worst], runs[worst] = floor, run
    return replace(row, floors=tuple(floors), runs=tuple(runs), repeats=row.repeats + 1)


def table(rows: Sequence[Row]) -> str:
    """Markdown: two lines for each job, that of its floors first."""
    lines = [
        "| job | wall s | spread | × floor | CPU s | × CPU | peak MB | foreign load (max) | disk read MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(_line("floor", row.floors, "", ""))
        note = f" (repeated: {row.repeats})" if row.repeats else ""
        lines.append(_line(row.name + note, row.runs, f"**{row.ratio:.2f}**", f"{row.cpu_ratio:.2f}"))
    return "\n".join(lines)


def _line(name: str, runs: Sequence[Measured], ratio: str, cpu_ratio: str) -> str:
    peak, foreign = max(run.peak_rss_mb for run in runs), [run.foreign for run in runs]
    read = max(run.disk_read_mb for run in runs)
    cells = [
        name,
        f"{median(runs, 'seconds'):.2f}",
        f"{spread(runs):.0%}",
        ratio,
        f"{median(runs, 'cpu_seconds'):.2f}",
        cpu_ratio,
        f"{peak:.0f}",
        f"{statistics.median(foreign):.0%} ({max(foreign):.0%})",
        f"{read:.0f}",
    ]
    return f"| {' | '.join(cells)} |"
