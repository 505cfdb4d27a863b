"""Where a module's path begins: keys of models and stems of adapters, cut into slot and path.

A slot is a part of a model that has module paths of its own: "unet", "unet2" (a second expert), "te1", "te2", "t5" and
"lm" (text encoders by what they are, since T5 is the second of Flux and the third of SD3), "vae".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._alias import BARE
from ._components import component_of, strip_denoiser
from ._family import Detected

# Parameters that modules have; anything else is a parameter by itself.
PARAMS = ("weight", "bias", "scale", "gamma", "beta")
_IN_PROJ = re.compile(r"(.*\.in_proj)_(weight|bias)$")
# A text encoder's start, in models and in adapters.
_ENCODER = re.compile(
    r"(?:cond_stage_model\.|conditioner\.embedders\.\d+\.|(?:text_encoders\.)?(?:clip_[lgh]|t5xxl)\.|text_encoders\.\w+\."
    r"|text_encoder(?:_\d)?[./](?:base_model\.model\.)?|lora_(?:prior_)?te\d?_|base_model\.model\.|lycoris_)?"
    r"(?:transformer[._](?!resblocks)|model\.(?!layers|embed_tokens|norm))?"
)
_T5 = re.compile(r"(?:encoder|decoder)[._](?:block[._]\d|final_layer_norm|embed_tokens)|shared(?:$|[._])")
_LM_HEAD = re.compile(r"(?:(?:base_model|language_model|model|transformer(?=[._](?:h|wte|wpe|ln_f)\b))[._])+")
_LM = re.compile(r"(?:layers|h)[._]\d|embed_tokens|norm(?:$|[._])|lm_head")
# Old files leave out the first part of CLIP's paths.
_HEADLESS = re.compile(r"(?:encoder[._]layers[._]|embeddings[._]|final_layer_norm)")
_SECOND = re.compile(r"transformer_2[./]")
# Starts of adapter stems that say "denoiser" and nothing else.
_DENOISER = re.compile(
    r"lora_(?:prior_)?unet_+|lora_transformer_|oft_unet_|lycoris_|(?:unet|transformer(?:_2)?)\.(?:base_model\.model\.)?"
    r"|base_model\.model\.|(?:model\.)?diffusion_model\.|model\.|net\."
)
# Text encoders by name only, as some tools save them.
_CLIP = re.compile(r"(clip_l|clip_g|clip_h|t5xxl)\.")
_CLIPS = {"clip_l": "te1", "clip_g": "te2", "clip_h": "te1", "t5xxl": "te3"}
# A lone CLIP file is the first or second text encoder by its width.
_LONE = {"l": "te1", "g": "te2", "h": "te1"}
_COMPONENTS = {"unet2": "unet", "t5": "te3", "lm": "te1"}


def read_key(key: str, found: Detected) -> tuple[str, str]:
    """(slot, dotted path) of a model's tensor, the path still with its parameter.

    Args:
        key: full tensor name.
        found: what the file is.
    """
    part = component_of(key, found)
    if part == "llm":
        return "lm", _LM_HEAD.sub("", key, count=1)
    if found.kind == "text encoder":
        slot = _LONE.get(found.variant) or (component_of(key) if found.prefix else "te1")
        return _encoder(key[len(found.prefix) :], slot)
    if part.startswith("te"):
        return _encoder(key, _numbered(part, found))
    if part == "unet":
        return "unet2" if _SECOND.match(key) else "unet", strip_denoiser(key, found)
    return part, key


def read_stem(stem: str, found: Detected) -> Iterator[tuple[str, str]]:
    """(slot, path) of an adapter's module, the likeliest reading first; the path dotted or squashed, as in the file.

    Args:
        stem: as in the file, prefix included.
        found: what the model is that it is looked for in.
    """
    part = _part(stem)
    if part == "llm" or found.kind == "llm":
        yield "lm", _LM_HEAD.sub("", _DENOISER.sub("", stem, count=1) if part != "llm" else stem, count=1)
    if part.startswith("te"):
        yield _encoder(stem, _numbered(part, found))
    if part != "unet":
        return
    slot, path = ("unet2" if _SECOND.match(stem) else "unet"), stem
    readings = [path]
    while match := _DENOISER.match(path):
        path = path[match.end() :]
        readings.append(path)
    yield from ((slot, path) for path in reversed(readings))
    if stem.startswith(("base_model.model.", "lycoris_")):
        yield _encoder(stem, _numbered("te1", found))


def wrapped_in(stem: str) -> tuple[str, ...]:
    """The slots that a stem may belong to whose start is not understood: none, if it says a text encoder's."""
    if _part(stem) not in ("unet", "llm"):
        return ()
    return ("unet", "lm") if _DENOISER.match(stem) else ("unet", "lm", "te1", "te2", "t5")


def split_param(name: str) -> tuple[str, str]:
    """(module path, parameter) of a tensor's path; a parameter by itself gets `=` in front."""
    path, _, param = name.rpartition(".")
    if path and param in PARAMS:
        return path, param
    if found := _IN_PROJ.match(name):
        return found[1], found[2]
    return BARE + name, ""


def component(slot: str, found: Detected) -> str:
    """What reports call a slot: "unet", "te1" …, "llm"."""
    return "llm" if slot == "lm" and found.kind == "llm" else _COMPONENTS.get(slot, slot)


def _encoder(key: str, slot: str) -> tuple[str, str]:
    path = _ENCODER.sub("", key, count=1)
    if _T5.match(path):
        return "t5", path
    short = _LM_HEAD.sub("", path, count=1)
    if _LM.match(short):
        return "lm", short
    if _HEADLESS.match(path):
        separator = "." if "." in path else "_"
        return slot, f"text_model{separator}{path}"
    return slot, path


def _part(stem: str) -> str:
    bare = _CLIP.match(stem)
    return _CLIPS[bare[1]] if bare else component_of(stem)


def _numbered(part: str, found: Detected) -> str:
    """The slot of a CLIP: the refiner has one only, the big one, that files number 1 or 2."""
    return "te1" if found.id == "sdxl_refiner" else part
