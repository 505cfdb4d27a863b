"""Stable Diffusion 3 and 3.5: joint blocks of text and image."""

from __future__ import annotations

from ._alias import Alias, below, fused, renamed
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_WIDTH = (("3.5-large", 2432), ("medium", 1536))
_SECOND_ATTENTION = ("joint_blocks.#.x_block.attn2.qkv.weight", "transformer_blocks.#.attn2.to_q.weight")

_STREAM_NAMES = (
    *below(
        "transformer_blocks.#",
        "joint_blocks.#.x_block",
        *fused("attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
        *fused("attn2.qkv", "attn2.to_q", "attn2.to_k", "attn2.to_v"),
        *renamed(
            *(("attn.to_out.0", "attn.proj"), ("attn.norm_q", "attn.ln_q"), ("attn.norm_k", "attn.ln_k")),
            *(("attn2.to_out.0", "attn2.proj"), ("attn2.norm_q", "attn2.ln_q"), ("attn2.norm_k", "attn2.ln_k")),
            *(("ff.net.0.proj", "mlp.fc1"), ("ff.net.2", "mlp.fc2"), ("norm1.linear", "adaLN_modulation.1")),
        ),
    ),
    *below(
        "transformer_blocks.#",
        "joint_blocks.#.context_block",
        *fused("attn.qkv", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        *renamed(
            *(("attn.to_add_out", "attn.proj"), ("norm1_context.linear", "adaLN_modulation.1")),
            *(("attn.norm_added_q", "attn.ln_q"), ("attn.norm_added_k", "attn.ln_k")),
            *(("ff_context.net.0.proj", "mlp.fc1"), ("ff_context.net.2", "mlp.fc2")),
        ),
        # The last block has no more than a scale and a shift for the text, which diffusers turns round.
        Alias("norm1_context.linear", "adaLN_modulation.1", post="swap", last=True),
    ),
)
_NAMES = (
    *_STREAM_NAMES,
    *renamed(
        *(("pos_embed.proj", "x_embedder.proj"), ("context_embedder", "context_embedder")),
        ("proj_out", "final_layer.linear"),
        *(
            (f"time_text_embed.{name}_embedder.linear_{n}", f"{native}_embedder.mlp.{2 * n - 2}")
            for name, native in (("timestep", "t"), ("text", "y"))
            for n in (1, 2)
        ),
        ("=pos_embed.pos_embed", "=pos_embed"),
    ),
    Alias("norm_out.linear", "final_layer.adaLN_modulation.1", post="swap"),
)

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
    names=_NAMES,
    encoders=("te1", "te2", "t5"),
)
