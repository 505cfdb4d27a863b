"""Krea 2: one list of blocks with gated attention, behind a fusion of the text encoder's layers."""

from __future__ import annotations

from ._alias import below, renamed
from ._family import OUT_RULES, Family, Mark, Sign, numbered, starting

_BLOCK_NAMES = renamed(
    *(("attn.to_q", "attn.wq"), ("attn.to_k", "attn.wk"), ("attn.to_v", "attn.wv"), ("attn.to_out.0", "attn.wo")),
    *(("attn.to_gate", "attn.gate"), ("attn.norm_q", "attn.qknorm.qnorm"), ("attn.norm_k", "attn.qknorm.knorm")),
    *(("ff.up", "mlp.up"), ("ff.gate", "mlp.gate"), ("ff.down", "mlp.down")),
    *(("norm1", "prenorm"), ("norm2", "postnorm")),
)
_NAMES = (
    *below("transformer_blocks.#", "blocks.#", *_BLOCK_NAMES),
    *below("text_fusion.layerwise_blocks.#", "txtfusion.layerwise_blocks.#", *_BLOCK_NAMES),
    *below("text_fusion.refiner_blocks.#", "txtfusion.refiner_blocks.#", *_BLOCK_NAMES),
    *renamed(
        *(("img_in", "first"), ("time_embed.linear_1", "tmlp.0"), ("time_embed.linear_2", "tmlp.2")),
        *(("time_mod_proj", "tproj.1"), ("txt_in.norm", "txtmlp.0")),
        *(("txt_in.linear_1", "txtmlp.1"), ("txt_in.linear_2", "txtmlp.3")),
        *(("text_fusion.projector", "txtfusion.projector"), ("final_layer.linear", "last.linear")),
        ("final_layer.norm", "last.norm"),
    ),
)

FAMILY = Family(
    "krea2",
    "Krea 2",
    65,
    signs=(
        Sign(has=("blocks.#.attn.wq.weight", "txtfusion.projector.weight")),
        Sign(has=("transformer_blocks.#.attn.to_gate.weight", "text_fusion.projector.weight"), naming="diffusers"),
    ),
    rules=(*numbered("B", "blocks", "transformer_blocks"), *starting(("OUT",), "last."), *OUT_RULES),
    adapter=(
        Mark(r"blocks.\d+.attn.(?:w[qkvo]|gate)$"),
        Mark(r"transformer_blocks.\d+.attn.to_gate"),
        Mark(r"(?:text_fusion|txtfusion)."),
    ),
    names=_NAMES,
)
