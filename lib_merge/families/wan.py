"""Wan 2.1 and 2.2: text or image to video."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

_PATCH = "patch_embedding.weight"
_SIZES = (("5b", 3072), ("1.3b", 1536), ("14b", 5120))

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
)
