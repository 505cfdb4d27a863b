"""Qwen-Image: one list of blocks with the same names in its own and in diffusers files."""

from __future__ import annotations

from ._alias import below, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_NAMES = (
    *below(
        *("transformer_blocks.#", "transformer_blocks.#"),
        *same(*(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out"))),
        *same(*(f"attn.add_{part}_proj" for part in "qkv")),
        *same(*(f"attn.norm_{part}" for part in ("q", "k", "added_q", "added_k"))),
        *same(*(f"{stream}_{name}" for stream in ("img", "txt") for name in ("mod.1", "mlp.net.0.proj", "mlp.net.2"))),
    ),
    *same(*(f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2))),
    *same("img_in", "txt_in", "txt_norm", "norm_out.linear", "proj_out"),
)

FAMILY = Family(
    "qwen_image",
    "Qwen-Image",
    29,
    signs=(Sign(has=("txt_norm.weight", "transformer_blocks.#.img_mod.1.weight")),),
    rules=(*numbered("B", "transformer_blocks"), *OUT_RULES),
    adapter=(
        Mark(r"transformer_blocks.\d+.(?:img|txt)_(?:mod|mlp)"),
        Mark(r"transformer_blocks.\d+.attn.add_[qkv]_proj", (3072,)),
    ),
    names=_NAMES,
)
