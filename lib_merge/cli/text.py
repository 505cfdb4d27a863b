"""Plans, results, methods and models as text for the command line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import Problem
from ..execute import Result
from ..kernels.registry import Method
from ..plan import Plan
from ..recipe import called
from ..steps import Baked, Step
from ..version import __version__

_SHOWN_STEPS = 20


def describe_result(made: Result) -> str:
    """What a run did, in a few lines."""
    counts = {"merged": made.merged, "copied": made.copied, "discarded": made.discarded, "unused": len(made.unused)}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    lines = [f"wrote {made.output}: {told.replace(' ', ' tensors ', 1)}"]
    lines += [f"warning: {text}" for text in made.warnings]
    for problem in made.plan.problems:
        if problem.level == "note":
            lines.append(f"note: {problem.what}" + (f" ({problem.hint})" if problem.hint else ""))
    size = made.plan.output_bytes
    lines.append(f"{size / 1e6:,.1f} MB in {made.seconds:.1f} s, peak memory {made.peak_rss_mb:.0f} MB")
    if made.sha256:
        lines.append(f"sha256 {made.sha256}")
    return "\n".join(lines)


def report_header(made: Result) -> dict[str, str]:
    """What a report says of the run above its table."""
    from importlib.metadata import version  # here: it takes a while to load, and only reports need it

    plan = made.plan
    recipe, hashes = plan.recipe, plan.known_hashes
    params = ", ".join(f"{name} {value}" for name, value in recipe.params.items())
    models = {
        called(slot): source.name + (f", sha256 {hashes[slot][:10]}…" if slot in hashes else "")
        for slot, source in plan.sources.items()
    }
    versions = f"lib_merge {__version__}, torch {version('torch')}"
    return {
        "method": f"{recipe.method or recipe.task} {params}".strip(),
        **models,
        "device": made.device,
        **({"config": f"{plan.sidecar.name}, copied with the model"} if plan.sidecar else {}),
        "versions": versions,
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan for `--dry-run --json`."""
    return {
        "steps": [_step_dict(step) for step in plan.steps],
        "counts": plan.counts,
        "problems": [vars(problem) for problem in plan.problems],
        "output_bytes": plan.output_bytes,
        "peak_memory_mb": round(plan.peak_bytes / 1e6),
    }


def _step_dict(step: Step) -> dict[str, Any]:
    node = step.merge if step.action == "merged" else None
    described: dict[str, Any] = {
        "key": step.key,
        "dtype": step.dtype,
        "shape": list(step.shape),
        "action": step.action,
        "method": step.methods or None,
        "params": dict(node.params) if node else {},
        "reason": step.reason,
    }
    if isinstance(step.node, Baked):
        described["loras"] = [
            {"lora": change.slot, "format": change.format, "rank": change.rank, "strength": change.strength}
            for change in step.node.changes
        ]
    return described


def describe_plan(plan: Plan) -> str:
    """A plan for people: counts, findings, and the first steps of each kind."""
    counts = ", ".join(f"{count} {name}" for name, count in plan.counts.items())
    lines = [
        f"plan: {counts}",
        f"output {plan.output_bytes / 1e6:,.1f} MB, expected peak memory {plan.peak_bytes / 1e6:.0f} MB",
    ]
    return "\n".join([*lines, *findings(plan.problems), *first_steps(plan_dict(plan)["steps"], _step_line)])


def findings(problems: Sequence[Problem]) -> Iterator[str]:
    """What a plan found, a line each, and what to do below it."""
    for problem in problems:
        yield f"{problem.level}: {problem.what}" + (f" ({problem.file})" if problem.file else "")
        if problem.hint:
            yield f"  hint: {problem.hint}"


def first_steps(steps: Sequence[Any], line: Callable[[Any], str]) -> Iterator[str]:
    """The first steps of a plan, a line each, and how many there are beside them."""
    for step in steps[:_SHOWN_STEPS]:
        yield f"  {line(step)}"
    if len(steps) > _SHOWN_STEPS:
        yield f"  … and {len(steps) - _SHOWN_STEPS} more (--json lists all)"


def _step_line(entry: Mapping[str, Any]) -> str:
    values = " ".join(f"{name}={value}" for name, value in entry["params"].items())
    loras = " ".join(f"{item['lora']}@{item['strength']:g}" for item in entry.get("loras", ()))
    detail = " ".join(part for part in (entry["method"] or "", values, loras, entry["reason"]) if part)
    return f"{entry['action']:7} {entry['dtype']:7} {entry['key']}  {detail}"


def methods_table(methods: Sequence[Method]) -> str:
    """One line for each method, its formula below."""
    lines = []
    for item in methods:
        params = ", ".join(f"{param.name}={param.shown_default}" for param in item.params)
        lines.append(f"{item.id} ({params})  models {item.models}")
        lines += textwrap.wrap(item.formula, 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "", "lib-merge methods ID shows one in full."])


def method_dict(item: Method) -> dict[str, Any]:
    """A method for `methods --json`."""
    params = [{"name": p.name, "default": p.default, "range": p.range, "meaning": p.meaning} for p in item.params]
    return {
        "id": item.id,
        "label": item.label,
        "inputs": list(item.inputs),
        "more": item.more,
        "formula": item.formula,
        "summary": item.summary,
        "strength": item.strength,
        "params": params,
        "random": bool(item.random),
        "exact_arithmetic": item.exact_arithmetic,
        "exact_a": item.exact_a,
        "exact_b": item.exact_b,
    }


def method_text(item: Method) -> str:
    """A method in full."""
    lines = [f"{item.label} ({item.id})", item.summary, "", f"formula: {item.formula}"]
    lines += [f"models: {item.models}", f"exactly A when {item.exact_a}"]
    if item.exact_b:
        lines.append(f"exactly B when {item.exact_b}")
    lines += [f"strength: {item.strength} (what a bare block number sets; 0 gives A)", "parameters:"]
    for param in item.params:
        lines.append(f"  {param.name} = {param.shown_default}  ({param.range})  {param.meaning}")
    bytes_where = "every CPU" if item.exact_arithmetic else "one CPU type and torch build; elsewhere within 2 ulp"
    lines.append(
        f"same bytes on {bytes_where}" + ("; draws depend on seed and tensor name only" if item.random else "")
    )
    return "\n".join(lines)


def inspect_text(found: Mapping[str, Any]) -> str:
    """A model for people."""
    dtypes = ", ".join(f"{count} {name}" for name, count in found["dtype"].items())
    components = ", ".join(f"{name} {count}" for name, count in found["components"].items())
    family = " ".join(part for part in (found["family"], found["variant"]) if part) or "unknown family"
    lines = [
        f"{found['file']}",
        f"  {found['kind']}, {family}, {', '.join(dict.fromkeys((found['format'], found['container'])))}",
        f"  {found['tensors']} tensors ({dtypes}), {found['parameters']:,} parameters, {found['bytes'] / 1e6:,.1f} MB",
        f"  components: {components}",
        f"  blocks: {' '.join(found['blocks']) or 'none'}",
    ]
    lines += _adapter_lines(found)
    if found["coded"]:
        lines.append(f"  coded weights: {', '.join(found['coded'])}")
    lines += [f"  {name}: {value}" for name, value in found["hashes"].items() if value]
    shown = {key: value for key, value in found["metadata"].items() if key not in found["hashes"]}
    lines += [f"  {key}: {textwrap.shorten(value, 90)}" for key, value in shown.items()]
    if found["recipe"]:
        lines.append("  recipe: yes (lib-merge recipe FILE prints it)")
    lines += [f"  note: {note}" for note in found["notes"]]
    if "damaged" in found:
        lines += [f"  damaged: {key}: {what}" for key, what in found["damaged"].items()] or ["  all numbers are finite"]
    return "\n".join(lines)


def blocks_text(shapes: Mapping[str, Mapping[str, float]], lists: Mapping[int, Sequence[str]]) -> str:
    """Shapes with a value for each layer, and what lists of numbers stand for."""
    lines = ['shapes, as in --blocks "V" or --blocks "gradient_up=0.8, BASE=0":']
    for name, values in shapes.items():
        shown = " ".join(f"{layer}={value:.3g}" for layer, value in values.items())
        lines += textwrap.wrap(f"{name:14}{shown}", 110, initial_indent="  ", subsequent_indent=" " * 16)
    lines.append("lists of numbers, by their length:")
    for size, names in lists.items():
        lines += textwrap.wrap(f"{size:<14}{' '.join(names)}", 110, initial_indent="  ", subsequent_indent=" " * 16)
    return "\n".join(lines)


def _adapter_lines(found: Mapping[str, Any]) -> list[str]:
    """What only adapters have."""
    lines = []
    if found.get("modules"):
        per_block = ", ".join(f"{name} {count}" for name, count in found["modules_per_block"].items())
        lines.append(f"  {found['modules']} modules: {per_block}")
        lines += [f"  {name}: {_spread(found[name])}" for name in ("ranks", "alphas") if found[name]]
    if found["trigger_words"]:
        lines.append(f"  trigger words: {textwrap.shorten(', '.join(found['trigger_words']), 200)}")
    return lines


def _spread(counts: Mapping[str, int]) -> str:
    """`16` where all modules have one number, else `16 (200 modules), 8 (64)`."""
    first, *others = counts.items()
    if not others:
        return first[0]
    return ", ".join([f"{first[0]} ({first[1]} modules)", *(f"{number} ({count})" for number, count in others)])
