"""Plan, progress, result and errors as HTML for the cards on the right; text in, text out, no gradio."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from html import escape
from pathlib import Path

from ..errors import MergeError, PlanError, Problem
from ..execute import Result
from ..job import Job
from ..kernels.registry import Method
from ..lora import LoraResult
from ..plan import Plan
from .facts import Facts, size_text

_SHOWN = 12
_STAGES = {
    "merging": "Merging",
    "hashing": "Computing hashes for the recipe",
    "publishing": "Writing to the disk",
    "verifying": "Verifying",
    "comparing": "Comparing",
}
# Task of a recipe -> what its result is called.
_DONE = {"merge": "Merged", "bake": "Baked", "convert": "Converted"}
_LEVELS = {"error": "Error", "warning": "Warning", "note": "Note"}


def idle_card() -> str:
    """Nothing runs and nothing has run."""
    return _card("status", "Ready", _line("Choose models; the plan below says what will be done."), live=True)


def plan_card(plan: Plan, facts: Sequence[tuple[str, Facts]], target: Path) -> str:
    """What a run would do.

    Args:
        plan: with all its problems.
        facts: (slot, what its header says).
        target: where the result goes.
    """
    counts = ", ".join(f"{count:,} {action}" for action, count in plan.counts.items() if count) or "nothing"
    body = [
        _models_table(facts),
        _line(f"Tensors: {counts}"),
        _line(f"Result: {size_text(plan.output_bytes)}, expected peak memory {size_text(plan.peak_bytes)}"),
        _written(target),
        problem_list(plan.problems),
    ]
    verdict = "This cannot run" if plan.errors() else "Plan"
    return _card("plan", verdict, "".join(body), tone="bad" if plan.errors() else "")


def _models_table(facts: Sequence[tuple[str, Facts]]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(_slot_text(slot))}</th><td>{escape(fact.name)}</td>"
        f"<td>{escape(fact.text)}</td></tr>"
        for slot, fact in facts
    )
    return (
        "<table class='lm-table'><thead><tr><th scope='col'>Model</th><th scope='col'>File</th>"
        f"<th scope='col'>Is</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _slot_text(slot: str) -> str:
    """`lora1` for people: LoRA 1."""
    return f"LoRA {slot[4:]}" if slot.startswith("lora") else slot


def _written(target: Path) -> str:
    state = (
        "replaces the file that is there" if os.path.exists(target) else "new"
    )  # false, not an error, for a name that is too long
    return (
        f"<p>Writes <code>{escape(target.name)}</code> ({state})<br><small>in {escape(str(target.parent))}</small></p>"
    )


def planned_card(made: Result | LoraResult, facts: Sequence[tuple[str, Facts]]) -> str:
    """What a run that was only planned would do; closes the files of its plan."""
    if isinstance(made, Result):
        with closing(made.plan):
            return plan_card(made.plan, facts, made.output)
    body = [
        _models_table(facts),
        _line(f"LoRA: {made.modules:,} modules" + (f", {made.copied:,} tensors copied" if made.copied else "")),
        _written(made.output),
        problem_list(_told(made)),
    ]
    return _card("plan", "Plan", "".join(body))


def _told(made: LoraResult) -> list[Problem]:
    return [Problem("warning", text) for text in made.warnings] + [Problem("note", text) for text in made.notes]


def refusal_card(error: MergeError) -> str:
    """Why there is no plan."""
    return _card("plan", "This cannot run", _error_body(error), tone="bad")


def empty_plan_card(text: str) -> str:
    """No plan yet, and what is missing for one."""
    return _card("plan", "Plan", _line(text))


def problem_list(problems: Iterable[Problem]) -> str:
    """Findings of a plan, worst first; long lists are cut and say so."""
    order = list(_LEVELS)
    found = sorted(problems, key=lambda problem: order.index(problem.level))
    items = []
    for problem in found[:_SHOWN]:
        where = " · ".join(part for part in (problem.file and Path(problem.file).name, problem.tensor) if part)
        items.append(
            f"<li class='lm-{problem.level}'><b>{_LEVELS[problem.level]}:</b> {escape(problem.what)}"
            + (f" <small>{escape(where)}</small>" if where else "")
            + (f"<br><small>{escape(problem.hint)}</small>" if problem.hint else "")
            + "</li>"
        )
    if len(found) > _SHOWN:
        items.append(f"<li>… and {len(found) - _SHOWN} more</li>")
    return f"<ul class='lm-problems'>{''.join(items)}</ul>" if items else ""


def error_card(error: BaseException) -> str:
    """Why a run could not begin, or ended before its result was there."""
    return _card("status", "Not done", _error_body(error), tone="bad", live=True)


def form_card(wrong: Iterable[tuple[str, MergeError]]) -> str:
    """Why a run could not begin: (label of the entry, what is wrong with it)."""
    problems = [Problem("error", f"{label}: {error.what}", error.file, hint=error.hint) for label, error in wrong]
    return _card("status", "Not done", problem_list(problems), tone="bad", live=True)


def _error_body(error: BaseException) -> str:
    if isinstance(error, PlanError):
        return problem_list(error.problems)
    if isinstance(error, MergeError):
        return problem_list([Problem("error", error.what, error.file, error.tensor, error.hint)])
    return problem_list([Problem("error", f"{type(error).__name__}: {error}", hint="this should not happen")])


def job_card(job: Job) -> str:
    """A run as it stands: progress while it goes on, then what came of it."""
    if job.state in ("waiting", "running"):
        return _progress_card(job)
    if job.state == "done":
        return _result_card(job)
    if job.state == "stopped":
        body = _line(f"{job.title}: stopped after {_duration(job.ended - job.started)}; nothing was written.")
        return _card("status", "Stopped", body + _log(job), live=True)
    assert job.error is not None
    return _card("status", "Not done", _line(job.title) + _error_body(job.error) + _log(job), tone="bad", live=True)


def _progress_card(job: Job) -> str:
    progress = job.progress
    gone = max(0.0, time.time() - job.started)
    share = progress.done_bytes / progress.total_bytes if progress and progress.total_bytes else 0.0
    stage = _STAGES.get(progress.stage, progress.stage) if progress else "Starting"
    parts = [f"{_duration(gone)} gone"]
    in_bytes = progress is not None and progress.counted == "bytes"
    if progress and progress.stage == "merging" and share > 0.02 and gone > 1:
        parts.append(f"about {_duration(gone * (1 - share) / share)} left")
        parts += [f"{progress.done_bytes / gone / 1e6:,.0f} MB/s"] if in_bytes else []
    if progress and progress.total_bytes:
        done, total = progress.done_bytes, progress.total_bytes
        said = f"{size_text(done)} of {size_text(total)}" if in_bytes else f"{done:,} of {total:,} {progress.counted}"
        parts.insert(0, said)
    percent = round(100 * share)
    bar = (
        f"<div class='lm-bar' role='progressbar' aria-label='progress of the run' aria-valuemin='0' "
        f"aria-valuemax='100' aria-valuenow='{percent}'><div style='width:{percent}%'></div></div>"
    )
    key = f"<p class='lm-key'><small>{escape(progress.key)}</small></p>" if progress and progress.key else ""
    body = _line(job.title) + bar + _line(" · ".join(parts)) + key
    return _card("status", f"{stage} {percent}%", body, tone="busy", live=True)


def _result_card(job: Job) -> str:
    made: Result | LoraResult = job.result
    if isinstance(made, LoraResult):
        return _lora_card(made, job)
    counts = {"merged": made.merged, "copied": made.copied, "discarded": made.discarded, "unused": len(made.unused)}
    said = ", ".join(f"{count:,} {action}" for action, count in counts.items() if count)
    body = [
        _path(made.output),
        _line(f"Tensors: {said}"),
        _line(f"{size_text(made.plan.output_bytes)} in {_duration(made.seconds)}"),
        problem_list(Problem("warning", text) for text in made.warnings),
        _log(job),
    ]
    return _card("status", _DONE.get(made.plan.recipe.task, "Done"), "".join(body), tone="good", live=True)


def _lora_card(made: LoraResult, job: Job) -> str:
    ranks = sorted(made.ranks)
    rank = "" if not ranks else f", rank {ranks[0]}" if len(ranks) == 1 else f", ranks {ranks[0]} … {ranks[-1]}"
    error = f"Relative error of what was cut: {made.error:.3g}"
    error += f", largest {made.worst[1]:.3g} at {made.worst[0]}" if made.worst[1] else ""
    body = [
        _path(made.output),
        _line(f"{made.modules:,} modules{rank}" + (f", {made.copied:,} tensors copied" if made.copied else "")),
        _line(error),
        _line(f"{size_text(made.output_bytes)} in {_duration(made.seconds)}"),
        problem_list(_told(made)),
        _log(job),
    ]
    return _card("status", "Done", "".join(body), tone="good", live=True)


def _path(output: Path) -> str:
    return (
        f"<p><code class='lm-path'>{escape(output.name)}</code><br><small>in {escape(str(output.parent))}</small></p>"
    )


def _log(job: Job) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in job.log)
    return f"<details><summary>Log</summary><ul>{lines}</ul></details>" if lines else ""


def method_text(method: Method) -> str:
    """What a method does, and its formula."""
    return (
        f"<div class='lm-method'><p>{escape(method.summary)}</p>"
        f"<p><code class='lm-formula'>{escape(method.formula)}</code></p></div>"
    )


def model_note(facts: Facts | None, error: MergeError | None) -> str:
    """The line below a model's list: what the file is, or why it cannot be used."""
    if error is not None:
        hint = f" <small>{escape(error.hint)}</small>" if error.hint else ""
        return f"<div class='lm-note lm-error'><b>!</b> {escape(error.what)}{hint}</div>"
    return f"<div class='lm-note'>{escape(facts.text)}</div>" if facts else ""


def note_card(title: str, lines: Iterable[str], *, tone: str = "") -> str:
    """A short answer to a press."""
    return _card("note", title, "".join(map(_line, lines)), tone=tone, live=True)


def facts_card(title: str, facts: Mapping[str, str]) -> str:
    """Name -> text, one a line."""
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    return _card("note", title, f"<table class='lm-table'><tbody>{rows}</tbody></table>", live=True)


def filled_note(title: str, open_: Sequence[str]) -> str:
    """Above the form: which recipe filled it, and the models that it names and that are not chosen."""
    said = f"The form is filled from {title}." if title else ""
    if not open_:
        return help_note(said)
    return f"<div class='lm-note lm-error'><b>!</b> {escape(f'{said} {chr(32).join(open_)}'.strip())}</div>"


def help_note(text: str) -> str:
    """The line below an entry before anything is chosen: what it is for."""
    return f"<div class='lm-note'>{escape(text)}</div>" if text else ""


def field_note(error: MergeError | None) -> str:
    """The line below another entry: why it cannot be used."""
    return model_note(None, error)


def _card(kind: str, title: str, body: str, *, tone: str = "", live: bool = False) -> str:
    role = " role='status' aria-live='polite'" if live else f" role='region' aria-label='{escape(title)}'"
    return (
        f"<section class='lm-card lm-{kind} {f'lm-{tone}' if tone else ''}'{role}>"
        f"<h3>{escape(title)}</h3>{body}</section>"
    )


def _line(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
