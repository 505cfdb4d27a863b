"""AuraFlow: a few double layers, then single layers."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

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
    learned=("pos_embed.pos_embed",),
)
