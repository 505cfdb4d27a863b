"""`merge`, `bake`, `convert` and `run`: the Python API of the main jobs; each builds a recipe and carries it out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .blocks import parse as parse_blocks
from .catalog import PathLike, known_hashes, locate
from .changes import LoraLike, named_loras
from .errors import OutputError, RecipeError
from .execute import Result, Running, execute, planned
from .files.sidecar import sidecar_of, taken
from .files.target import is_taken, numbered
from .fold import Folded, fold_recipe
from .kernels.registry import method as find_method
from .lora import TASKS, LoraResult, carry_out_recipe
from .lora_strengths import STRENGTH
from .metadata import text_metadata
from .plan import base_slot, make_plan
from .recipe import Component, Mismatch, Output, Recipe, Rule, SaveDtype, Slot, Value

SLOTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# A model with its strength: of methods that take any number of models.
ModelLike = PathLike | tuple[PathLike, float]


def merge(
    a: PathLike,
    b: ModelLike,
    *more: ModelLike,
    out: PathLike,
    method: str = "weighted_sum",
    params: Mapping[str, Value] | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    gamma: float | None = None,
    delta: float | None = None,
    blocks: str | Mapping[str, Mapping[str, float]] = "",
    rules: Sequence[tuple[str, Mapping[str, Value]]] = (),
    exclude: str | Sequence[str] = (),
    include_mode: bool = False,
    discard: str | Sequence[str] = (),
    glob: bool = False,
    mismatch: Mismatch = "skip",
    allow_mixed_prediction: bool = False,
    vae: PathLike | None = None,
    loras: Sequence[LoraLike] = (),
    lora_alpha: float | None = None,
    save_dtype: SaveDtype = "auto",
    override_dtype: bool = False,
    metadata: Mapping[str, Any] | None = None,
    seed: int = 0,
    **running: Any,
) -> Result:
    """Merge checkpoints into one.

    Args:
        a: file or folder; the base that the output follows.
        b: file or folder; or (path, strength) where the method takes any number of models.
        *more: C, D … where the method takes them, as `b`.
        out: file to write (`.safetensors`), or folder when A is one.
        method: id, see `lib-merge methods`.
        params: the method's parameters.
        alpha: short for that parameter.
        beta: short for that parameter.
        gamma: short for that parameter.
        delta: short for that parameter.
        blocks: block weights as text (see `lib_merge.blocks.parse`) or name -> parameters.
        rules: (pattern, parameters) pairs, later ones win.
        exclude: patterns of tensors that keep A's values.
        include_mode: merge only what `exclude` matches.
        discard: patterns of tensors to leave out.
        glob: patterns are globs instead of regular expressions.
        mismatch: what happens where another model lacks a tensor: `skip`, `zeros` or `error`.
        allow_mixed_prediction: merge although only one of A and B has the marker v_pred or ztsnr; A's markers stay.
        vae: file whose VAE replaces A's.
        loras: LoRAs to bake into the result: paths, or tuples as for `bake`.
        lora_alpha: alpha of LoRAs that carry none.
        save_dtype: least precise dtype to store: auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2.
        override_dtype: force every float tensor to `save_dtype`.
        metadata: extra header metadata; values that are not text become JSON.
        seed: of random methods.
        **running: fields of `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    short = {"alpha": alpha, "beta": beta, "gamma": gamma, "delta": delta}
    given = {**(params or {}), **{name: value for name, value in short.items() if value is not None}}
    if len(more) > len(SLOTS) - 2:
        raise RecipeError(f"{len(more) + 2} models are more than the {len(SLOTS)} that a recipe has room for")
    given_models = dict(zip(SLOTS, (a, b, *more), strict=False))
    models: dict[str, Slot | None] = {slot: _model(model) for slot, model in given_models.items()}
    paths = {slot: model[0] if isinstance(model, tuple) else model for slot, model in given_models.items()}
    if lora_alpha is not None and not loras:
        raise RecipeError("lora_alpha takes effect only with a LoRA", hint="leave it out, or name one with --lora")
    baked, lora_paths = named_loras(loras, lora_alpha)
    recipe = Recipe(
        task="merge",
        method=method,
        params=given,
        seed=seed,
        models=models,
        blocks=named_blocks(blocks, method),
        rules=tuple(Rule(match=match, params=dict(values)) for match, values in rules),
        exclude=_patterns(exclude),
        include_mode=include_mode,
        discard=_patterns(discard),
        glob=glob,
        mismatch=mismatch,
        allow_mixed_prediction=allow_mixed_prediction,
        vae=None if vae is None else Slot(file=_name(vae)),
        loras=baked,
        output=Output(save_dtype=save_dtype, override_dtype=override_dtype, metadata=text_metadata(metadata or {})),
    )
    return _run(recipe, out=out, files=paths | lora_paths | ({} if vae is None else {"vae": vae}), **running)


def bake(
    checkpoint: PathLike,
    *loras: LoraLike,
    out: PathLike,
    blocks: str | Mapping[str, float] = "",
    lora_alpha: float | None = None,
    exclude: str | Sequence[str] = (),
    include_mode: bool = False,
    glob: bool = False,
    save_dtype: SaveDtype = "auto",
    override_dtype: bool = False,
    metadata: Mapping[str, Any] | None = None,
    **running: Any,
) -> Result:
    """Add LoRAs to a checkpoint: W + Σ strength·ΔW, summed in float32 or wider, rounded once.

    Args:
        checkpoint: file or folder; the base that the output follows.
        *loras: adapter files or PEFT folders of any format: path, or (path, strength, te_strength, blocks), of which
            the later ones may be left out.
        out: file to write (`.safetensors`), or folder when the checkpoint is one.
        blocks: weights for LoRAs without their own, as text (see `lib_merge.blocks.parse`) or name -> number; a number
            multiplies the strength, blocks not named keep it, BASE is what lies outside the blocks, text encoders too.
        lora_alpha: alpha of LoRAs that carry none; without it their scale alpha/rank is 1.
        exclude: patterns of tensors that keep the checkpoint's values.
        include_mode: bake only into what `exclude` matches.
        glob: patterns are globs instead of regular expressions.
        save_dtype: least precise dtype to store: auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2.
        override_dtype: force every float tensor to `save_dtype`.
        metadata: extra header metadata; values that are not text become JSON.
        **running: fields of `Running`.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    baked, paths = named_loras(loras, lora_alpha)
    values = parse_blocks(blocks) if isinstance(blocks, str) else {name: {"": value} for name, value in blocks.items()}
    recipe = Recipe(
        task="bake",
        models={"A": Slot(file=_name(checkpoint))},
        loras=baked,
        blocks={name: {param or STRENGTH: value for param, value in entry.items()} for name, entry in values.items()},
        exclude=_patterns(exclude),
        include_mode=include_mode,
        glob=glob,
        output=Output(save_dtype=save_dtype, override_dtype=override_dtype, metadata=text_metadata(metadata or {})),
    )
    return _run(recipe, out=out, files={"A": checkpoint} | paths, **running)


def _model(given: ModelLike) -> Slot:
    """A model's slot of the recipe."""
    path, strength = given if isinstance(given, tuple) else (given, None)
    return Slot(file=_name(path), strength=strength)


def _name(path: PathLike) -> str:
    """What a recipe calls a model: the name of its file or folder, also where the path ends in `.` or `..`."""
    return os.path.basename(os.path.abspath(path))


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def named_blocks(given: str | Mapping[str, Mapping[str, float]], method_id: str) -> dict[str, dict[str, Value]]:
    """Block weights with the name of the method's strength where only a number was given."""
    values = parse_blocks(given) if isinstance(given, str) else given
    if not values:
        return {}
    strength = find_method(method_id).strength
    return {name: {param or strength: value for param, value in params.items()} for name, params in values.items()}


def convert(
    a: PathLike,
    *,
    out: PathLike,
    save_dtype: SaveDtype = "auto",
    override_dtype: bool = False,
    vae: PathLike | None = None,
    discard: str | Sequence[str] = (),
    glob: bool = False,
    only: Component | None = None,
    metadata: Mapping[str, Any] | None = None,
    **running: Any,
) -> Result:
    """Write a checkpoint anew: other dtype, other VAE, fewer tensors, or a pickle as safetensors.

    Args:
        a: file or folder.
        out: file or folder to write.
        save_dtype: least precise dtype to store: auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2.
        override_dtype: force every float tensor to `save_dtype`.
        vae: file whose VAE replaces A's.
        discard: patterns of tensors to leave out.
        glob: patterns are globs.
        only: keep one component alone: `unet`, `te` or `vae`.
        metadata: extra header metadata.
        **running: fields of `Running`.
    """
    recipe = Recipe(
        task="convert",
        models={"A": Slot(file=_name(a))},
        discard=_patterns(discard),
        glob=glob,
        only=only,
        vae=None if vae is None else Slot(file=_name(vae)),
        output=Output(save_dtype=save_dtype, override_dtype=override_dtype, metadata=text_metadata(metadata or {})),
    )
    return _run(recipe, out=out, files={"A": a} | ({} if vae is None else {"vae": vae}), **running)


def run(
    recipe: Recipe,
    *,
    out: PathLike,
    files: Mapping[str, PathLike] | None = None,
    models: Sequence[PathLike] = (),
    **running: Any,
) -> Result | LoraResult | Folded:
    """Carry out a recipe.

    Args:
        recipe: what to do.
        out: file or folder to write.
        files: slot path (`A`, `B.C`, `vae`) -> file; slots that are not given are looked for in `models`.
        models: folders to look for inputs in, by hash and name.
        **running: fields of `Running`.

    Returns:
        a `LoraResult` where the recipe makes a LoRA, a `Folded` of the task fold.

    Raises:
        MergeError: see `lib_merge.errors`; nothing is written in that case.
    """
    if recipe.task == "fold":
        how = Running(**running)
        return fold_recipe(recipe, locate(recipe, files or {}, models, how.cache), Path(out), how)
    if recipe.task in TASKS:
        how = Running(**running)
        return carry_out_recipe(recipe, locate(recipe, files or {}, models, how.cache), Path(out), how)
    return _run(recipe, out=out, files=files, models=models, **running)


def _run(
    recipe: Recipe,
    *,
    out: PathLike,
    files: Mapping[str, PathLike] | None = None,
    models: Sequence[PathLike] = (),
    **running: Any,
) -> Result:
    """Carry out a recipe that makes a model."""
    how = Running(**running)
    target = Path(out)
    if (
        models and os.path.lexists(target) and not (how.overwrite or how.number)
    ):  # before files are hashed to find inputs
        raise OutputError("the output exists", file=target, hint="choose another name, or --overwrite, or --number")
    located = locate(recipe, files or {}, models, how.cache)
    if how.number:
        target = _numbered(target, located.get(base_slot(recipe)))
    known = known_hashes(located, how.cache) if how.keep_recipe else {}
    plan = make_plan(
        recipe,
        located,
        target=target,
        overwrite=how.overwrite,
        strict=how.strict,
        keep_recipe=how.keep_recipe,
        known_hashes=known,
        threads=how.threads,
    )
    return planned(plan, target) if how.dry_run else execute(plan, target, how)


def _numbered(target: Path, base: PathLike | None) -> Path:
    """The first name whose file is not there, nor a config of another model beside it."""
    sidecar = None if base is None else sidecar_of(Path(base))
    return numbered(target, lambda path: is_taken(path) or taken(sidecar, path))
