"""Measures every merged tensor while a run goes on, for the report; sums are added exactly, in any order."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .families import Detected, block_of, component_of, detect
from .kernels.measure import BLOCK, change_sums, compare_sums, dot, row_block
from .kernels.registry import Columns, method
from .plan import Plan
from .steps import Baked, Channels, Counting, FreshScale, Merged, Node, Scaled, Step, Stored, Zeros

if TYPE_CHECKING:
    from torch import Tensor

    from .report import Rows


class Watcher:
    """Collects sums of every tile; `rows` turns them into the report.

    Sums are taken over blocks whose place in the tensor is fixed, and added without rounding, so that the numbers do
    not depend on threads, nor on tiles of whole blocks.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # key -> name of the sum -> floats whose sum it is exactly
        self._sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._largest: dict[str, float] = defaultdict(float)
        self._before: dict[tuple[str, int], Tensor] = {}
        self._told: dict[str, Columns] = {}
        self._lock = threading.Lock()

    def before(self, step: Step, low: int, operands: list[Tensor]) -> None:
        """Measure the operands and keep A's tile, which the method may overwrite."""
        for tensors in _blocks(step, *operands[:3]):
            self._add(step.key, compare_sums(*tensors) if len(tensors) > 1 else {"aa": dot(*tensors, *tensors)})
        told = _explained(step, operands)
        with self._lock:
            self._before[step.key, low] = operands[0].clone()
            self._told |= {step.key: told} if told else {}

    def after(self, step: Step, low: int, result: Tensor) -> None:
        """Measure the result against A."""
        with self._lock:
            a = self._before.pop((step.key, low))
        for tensors in _blocks(step, a, result):
            sums = change_sums(*tensors)
            largest = sums.pop("max_change")
            with self._lock:
                self._largest[step.key] = max(self._largest[step.key], largest)
            self._add(step.key, sums)

    def _add(self, key: str, sums: dict[str, float]) -> None:
        with self._lock:
            for name, value in sums.items():
                _add_exactly(self._sums[key][name], value)

    def rows(self) -> Rows:
        """One row per output tensor, in order; numbers that do not apply are NaN."""
        found = detect({step.key: (step.dtype, step.shape) for step in self._plan.steps})
        chosen = self._plan.recipe.method
        explaining = chosen is not None and method(chosen).explain is not None
        rows = []
        for step in self._plan.steps:
            total = {name: math.fsum(values) for name, values in self._sums.get(step.key, {}).items()}
            row = _row(step, found, total, self._largest.get(step.key, math.nan))
            if explaining:
                row |= _told_columns(row, self._told.get(step.key, {}))
            if self._plan.recipe.loras:
                row |= _lora_columns(step.node, row["max_change"])
            another = isinstance(step.node, (Stored, Counting)) and step.action == "copied"  # file's, or repaired
            if another or isinstance(step.node, FreshScale):
                row["dtype_a"] = self._plan.sources[self._plan.base].tensors[step.key].dtype
            rows.append(row)
        return rows


def _blocks(step: Step, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The same block of each tensor, one after the other; tiles start at one."""
    node = step.merge
    size = row_block(node.columns) * max(1, node.columns) if node is not None and node.rows else BLOCK
    flat = [tensor.reshape(-1) for tensor in tensors]
    for low in range(0, flat[0].numel(), size):
        yield [tensor[low : low + size] for tensor in flat]


def _add_exactly(parts: list[float], value: float) -> None:
    """Add to a sum that is kept as floats without overlapping bits (Shewchuk 1997), so that no order rounds."""
    count = 0
    for part in parts:
        large, small = (value, part) if abs(value) >= abs(part) else (part, value)
        value = large + small
        if rest := small - (value - large):
            parts[count] = rest
            count += 1
    parts[count:] = [value]


def _row(step: Step, found: Detected, total: dict[str, float], largest: float) -> dict[str, Any]:
    node = step.merge or step.node
    row: dict[str, Any] = {
        "key": step.key,
        "component": component_of(step.key, found),
        "block": block_of(step.key, found),
        "action": step.action,
        "method": step.methods,
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
    row["max_change"] = largest
    row["sign_conflict"] = _ratio(total.get("conflicts", math.nan), total.get("both", math.nan))
    row |= {"reason": step.reason, "note": ""}
    return row


def _explained(step: Step, operands: list[Tensor]) -> Columns:
    """What the step's method tells of its decision about the tensor."""
    node = step.merge
    explain = method(node.method).explain if node is not None else None
    if node is None or explain is None:
        return {}
    shaped = [operand.reshape(node.shape) for operand in operands]
    return explain(*shaped, **node.params, **({"strengths": node.strengths} if node.strengths else {}))


def _told_columns(row: Mapping[str, Any], told: Columns) -> dict[str, Any]:
    """The columns of a method that chooses; its reason stands behind the one that the parameters have."""
    blank = {"strategy": "", **dict.fromkeys(("n", "conflict_expected", "ratio", "density"), math.nan)}
    reasons = [str(reason) for reason in (row["reason"], told.get("reason", "")) if reason]
    return {**blank, **told, "reason": ", ".join(reasons)}


def _lora_columns(node: Node, max_change: float) -> dict[str, Any]:
    """How many modules of LoRAs change a tensor, and the rank of their sum where each of them has one."""
    changes = node.changes if isinstance(node, Baked) else ()
    ranks = [change.rank for change in changes if change.rank is not None]
    rank = sum(ranks) if changes and len(ranks) == len(changes) else math.nan
    notes = ["no change"] if changes and max_change == 0 else []
    notes += ["no alpha in the LoRA: scale 1"] if any(change.guessed for change in changes) else []
    return {"n": len(changes), "rank": rank, "note": ", ".join(notes)}


_NORMS = {"norm_a": "aa", "norm_b": "bb", "norm_diff": "dd", "norm_out": "oo", "norm_change": "cc"}


def _operand_dtype(node: Node, number: int) -> str:
    operands = node.inputs if isinstance(node, Merged) else (node,)
    return _dtype(operands[number]) if number < len(operands) else ""


def _dtype(node: Node) -> str:
    """As stored, where it is."""
    if isinstance(node, (Baked, Channels, Scaled)):
        return _dtype(node.inputs[0])
    return "" if isinstance(node, Zeros) else node.dtype


def _cosine(total: dict[str, float]) -> float:
    """Of A and B; of B − A and C − A where there are three models."""
    cross, left, right = ("de", "dd", "ee") if "de" in total else ("ab", "aa", "bb")
    if cross not in total:
        return math.nan
    return _ratio(total[cross], math.sqrt(total[left]) * math.sqrt(total[right]))


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
