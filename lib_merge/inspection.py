"""What a model file is, told from its header; with `check`, also whether its numbers are sound."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from . import families
from .adapter_facts import adapter_facts
from .files.companion import adapter_path
from .files.dtypes import DTYPES
from .files.hashes import HashCache
from .files.open import open_model
from .files.source import Source
from .kernels.measure import bits_finite
from .lazy import np
from .quant.coded import coded_tensors
from .quant.fp8 import scales_of
from .recipe import METADATA_KEY

_PIECE_BYTES = 1 << 22


def inspect(path: Path | str, *, check: bool = False, cache: HashCache | None = None) -> dict[str, Any]:
    """Describe a model.

    Args:
        path: file or folder.
        check: read every float tensor and look for values that are not finite.
        cache: remembered hashes; none is computed here.

    Returns:
        `kind, family, format, container, dtype, tensors, parameters, bytes, components, blocks, layers, metadata,
        recipe, ranks, trigger_words, hashes, notes`; of an adapter also `alphas, modules, modules_per_block`; with
        `check` also `damaged`: key -> what is wrong. `format` is the adapter's, or the container of a model.

    Raises:
        FileError: it cannot be opened or read.
    """
    with closing(open_model(adapter_path(path))) as source:
        result = _described(source, path, cache or HashCache())
        if check:
            result["damaged"] = dict(_damage(source))
    return result


def _described(source: Source, path: Path | str, cache: HashCache) -> dict[str, Any]:
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
    found = families.detect(tensors)
    storages = sorted(set(coded_tensors({key: dtype for key, (dtype, _) in tensors.items()}).values()))
    recipe, notes = _recipe(source)
    if scales := scales_of(tensors):
        notes.append(f"{len(scales)} weights in scaled fp8: merges decode them by their scales")
    sha256, blocks = cache.get_source(source), families.block_names(tensors, found)
    facts = adapter_facts(source, found, blocks, sha256) if found.kind == "adapter" else {}
    return {
        "file": str(path),
        "kind": found.kind,
        "family": found.name,
        "variant": found.variant,
        "prefix": found.prefix,
        "format": source.kind,
        "container": source.kind,
        "dtype": dict(Counter(info.dtype for info in source.tensors.values()).most_common()),
        "coded": storages,
        "tensors": len(tensors),
        "parameters": sum(info.numel for info in source.tensors.values()),
        "bytes": sum(info.nbytes for info in source.tensors.values()),
        "components": dict(Counter(families.component_of(key, found) for key in tensors).most_common()),
        "blocks": blocks,
        "layers": families.layer_names(tensors, found),
        "metadata": {key: value for key, value in source.metadata.items() if key != METADATA_KEY},
        "recipe": recipe,
        "ranks": {},
        "trigger_words": [],
        "hashes": {"sha256": sha256},
        **facts,
        "notes": [*source.notes, *notes, *facts.get("notes", ())],
    }


def _recipe(source: Source) -> tuple[Any, list[str]]:
    """The recipe as it stands in the header, and what is wrong with it."""
    text = source.metadata.get(METADATA_KEY)
    try:
        return json.loads(text) if text else None, []
    except (ValueError, RecursionError):
        return None, ["the recipe in the header is not JSON"]


def _damage(source: Source) -> Iterator[tuple[str, str]]:
    for key, info in source.tensors.items():
        dtype = DTYPES[info.dtype]
        if dtype.kind != "float":
            continue
        if key.endswith("position_ids"):
            yield key, "floats where whole numbers belong"
        for low in range(0, info.nbytes, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, info.nbytes - low))
            source.read_into(key, low, memoryview(piece))
            if not bits_finite(np.frombuffer(piece, np.uint8), dtype.bits, dtype.unbounded):
                yield key, "a value is not finite"
                break
