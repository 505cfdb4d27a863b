"""PixArt."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

FAMILY = Family(
    "pixart",
    "PixArt",
    63,
    signs=(Sign(has=("t_block.1.weight",)),),
    rules=(*numbered("B", "blocks"), *OUT_RULES),
    adapter=(Mark(r"blocks.\d+.(?:attn.qkv|cross_attn.(?:kv_linear|q_linear))"),),
)
