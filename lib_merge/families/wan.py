"""Wan 2.1 and 2.2: text or image to video."""

from __future__ import annotations

from ._alias import below, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_PATCH = "patch_embedding.weight"
_SIZES = (("5b", 3072), ("1.3b", 1536), ("14b", 5120))

_BLOCK_NAMES = (
    *(
        row
        for name, native in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for row in below(
            name,
            native,
            *renamed(("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")),
            *renamed(("add_k_proj", "k_img"), ("add_v_proj", "v_img"), ("norm_added_k", "norm_k_img")),
            *same("norm_q", "norm_k"),
        )
    ),
    *renamed(("norm2", "norm3"), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2")),
)
_NAMES = (
    *below("blocks.#", "blocks.#", *_BLOCK_NAMES, *renamed(("=scale_shift_table", "=modulation"))),
    *below(
        *("vace_blocks.#", "vace_blocks.#"),
        *(*_BLOCK_NAMES, *renamed(("=scale_shift_table", "=modulation"), ("proj_in", "before_proj"))),
        *renamed(("proj_out", "after_proj")),
    ),
    *renamed(
        *(
            (f"condition_embedder.{name}_embedder.linear_{n}", f"{name}_embedding.{2 * n - 2}")
            for name in ("time", "text")
            for n in (1, 2)
        ),
        ("condition_embedder.time_proj", "time_projection.1"),
    ),
    *below(
        *("condition_embedder.image_embedder", "img_emb.proj"),
        *renamed(("norm1", "0"), ("ff.net.0.proj", "1"), ("ff.net.2", "3"), ("norm2", "4")),
    ),
    *renamed(("=condition_embedder.image_embedder.pos_embed", "=img_emb.emb_pos")),
    *same("vace_patch_embedding", "patch_embedding"),
    *renamed(("proj_out", "head.head"), ("=scale_shift_table", "=head.modulation")),
)

FAMILY = Family(
    "wan",
    "Wan",
    40,
    signs=(
        Sign(has=("head.modulation",)),
        Sign(has=("condition_embedder.time_embedder.linear_1.weight", "blocks."), naming="diffusers"),
    ),
    variants=(
        ("vace", Sign(has=("vace_blocks.",))),
        ("i2v", Sign(has=("img_emb.proj.0.bias",))),
        ("i2v", Sign(has=("condition_embedder.image_embedder.",))),
        ("i2v", Sign(sizes=((_PATCH, 1, (36,)),))),
        *((name, Sign(sizes=((_PATCH, 0, (width,)),))) for name, width in _SIZES),
    ),
    rules=(*numbered("B", "blocks"), *numbered("V", "vace_blocks"), *OUT_RULES),
    adapter=(
        Mark(r"(?:vace_)?blocks.\d+.(?:self|cross)_attn.(?:[qkvo]|[kv]_img)$"),
        Mark(r"blocks.\d+.ffn.(?:[02]|net)"),
        Mark(r"blocks.\d+.attn[12].(?:to_|add_)"),
    ),
    names=_NAMES,
    encoders=("t5",),
)
