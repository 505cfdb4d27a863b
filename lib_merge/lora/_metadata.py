"""What the header of a LoRA says: how it was made, of what, its ranks, its trigger words and its own hashes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..metadata import header_metadata
from ..recipe import Recipe
from ._inputs import Input
from ._module import Module
from ._output import NO_HASH, Stored, with_hash

_NETWORK = "networks.lora"
# Fields of the inputs that hold for the result where all inputs agree.
_COMMON = ("ss_base_model_version", "ss_sd_model_name", "ss_sd_model_hash", "ss_v2", "modelspec.architecture",
           "modelspec.implementation", "modelspec.resolution", "modelspec.prediction_type")  # fmt: skip
_TRIGGERS = "modelspec.trigger_phrase"
_TAGS = "ss_tag_frequency"


def common(texts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The fields on which all inputs agree."""
    found = {}
    for name in _COMMON:
        values = {text[name] for text in texts if name in text}
        if len(values) == 1:
            found[name] = values.pop()
    return found


def ranks(modules: Sequence[Module]) -> dict[str, str]:
    """`ss_network_*` in kohya's shape: one number where all modules have it, `Dynamic` where not."""
    dims = {module.rank for module in modules if module.rank is not None}
    alphas = {float(module.rank if module.alpha is None else module.alpha) for module in modules if module.rank}
    fields = {"ss_network_module": _NETWORK}
    if dims:
        fields["ss_network_dim"] = str(dims.pop()) if len(dims) == 1 else "Dynamic"
        fields["ss_network_alpha"] = f"{alphas.pop():g}" if len(alphas) == 1 else "Dynamic"
    return fields


def triggers(texts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The trigger words and the tag counts of all inputs together."""
    fields = {}
    words = dict.fromkeys(word.strip() for text in texts for word in text.get(_TRIGGERS, "").split(",") if word.strip())
    if words:
        fields[_TRIGGERS] = ", ".join(words)
    folders: dict[str, Counter[str]] = {}
    for text in texts:
        for folder, tags in _table(text.get(_TAGS)).items():
            counts = (
                {tag: number for tag, number in tags.items() if isinstance(number, int)}
                if isinstance(tags, dict)
                else {}
            )
            folders.setdefault(folder, Counter()).update(counts)
    if folders:
        fields[_TAGS] = json.dumps(folders, ensure_ascii=False)
    return fields


def _table(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def build(
    recipe: Recipe,
    inputs: Sequence[Input],
    modules: Sequence[Module],
    result: Stored,
    sources: Mapping[str, Any],
    hashes: Mapping[str, str],
    keep_recipe: bool,
) -> dict[str, str]:
    """The whole header of the result, with place holders for its own hash; strings only.

    Args:
        recipe: complete.
        inputs: the LoRAs that went in; none for an extraction.
        modules: what came out.
        result: as it is stored.
        sources: slot -> opened input.
        hashes: slot -> sha256 of the inputs.
        keep_recipe: store the recipe and the inputs' names.
    """
    texts = [item.source.metadata for item in inputs]
    own = {**common(texts), **ranks(modules), **triggers(texts), "modelspec.sai_model_spec": "1.0.1"}
    own = with_hash(own, NO_HASH)
    if keep_recipe and inputs:
        own["modelspec.merged_from"] = ", ".join(Path(item.source.name).stem for item in inputs)
    if result.config is not None:
        fields = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "peft_type")
        own["lora_adapter_metadata"] = json.dumps({name: result.config[name] for name in fields})
    legacy = dict.fromkeys(sources, "")
    (told,) = header_metadata(recipe, sources, [{}], hashes, legacy, keep_recipe, variant="")
    return {**own, **told}
