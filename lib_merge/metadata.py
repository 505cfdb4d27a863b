"""The header metadata of a result: model A's, the recipe, and the hosts' own merge notes; strings only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from . import recipe as recipes
from .errors import RecipeError
from .files.source import Source
from .patterns import split
from .recipe import METADATA_KEY, VERSION_KEY, Recipe, Slot
from .version import __version__

UNKNOWN_SHA256 = "0" * 64
UNKNOWN_LEGACY = "0" * 8
_HOST_RECIPE, _HOST_MODELS = "sd_merge_recipe", "sd_merge_models"
# Hashes of the old contents: a reader would take them for the result's.
STALE = ("sshs_", "modelspec.hash_")
_NAMES_INPUTS = (METADATA_KEY, VERSION_KEY, _HOST_RECIPE, _HOST_MODELS, "modelspec.merged_from")
# A parent's own recipe is carried along up to this size; families of merges would double with each generation.
_LARGEST_PARENT_BYTES = 256 << 10


def header_metadata(
    recipe: Recipe,
    sources: Mapping[str, Source],
    inherited: Sequence[Mapping[str, str]],
    hashes: Mapping[str, str],
    legacy: Mapping[str, str],
    keep_recipe: bool,
    variant: str = "",
) -> list[dict[str, str]]:
    """Metadata of each part of the output.

    Unknown hashes become zeros, so that the text is never shorter than with the real ones: the header's size is
    known before the hashes are. A model counts as unknown unless both its hashes are given, so that the planned text
    is the same whether some are remembered or not.

    Args:
        recipe: complete recipe.
        sources: slot path -> input.
        inherited: metadata of A's parts.
        hashes: slot path -> sha256.
        legacy: slot path -> the hosts' old 8-digit hash.
        keep_recipe: store the recipe (in the first part) and the hosts' notes; else nothing may name an input.
        variant: of the result's family, such as `inpaint`; empty for the plain one.
    """
    results = []
    names = [] if keep_recipe else [source.name for source in sources.values()]
    for number, values in enumerate(inherited):
        kept = {
            key: value
            for key, value in values.items()
            if key not in _NAMES_INPUTS and not key.startswith(STALE) and not _tells(value, names)
        }
        result = {"format": "pt", **kept, **recipe.output.metadata}
        if keep_recipe and number == 0:
            result |= _provenance(recipe, sources, hashes, legacy, variant)
        results.append(result)
    return results


def text_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """A user's metadata as strings: anything that is not text becomes JSON.

    Raises:
        RecipeError: a value that JSON, or a name or text that UTF-8 cannot hold.
    """
    result = {}
    for key, value in values.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            f"{key}{text}".encode()
            result[str(key)] = text
        except (TypeError, ValueError) as error:
            raise RecipeError(f"the metadata value of {key!r} cannot be stored: {error}") from error
    return result


def _tells(text: str, names: Iterable[str]) -> bool:
    """True when a text names one of the files, with or without its suffix."""
    words = {word for name in names for word in (name, PurePath(name).stem)}
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words)


def _provenance(
    recipe: Recipe, sources: Mapping[str, Source], hashes: Mapping[str, str], legacy: Mapping[str, str], variant: str
) -> dict[str, str]:
    known = {slot: hashes[slot] if slot in hashes and slot in legacy else UNKNOWN_SHA256 for slot in sources}
    full = _with_parents(recipes.with_hashes(recipe, known), sources, "")
    note = _host_recipe(recipe, known, variant)
    return {
        METADATA_KEY: recipes.to_json(full),
        VERSION_KEY: __version__,
        _HOST_RECIPE: json.dumps(note),
        _HOST_MODELS: json.dumps(_host_models(sources, known, legacy)),
    }


def _with_parents(recipe: Recipe, sources: Mapping[str, Source], path: str) -> Recipe:
    """The recipe with each input's own recipe beside its name, as that file tells it."""

    def told(name: str, slot: Slot | None) -> Slot | None:
        if slot is None:
            return None
        if slot.recipe is not None:
            inner = _with_parents(slot.recipe, sources, f"{path}{name}.")
            return msgspec.structs.replace(slot, recipe=inner)
        return msgspec.structs.replace(slot, made_by=_made_by(sources[path + name]))

    models = {name: told(name, slot) for name, slot in recipe.models.items()}
    loras = tuple(
        msgspec.structs.replace(lora, made_by=_made_by(sources[path + name]))
        for name, lora in recipes.lora_slots(recipe)
    )
    return msgspec.structs.replace(recipe, models=models, vae=told("vae", recipe.vae), loras=loras)


def _made_by(source: Source) -> Recipe | None:
    """The recipe that an input itself holds."""
    text = source.metadata.get(METADATA_KEY, "")
    try:
        return recipes.from_json(text) if 0 < len(text) <= _LARGEST_PARENT_BYTES else None
    except RecipeError:  # written by a newer version: the file is usable, its story is not readable
        return None


def _host_recipe(recipe: Recipe, hashes: Mapping[str, str], variant: str) -> dict[str, Any]:
    """What the web UIs show of a merge, in their shape."""
    return {
        "type": "lib_merge",
        "primary_model_hash": hashes.get("A"),
        "secondary_model_hash": hashes.get("B"),
        "tertiary_model_hash": hashes.get("C"),
        "interp_method": recipe.method or recipe.task,
        "multiplier": recipe.params.get("alpha"),
        "save_as_half": recipe.output.save_dtype == "fp16",
        "custom_name": "",
        "config_source": 0,
        "bake_in_vae": recipe.vae.file if recipe.vae else None,
        "discard_weights": "|".join(split(recipe.discard)),
        "is_inpainting": variant == "inpaint",
        "is_instruct_pix2pix": variant == "ix2pix",
    }


def _host_models(sources: Mapping[str, Source], hashes: Mapping[str, str], legacy: Mapping[str, str]) -> dict[str, Any]:
    """sha256 -> name and story of each input and of its ancestors."""
    models: dict[str, Any] = {}
    for number, (slot, source) in enumerate(sources.items()):
        key = hashes[slot]
        if key == UNKNOWN_SHA256:  # place holders must not fall together, or the real text could be longer
            key = f"{number:064d}"
        models[key] = {
            "name": source.name,
            "legacy_hash": legacy.get(slot, UNKNOWN_LEGACY),
            _HOST_RECIPE: _json_or_none(source.metadata.get(_HOST_RECIPE)),
        }
        ancestors = _json_or_none(source.metadata.get(_HOST_MODELS))
        for ancestor, story in (ancestors or {}).items():
            models.setdefault(ancestor, story)
    return models


def _json_or_none(text: str | None) -> dict[str, Any] | None:
    """A JSON table from another program's metadata, or None."""
    try:
        value = json.loads(text) if text else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
