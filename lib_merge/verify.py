"""Compute a merged model anew from its recipe and compare it byte for byte: the run's path with a comparing sink."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import recipe as recipes
from .catalog import Catalog, PathLike, model_hash, search
from .engine import Options, carry_out
from .events import CancelToken, OnProgress
from .execute import Running
from .files.dtypes import DTYPES
from .files.hashes import HashCache
from .files.open import open_model
from .files.sidecar import compared_sidecar
from .files.source import Source
from .kernels.measure import bits_finite
from .kernels.registry import method
from .lazy import np
from .lora import TASKS, differing
from .plan import Plan, default_threads, make_plan
from .presets import in_header
from .recipe import Recipe
from .steps import Baked, Merged, Step, walk

TOLERANCE_ULP = 2
# Distances of float64 beyond this do not fit an int64.
_FAR = 2.0**62
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Verified:
    """Result of `verify`.

    Attributes:
        compared: tensors compared.
        differing: keys whose bytes differ, missing and extra ones included.
        within_2_ulp: keys of methods with pow, exp, products or SVD that differ by at most 2 ulp: another CPU.
        missing_inputs: inputs that were not found, by name.
        sidecar: the config beside the file is `same` as A's, `different` or `missing`; empty where A has none.
    """

    compared: int
    differing: tuple[str, ...]
    within_2_ulp: tuple[str, ...]
    missing_inputs: tuple[str, ...]
    sidecar: str = ""

    @property
    def ok(self) -> bool:
        """True when everything was compared and nothing differs beyond rounding."""
        return not self.differing and not self.missing_inputs

    def to_dict(self) -> dict[str, Any]:
        """The fields of the command line's `--json`."""
        return {
            "ok": self.ok,
            "compared": self.compared,
            "differing": list(self.differing),
            "within_2_ulp": list(self.within_2_ulp),
            "missing_inputs": list(self.missing_inputs),
            **({"sidecar": self.sidecar} if self.sidecar else {}),
        }


def verify(
    out: PathLike,
    *,
    models: Sequence[PathLike] = (),
    files: Mapping[str, PathLike] | None = None,
    threads: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    cancel: CancelToken | None = None,
    cache: HashCache | None = None,
) -> Verified:
    """Check that a merged model is what its recipe says.

    Args:
        out: file or folder with a recipe in its header.
        models: folders to look for the inputs in, with all that is below them; `out`'s own folder counts too.
        files: slot path -> input, where they are known.
        threads: workers; None for the cores of this machine, at most 8.
        on_progress: told about ten times a second.
        cancel: stops the check from another thread.
        cache: remembered hashes.

    Raises:
        RecipeError: there is no recipe in it.
        MergeError: the inputs cannot be planned or read.
    """
    cache = cache or HashCache()
    source = open_model(out)
    recipe = stored_recipe(source)
    catalog = Catalog([Path(folder) for folder in models], cache, near=[Path(out).absolute().parent])
    located, lost = search(recipe, files or {}, catalog)
    if lost:
        return Verified(0, (), (), tuple(str(model.file) for slot, model in recipes.files(recipe) if slot in lost))
    if recipe.task in TASKS:
        with closing(source):
            running = Running(threads=threads, on_progress=on_progress, cancel=cancel or CancelToken(), cache=cache)
            return Verified(len(source.tensors), differing(recipe, located, source, running), (), ())
    hashes = {slot: digest for slot, path in located.items() if (digest := model_hash(path, cache))}
    plan = make_plan(recipe, located, known_hashes=hashes, threads=threads)
    try:
        plan.check()
        sink = _CompareSink(source, plan)
        options = Options(threads or default_threads(), on_progress=on_progress, cancel=cancel or CancelToken())
        carry_out(sink.plan, sink, options, "verifying")
    finally:
        plan.close()
        source.close()
    return Verified(len(sink.plan.steps), *sink.differences(), (), compared_sidecar(plan.sidecar, Path(out)))


def stored_recipe(source: Source) -> Recipe:
    """The recipe in a model's header.

    Raises:
        RecipeError: there is none.
    """
    return in_header(source.metadata, source.path)


class _CompareSink:
    """Takes the bytes of a run and holds them against those of a file."""

    def __init__(self, out: Source, plan: Plan) -> None:
        from dataclasses import replace

        steps = {step.key: step for step in plan.steps}
        same = {
            key
            for key, info in out.tensors.items()
            if key in steps and (info.dtype, info.shape) == (steps[key].dtype, steps[key].shape)
        }
        self.plan = replace(plan, steps=tuple(step for step in plan.steps if step.key in same))
        self._out, self._lock, self._same = out, threading.Lock(), same
        self._order = sorted(out.tensors, key=lambda key: (*self.place(key), out.tensors[key].nbytes))
        self._steps = steps
        self._differing = set(steps) ^ set(out.tensors) | (set(steps) - same)
        self._near: set[str] = set()

    def place(self, key: str) -> tuple[int, int]:
        """Where the tensor lies in the file that is checked."""
        info = self._out.tensors[key]
        return info.file, info.offset

    def write(self, key: str, offset: int, view: memoryview) -> None:
        """Compare one piece; a scale that is not there as planned differs already."""
        if key not in self._same:
            return
        there = memoryview(bytearray(len(view)))
        self._out.read_into(key, offset, there)
        if there != view:
            self._judge(key, np.frombuffer(view, np.uint8), np.frombuffer(there, np.uint8))

    def copy(self, key: str, offset: int, source: Source, source_key: str, count: int) -> None:
        """Compare a range that was copied; it may run over several tensors, each is looked at by itself."""
        for name in self._order[self._order.index(key) :]:
            size = self._out.tensors[name].nbytes
            end = min(size, offset + count)
            for low in range(min(offset, size), end, _PIECE_BYTES):
                piece = memoryview(bytearray(min(_PIECE_BYTES, end - low)))
                source.read_into(self._steps[name].node.key, low, piece)  # type: ignore[union-attr]
                self.write(name, low, piece)
            count -= max(0, end - offset)
            offset = max(0, offset - size)
            if count <= 0:
                return

    def _judge(self, key: str, here: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> None:
        dtype = DTYPES[self._steps[key].dtype]
        near = (
            not _exact(self._steps[key])
            and bits_finite(there, dtype.bits, dtype.unbounded)
            and ulp_distance(here, there, dtype.name) <= TOLERANCE_ULP
        )
        with self._lock:
            (self._near if near else self._differing).add(key)

    def differences(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Keys that differ, and keys that differ within the tolerance only."""
        return tuple(sorted(self._differing)), tuple(sorted(self._near - self._differing))


def _exact(step: Step) -> bool:
    """True when all that is done on the way gives the same bytes on every CPU."""
    return not any(
        isinstance(node, Baked) or (isinstance(node, Merged) and not method(node.method).exact_arithmetic)
        for node in walk(step.node)
    )


def ulp_distance(here: np.ndarray[Any, Any], there: np.ndarray[Any, Any], dtype: str) -> int:
    """Largest distance in steps of the float format between two arrays of its bytes."""
    size = DTYPES[dtype].bits // 8
    one, other = (_line(array.view(f"<i{size}").astype(np.int64), DTYPES[dtype].bits) for array in (here, there))
    rough = float(np.abs(one.astype(np.float64) - other).max())
    return int(rough) if rough > _FAR else int(np.abs(one - other).max())


def _line(bits: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Float bits as integers in the order of their values; both zeros are 0."""
    sign = -(1 << (width - 1))
    return np.where(bits < 0, sign - bits, bits)
