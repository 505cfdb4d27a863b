"""Runs as HTML: the card of one as it stands, and the list of all; text in, text out, no gradio."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import Problem
from ..execute import Result
from ..fold import Folded
from ..job import Job
from ..lora import LoraResult
from ..memory import rss_mb
from .cards import card, duration, error_body, line, problem_list, told
from .facts import size_text
from .form import Made

_STAGES = {
    "merging": "Merging",
    "hashing": "Computing hashes for the recipe",
    "publishing": "Writing to the disk",
    "verifying": "Verifying",
    "comparing": "Comparing",
}
# Task of a recipe -> what its result is called.
_DONE = {"merge": "Merged", "bake": "Baked", "convert": "Converted"}
_STATES = {"waiting": "Waiting", "running": "Running", "done": "Done", "failed": "Not done", "stopped": "Stopped"}


def job_card(job: Job, *, earlier: bool = False) -> str:
    """A run as it stands: progress while it goes on, then what came of it.

    Args:
        job: the run.
        earlier: the form asks for something else by now, and the card says so.
    """
    if job.state == "running":
        return _progress_card(job)
    if job.state == "waiting":
        return card("status", "Waiting", line(job.title) + line("Begins when the runs before it are over."), live=True)
    title = (_done_word(job) if job.state == "done" else _STATES[job.state]) + (" (an earlier run)" if earlier else "")
    tone = "" if earlier else {"done": "good", "failed": "bad"}.get(job.state, "")
    return card("status", title, _outcome(job), tone=tone, live=True)


def job_list(jobs: Sequence[Job]) -> str:
    """All runs that are known: the one that goes on, those that wait, those that are over; empty for none.

    It holds nothing that changes from moment to moment, so that what was unfolded stays so.
    """
    if not jobs:
        return ""
    rows = "".join(
        f"<li><details><summary><b>{_STATES[job.state]}</b> {escape(job.title)} <small>{_when(job)}</small></summary>"
        f"{_outcome(job) if job.ended else _log(job)}</details></li>"
        for job in jobs
    )
    return card("jobs", "Jobs", f"<ul class='lm-jobs-list'>{rows}</ul>")


def _when(job: Job) -> str:
    if job.state == "waiting":
        return ""
    clock = time.strftime("%H:%M", time.localtime(job.ended or job.started))
    if not job.ended:
        return f"since {clock}"
    return f"{clock}, took {duration(job.seconds)}" if job.started else clock


def _done_word(job: Job) -> str:
    return _DONE.get(job.result.plan.recipe.task, "Done") if isinstance(job.result, Result) else "Done"


def _outcome(job: Job) -> str:
    """What came of a run that is over."""
    if job.state == "done":
        return _RESULTS[type(job.result)](job.result) + _log(job)
    if job.state == "stopped":
        after = f"stopped after {duration(job.seconds)}" if job.started else "stopped before it began"
        return line(f"{job.title}: {after}; nothing was written.") + _log(job)
    assert job.error is not None
    return line(job.title) + error_body(job.error) + _log(job)


def _progress_card(job: Job) -> str:
    progress = job.progress
    stage = _STAGES.get(progress.stage, progress.stage) if progress else "Starting"
    parts = [f"{duration(job.seconds)} gone"]
    in_bytes = progress is not None and progress.counted == "bytes"
    if job.seconds_left is not None and job.per_second:
        parts.append(f"about {duration(job.seconds_left)} left")
        parts += [f"{job.per_second / 1e6:,.0f} MB/s"] if in_bytes else []
    if progress and progress.total_bytes:
        done, total = progress.done_bytes, progress.total_bytes
        said = f"{size_text(done)} of {size_text(total)}" if in_bytes else f"{done:,} of {total:,} {progress.counted}"
        parts.insert(0, said)
    if memory := rss_mb():
        parts.append(f"RAM {size_text(memory * 1e6)}")
    percent = round(100 * job.share)
    bar = (
        f"<div class='lm-bar' role='progressbar' aria-label='progress of the run' aria-valuemin='0' "
        f"aria-valuemax='100' aria-valuenow='{percent}'><div style='width:{percent}%'></div></div>"
    )
    key = f"<p class='lm-key'><small>{escape(progress.key)}</small></p>" if progress and progress.key else ""
    body = line(job.title) + bar + line(" · ".join(parts)) + key
    return card("status", f"{stage} {percent}%", body, tone="busy", live=True)


def _result(made: Result) -> str:
    counts = {"merged": made.merged, "copied": made.copied, "discarded": made.discarded, "unused": len(made.unused)}
    said = ", ".join(f"{count:,} {action}" for action, count in counts.items() if count)
    return (
        _path(made.output)
        + line(f"Tensors: {said}")
        + _cost(made.plan.output_bytes, made)
        + problem_list(Problem("warning", text) for text in made.warnings)
    )


def _lora_result(made: LoraResult) -> str:
    ranks = sorted(made.ranks)
    rank = "" if not ranks else f", rank {ranks[0]}" if len(ranks) == 1 else f", ranks {ranks[0]} … {ranks[-1]}"
    error = f"Relative error of what was cut: {made.error:.3g}"
    error += f", largest {made.worst[1]:.3g} at {made.worst[0]}" if made.worst[1] else ""
    error += "" if made.rounding is None else f"; rounding to the stored dtype adds {made.rounding:.3g}"
    return (
        _path(made.output)
        + line(f"{made.modules:,} modules{rank}" + (f", {made.copied:,} tensors copied" if made.copied else ""))
        + line(error)
        + _cost(made.output_bytes, made)
        + problem_list(told(made))
    )


def _fold_result(made: Folded) -> str:
    return (
        _path(made.output)
        + line(f"{made.folded:,} modules folded, {made.copied:,} tensors copied")
        + (line(made.rounding.describe()) if made.rounding else "")
        + _cost(made.output_bytes, made)
        + problem_list(told(made))
    )


# Type of a result -> what is said of it.
_RESULTS: Mapping[type, Callable[[Any], str]] = {Result: _result, LoraResult: _lora_result, Folded: _fold_result}


def _cost(size: int, made: Made) -> str:
    return line(f"{size_text(size)} in {duration(made.seconds)}, peak RAM {size_text(made.peak_rss_mb * 1e6)}")


def _path(output: Path) -> str:
    return (
        f"<p><code class='lm-path'>{escape(output.name)}</code><br><small>in {escape(str(output.parent))}</small></p>"
    )


def _log(job: Job) -> str:
    lines = "".join(f"<li>{escape(text)}</li>" for text in job.log)
    return f"<details><summary>Log</summary><ul>{lines}</ul></details>" if lines else ""
