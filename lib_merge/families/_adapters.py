"""Tells adapter files from models, and the family that an adapter was made for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ._components import component_of, strip_denoiser
from ._family import Family, Tensors

# Ends of keys that only adapters have.
ROLE = re.compile(
    r"(?:[._]lora_(?:down|up|mid)\.weight"
    r"|\.lora_[AB](?:\.[\w-]+)*"
    r"|lora\d*\.(?:down|up)\.weight|\.lora_linear_layer\.(?:down|up)\.weight"
    r"|\.lora_embedding_[AB](?:\.[\w-]+)*|\.lora_magnitude_vector(?:\.[\w-]+)*|\.dora_scale"
    r"|\.hada_(?:w[12]_[ab]|t[12])|\.lokr_(?:w[12](?:_[ab])?|t[12])"
    r"|\.oft_(?:blocks|diag|R(?:\.[\w-]+)*)|\.boft_[RS](?:\.[\w-]+)*|\.hra_u(?:\.[\w-]+)*|\.ia3_l(?:\.[\w-]+)*"
    r"|\.on_input|\.diff(?:_[bm])?|\.set_weight|\.[wb]_norm|\.reshape_weight)$",
    re.IGNORECASE,
)
# Starts that only adapters have.
_START = re.compile(r"(?:lora_(?:prior_)?(?:unet|te\d?|transformer)_|oft_unet_|lycoris_|base_model\.model\.)")
# The part whose second axis is the module's input.
_INPUT = re.compile(
    r"(?:lora_down\.weight|lora_A(?:\.[\w-]+)*|lora\d*\.down\.weight|lora_linear_layer\.down\.weight|hada_w[12]_b)$"
)


def is_adapter(tensors: Tensors) -> bool:
    """True when any key has a form that only adapters use."""
    return any(_START.match(key) or ROLE.search(key) for key in tensors)


def adapter_family(tensors: Tensors, families: Iterable[Family]) -> Family | None:
    """The family an adapter was made for, or None when its names could be those of several."""
    modules = list(_modules(tensors))
    for family in families:
        for mark in family.adapter:
            path = re.compile(mark.path)
            for name, width in modules:
                if path.match(name) and (not mark.sizes or width in mark.sizes):
                    return family
    return None


def _modules(tensors: Tensors) -> Iterator[tuple[str, int | None]]:
    """(module path below the prefix, length of its input) of the denoiser's or the LLM's modules."""
    for key, (_, shape) in tensors.items():
        if component_of(key) not in ("unet", "llm"):
            continue
        found = ROLE.search(key)
        name = strip_denoiser(key[: found.start()] if found else key.rpartition(".")[0])
        width = shape[1] if _INPUT.search(key) and len(shape) > 1 else None
        yield name, width
