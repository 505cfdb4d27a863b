"""Cosmos Predict 2 and Anima, which is made from it."""

from __future__ import annotations

from ._alias import below, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_BLOCK_NAMES = renamed(
    *(
        (f"attn{n}.{name}", f"{kind}_attn.{native}")
        for n, kind in ((1, "self"), (2, "cross"))
        for name, native in (
            *(("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out.0", "output_proj")),
            *(("norm_q", "q_norm"), ("norm_k", "k_norm")),
        )
    ),
    *(("ff.net.0.proj", "mlp.layer1"), ("ff.net.2", "mlp.layer2")),
    *(
        (f"norm{n}.linear_{m}", f"adaln_modulation_{part}.{m}")
        for n, part in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))
        for m in (1, 2)
    ),
)
# Anima's own part, between the language model and the blocks.
_CONDITIONER_NAMES = below(
    *("text_conditioner", "llm_adapter"),
    *below(
        *("blocks.#", "blocks.#"),
        *same(*(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in ("q_proj", "k_proj", "v_proj"))),
        *same(*(f"{kind}_attn.{name}" for kind in ("self", "cross") for name in ("o_proj", "q_norm", "k_norm"))),
        *same("norm_self_attn", "norm_cross_attn", "norm_mlp", "mlp.0", "mlp.2"),
    ),
    *same("embed", "in_proj", "out_proj", "norm"),
)
_NAMES = (
    *below("transformer_blocks.#", "blocks.#", *_BLOCK_NAMES),
    *_CONDITIONER_NAMES,
    *renamed(
        *(("patch_embed.proj", "x_embedder.proj.1"), ("proj_out", "final_layer.linear")),
        *(("time_embed.norm", "t_embedding_norm"), ("time_embed.t_embedder.linear_1", "t_embedder.1.linear_1")),
        ("time_embed.t_embedder.linear_2", "t_embedder.1.linear_2"),
        *((f"norm_out.linear_{n}", f"final_layer.adaln_modulation.{n}") for n in (1, 2)),
    ),
)

FAMILY = Family(
    "cosmos2",
    "Cosmos Predict 2",
    61,
    signs=(
        Sign(has=("blocks.#.mlp.layer1.weight",)),
        Sign(has=("transformer_blocks.#.norm1.linear_1.weight", "patch_embed.proj.weight"), naming="diffusers"),
    ),
    variants=(("anima", Sign(has=("llm_adapter.",))), ("anima", Sign(has=("^text_conditioner/",)))),
    rules=(*numbered("B", "blocks", "transformer_blocks"), *numbered("A", "llm_adapter.blocks"), *OUT_RULES),
    adapter=(
        Mark(r"blocks.\d+.(?:self|cross)_attn.(?:[qkv]|output)_proj"),
        Mark(r"blocks.\d+.mlp.layer[12]"),
        Mark(r"transformer_blocks.\d+.norm[123].linear_[12]"),
    ),
    names=_NAMES,
)
