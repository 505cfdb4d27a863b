"""Plan and errors as HTML for the cards on the right, and the lines below entries; text in, text out, no gradio."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from html import escape
from pathlib import Path

from ..errors import MergeError, PlanError, Problem
from ..execute import Result
from ..fold import Folded
from ..kernels.registry import Method
from ..lora import LoraPlan, LoraResult
from ..plan import Plan
from .facts import Facts, size_text
from .spoken import spoken

_SHOWN = 12
_LEVELS = {"error": "Error", "warning": "Warning", "note": "Note"}


def idle_card() -> str:
    """Nothing runs and nothing has run."""
    return card("status", "Ready", line("Choose models; the plan below says what will be done."), live=True)


def plan_card(
    plan: Plan,
    facts: Sequence[tuple[str, Facts]],
    target: Path,
    *,
    replaces: bool = True,
) -> str:
    """What a run would do.

    Args:
        plan: with all its problems.
        facts: (slot, what its header says).
        target: where the result goes.
        replaces: a file that is there is overwritten.
    """
    counts = ", ".join(f"{count:,} {action}" for action, count in plan.counts.items() if count) or "nothing"
    body = [
        _models_table(facts),
        line(f"Tensors: {counts}"),
        _picked(plan),
        line(f"Result: {size_text(plan.output_bytes)}, expected peak memory {size_text(plan.peak_bytes)}"),
        _written(target, replaces),
        problem_list(plan.problems),
    ]
    verdict = "This cannot run" if plan.errors() else "Plan"
    return card("plan", verdict, "".join(body), tone="bad" if plan.errors() else "")


# Words of a step's reason -> what a rule or a filter did.
_PICKED = {"rule ": "with parameters of a rule", "excluded": "excluded", "not included": "not included"}


def _picked(plan: Plan) -> str:
    """How many tensors rules and filters reach; empty where there are none."""
    counts = {
        said: sum(step.reason.startswith(word) or f", {word}" in step.reason for step in plan.steps)
        for word, said in _PICKED.items()
    }
    told = ", ".join(f"{count:,} {said}" for said, count in counts.items() if count)
    return line(f"Rules and filters: {told}") if told else ""


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


def _written(target: Path, replaces: bool) -> str:
    state = "new"
    if os.path.exists(target):  # false, not an error, for a name that is too long
        state = "replaces the file that is there" if replaces else "a file of that name is there"
    elif not target.parent.is_dir():
        state = "new, in a folder that is made for it"
    return (
        f"<p>Writes <code>{escape(target.name)}</code> ({state})<br><small>in {escape(str(target.parent))}</small></p>"
    )


def planned_card(
    made: Result | LoraResult | Folded,
    facts: Sequence[tuple[str, Facts]],
    *,
    replaces: bool = True,
) -> str:
    """What a run that was only planned would do; closes the files of its plan."""
    if isinstance(made, Result):
        with closing(made.plan):
            return plan_card(made.plan, facts, made.output, replaces=replaces)
    if isinstance(made, Folded):
        return _fold_card(made, facts, replaces)
    plan = made.plan
    body = [
        _models_table(facts),
        _lora_lines(plan) if plan else line(f"LoRA: {made.modules:,} modules"),
        _written(made.output, replaces),
        problem_list(plan.problems if plan else told(made)),
    ]
    return card("plan", "Plan", "".join(body))


def _lora_lines(plan: LoraPlan) -> str:
    """Modules, ranks, bytes and memory of a LoRA, and what is done where."""
    most = "" if plan.exact else "at most "
    counts = [f"{most}{len(plan.steps):,} modules"]
    counts += [f"{plan.copied:,} tensors copied"] if plan.copied else []
    counts += [f"{plan.unused:,} tensors not used"] if plan.unused else []
    ranks = Counter((step.rank, step.exact) for step in plan.steps if step.rank is not None)
    told_ranks = [
        f"{'' if exact else 'at most '}{rank} ({count:,})" for (rank, exact), count in ranks.most_common(_SHOWN)
    ] + (["…"] if len(ranks) > _SHOWN else [])
    reasons = Counter(step.reason for step in plan.steps if step.reason).most_common(_SHOWN)
    ways = "".join(f"<li>{escape(reason)} <small>({count:,} modules)</small></li>" for reason, count in reasons)
    size, peak = size_text(plan.output_bytes), size_text(plan.peak_bytes)
    return "".join(
        [
            line(f"LoRA: {', '.join(counts)}"),
            line(f"Ranks: {', '.join(told_ranks)}") if told_ranks else "",
            line(f"Result: {most}{size}, expected peak memory {peak}"),
            f"<details><summary>What is done</summary><ul>{ways}</ul></details>" if ways else "",
        ]
    )


def _fold_card(made: Folded, facts: Sequence[tuple[str, Facts]], replaces: bool) -> str:
    body = [
        _models_table(facts),
        line(f"{made.folded:,} modules are computed anew, {made.copied:,} tensors copied"),
        line(f"Result: {size_text(made.output_bytes)}, expected peak memory {size_text(made.expected_peak_bytes)}"),
        _written(made.output, replaces),
        problem_list([*made.problems, *told(made)]),
    ]
    verdict = "This cannot run" if made.problems else "Plan"
    return card("plan", verdict, "".join(body), tone="bad" if made.problems else "")


def told(made: LoraResult | Folded) -> list[Problem]:
    """What a result says beside its counts."""
    return [Problem("warning", text) for text in made.warnings] + [Problem("note", text) for text in made.notes]


def refusal_card(error: MergeError) -> str:
    """Why there is no plan."""
    return card("plan", "This cannot run", error_body(error), tone="bad")


def empty_plan_card(text: str) -> str:
    """No plan yet, and what is missing for one."""
    return card("plan", "Plan", line(text))


def problem_list(problems: Iterable[Problem]) -> str:
    """Findings of a plan, worst first; long lists are cut and say so."""
    order = list(_LEVELS)
    found = sorted(problems, key=lambda problem: order.index(problem.level))
    items = []
    for problem in found[:_SHOWN]:
        where = " · ".join(part for part in (problem.file and Path(problem.file).name, problem.tensor) if part)
        items.append(
            f"<li class='lm-{problem.level}'><b>{_LEVELS[problem.level]}:</b> {escape(spoken(problem.what) or '')}"
            + (f" <small>{escape(where)}</small>" if where else "")
            + (f"<br><small>{escape(spoken(problem.hint) or '')}</small>" if problem.hint else "")
            + "</li>"
        )
    if len(found) > _SHOWN:
        items.append(f"<li>… and {len(found) - _SHOWN} more</li>")
    return f"<ul class='lm-problems'>{''.join(items)}</ul>" if items else ""


def error_card(error: BaseException) -> str:
    """Why a run could not begin, or ended before its result was there."""
    return card("status", "Not done", error_body(error), tone="bad", live=True)


def form_card(wrong: Iterable[tuple[str, MergeError]]) -> str:
    """Why a run could not begin: (label of the entry, what is wrong with it)."""
    problems = [Problem("error", f"{label}: {error.what}", error.file, hint=error.hint) for label, error in wrong]
    return card("status", "Not done", problem_list(problems), tone="bad", live=True)


def error_body(error: BaseException) -> str:
    """What an error says, with the file, the tensor and what to do."""
    if isinstance(error, PlanError):
        return problem_list(error.problems)
    if isinstance(error, MergeError):
        return problem_list([Problem("error", error.what, error.file, error.tensor, error.hint)])
    return problem_list([Problem("error", f"{type(error).__name__}: {error}", hint="this should not happen")])


def method_text(method: Method) -> str:
    """What a method does, and its formula."""
    return (
        f"<div class='lm-method'><p>{escape(method.summary)}</p>"
        f"<p><code class='lm-formula'>{escape(method.formula)}</code></p></div>"
    )


def model_note(facts: Facts | None, error: MergeError | None) -> str:
    """The line below a model's list: what the file is, or why it cannot be used."""
    if error is not None:
        hint = f" <small>{escape(spoken(error.hint) or '')}</small>" if error.hint else ""
        return f"<div class='lm-note lm-error'><b>!</b> {escape(spoken(error.what) or '')}{hint}</div>"
    return f"<div class='lm-note'>{escape(facts.text)}</div>" if facts else ""


def note_card(title: str, lines: Iterable[str], *, tone: str = "") -> str:
    """A short answer to a press."""
    return card("note", title, "".join(map(line, lines)), tone=tone, live=True)


def facts_card(title: str, facts: Mapping[str, str]) -> str:
    """Name -> text, one a line."""
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    return card("note", title, f"<table class='lm-table'><tbody>{rows}</tbody></table>", live=True)


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


def card(kind: str, title: str, body: str, *, tone: str = "", live: bool = False) -> str:
    """A card; `live`: changes are read aloud."""
    role = " role='status' aria-live='polite'" if live else f" role='region' aria-label='{escape(title)}'"
    return (
        f"<section class='lm-card lm-{kind} {f'lm-{tone}' if tone else ''}'{role}>"
        f"<h3>{escape(title)}</h3>{body}</section>"
    )


def line(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
