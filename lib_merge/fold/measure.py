"""What a fold did to a module: the change that was wanted against the change that the codes can show."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..families import block_of, component_of, detect
from ..lazy import np, torch
from .plan import FoldPlan, Module
from .values import Scratch
from .work import Portion

if TYPE_CHECKING:
    from torch import Tensor

# Below this correlation most of what changed is rounding: it is reached where the change is about 7 % of a step.
LOST = 0.3


def sums(portion: Portion, shipped: Sequence[Tensor], scratch: Scratch) -> dict[str, float]:
    """Sums over some rows, from which the numbers of the whole module follow by addition.

    Args:
        portion: the rows, computed.
        shipped: bytes of the quantized checkpoint's leaves in these rows.
        scratch: of this thread.

    Returns:
        `ww` dense², `dd` wanted², `aa` achieved², `da` wanted·achieved, `oo` result², `ff` error of the result², `ss`
        error of the quantized checkpoint², and the counts `codes`, `numel`, `step` (sum over groups), `steps`.
    """
    storage, low, base = portion.rows.module.storage, portion.rows.low, portion.base
    out, before = _decoded(portion, portion.fresh, shipped, scratch)
    room = scratch.of("product", torch.float64, base.shape)

    def dot(x: Tensor, y: Tensor) -> float:
        return float(torch.sum(torch.mul(x, y, out=room)))

    length = dot(out, out)
    achieved = torch.sub(out, before, out=scratch.of("achieved", torch.float64, base.shape))
    wanted = torch.zeros_like(base) if portion.change is None else portion.change
    after, earlier = errors(portion, out, before)
    steps = storage.steps(shipped, low).double()
    return {
        "ww": dot(base, base),
        "dd": dot(wanted, wanted),
        "aa": dot(achieved, achieved),
        "da": dot(wanted, achieved),
        "oo": length,
        "ff": dot(after, after),
        "ss": dot(earlier, earlier),
        "codes": float((storage.codes(portion.fresh) != storage.codes(shipped)).sum()),
        "numel": float(base.numel()),
        "step": float(steps.sum()),
        "steps": float(steps.numel()),
    }


def errors(portion: Portion, out: Tensor, shipped: Tensor) -> tuple[Tensor, Tensor]:
    """What rounding to codes cost, in the result and in the quantized checkpoint, each against its own reference.

    Args:
        portion: the rows, computed.
        out: decoded result, float64 [rows, columns].
        shipped: decoded quantized checkpoint, as `out`.

    Returns:
        `out` and `shipped`, overwritten.
    """
    return out.sub_(portion.total), shipped.sub_(portion.base)


def column_squares(portion: Portion, out: Sequence[Tensor], shipped: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """Squares of `errors`, of what leaves stand for, summed for each column: float64 [2, columns]."""
    found = errors(portion, *_decoded(portion, out, shipped, scratch))
    return torch.stack([torch.from_numpy(np.einsum("ij,ij->j", *[error.numpy()] * 2)) for error in found])


def _decoded(
    portion: Portion, out: Sequence[Tensor], shipped: Sequence[Tensor], scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """What leaves stand for, in float64."""
    storage, low = portion.rows.module.storage, portion.rows.low
    return scratch.double("out", storage.decode(out, low)), scratch.double("shipped", storage.decode(shipped, low))


class Gathered:
    """Sums of tiles, collected from several threads and added in the order of the tiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
        self.cuts: dict[str, int] = {}

    def add(self, module: Module, low: int, found: Mapping[str, float]) -> None:
        """Keep the sums of rows from `low` on."""
        with self._lock:
            self._sums[module.name][low] = dict(found)

    def cut(self, module: Module, count: int) -> None:
        """Count weights that were cut to the largest code."""
        if count:
            with self._lock:
                self.cuts[module.name] = self.cuts.get(module.name, 0) + count

    def of(self, module: Module) -> dict[str, float]:
        """Totals of a module; empty where nothing was measured."""
        parts = [found for _, found in sorted(self._sums.get(module.name, {}).items())]
        return {name: math.fsum(part[name] for part in parts) for name in parts[0]} if parts else {}


def numbers(total: Mapping[str, float]) -> dict[str, float]:
    """Columns of the report from totals; what does not apply is NaN."""
    root = {name: math.sqrt(value) for name, value in total.items() if len(name) == 2}
    numel, step = total.get("numel", 0.0), _ratio(total.get("step", math.nan), total.get("steps", 0.0))
    missing = math.nan
    return {
        "norm_a": root.get("ww", missing),
        "norm_diff": root.get("dd", missing),
        "rel_diff": _ratio(root.get("dd", missing), root.get("ww", 0.0)),
        "norm_out": root.get("oo", missing),
        "norm_change": root.get("aa", missing),
        "step": step,
        "delta_step_ratio": _ratio(_ratio(root.get("dd", missing), math.sqrt(numel)), step),
        "codes_changed": _ratio(total.get("codes", missing), numel),
        "correlation": _ratio(total.get("da", missing), root.get("dd", 0.0) * root.get("aa", 0.0)),
        "rms_ratio": rms_ratio(total),
    }


def rms_ratio(total: Mapping[str, float]) -> float:
    """RMS error of the result over that of the quantized checkpoint, each against its own float64 reference.

    1 where both are exact; infinite where only the result has an error.
    """
    if not total:
        return math.nan
    if total["ss"] == 0:
        return 1.0 if total["ff"] == 0 else math.inf
    return math.sqrt(total["ff"] / total["ss"])


def rows(plan: FoldPlan, gathered: Gathered) -> list[dict[str, Any]]:
    """The report: one row for each folded module, then those of the tensors that were copied."""
    tensors = plan.shipped.source.tensors
    found = detect({key: (info.dtype, info.shape) for key, info in plan.dense.tensors.items()})
    made = [_row(plan, module, numbers(gathered.of(module)), found) for module in plan.modules]
    folded = {leaf.key for module in plan.modules for leaf in module.storage.leaves}
    for key, info in tensors.items():
        if key not in folded:
            file = plan.shipped.gguf
            dtype, shape = (file.types[key], file.shapes[key]) if file else (info.dtype, info.shape)
            made.append(_place(key, found) | _stored("copied", dtype, list(shape)) | numbers({}))
    return made


def _row(plan: FoldPlan, module: Module, measured: Mapping[str, float], found: Any) -> dict[str, Any]:
    key = module.storage.leaves[0].key
    row = _place(module.dense, found) | _stored("merged", module.storage.label, list(module.shape))
    change = module.change
    note = f"rank {change.rank}, scale {change.scale:g}" if change else ""
    row |= {"key": key, "method": "fold", "dtype_a": plan.dense.tensors[module.dense].dtype, **measured}
    return row | {"rank": change.rank if change else math.nan, "reason": "named by the adapter", "note": note}


def _place(key: str, found: Any) -> dict[str, Any]:
    return {"key": key, "component": component_of(key, found), "block": block_of(key, found)}


def _stored(action: str, dtype: str, shape: list[int]) -> dict[str, Any]:
    return {
        "action": action,
        "method": "",
        "dtype_a": "",
        "dtype_b": "",
        "dtype_out": dtype,
        "shape": shape,
        "numel": math.prod(shape),
    }


def lost_effect(plan: FoldPlan, gathered: Gathered) -> list[str]:
    """Warnings for modules whose codes hardly show what the adapter wants."""
    found = {module.name: numbers(gathered.of(module)) for module in plan.modules}
    unchanged = [name for name, row in found.items() if row["norm_diff"] > 0 and row["codes_changed"] == 0]
    weak = [name for name, row in found.items() if row["codes_changed"] > 0 and row["correlation"] < LOST]
    said = []
    if gathered.cuts:
        said.append(
            f"{sum(gathered.cuts.values())} weights of {len(gathered.cuts)} modules are beyond their scale and were "
            f"cut to the largest code ({next(iter(gathered.cuts))}, …)"
        )
    if unchanged:
        said.append(
            f"{len(unchanged)} of {len(found)} modules keep all of their codes: the adapter's change of them is lost, "
            f"it is too small for their step ({unchanged[0]}, …)"
        )
    if weak:
        ratio, correlation = (
            math.fsum(found[name][column] for name in weak) / len(weak)
            for column in ("delta_step_ratio", "correlation")
        )
        said.append(
            f"in {len(weak)} of {len(found)} modules most of the adapter's effect may be lost: its change is "
            f"{100 * ratio:.1f} % of a step, and what the codes show of it is mostly rounding (correlation "
            f"{correlation:.2f}); a quantized checkpoint with more bits keeps more of it"
        )
    return said


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
