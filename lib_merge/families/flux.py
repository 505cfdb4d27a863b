"""Flux.1, Flux.2 and Chroma: streams of text and image in double blocks, then single blocks."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

RULES = (
    *numbered("D", "double_blocks", "transformer_blocks"),
    *numbered("S", "single_blocks", "single_transformer_blocks"),
    *OUT_RULES,
)

_SINGLE = "single_transformer_blocks.#.attn.to_q.weight"
# An adapter holds one kind of block at least; these names HunyuanVideo has too, so it is asked first.
_NATIVE = r"(?:double_blocks.\d+.(?:img|txt)_(?:attn|mod|mlp)|single_blocks.\d+.(?:linear[12]|modulation))"
_DIFFUSERS = r"single_transformer_blocks.\d+.(?:attn|proj_mlp|proj_out|norm)"


def _wide(width: int) -> tuple[Sign, ...]:
    return tuple(Sign(sizes=((name, 1, (width,)),)) for name in ("img_in.weight", "x_embedder.weight"))


FAMILIES = (
    Family(
        "flux2",
        "Flux.2",
        20,
        signs=(
            Sign(has=("single_stream_modulation.lin.weight",)),
            Sign(has=("single_stream_modulation.linear.weight",), naming="diffusers"),
        ),
        rules=RULES,
        adapter=(
            Mark(r"(?:single|double)_stream_modulation"),
            Mark(r"single_transformer_blocks.\d+.attn.to_qkv_mlp_proj"),
            Mark(_NATIVE, (6144,)),
        ),
    ),
    Family(
        "chroma",
        "Chroma",
        21,
        signs=(
            Sign(has=("distilled_guidance_layer.in_proj.weight",), lacks=("transformer_blocks.",)),
            Sign(has=("distilled_guidance_layer.in_proj.weight",), naming="diffusers"),
        ),
        variants=(("radiance", Sign(has=("nerf_blocks.",))),),
        rules=(*RULES, *numbered("N", "nerf_blocks")),
        named=("T5",),
        adapter=(Mark(r"distilled_guidance_layer"),),
    ),
    Family(
        "flux",
        "Flux.1",
        23,
        signs=(
            Sign(has=("double_blocks.#.img_attn.norm.key_norm.scale",)),
            Sign(has=("double_blocks.#.img_attn.qkv.weight",)),
            Sign(has=("transformer_blocks.#.attn.add_q_proj.weight", _SINGLE), naming="diffusers"),
        ),
        variants=(
            *(("fill", sign) for sign in _wide(384)),
            *(("control", sign) for sign in _wide(128)),
            ("dev", Sign(has=("guidance_in.in_layer.weight",))),
            ("dev", Sign(has=("time_text_embed.guidance_embedder.linear_1.weight",))),
        ),
        variant="schnell",
        rules=RULES,
        blocks=("CLIP", "T5", "IN", "OUT"),
        named=("CLIP", "T5"),
        adapter=(Mark(_NATIVE), Mark(_DIFFUSERS), Mark(r"(?:double|single)_blocks.\d+.processor")),
    ),
)
