"""Recipes that the web UIs' own mergers leave in a checkpoint's metadata, as ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import RecipeError
from .patterns import compiled
from .recipe import Output, Recipe, Slot

HOST_RECIPE, HOST_MODELS = "sd_merge_recipe", "sd_merge_models"
# The web UIs' method -> ours, and the models that it takes.
_METHODS: Mapping[str, tuple[str | None, str]] = {
    "no interpolation": (None, "A"),
    "weighted sum": ("weighted_sum", "AB"),
    "add difference": ("add_difference", "ABC"),
}
_SLOTS = {"A": "primary_model_hash", "B": "secondary_model_hash", "C": "tertiary_model_hash"}
# Entries that say what ours does by itself, or that have no meaning for a file of ours.
_WITHOUT_EFFECT = {"type", "custom_name", "is_inpainting", "is_instruct_pix2pix"}
_READ = {"interp_method", "multiplier", "save_as_half", "bake_in_vae", "discard_weights", "config_source"}
_SINGLE_FILE = ".safetensors"


def host_recipe(metadata: Mapping[str, str], where: object = None) -> tuple[Recipe, tuple[str, ...]] | None:
    """The recipe of a web UI's merge, and what of it could not be taken over; None where there is none.

    `A·(1−M) + B·M` and `A + (B−C)·M` are `weighted_sum` and `add_difference` with alpha M; a single model is the task
    convert. Models are named by their sha256, which finds them under any name.

    Args:
        metadata: of the merged file.
        where: that file, for errors.

    Raises:
        RecipeError: it was written by another program, or with a method that is not known.
    """
    told = _object(metadata.get(HOST_RECIPE))
    if not told:
        return None
    if str(told.get("type")).lower() not in ("webui", "neo"):
        what = f"the merge was made by another program, {told.get('type')!r}"
        raise RecipeError(what, file=where, hint="merges of A1111, Forge, reForge and Neo can be taken over")
    name = str(told.get("interp_method"))
    if name.lower() not in _METHODS:
        known = ", ".join(_METHODS)
        raise RecipeError(f"the merge has a method that is not known: {name}", file=where, hint=f"known are: {known}")
    method, slots = _METHODS[name.lower()]
    notes: list[str] = []
    models = {slot: _slot(slot, told, _object(metadata.get(HOST_MODELS)), notes) for slot in slots}
    notes += _not_taken(told)
    vae = told.get("bake_in_vae")
    half = bool(told.get("save_as_half"))
    recipe = Recipe(
        task="merge" if method else "convert",
        method=method,
        params={"alpha": _multiplier(told, where)} if method else {},
        models=models,
        vae=None if vae in (None, "", "None") else Slot(file=str(vae)),
        discard=tuple(_discard(told, notes)),
        output=Output(save_dtype="fp16" if half else "keep", override_dtype=half),
    )
    return recipe, tuple(notes)


def _object(text: str | None) -> dict[str, Any]:
    """The object of a JSON text; empty where it is none."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _slot(slot: str, told: Mapping[str, Any], models: Mapping[str, Any], notes: list[str]) -> Slot | None:
    sha256 = told.get(_SLOTS[slot])
    if not sha256:
        notes.append(f"model {slot} is left open: the web UI did not store its hash")
        return None
    known = models.get(sha256)
    name = known.get("name") if isinstance(known, dict) else None
    if not name:
        notes.append(f"model {slot} is known by its hash alone: {sha256[:10]}")
    file = str(name or f"{str(sha256)[:10]}{_SINGLE_FILE}").replace("\\", "/").rpartition("/")[2]
    return Slot(file=file, sha256=str(sha256))


def _multiplier(told: Mapping[str, Any], where: object) -> float:
    value = told.get("multiplier")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecipeError(f"the merge's multiplier is no number: {value!r}", file=where)
    return float(value)


def _discard(told: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    """The pattern of tensors that are left out; the web UIs search for one regular expression."""
    pattern = str(told.get("discard_weights") or "").strip()
    if not pattern:
        return
    try:
        compiled(pattern, glob=False)
    except RecipeError:
        notes.append(f"discard_weights is not taken over, it is no regular expression: {pattern}")
        return
    if pattern.split() != [pattern]:
        notes.append(f"discard_weights is not taken over, since it holds spaces: {pattern}")
        return
    yield pattern


def _not_taken(told: Mapping[str, Any]) -> Iterator[str]:
    """What ours has no place for."""
    if told.get("config_source") not in (None, 0):
        yield "config_source is not taken over: a config beside model A goes with the result"
    if told.get("save_as_half"):
        yield "save_as_half forces fp16 on every tensor here, the web UI leaves bf16 as it is"
    if strange := sorted(told.keys() - _READ - _WITHOUT_EFFECT - set(_SLOTS.values())):
        yield f"not taken over: {', '.join(strange)}"
