"""HunyuanVideo: double and single blocks as in Flux, behind a refiner of the text."""

from __future__ import annotations

from ._family import Family, Mark, Sign
from .flux import RULES

FAMILY = Family(
    "hunyuan_video",
    "HunyuanVideo",
    22,
    signs=(
        Sign(has=("txt_in.individual_token_refiner.blocks.#.norm1.weight",)),
        Sign(has=("context_embedder.token_refiner.refiner_blocks.#.attn.to_q.weight",), naming="diffusers"),
    ),
    rules=RULES,
    adapter=(
        Mark(r"(?:txt_in.individual_token_refiner|context_embedder.token_refiner)"),
        Mark(r"double_blocks.\d+.(?:img|txt)_(?:mlp.fc[12]|mod.linear)"),
        Mark(r"(?:double|transformer)_blocks.19.(?:img_attn|attn.add)"),
    ),
)
