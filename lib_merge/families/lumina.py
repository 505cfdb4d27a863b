"""Lumina 2 and Z-Image: refiners of noise and text, then one list of layers."""

from __future__ import annotations

from ._alias import Alias, below, fused, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_RULES = (
    *numbered("NR", "noise_refiner"),
    *numbered("CR", "context_refiner"),
    *numbered("L", "layers"),
    *OUT_RULES,
)
_LISTS = ("layers.#", "noise_refiner.#", "context_refiner.#")
_Z_BLOCK_NAMES = (
    *fused("attention.qkv", "attention.to_q", "attention.to_k", "attention.to_v"),
    *renamed(
        *(("attention.to_out.0", "attention.out"), ("attention.norm_q", "attention.q_norm")),
        ("attention.norm_k", "attention.k_norm"),
    ),
    *same(*(f"feed_forward.w{n}" for n in (1, 2, 3)), "attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"),
    *same("adaLN_modulation.0"),
)
_Z_NAMES = (
    *(row for head in _LISTS for row in below(head, head, *_Z_BLOCK_NAMES)),
    *renamed(
        *(("all_x_embedder.2-1", "x_embedder"), ("all_final_layer.2-1.linear", "final_layer.linear")),
        ("all_final_layer.2-1.adaLN_modulation.1", "final_layer.adaLN_modulation.1"),
    ),
    *same("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.0", "cap_embedder.1"),
    *same("=x_pad_token", "=cap_pad_token"),
)
_LUMINA_BLOCK_NAMES = (
    # 24 heads of queries, 8 of keys and of values.
    *fused("attention.qkv", "attn.to_q", "attn.to_k", "attn.to_v", shares=(3, 1, 1)),
    *renamed(
        *(("attn.to_out.0", "attention.out"), ("attn.norm_q", "attention.q_norm"), ("attn.norm_k", "attention.k_norm")),
        *((f"feed_forward.linear_{n}", f"feed_forward.w{n}") for n in (1, 2, 3)),
        ("norm2", "attention_norm2"),
    ),
    *same("ffn_norm1", "ffn_norm2"),
)
_MODULATED_NAMES = renamed(("norm1.linear", "adaLN_modulation.1"), ("norm1.norm", "attention_norm1"))
_LUMINA_NAMES = (
    *(row for head in _LISTS for row in below(head, head, *_LUMINA_BLOCK_NAMES)),
    *(row for head in _LISTS[:2] for row in below(head, head, *_MODULATED_NAMES)),
    Alias("context_refiner.#.norm1", "context_refiner.#.attention_norm1"),
    *renamed(
        *((f"time_caption_embed.timestep_embedder.linear_{n}", f"t_embedder.mlp.{2 * n - 2}") for n in (1, 2)),
        *((f"time_caption_embed.caption_embedder.{n}", f"cap_embedder.{n}") for n in (0, 1)),
        *(("norm_out.linear_1", "final_layer.adaLN_modulation.1"), ("norm_out.linear_2", "final_layer.linear")),
    ),
    *same("x_embedder"),
)
_CAPTION = "cap_embedder.1.weight"


def _adapter(width: int) -> tuple[Mark, ...]:
    return (Mark(r"(?:layers|noise_refiner|context_refiner).\d+.(?:attn|attention|feed_forward)", (width,)),)


FAMILIES = (
    Family(
        "z_image",
        "Z-Image",
        50,
        signs=(
            Sign(has=("all_x_embedder.2-1.weight",), naming="diffusers"),
            Sign(has=(_CAPTION, "layers.#.adaLN_modulation.0.weight")),
        ),
        rules=_RULES,
        adapter=_adapter(3840),
        names=_Z_NAMES,
    ),
    Family(
        "lumina2",
        "Lumina 2",
        51,
        signs=(
            Sign(has=(_CAPTION, "layers.#.adaLN_modulation.1.weight")),
            Sign(has=("layers.#.attn.to_q.weight", "noise_refiner."), naming="diffusers"),
        ),
        rules=_RULES,
        adapter=_adapter(2304),
        names=_LUMINA_NAMES,
    ),
)
