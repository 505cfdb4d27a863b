"""Measures every merged tensor while a run goes on, for the report; sums are added exactly, in any order."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from .families import Detected, block_of, component_of, detect
from .kernels.measure import change_sums, compare_sums
from .plan import Plan
from .steps import Merged, Node, Step, Zeros

if TYPE_CHECKING:
    from torch import Tensor

    from .report import Rows


class Watcher:
    """Collects sums of every tile; `rows` turns them into the report."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._before: dict[tuple[str, int], Tensor] = {}
        self._lock = threading.Lock()

    def before(self, step: Step, low: int, operands: list[Tensor]) -> None:
        """Measure the operands and keep A's tile, which the method may overwrite."""
        a, b = operands[0], operands[1]
        sums = compare_sums(a, b, operands[2] if len(operands) > 2 else None)
        with self._lock:
            self._before[step.key, low] = a.clone()
        self._add(step.key, sums)

    def after(self, step: Step, low: int, result: Tensor) -> None:
        """Measure the result against A."""
        with self._lock:
            a = self._before.pop((step.key, low))
        self._add(step.key, change_sums(a, result))

    def _add(self, key: str, sums: dict[str, float]) -> None:
        with self._lock:
            for name, value in sums.items():
                self._sums[key][name].append(value)

    def rows(self) -> Rows:
        """One row per output tensor, in order; numbers that do not apply are NaN."""
        found = detect({step.key: (step.dtype, step.shape) for step in self._plan.steps})
        return [_row(step, found, self._sums.get(step.key, {})) for step in self._plan.steps]


def _row(step: Step, found: Detected, sums: dict[str, list[float]]) -> dict[str, Any]:
    total = {name: math.fsum(values) for name, values in sums.items() if name != "max_change"}
    node = step.node
    row: dict[str, Any] = {
        "key": step.key,
        "component": component_of(step.key, found),
        "block": block_of(step.key, found),
        "action": step.action,
        "method": node.method if isinstance(node, Merged) and step.action == "merged" else "",
        "dtype_a": _operand_dtype(node, 0),
        "dtype_b": _operand_dtype(node, 1),
        "dtype_out": step.dtype,
        "shape": list(step.shape),
        "numel": step.numel,
    }
    norms = {name: math.sqrt(total[square]) if square in total else math.nan for name, square in _NORMS.items()}
    row |= {"norm_a": norms["norm_a"], "norm_b": norms["norm_b"], "norm_diff": norms["norm_diff"]}
    row["rel_diff"] = _ratio(norms["norm_diff"], norms["norm_a"])
    row["cosine"] = _cosine(total)
    row |= {"norm_out": norms["norm_out"], "norm_change": norms["norm_change"]}
    row["max_change"] = max(sums["max_change"]) if "max_change" in sums else math.nan
    row["sign_conflict"] = _ratio(total.get("conflicts", math.nan), total.get("both", math.nan))
    row |= {"reason": step.reason, "note": ""}
    return row


_NORMS = {"norm_a": "aa", "norm_b": "bb", "norm_diff": "dd", "norm_out": "oo", "norm_change": "cc"}


def _operand_dtype(node: Node, number: int) -> str:
    if not isinstance(node, Merged):
        return node.dtype if number == 0 else ""
    inputs = node.inputs
    return inputs[number].dtype if number < len(inputs) and not isinstance(inputs[number], Zeros) else ""


def _cosine(total: dict[str, float]) -> float:
    """Of A and B; of B − A and C − A where there are three models."""
    cross, left, right = ("de", "dd", "ee") if "de" in total else ("ab", "aa", "bb")
    if cross not in total:
        return math.nan
    return _ratio(total[cross], math.sqrt(total[left]) * math.sqrt(total[right]))


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
