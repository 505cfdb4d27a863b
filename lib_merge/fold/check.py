"""The proof of a fold: every byte that it may not touch, and every group that it wrote, computed anew."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..catalog import PathLike
from ..crew import Crew
from ..errors import FileError, MergeError
from ..events import CancelToken, OnProgress, Progress
from ..files import calls
from ..files.patched import Range, outside
from ..lazy import torch
from ..plan import default_threads
from .measure import column_squares, rms_ratio
from .plan import FoldPlan, Shipped, listing, make_fold_plan
from .rounding import AUTO, Choice, choose, equal_groups
from .work import Factors, Rows, Worker, read_leaves, row_tiles

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_RMS_RATIO = 2.0
_COMPARED_BYTES = 4 << 20
_SHOWN = 5


@dataclass(frozen=True)
class Gate:
    """One thing that must hold: its name, what was found, and whether it holds."""

    name: str
    found: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.found}: {'ok' if self.ok else 'FAILED'}"


@dataclass(frozen=True)
class Checked:
    """What a check of a folded checkpoint found.

    Attributes:
        gates: what must hold, in the order in which it was looked at.
        groups: groups that were computed anew and compared.
        differing: how many of them are not as computed.
        identical: files that are the quantized checkpoint's, byte for byte.
        touched: files that are not.
        rms_ratio: RMS error of the result over that of the quantized checkpoint, over all folded modules.
        worst_column: the largest such ratio of a single column, and its module; shown, never a gate.
        rounding: how codes were rounded.
    """

    gates: tuple[Gate, ...]
    groups: int = 0
    differing: int = 0
    identical: int = 0
    touched: int = 0
    rms_ratio: float = math.nan
    worst_column: tuple[float, str] = (math.nan, "")
    rounding: Choice | None = None

    @property
    def ok(self) -> bool:
        """True when every gate holds."""
        return all(gate.ok for gate in self.gates)

    def describe(self) -> str:
        """For a terminal; the last line says whether all gates pass."""
        lines = [self.rounding.describe()] if self.rounding else []
        lines += [str(gate) for gate in self.gates]
        if self.worst_column[1]:
            lines.append(f"worst column: RMS folded/shipped {self.worst_column[0]:.4f} in {self.worst_column[1]}")
        return "\n".join([*lines, f"merge check: {'all gates pass' if self.ok else 'FAILED'}"])

    def to_dict(self) -> dict[str, object]:
        """The fields of the command line's `--json`."""
        ratio, worst = (value if math.isfinite(value) else None for value in (self.rms_ratio, self.worst_column[0]))
        return {
            "ok": self.ok,
            "gates": [{"name": gate.name, "found": gate.found, "ok": gate.ok} for gate in self.gates],
            "groups": self.groups,
            "differing": self.differing,
            "identical_files": self.identical,
            "touched_files": self.touched,
            "rms_ratio": ratio,
            "worst_column": worst,
            "rounding": self.rounding.rounding if self.rounding else None,
        }


def fold_check(
    dense: PathLike,
    adapter: PathLike,
    out: PathLike,
    shipped: PathLike,
    *,
    rounding: str = AUTO,
    round_dense: bool = False,
    lora_alpha: float | None = None,
    threads: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    cancel: CancelToken | None = None,
) -> Checked:
    """Prove that `out` is what folding the adapter gives; nothing is written.

    Args:
        dense: as in `fold`.
        adapter: as in `fold`.
        out: what `fold` wrote.
        shipped: the quantized checkpoint that it was folded into.
        rounding: as it was given to `fold`.
        round_dense: as it was given to `fold`.
        lora_alpha: as it was given to `fold`.
        threads: workers; None for the cores of this machine, at most 8.
        on_progress: told about ten times a second.
        cancel: stops the check from another thread.

    Raises:
        MergeError: the inputs cannot be read or folded. What is wrong with `out` is told in the result.
    """
    plan = make_fold_plan(Path(dense), Path(adapter), Path(shipped), lora_alpha)
    with closing(plan):
        files = _same_files(plan.shipped, Path(out))
        if not files.ok:
            return Checked((files,))
        choice = choose(plan, rounding)
        folded = _as_shipped(plan.shipped, Path(out))
        found = _Findings(plan, folded)
        with closing(folded.source):
            count = threads or default_threads()
            factors = Factors(plan.adapter.source, count + 1)

            def worker() -> Callable[[Range | Rows], None]:
                hand = Worker(plan.dense, plan.shipped, factors, choice.rounding, round_dense)
                return lambda job: found.look_at(job, hand)

            jobs: list[Range | Rows] = [*row_tiles(plan.modules), *outside(found.sizes, plan.holes)]
            total = plan.shipped.nbytes
            Crew(
                iter(jobs),
                worker,
                threads=count,
                beat=lambda: on_progress(Progress("verifying", min(found.done, total), total)),
                cancel=cancel or CancelToken(),
            ).run()
            without_effect = all(module.change and factors.is_zero(module.change) for module in plan.modules)
        return found.checked(files, choice, without_effect)


def _same_files(shipped: Shipped, out: Path) -> Gate:
    """The same files of the same lengths, no more and no fewer."""
    wrong: list[str] = []
    if shipped.folder:
        try:
            have = set(listing(out)[0]) if out.is_dir() else None
        except MergeError as error:
            return Gate("files", str(error), False)
        if have is None:
            raise FileError("no such folder", file=out)
        wrong += [f"{name} is missing" for name in shipped.names if name not in have]
        wrong += [f"{name} is one too many" for name in sorted(have - set(shipped.names))]
    elif not out.is_file():
        raise FileError("no such file", file=out)
    for path, name in zip(shipped.files, shipped.names, strict=True):
        other = out / name if shipped.folder else out
        if other.is_file() and other.stat().st_size != path.stat().st_size:
            wrong.append(f"{name or out.name} has {other.stat().st_size} bytes instead of {path.stat().st_size}")
    said = "; ".join(wrong[:_SHOWN]) + (f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else "")
    return Gate("files", said or f"the same {len(shipped.names)} files of the same lengths", not wrong)


def _as_shipped(shipped: Shipped, out: Path) -> Shipped:
    """OUT, taken to hold the same tensors at the same places: what is not so is found byte by byte."""
    names = shipped.names
    files = tuple(out / name if shipped.folder else out for name in names)
    weights = files[: len(shipped.source.files)]
    return replace(shipped, source=replace(shipped.source, path=out, files=weights), files=files)


@dataclass
class _Findings:
    """What the threads have found so far."""

    plan: FoldPlan
    folded: Shipped
    done: int = 0
    groups: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    strangers: dict[int, int] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    columns: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock, self._rows = threading.Lock(), dict[str, int]()
        self.sizes = [path.stat().st_size for path in self.plan.shipped.files]

    def look_at(self, job: Range | Rows, hand: Worker) -> None:
        """Compare a range of bytes, or compute some rows anew."""
        if isinstance(job, Range):
            self._compare(job)
        else:
            self._recompute(job, hand)

    def _compare(self, job: Range) -> None:
        """Bytes outside of the folded modules."""
        for offset in range(job.offset, job.offset + job.count, _COMPARED_BYTES):
            part = Range(job.file, offset, min(_COMPARED_BYTES, job.offset + job.count - offset))
            one, other = (_read(model.files[job.file], part) for model in (self.plan.shipped, self.folded))
            first = _first_difference(one, other)
            with self._lock:
                self.done += part.count
                if first is not None:
                    self.touched.add(job.file)
                    self.strangers[job.file] = min(offset + first, self.strangers.get(job.file, offset + first))

    def _recompute(self, job: Rows, hand: Worker) -> None:
        """Groups of a folded module."""
        module, leaves = job.module, job.module.storage.leaves
        same, squares, touched = [], torch.zeros(2, module.shape[1], dtype=torch.float64), set()
        for portion in hand.portions(job):
            stored, shipped = (read_leaves(model, leaves, portion.rows) for model in (self.folded, self.plan.shipped))
            same.append(equal_groups(module, portion.fresh, stored))
            squares += column_squares(portion, stored, shipped, hand.scratch)
            touched |= {leaf.file for leaf, *raw in zip(leaves, stored, shipped, strict=True) if not torch.equal(*raw)}
        equal = torch.cat(same)
        if not bool(equal.all()):  # decided once more without matrix multiplication, before it counts
            equal = equal_groups(module, hand.fresh(job, fast=False), read_leaves(self.folded, leaves, job))
        with self._lock:
            self.groups += equal.numel()
            if different := equal.numel() - int(equal.sum()):
                self.differing[module.name] = self.differing.get(module.name, 0) + different
            self._keep(job, squares)
            self.touched |= touched
            self.done += sum(leaf.row_bytes for leaf in leaves) * (job.high - job.low)

    def _keep(self, job: Rows, squares: Tensor) -> None:
        """Sums of some rows; those of a whole module become one, in the order of its rows."""
        parts = self.columns.setdefault(job.module.name, {})
        parts[job.low] = squares
        self._rows[job.module.name] = self._rows.get(job.module.name, 0) + job.high - job.low
        if self._rows[job.module.name] == job.module.shape[0]:
            self.columns[job.module.name] = {0: torch.stack([parts[low] for low in sorted(parts)]).sum(0)}

    def checked(self, files: Gate, choice: Choice, without_effect: bool) -> Checked:
        """The gates, once everything was looked at."""
        per_column = {name: whole for name, parts in self.columns.items() for whole in parts.values()}
        after, before = (math.fsum(float(sums[row].sum()) for sums in per_column.values()) for row in (0, 1))
        ratio = rms_ratio({"ff": after, "ss": before})
        identical = len(self.sizes) - len(self.touched)
        gates = (
            files,
            self._identity(identical, without_effect),
            self._bytes(),
            self._groups(),
            Gate("RMS", f"folded/shipped {ratio:.4f}, at most {LARGEST_RMS_RATIO:g}", passes(ratio)),
        )
        return Checked(
            gates,
            groups=self.groups,
            differing=sum(self.differing.values()),
            identical=identical,
            touched=len(self.touched),
            rms_ratio=ratio,
            worst_column=_worst(per_column),
            rounding=choice,
        )

    def _identity(self, identical: int, without_effect: bool) -> Gate:
        said = f"{identical} files byte-identical, {len(self.touched)} touched"
        if without_effect:
            return Gate("identity", f"{said} by an adapter without effect", not self.touched)
        return Gate("identity", said, True)

    def _bytes(self) -> Gate:
        """What lies outside of the folded modules."""
        if not self.strangers:
            return Gate("bytes", "every byte outside of the folded modules is the quantized checkpoint's", True)
        file, at = min(self.strangers.items())
        where = os.path.basename(self.folded.files[file])
        return Gate("bytes", f"{where} differs at byte {at}, which no folded module covers", False)

    def _groups(self) -> Gate:
        differing = sum(self.differing.values())
        where = f" (in {', '.join(list(self.differing)[:_SHOWN])})" if differing else ""
        return Gate("groups", f"{differing} of {self.groups} groups differ{where}", not differing)


def passes(ratio: float) -> bool:
    """True for an RMS ratio that no gross fault gives: a wrong scale or sign is far above it."""
    return ratio <= LARGEST_RMS_RATIO


def _worst(per_column: dict[str, Tensor]) -> tuple[float, str]:
    """The largest RMS ratio of a column, and its module."""
    found = []
    for name, (after, before) in per_column.items():
        ratios = torch.where(before > 0, after / before, torch.where(after > 0, math.inf, 1.0))
        found.append((math.sqrt(float(ratios.max())), name))
    return max(found, default=(math.nan, ""))


def _read(path: Path, job: Range) -> memoryview:
    view = memoryview(bytearray(job.count))
    try:
        fd = calls.open_read(path)
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=path) from error
    try:
        calls.CALLS.read_at(fd, view, job.offset)
    except (OSError, EOFError) as error:
        raise FileError(f"cannot read: {error}", file=path) from error
    finally:
        with suppress(OSError):  # of a file that was only read: nothing is lost
            os.close(fd)
    return view


def _first_difference(one: memoryview, other: memoryview) -> int | None:
    """Where two ranges of one length begin to differ."""
    if one == other:
        return None
    low, high = 0, len(one)
    while high - low > 1:  # halves: comparing whole ranges is what memory does fast
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
