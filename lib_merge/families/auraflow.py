"""AuraFlow: a few double layers, then single layers."""

from __future__ import annotations

from ._alias import Alias, below, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

# diffusers' word and the original's for the three layers of a feed-forward.
_MLP = (("linear_1", "c_fc1"), ("linear_2", "c_fc2"), ("out_projection", "c_proj"))


def _mlp(head: str, native: str) -> tuple[Alias, ...]:
    return renamed(*((f"{head}.{name}", f"{native}.{layer}") for name, layer in _MLP))


_NAMES = (
    *below(
        "joint_transformer_blocks.#",
        "double_layers.#",
        *renamed(
            *(("attn.to_q", "attn.w2q"), ("attn.to_k", "attn.w2k"), ("attn.to_v", "attn.w2v")),
            *(("attn.to_out.0", "attn.w2o"), ("attn.to_add_out", "attn.w1o")),
            *(("attn.add_q_proj", "attn.w1q"), ("attn.add_k_proj", "attn.w1k"), ("attn.add_v_proj", "attn.w1v")),
            *(("norm1.linear", "modX.1"), ("norm1_context.linear", "modC.1")),
        ),
    ),
    *below("joint_transformer_blocks.#", "double_layers.#", *_mlp("ff", "mlpX"), *_mlp("ff_context", "mlpC")),
    *below(
        "single_transformer_blocks.#",
        "single_layers.#",
        *renamed(
            *(("attn.to_q", "attn.w1q"), ("attn.to_k", "attn.w1k"), ("attn.to_v", "attn.w1v")),
            *(("attn.to_out.0", "attn.w1o"), ("norm1.linear", "modCX.1")),
        ),
        *_mlp("ff", "mlp"),
    ),
    *renamed(
        *(("pos_embed.proj", "init_x_linear"), ("context_embedder", "cond_seq_linear")),
        *(("time_step_proj.linear_1", "t_embedder.mlp.0"), ("time_step_proj.linear_2", "t_embedder.mlp.2")),
        *(("proj_out", "final_linear"), ("=pos_embed.pos_embed", "=positional_encoding")),
    ),
    *same("=register_tokens"),
    Alias("norm_out.linear", "modF.1", post="swap"),
)

FAMILY = Family(
    "auraflow",
    "AuraFlow",
    24,
    signs=(
        Sign(has=("double_layers.#.attn.w1q.weight",)),
        Sign(has=("joint_transformer_blocks.#.attn.to_q.weight",), naming="diffusers"),
    ),
    rules=(
        *numbered("D", "double_layers", "joint_transformer_blocks"),
        *numbered("S", "single_layers", "single_transformer_blocks"),
        *OUT_RULES,
    ),
    adapter=(Mark(r"(?:double_layers|joint_transformer_blocks).\d"), Mark(r"single_layers.\d+.(?:attn|mlp)")),
    names=_NAMES,
    encoders=("t5",),
    learned=("pos_embed.pos_embed",),
)
