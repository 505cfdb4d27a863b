"""What an adapter's header tells a person: formats, ranks, alphas, modules per block, trigger words, hashes."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import families
from .adapters import FORMATS, Adapter, Piece, read
from .errors import MergeError, NumberError, Problem
from .files.companion import adapter_config
from .files.source import Source

# Metadata that names what to write into a prompt: text with commas, or a JSON list.
_TRIGGERS = (
    "modelspec.trigger_phrase",
    "trigger_words",
    "trained_words",
    "trigger_word",
    "activation text",
    "ss_trigger",
)
_TAGS = "ss_tag_frequency"
_MOST_WORDS = 20
# Hashes that trainers and web UIs write into the header.
_HASHES = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
_AUTOV2_DIGITS = 10
_LAYOUTS = {"F16": "<e", "F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B"}


def adapter_facts(
    source: Source, found: families.Detected, blocks: Sequence[str], sha256: str | None
) -> dict[str, Any]:
    """Describe an adapter; reads its header and its alphas, a few bytes each.

    Args:
        source: the opened file or PEFT folder.
        found: what it is.
        blocks: its blocks, in order.
        sha256: of the file, if it is known.

    Returns:
        `format, ranks, alphas, modules, modules_per_block, trigger_words, hashes, notes`. `ranks` and `alphas` count
        modules by number; an alpha that is not there is "none", which means alpha = rank.
    """
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
    facts: dict[str, Any] = {
        "trigger_words": trigger_words(source.metadata),
        "hashes": _hashes(source.metadata, sha256),
    }
    try:
        adapter = read(tensors, source.metadata, adapter_config(source))
    except MergeError as error:
        return {**facts, "notes": [f"{error.what} ({error.hint})" if error.hint else error.what]}
    return {**facts, **_contents(source, adapter, found, blocks)}


def _contents(source: Source, adapter: Adapter, found: families.Detected, order: Sequence[str]) -> dict[str, Any]:
    ranked = [piece for piece in adapter.pieces if piece.rank is not None]
    blocks = {piece.stem: families.block_of(next(iter(piece.keys.values())), found) for piece in adapter.pieces}
    count = Counter(blocks.values())
    notes = list(adapter.notes)
    if adapter.leftover:
        notes.append(f"{len(adapter.leftover)} tensors belong to no known format: {', '.join(adapter.leftover[:3])}")
    return {
        "format": ", ".join(dict.fromkeys(FORMATS[piece.format].label for piece in adapter.pieces)),
        "ranks": _counted(piece.rank for piece in ranked if piece.rank is not None),
        "alphas": _counted(_alpha(source, piece) for piece in ranked),
        "modules": len(blocks),
        "modules_per_block": {name: count[name] for name in (*order, *sorted(set(count) - set(order))) if count[name]},
        "notes": notes,
    }


def _counted(values: Iterable[float | None]) -> dict[str, int]:
    """Number -> how many, the most frequent first."""
    return dict(Counter("none" if value is None else f"{value:g}" for value in values).most_common())


def _alpha(source: Source, piece: Piece) -> float | None:
    """A module's alpha, from its tensor or from the configuration."""
    if key := piece.keys.get("alpha"):
        return read_scalar(source, key)
    value = piece.settings.get("alpha")
    return None if value is None else float(value)


def read_scalar(source: Source, key: str) -> float | None:
    """The first number of a tensor; None where it has none that can be read so."""
    info = source.tensors[key]
    if info.numel != 1 or info.dtype not in (*_LAYOUTS, "BF16"):
        return None
    data = bytearray(info.nbytes)
    source.read_into(key, 0, memoryview(data))
    if info.dtype == "BF16":  # the upper half of a float32
        data, layout = bytearray(2) + data, _LAYOUTS["F32"]
    else:
        layout = _LAYOUTS[info.dtype]
    return float(struct.unpack(layout, data)[0])


def stored_alphas(source: Source, pieces: Iterable[Piece]) -> dict[str, float]:
    """Key -> value of the alphas that scale factors; of OFT, where alpha is a limit, none.

    Raises:
        NumberError: one is not finite.
    """
    scaled = (piece.keys for piece in pieces if piece.rank is not None and "scale" not in piece.keys)
    keys = dict.fromkeys(keys["alpha"] for keys in scaled if "alpha" in keys)
    found = {key: value for key in keys if (value := read_scalar(source, key)) is not None}
    for key, value in found.items():
        if not math.isfinite(value):
            raise NumberError(
                "the LoRA holds a value that is not finite", file=source.path, tensor=key, hint="use an undamaged file"
            )
    return found


def zero_alphas(name: str, source: Source, alphas: Mapping[str, float]) -> list[Problem]:
    """What the user should know of alphas that are 0: taken as they stand, they would switch their modules off.

    Args:
        name: of the LoRA.
        source: its file.
        alphas: from `stored_alphas`.
    """
    zeros = [key for key, value in alphas.items() if not value]
    if not zeros:
        return []
    what = f"{name}: {len(zeros)} modules have alpha 0, which counts as their rank, as in its trainer"
    return [Problem("warning", what, str(source.path), zeros[0])]


def trigger_words(metadata: Mapping[str, str]) -> list[str]:
    """What to write into a prompt: the trainer's own words, then the most frequent tags of the training images."""
    words = [word for name in _TRIGGERS for word in _listed(metadata.get(name, ""))]
    tags: Counter[str] = Counter()
    for folder in _values(_parsed(metadata.get(_TAGS, ""))):
        counts = folder.items() if isinstance(folder, dict) else ()
        tags.update({str(tag).strip(): n for tag, n in counts if isinstance(n, int)})
    return list(dict.fromkeys([*words, *(tag for tag, _ in tags.most_common() if tag)]))[:_MOST_WORDS]


def _listed(text: str) -> list[str]:
    parsed = _parsed(text)
    words = parsed if isinstance(parsed, list) else re.split(r"[,\n]", text)
    return [word for word in (str(item).strip() for item in words) if word]


def _values(parsed: Any) -> Iterator[Any]:
    yield from parsed.values() if isinstance(parsed, dict) else ()


def _parsed(text: str) -> Any:
    """JSON in a metadata value, or None."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _hashes(metadata: Mapping[str, str], sha256: str | None) -> dict[str, str | None]:
    known = {name: metadata[name] for name in _HASHES if metadata.get(name)}
    return {"sha256": sha256, **({"autov2": sha256[:_AUTOV2_DIGITS]} if sha256 else {}), **known}
