"""LTX-Video."""

from __future__ import annotations

from ._alias import below, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

_NAMES = (
    *below(
        *("transformer_blocks.#", "transformer_blocks.#"),
        *renamed(*((f"attn{n}.norm_{part}", f"attn{n}.{part}_norm") for n in (1, 2) for part in "qk")),
        *same(*(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))),
        *same("ff.net.0.proj", "ff.net.2", "=scale_shift_table"),
    ),
    *renamed(
        *(("proj_in", "patchify_proj"), ("time_embed.linear", "adaln_single.linear")),
        *(
            (f"time_embed.emb.timestep_embedder.linear_{n}", f"adaln_single.emb.timestep_embedder.linear_{n}")
            for n in (1, 2)
        ),
    ),
    *same("caption_projection.linear_1", "caption_projection.linear_2", "proj_out", "=scale_shift_table"),
)

FAMILY = Family(
    "ltx",
    "LTX-Video",
    60,
    signs=(
        Sign(has=("patchify_proj.weight",)),
        Sign(has=("adaln_single.emb.timestep_embedder.linear_1.weight", "transformer_blocks.#.scale_shift_table")),
        Sign(has=("transformer_blocks.#.scale_shift_table", "proj_in.weight"), naming="diffusers"),
    ),
    rules=(*numbered("B", "transformer_blocks"), *OUT_RULES),
    adapter=(Mark(r"transformer_blocks.\d+.attn1.to_q", (2048,)),),
    names=_NAMES,
    encoders=("t5",),
)
