"""Stable Diffusion 3 and 3.5: joint blocks of text and image."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

_WIDTH = (("3.5-large", 2432), ("medium", 1536))
_SECOND_ATTENTION = ("joint_blocks.#.x_block.attn2.qkv.weight", "transformer_blocks.#.attn2.to_q.weight")

FAMILY = Family(
    "sd3",
    "SD 3",
    30,
    signs=(
        Sign(has=("joint_blocks.#.context_block.attn.qkv.weight",)),
        Sign(has=("transformer_blocks.#.attn.add_q_proj.weight", "pos_embed.proj.weight"), naming="diffusers"),
    ),
    variants=(
        *(("3.5-medium", Sign(has=(name,))) for name in _SECOND_ATTENTION),
        *(
            (name, Sign(sizes=((embedder, 0, (width,)),)))
            for name, width in _WIDTH
            for embedder in ("x_embedder.proj.weight", "pos_embed.proj.weight")
        ),
    ),
    rules=(*numbered("J", "joint_blocks", "transformer_blocks"), *OUT_RULES),
    adapter=(Mark(r"joint_blocks.\d"), Mark(r"transformer_blocks.\d+.attn.add_[qkv]_proj", (1536, 2432))),
)
