"""`merge_loras`, `extract_lora` and `resize_lora`: the Python API; each builds a recipe and carries it out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ..catalog import PathLike
from ..changes import LoraLike, named_loras
from ..errors import OutputError
from ..execute import Running
from ..files.companion import adapter_path
from ..files.source import Source
from ..files.target import numbered
from ..metadata import text_metadata
from ..recipe import LoraNames, Output, Recipe, SaveDtype, Slot, Value
from ._extract import extract_work
from ._merge import merge_work
from ._output import raw
from ._resize import resize_work
from ._work import LoraResult, Work, carry_out, compute_stored, opened

TASKS: Mapping[str, Callable[[Recipe, Mapping[str, Source]], Work]] = {
    "lora_merge": merge_work,
    "lora_extract": extract_work,
    "lora_resize": resize_work,
}


def merge_loras(
    *loras: LoraLike,
    out: PathLike,
    method: str = "concat",
    rank: int | Literal["auto"] | None = None,
    max_rank: int | None = None,
    max_error: float | None = None,
    base: PathLike | None = None,
    lora_alpha: float | None = None,
    params: Mapping[str, Value] | None = None,
    save_dtype: SaveDtype = "auto",
    metadata: Mapping[str, Any] | None = None,
    seed: int = 0,
    **running: Any,
) -> LoraResult:
    """Merge LoRAs into one that does what they do together: Σ wᵢ·ΔWᵢ.

    Args:
        *loras: files or PEFT folders of any format: path, or (path, strength, te_strength).
        out: `.safetensors` file, or a folder for PEFT.
        method: `concat` (exact; `weighted_sum` is the same), `weighted_average`, or the id of another program's merge.
        rank: cut every module to this rank; `auto`: to the smallest with an error of at most `max_error`; None: the
            added ranks, nothing is cut.
        max_rank: no module gets more.
        max_error: relative error that `auto` allows, 0.05 by default.
        base: the checkpoint, needed for adapters that are no sums (DoRA, OFT, (IA)³, GLoRA, full copies).
        lora_alpha: alpha of LoRAs that carry none.
        params: of another program's merge: density, clamp, frequency.
        save_dtype: dtype of the result; `auto`: the widest of the inputs.
        metadata: extra header metadata; values that are not text become JSON.
        seed: of random methods.
        **running: fields of `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    given, paths = named_loras(loras, lora_alpha)
    wanted: dict[str, Value] = dict(params or {})
    for name, value in (("rank", None if rank == "auto" else rank), ("max_rank", max_rank), ("max_error", max_error)):
        if value is not None:
            wanted[name] = float(value)
    if rank == "auto":
        wanted["auto"] = True
    recipe = Recipe(
        task="lora_merge",
        method=method,
        params=wanted,
        seed=seed,
        models={} if base is None else {"A": Slot(file=_name(base))},
        loras=given,
        output=Output(save_dtype=save_dtype, metadata=text_metadata(metadata or {})),
    )
    located: dict[str, PathLike] = {**paths, **({} if base is None else {"A": base})}
    return carry_out_recipe(recipe, located, Path(out), Running(**running))


def extract_lora(
    tuned: PathLike,
    base: PathLike,
    *,
    out: PathLike,
    rank: int | None = None,
    conv_rank: int | None = None,
    keep: float | None = None,
    clamp: float = 1.0,
    exact: bool = False,
    store_diffs: bool = False,
    min_diff: float = 0.0,
    names: LoraNames = "",
    save_dtype: SaveDtype = "auto",
    metadata: Mapping[str, Any] | None = None,
    **running: Any,
) -> LoraResult:
    """Store what a tuned model has more than its base as a LoRA: base + LoRA = tuned, as far as the rank allows.

    Args:
        tuned: the tuned checkpoint.
        base: what it was tuned from.
        out: `.safetensors` file, or a folder for PEFT.
        rank: of matrices, 64 by default; as many as the matrix has is exact.
        conv_rank: of 3×3 convolutions, 32 by default.
        keep: share of each module's norm to keep, at the smallest rank that does; `rank` is then where it starts.
        clamp: keep changes within this quantile of their sizes; 1 changes nothing.
        exact: full singular value decompositions instead of sampled ones.
        store_diffs: store what factors cannot hold (norms, biases, embeddings) as whole differences.
        min_diff: leave out tensors whose largest change is not above this.
        names: whose module names: `kohya` (default; A1111, Forge, ComfyUI), `diffusers`, `peft` (LLMs).
        save_dtype: dtype of the result; `auto`: that of most of the tuned model's tensors.
        metadata: extra header metadata.
        **running: fields of `Running`.
    """
    given = {"rank": rank, "conv_rank": conv_rank, "keep": keep}
    params: dict[str, Value] = {name: float(value) for name, value in given.items() if value is not None}
    switches = {"exact": exact, "store_diffs": store_diffs}
    params |= {"clamp": clamp, "min_diff": min_diff, **{name: True for name, on in switches.items() if on}}
    recipe = Recipe(
        task="lora_extract",
        params=params,
        models={"A": Slot(file=_name(tuned)), "B": Slot(file=_name(base))},
        output=Output(save_dtype=save_dtype, names=names, metadata=text_metadata(metadata or {})),
    )
    return carry_out_recipe(recipe, {"A": tuned, "B": base}, Path(out), Running(**running))


def resize_lora(
    lora: PathLike,
    *,
    out: PathLike,
    rank: int | None = None,
    keep: float | None = None,
    rule: str = "frobenius",
    max_rank: int | None = None,
    params: Mapping[str, Value] | None = None,
    lora_alpha: float | None = None,
    save_dtype: SaveDtype = "auto",
    metadata: Mapping[str, Any] | None = None,
    **running: Any,
) -> LoraResult:
    """Cut a LoRA to a smaller rank; no module ever grows.

    Args:
        lora: file or PEFT folder.
        out: `.safetensors` file, or a folder for PEFT.
        rank: for all modules.
        keep: share to keep instead, at the smallest rank that does.
        rule: what the share is of: `ratio` (of the largest singular value), `cumulative` (of their sum), `frobenius`
            (of the norm), or `kohya_resize` with its own parameters.
        max_rank: with `keep`: no module gets more.
        params: of `kohya_resize`: rank, and ratio, cumulative or frobenius.
        lora_alpha: alpha of a LoRA that carries none.
        save_dtype: dtype of the result; `auto`: that of the input.
        metadata: extra header metadata.
        **running: fields of `Running`.
    """
    given, paths = named_loras([adapter_path(lora)], lora_alpha)
    wanted: dict[str, Value] = dict(params or {})
    for name, value in (("rank", rank), ("keep", keep), ("max_rank", max_rank)):
        if value is not None:
            wanted[name] = float(value)
    recipe = Recipe(
        task="lora_resize",
        method="rank" if keep is None and not params else rule,
        params=wanted,
        loras=given,
        output=Output(save_dtype=save_dtype, metadata=text_metadata(metadata or {})),
    )
    return carry_out_recipe(recipe, paths, Path(out), Running(**running))


def carry_out_recipe(recipe: Recipe, located: Mapping[str, PathLike], target: Path, how: Running) -> LoraResult:
    """Carry out a recipe of one of `TASKS`.

    Args:
        recipe: what to do.
        located: slot (`lora1`, `A` …) -> file.
        target: file or folder to write.
        how: see `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    target = numbered(target) if how.number else target
    if os.path.lexists(target) and not how.overwrite:  # said before anything is read
        raise OutputError("the output exists", file=target, hint="choose another name, or --overwrite, or --number")
    with opened({slot: Path(path) for slot, path in located.items()}) as sources:
        return carry_out(TASKS[recipe.task](recipe, sources), target, how)


def differing(recipe: Recipe, located: Mapping[str, PathLike], made: Source, how: Running) -> tuple[str, ...]:
    """The keys of a finished LoRA whose bytes are not what its recipe gives, missing and extra ones included.

    Args:
        recipe: of one of `TASKS`.
        located: slot -> file.
        made: the opened result.
        how: threads, progress, cancel.
    """
    with opened({slot: Path(path) for slot, path in located.items()}) as sources:
        result = compute_stored(TASKS[recipe.task](recipe, sources), how)
    wrong = {key for key in made.tensors if key not in result.tensors} | (result.tensors.keys() - made.tensors.keys())
    for key, (dtype, tensor) in result.tensors.items():
        info = made.tensors.get(key)
        if info is not None:
            there = memoryview(bytearray(info.nbytes))
            made.read_into(key, 0, there)
            if (info.dtype, info.shape) != (dtype, tuple(tensor.shape)) or there != raw(tensor):
                wrong.add(key)
    return tuple(sorted(wrong))


def _name(path: PathLike) -> str:
    """What a recipe calls a model: the name of its file or folder."""
    return os.path.basename(os.path.abspath(path))
