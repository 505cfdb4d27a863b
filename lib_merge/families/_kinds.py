"""The layer kind of a tensor: what is left of its name when the blocks it stands in are taken off."""

from __future__ import annotations

import re

from ._adapters import ROLE
from ._components import component_of, strip_denoiser
from ._family import Detected

# A list of blocks with its number: `transformer_blocks.0.`, `layers_3_`, `input_blocks.4.1.`, `down.0.block.1.`
_LISTS = re.compile(
    r"^.*(?:^|[._/])(?:\w*blocks?|layers?|\w+_layers|resnets|attentions|\w+_refiner|attn|down|up|h)"
    r"(?:[._]\d+)+[._](?=[A-Za-z_])"
)
_COMPONENT = re.compile(
    r"^(?:lora_te\d?_|cond_stage_model\.|conditioner\.embedders\.\d+\.|first_stage_model\.|text_encoders\.\w+\."
    r"|(?:text_encoder|vae)\w*[./])?(?:transformer\.(?=text_model|encoder|shared|model)|model\.)?(?:text_model\.)?"
)
_PART = re.compile(r"\.(?:weight|bias|scale|alpha)$|(?<=in_proj)_(?:weight|bias)$")
_NORM = re.compile(r"(?:.*[._])?(?:\w*norm\d*(?:_\w+)?|\w*layernorm\w*|ln_\w+)$")
# Names that say less than they should.
_ALIASES = {
    "in_layers.0": "norm",
    "out_layers.0": "norm",
    "out.0": "norm",
    "out.2": "conv_out",
    "input_blocks.0.0": "conv_in",
}


def kind_of(key: str, found: Detected | None = None) -> str:
    """The layer kind, such as `attn1.to_q`, `ff.net.0.proj`, `img_attn.qkv` or `norm`; weight and bias have the same.

    Args:
        key: full tensor name; in an adapter's, underscores stay: `attn1_to_q`.
        found: what the file is; helps to tell the prefix.
    """
    in_denoiser = component_of(key, found) == "unet"
    name = strip_denoiser(key, found) if in_denoiser else _COMPONENT.sub("", key, count=1)
    role = ROLE.search(name)
    name = name[: role.start()] if role else _PART.sub("", name)
    name = _LISTS.sub("", name)
    name = _ALIASES.get(name, name)
    return "norm" if _NORM.fullmatch(name) else name
