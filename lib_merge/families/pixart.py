"""PixArt."""

from __future__ import annotations

from ._alias import below, fused, renamed
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_NAMES = (
    *below(
        "transformer_blocks.#",
        "blocks.#",
        *fused("attn.qkv", "attn1.to_q", "attn1.to_k", "attn1.to_v"),
        *fused("cross_attn.kv_linear", "attn2.to_k", "attn2.to_v"),
        *renamed(
            *(("attn1.to_out.0", "attn.proj"), ("attn1.q_norm", "attn.q_norm"), ("attn1.k_norm", "attn.k_norm")),
            *(("attn2.to_q", "cross_attn.q_linear"), ("attn2.to_out.0", "cross_attn.proj")),
            *(("ff.net.0.proj", "mlp.fc1"), ("ff.net.2", "mlp.fc2"), ("=scale_shift_table", "=scale_shift_table")),
        ),
    ),
    *renamed(
        *(
            (f"adaln_single.emb.{name}_embedder.linear_{n}", f"{native}_embedder.mlp.{2 * n - 2}")
            for name, native in (("timestep", "t"), ("resolution", "csize"), ("aspect_ratio", "ar"))
            for n in (1, 2)
        ),
        *((f"caption_projection.linear_{n}", f"y_embedder.y_proj.fc{n}") for n in (1, 2)),
        *(("adaln_single.linear", "t_block.1"), ("pos_embed.proj", "x_embedder.proj")),
        *(("proj_out", "final_layer.linear"), ("=scale_shift_table", "=final_layer.scale_shift_table")),
    ),
)

FAMILY = Family(
    "pixart",
    "PixArt",
    58,
    signs=(
        Sign(has=("t_block.1.weight",)),
        Sign(
            has=("adaln_single.linear.weight", "pos_embed.proj.weight", "transformer_blocks.#.scale_shift_table"),
            naming="diffusers",
        ),
    ),
    rules=(*numbered("B", "blocks", "transformer_blocks"), *OUT_RULES),
    adapter=(
        Mark(r"blocks.\d+.(?:attn.qkv|cross_attn.(?:kv_linear|q_linear))"),
        Mark(r"transformer_blocks.\d+.attn1.to_q", (1152,)),
    ),
    names=_NAMES,
    encoders=("t5",),
)
