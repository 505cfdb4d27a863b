"""Which block a tensor belongs to, and the blocks of a model in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ._components import component_of, strip_denoiser
from ._family import OUT_RULES, Detected, Family, numbered
from .llm import RULES as LLM_RULES
from .sd_unet import unet_rules

# Names that may be set on their own but belong to another block as long as nobody does.
OVERRIDES = frozenset({"TIME", "LABEL", "CLIP", "CLIPL", "CLIPG", "CLIPH", "T5", "TE", "VISION"})
# Blocks that are no layers of the denoiser (or of the LLM).
_BESIDES = OVERRIDES | {"BASE", "VAE"}

# Text encoders by name, the first that fits.
_ENCODERS = tuple(
    (blocks, re.compile(pattern))
    for blocks, pattern in (
        (("CLIPG", "CLIP", "BASE"), r"clip_g|embedders\.[01]\.model\.|text_encoder_2[./]text_model|lora_te2_text"),
        (("CLIPH", "CLIP", "BASE"), r"cond_stage_model\.model\."),
        (("CLIPL", "CLIP", "BASE"), r"clip_l|text_model|cond_stage_model\.transformer\."),
        (("T5", "BASE"), r"t5|[._/]block[._]\d|[./]shared\.weight|encoder\.(?:final_layer_norm|embed_tokens)"),
        (("TE", "BASE"), r""),
    )
)

# Lists of blocks as most transformers name them, for models that no family fits.
_COMMON = (
    *unet_rules("OUT"),
    *numbered("D", "double_blocks", "double_layers", "double_stream_blocks", "joint_transformer_blocks"),
    *numbered("S", "single_blocks", "single_layers", "single_stream_blocks", "single_transformer_blocks"),
    *numbered("J", "joint_blocks"),
    *numbered("NR", "noise_refiner"),
    *numbered("CR", "context_refiner"),
    *numbered("L", "layers"),
    *numbered("B", "blocks", "transformer_blocks"),
    *OUT_RULES,
)
UNKNOWN = Family("unknown", "unknown", 1000, (), rules=_COMMON)
LLM = Family("unknown", "unknown", 1000, (), rules=LLM_RULES)
# Any other list: `some.stack.3.` with more than `weight` behind the number.
_ANY_LIST = re.compile(r"((?:[A-Za-z_]\w*\.)*?[A-Za-z_]\w*)\.(\d+)\.(?!(?:weight|bias|scale)$)")

_BEFORE = ("BASE", "CLIP", "T5", "EMBED", "IN")
_AFTER = ("M", "OUT", "NORM", "HEAD")
_NUMBERED = re.compile(r"(.*?)(\d+)$")


def blocks_of(key: str, found: Detected | None = None) -> tuple[str, ...]:
    """Every block name that reaches a tensor, most specific first: `("TIME", "BASE")`.

    Args:
        key: full tensor name.
        found: what the file is. Without it only names that mean the same in every model are understood;
            the last blocks of a UNet are called OUT then.
    """
    part = component_of(key, found)
    if part == "vae":
        return ("VAE",)
    if part in ("ema", "other"):
        return ("BASE",)
    if part.startswith("te"):
        return _encoder_blocks(key, found)
    family = found.family if found is not None and found.family is not None else UNKNOWN
    if part == "llm":
        return _apply(LLM if family is UNKNOWN else family, key.removeprefix("base_model.model."))
    return _apply(family, strip_denoiser(key, found))


def _encoder_blocks(key: str, found: Detected | None) -> tuple[str, ...]:
    if found is not None and found.kind == "text encoder" and found.family is not None:
        return _apply(found.family, key[len(found.prefix) :])
    return next(blocks for blocks, pattern in _ENCODERS if pattern.search(key))


def _apply(family: Family, name: str) -> tuple[str, ...]:
    for rule in family.rules:
        if (blocks := rule.match(name)) is not None:
            return blocks
    if family is UNKNOWN and (found := _ANY_LIST.match(name)):
        return (f"{found[1]}.{int(found[2]):02d}",)
    return family.rest


def block_of(key: str, found: Detected | None = None) -> str:
    """The block a tensor belongs to: IN03, M00, BASE … ; arguments as for `blocks_of`."""
    named = found.family.named if found is not None and found.family is not None else ()
    names = blocks_of(key, found)
    return next((name for name in names if name in named or name not in OVERRIDES), names[-1])


def block_names(tensors: Mapping[str, object], found: Detected, *, overrides: bool = False) -> list[str]:
    """The blocks of a model, in order.

    Args:
        tensors: its keys.
        found: what it is.
        overrides: add, at the end, the names that may be set besides: VAE, TIME, CLIPL … as far as they reach
            a tensor.
    """
    family = found.family or UNKNOWN
    names = set(family.blocks)
    reached: set[str] = set()
    for key in tensors:
        reached.update(blocks_of(key, found))
        if component_of(key, found) not in ("ema", "other"):
            names.add(block_of(key, found))
    if family.kind != "vae":
        names.discard("VAE")
    listed = _sorted(names, family)
    return listed + sorted(reached - names) if overrides else listed


def layer_names(tensors: Mapping[str, object], found: Detected) -> list[str]:
    """The blocks of a model that are layers one after the other, in order; text encoders, VAE and the rest left out."""
    return [name for name in block_names(tensors, found) if name not in _BESIDES]


def _sorted(names: Iterable[str], family: Family) -> list[str]:
    lists = dict.fromkeys(rule.blocks[0] for rule in family.rules if rule.index)
    between = [name for name in lists if name not in _BEFORE + _AFTER]
    ranks = {name: rank for rank, name in enumerate((*_BEFORE, *between))}
    ranks |= {name: 1000 + rank for rank, name in enumerate(_AFTER)}

    def place(name: str) -> tuple[int, str, int]:
        found = _NUMBERED.match(name) if name not in OVERRIDES else None
        group, number = (found[1], int(found[2])) if found else (name, -1)
        return ranks.get(group, 999), group, number

    return sorted(names, key=place)
