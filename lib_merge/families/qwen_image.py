"""Qwen-Image: one list of blocks with the same names in its own and in diffusers files."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

FAMILY = Family(
    "qwen_image",
    "Qwen-Image",
    29,
    signs=(Sign(has=("txt_norm.weight", "transformer_blocks.#.img_mod.1.weight")),),
    rules=(*numbered("B", "transformer_blocks"), *OUT_RULES),
    adapter=(
        Mark(r"transformer_blocks.\d+.(?:img|txt)_(?:mod|mlp)"),
        Mark(r"transformer_blocks.\d+.attn.add_[qkv]_proj", (3072,)),
    ),
)
