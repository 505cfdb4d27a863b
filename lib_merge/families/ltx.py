"""LTX-Video."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

FAMILY = Family(
    "ltx",
    "LTX-Video",
    60,
    signs=(
        Sign(has=("patchify_proj.weight",)),
        Sign(has=("adaln_single.emb.timestep_embedder.linear_1.weight", "transformer_blocks.#.scale_shift_table")),
        Sign(has=("transformer_blocks.#.scale_shift_table", "proj_in.weight"), naming="diffusers"),
    ),
    rules=(*numbered("B", "transformer_blocks"), *OUT_RULES),
    adapter=(Mark(r"transformer_blocks.\d+.attn1.to_q", (2048,)),),
)
