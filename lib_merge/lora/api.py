"""`merge_loras`, `extract_lora` and `resize_lora`: the Python API; each builds a recipe and carries it out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from ..catalog import PathLike
from ..changes import LoraLike, named_loras
from ..choose import word
from ..errors import OutputError, RecipeError
from ..execute import Running
from ..files.companion import adapter_path
from ..files.source import Source
from ..files.target import numbered
from ..metadata import text_metadata
from ..recipe import (
    ConflictMode,
    KeyFilter,
    Lora,
    LoraNames,
    Optimizer,
    Output,
    Recipe,
    SaveDtype,
    Slot,
    Value,
    validated,
)
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
    scope: str = "per_prefix",
    profile: str = "v1.2",
    rules: str = "ordered",
    refinement: str = "standard",
    sparsify: str = "none",
    density: float | Literal["auto"] | None = None,
    dampening: float | None = None,
    smoothing: float | None = None,
    auto_strength: bool | None = None,
    output_strength: float | Literal["auto"] | None = None,
    normalize: bool = True,
    lossless: bool = False,
    conflict_modes: Sequence[ConflictMode] = (),
    key_filters: Sequence[KeyFilter] = (),
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
    """Merge LoRAs into one: what they do together (Σ wᵢ·ΔWᵢ), or weight by weight what suits them best.

    Args:
        *loras: files or PEFT folders of any format: path, or (path, strength, te_strength, blocks), of
            which the last ones may be left out; for blocks, numbers that multiply the strength, see `blocks.parse`.
        out: `.safetensors` file, or a folder for PEFT.
        method: `concat` (exact; `weighted_sum` is the same); `auto`: for each weight that several LoRAs change the one
            of the following that its numbers call for; `weighted_average`, `slerp`, `consensus`, `ties`: that one for
            all of them; or the id of another program's merge. A weight that one LoRA alone changes takes it as it is.
        scope: `per_prefix`: a decision for each weight; `global`: one for the denoiser, one for the text encoders;
            `additive`: sums.
        profile: `v1.2`: all strategies; `no_slerp`: averages instead of SLERP and consensus; `classic`: sums, averages
            and TIES.
        rules: `ordered`, or `document` for the literal thresholds of the optimizer's documentation.
        refinement: `enhanced`: entries that are one LoRA's alone stay as they are, the rest of the LoRAs is made
            orthogonal; `maximum`: the same in a common basis, which is stored exactly; `standard`: neither.
        sparsify: entries dropped by chance before: `dare`, `della`, and only where LoRAs conflict: `dare_conflict`,
            `della_conflict`; random, by `seed`.
        density: share of entries that TIES (default 0.5) or `sparsify` (0.7) keeps, 0 … 1; `auto`: measured.
        dampening: of the rescaling after DARE, 0 … 1; 0, the default, keeps the mean.
        smoothing: how far each weight's numbers are drawn to its block's before the decision, 0 … 1, default 0.25.
        auto_strength: make no result larger than the largest input; by default of the sums of `auto` alone.
        output_strength: factor of the whole result; `auto`: the largest one that is advised.
        normalize: averages, SLERP, consensus and TIES give a mean, whatever factor all strengths share; False gives
            them the strengths' size back: times Σw²/Σ|w|.
        lossless: store what is no product of small factors as whole differences (`.diff`).
        conflict_modes: one for each LoRA: `all`, `low_conflict` or `high_conflict` entries of it take part.
        key_filters: one for each LoRA: `all`, `shared_only` or `unique_only` weights of it take part.
        rank: cut every module to this rank; `auto`: to the smallest with an error of at most `max_error`; None: what is
            exact is not cut, the rest as by `auto`.
        max_rank: no module gets more; by default the added ranks.
        max_error: relative error that a cut allows, 0.05 by default.
        base: the checkpoint, needed for adapters that are no sums (DoRA, OFT, (IA)³, GLoRA, full copies).
        lora_alpha: alpha of LoRAs that carry none.
        params: of another program's merge: density, clamp, frequency; of this one's, with True, variants of steps:
            `count_divisor`, `projection_vote`, `drop_selfish`, `linear_dampening`, `document_della`, see `VARIANTS`.
        save_dtype: dtype of the result; `auto`: the widest of the inputs.
        metadata: extra header metadata; values that are not text become JSON.
        seed: of random methods.
        **running: fields of `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    given, paths = named_loras(loras, lora_alpha)
    numbers = {
        "rank": rank,
        "max_rank": max_rank,
        "max_error": max_error,
        "density": density,
        "dampening": dampening,
        "smoothing": smoothing,
        "output_strength": output_strength,
    }
    switches: dict[str, Value] = {} if auto_strength is None else {"auto_strength": auto_strength}
    switches |= {} if normalize else {"normalize": False}
    switches |= {"lossless": True} if lossless else {}
    words = {"scope": scope, "profile": profile, "rules": rules, "refinement": refinement, "sparsify": sparsify}
    recipe = Recipe(
        task="lora_merge",
        method=method,
        params={**(params or {}), **_numbers(numbers), **switches},
        seed=seed,
        models={} if base is None else {"A": Slot(file=_name(base))},
        loras=_with_masks(given, conflict_modes, key_filters),
        optimizer=Optimizer(**{name: word(name, value) for name, value in words.items()}),  # type: ignore[arg-type]
        output=Output(save_dtype=save_dtype, metadata=text_metadata(metadata or {})),
    )
    located: dict[str, PathLike] = {**paths, **({} if base is None else {"A": base})}
    return carry_out_recipe(validated(recipe), located, Path(out), Running(**running))


# Number that may be found by itself -> the parameter that says so.
_AUTOMATIC = {"rank": "auto", "density": "auto_density", "output_strength": "auto_output_strength"}


def _numbers(given: Mapping[str, float | str | None]) -> dict[str, Value]:
    """Parameters of a recipe; those that were not given are left out."""
    found: dict[str, Value] = {}
    for name, value in given.items():
        if value == "auto" and name in _AUTOMATIC:
            found[_AUTOMATIC[name]] = True
        elif value is not None:
            found[name] = float(value)
    return found


def _with_masks(
    loras: Sequence[Lora], conflict_modes: Sequence[ConflictMode], key_filters: Sequence[KeyFilter]
) -> tuple[Lora, ...]:
    """The LoRAs with what takes part of each."""
    found = list(loras)
    for name, values in (("conflict_mode", conflict_modes), ("key_filter", key_filters)):
        if values and len(values) != len(loras):
            raise RecipeError(f"{len(values)} values of {name} for {len(loras)} LoRAs", hint="give one for each")
        found = [
            replace(lora, **{name: value}) for lora, value in zip(found, values or ["all"] * len(found), strict=True)
        ]
    return tuple(found)


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
    rule: str | None = None,
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
            (of the norm, the default), or `kohya_resize` with its own parameters.
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
        method=rule or ("rank" if keep is None and not params else "frobenius"),
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
    if target.name and os.path.lexists(target) and not how.overwrite:  # said before anything is read
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
