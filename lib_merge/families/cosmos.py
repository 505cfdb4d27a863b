"""Cosmos Predict 2 and Anima, which is made from it."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

FAMILY = Family(
    "cosmos2",
    "Cosmos Predict 2",
    61,
    signs=(Sign(has=("blocks.#.mlp.layer1.weight",)),),
    variants=(("anima", Sign(has=("llm_adapter.",))),),
    rules=(*numbered("B", "blocks"), *numbered("A", "llm_adapter.blocks"), *OUT_RULES),
    adapter=(Mark(r"blocks.\d+.(?:self|cross)_attn.(?:[qkv]|output)_proj"), Mark(r"blocks.\d+.mlp.layer[12]")),
)
