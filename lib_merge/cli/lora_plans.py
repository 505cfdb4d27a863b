"""Plans of LoRA tasks as text and as JSON, for `--dry-run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..lora import LoraPlan, Planned
from .text import findings, first_steps


def lora_plan_dict(plan: LoraPlan) -> dict[str, Any]:
    """A plan for `--dry-run --json`."""
    steps = [
        {
            "key": step.key,
            "dtype": plan.dtype,
            "shape": list(step.shape),
            "action": "merged",
            "ranks": list(step.ranks),
            "rank": step.rank,
            "exact": step.exact,
            "reason": step.reason,
        }
        for step in plan.steps
    ]
    return {
        "steps": steps,
        "counts": {"merged": len(steps), "copied": plan.copied, "discarded": 0, "unused": plan.unused},
        "problems": [vars(problem) for problem in plan.problems],
        "output_bytes": plan.output_bytes,
        "peak_memory_mb": round(plan.peak_bytes / 1e6),
    }


def describe_lora_plan(plan: LoraPlan, output: Path) -> str:
    """A plan for people: counts, findings, and the first modules."""
    most = "" if plan.exact else "at most "
    lines = [
        f"would write {output}: {most}{len(plan.steps)} modules, {plan.copied} tensors copied",
        f"output {most}{plan.output_bytes / 1e6:,.1f} MB, expected peak memory about {plan.peak_bytes / 1e6:.0f} MB",
    ]
    return "\n".join([*lines, *findings(plan.problems), *first_steps(plan.steps, _step_line)])


def _step_line(step: Planned) -> str:
    before = f"rank {' + '.join(map(str, step.ranks))} to " if step.ranks else "rank "
    after = "" if step.rank is None else f"{before}{'' if step.exact else 'at most '}{step.rank}"
    return f"{step.key}  {'×'.join(map(str, step.shape))}  {', '.join(filter(None, (after, step.reason)))}"
