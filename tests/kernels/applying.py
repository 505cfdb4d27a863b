"""What the tests of the kernels share: inputs for a method, its parameters, and a plain way to run it, cut or not.

Everything comes from the registry, so that a new method is tested without a change here.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lib_merge.kernels.measure import row_block
from lib_merge.kernels.random import draws, stream_key
from lib_merge.kernels.registry import Method, Param, Value, all_methods

METHODS = tuple(all_methods().values())
FLOATS = (torch.float32, torch.float64)
NAME = "a.weight"
# Parameters at which a method that declares `exact_b` gives B, bit for bit.
EXACT_B: dict[str, list[dict[str, float]]] = {
    "comparative_interpolation": [{"alpha": 1, "gamma": 0.5}, {"alpha": 1, "beta": 1, "gamma": 0}],
    "enhanced_man_interp": [{"alpha": 1, "beta": 0, "gamma": 1, "delta": 0.5}],
    "extract_features": [{"alpha": 0, "beta": 0, "gamma": 0, "delta": 1}],
    "power_up_dare": [{"alpha": 0, "beta": 1}, {"alpha": 1e-7, "beta": 1}],
    "power_up_dare_enhanced": [{"beta": 1, "delta": 1}],
    "power_up_dare_ties": [{"alpha": 0, "beta": 0, "gamma": 1}],
    "power_up_dare_ties_enhanced": [{"beta": 0, "gamma": 1, "epsilon": 1}],
    "slerp": [{"alpha": 1}],
    "sum_twice": [{"alpha": 1, "beta": 0, "gamma": 1}],
    "tensor_select": [{"alpha": 1}],
    "triple_sum": [{"alpha": 1, "beta": 0}],
    "weight_sum_cutoff": [{"alpha": 1, "beta": 1, "gamma": 0}],
    "weighted_sum": [{"alpha": 1}, {"alpha": 7}],
}


def generic(method: Method, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """One tensor for each slot: weights, and others at some distance that grows from column to column.

    A few weights are the same in all, and in each other model a few more are as in the first.
    """
    return [torch.tensor(model).to(dtype) for model in _models(len(method.inputs), shape, seed)]


@lru_cache(maxsize=64)
def _models(count: int, shape: tuple[int, ...], seed: int) -> list[NDArray[np.float64]]:
    """By NumPy, whose numbers do not depend on torch's instruction set."""
    rng = np.random.default_rng(seed)
    models = [rng.standard_normal(shape)]
    columns = math.prod(shape[1:])
    reach = np.linspace(0.8, 0.05, columns).reshape(shape[1:])
    same = rng.random(shape) < 0.05
    for _ in range(count - 1):
        step = rng.uniform(0.12, 0.62, shape) * np.where(rng.random(shape) < 0.5, -1, 1) * reach
        models.append(models[0] + np.where(same | (rng.random(shape) < 0.05), 0, step))
    return models


def edges(method: Method, dtype: torch.dtype) -> list[Tensor]:
    """One tensor for each slot in which −0.0, subnormal, tiny and huge numbers meet each other."""
    limits = torch.finfo(dtype)
    values = [0.0, 1.0, 2.5, limits.tiny, limits.smallest_normal / 8, limits.max, limits.max / 3, 1 + limits.eps]
    signed = torch.tensor([sign * value for value in values for sign in (1, -1)], dtype=dtype)
    grids = torch.meshgrid(*[signed] * len(method.inputs), indexing="ij")
    return [grid.reshape(16, -1).clone() for grid in grids]


def inner(param: Param, share: float) -> Value:
    """A value inside the parameter's range, `share` of the way; a bool's is its `share` rounded."""
    if isinstance(param.default, bool):
        return share > 0.5
    low, high = (param.low, param.high) if math.isfinite(param.high - param.low) else param.slider
    return low + share * (high - low)


def settings(method: Method) -> list[dict[str, Value]]:
    """Parameters to try: the defaults and two points inside every range; bools are false at the first of them."""
    found = [method.check({})]
    for shares in (itertools.cycle((0.3, 0.25, 0.7, 0.4)), itertools.cycle((0.7, 0.45, 0.85, 0.65))):
        point = {param.name: inner(param, share) for param, share in zip(method.params, shares, strict=False)}
        flags = [param.name for param in method.params if isinstance(param.default, bool)]
        found.append(method.check(point | dict.fromkeys(flags, len(found) == 2)))
    return found


def apply(
    method: Method,
    tensors: Sequence[Tensor],
    params: Mapping[str, object] | None = None,
    *,
    seed: int = 0,
    name: str = NAME,
    cuts: Sequence[int] | None = None,
) -> Tensor:
    """Result of a method on copies of the tensors.

    Args:
        method: any.
        tensors: one for each slot, of one shape and dtype.
        params: some of the parameters; the others by default.
        seed: of random methods.
        name: of the tensor.
        cuts: elements at which to cut a method that may be cut; None for one piece.
    """
    values = method.check(params or {})
    shape = tensors[0].shape
    copies = [tensor.detach().clone() for tensor in tensors]
    if method.needs_whole(values):
        assert cuts is None
        return _call(method, copies, values, stream_key(seed, name), 0, [])
    flat = [copy.reshape(-1) for copy in copies]
    at = [0, *(cuts or ()), flat[0].numel()]
    columns = math.prod(shape[1:])
    pieces = []
    for low, high in itertools.pairwise(at):
        piece = [tensor[low:high] for tensor in flat]
        pieces.append((low, [part.reshape(-1, columns) for part in piece] if method.rows else piece))
    key = stream_key(seed, name)
    measures: list[object] = []
    for measure in method.needed_measures(values):
        parts = [measure.tile(*piece, **named(method, piece, values, key, low, measures)) for low, piece in pieces]
        measures.append(measure.combine(parts))
    results = [_call(method, piece, values, key, low, measures).reshape(-1) for low, piece in pieces]
    return torch.cat(results).reshape(shape)


def _call(
    method: Method,
    tensors: Sequence[Tensor],
    values: Mapping[str, Value],
    key: int,
    low: int,
    measures: Sequence[object],
) -> Tensor:
    return method.function(*tensors, **named(method, tensors, values, key, low, measures))


def named(
    method: Method,
    tensors: Sequence[Tensor],
    values: Mapping[str, Value],
    key: int,
    low: int,
    measures: Sequence[object],
) -> dict[str, object]:
    """What a method or a measure takes by name for a tile that starts at element `low`: parameters, draws, measures."""
    found: dict[str, object] = dict(values)
    if method.more:
        found["strengths"] = (1.0,) * (len(tensors) - 1)
    if method.random == "tensor":
        found["draws"] = draws(key, 0, 1)
    elif method.random:
        found["draws"] = draws(key, low, tensors[0].numel()).reshape(tensors[0].shape)
    if method.measures:
        found["measures"] = measures
    return found


def tiles(method: Method, shape: tuple[int, ...], size: int) -> list[int]:
    """Where the engine cuts for tiles of about `size` elements: at blocks of rows where the method asks for rows."""
    if method.rows:
        columns = math.prod(shape[1:])
        block = row_block(columns) * columns
        size = max(block, size // block * block)
    return list(range(size, math.prod(shape), size))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """True when dtype, shape and every bit are equal: −0.0 is not 0.0."""
    return x.dtype == y.dtype and x.shape == y.shape and raw(x) == raw(y)


def raw(x: Tensor) -> bytes:
    """A tensor's bytes."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def digests() -> dict[str, str]:
    """Method id -> sha256 over results of every method that promises the same bytes on every CPU."""
    found = {}
    for method in METHODS:
        if method.exact_arithmetic:
            digest = hashlib.sha256()
            for values in settings(method):
                for dtype in FLOATS:
                    for shape in ((3, 67), (67, 129), (12, 5, 3, 3), (1001,)):
                        digest.update(raw(apply(method, generic(method, shape, dtype), values)))
                    digest.update(raw(apply(method, edges(method, dtype), values).nan_to_num_()))
            found[method.id] = digest.hexdigest()
    return found


if __name__ == "__main__":
    print(torch.backends.cpu.get_cpu_capability())
    for item in digests().items():
        print(*item)
