"""Flux.1, Flux.2 and Chroma: streams of text and image in double blocks, then single blocks."""

from __future__ import annotations

from ._alias import Alias, below, fused, renamed, same
from ._family import OUT_RULES, Family, Mark, Sign, numbered

RULES = (
    *numbered("D", "double_blocks", "transformer_blocks"),
    *numbered("S", "single_blocks", "single_transformer_blocks"),
    *OUT_RULES,
)

# What diffusers calls the modules of the blocks, and of what stands around them.
_DOUBLE_NAMES = below(
    "transformer_blocks.#",
    "double_blocks.#",
    *fused("img_attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
    *fused("txt_attn.qkv", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    *renamed(
        *(("attn.to_out.0", "img_attn.proj"), ("attn.to_add_out", "txt_attn.proj")),
        *(("attn.norm_q", "img_attn.norm.query_norm"), ("attn.norm_k", "img_attn.norm.key_norm")),
        *(("attn.norm_added_q", "txt_attn.norm.query_norm"), ("attn.norm_added_k", "txt_attn.norm.key_norm")),
    ),
)
_WITH_MOD_NAMES = below(
    "transformer_blocks.#",
    "double_blocks.#",
    *renamed(
        *(("norm1.linear", "img_mod.lin"), ("norm1_context.linear", "txt_mod.lin")),
        *(("ff.net.0.proj", "img_mlp.0"), ("ff.net.2", "img_mlp.2")),
        *(("ff_context.net.0.proj", "txt_mlp.0"), ("ff_context.net.2", "txt_mlp.2")),
    ),
)
_SINGLE_NORM_NAMES = below(
    *("single_transformer_blocks.#", "single_blocks.#"),
    *renamed(("attn.norm_q", "norm.query_norm"), ("attn.norm_k", "norm.key_norm")),
)
_SINGLE_NAMES = below(
    "single_transformer_blocks.#",
    "single_blocks.#",
    *fused("linear1", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", shares=(1, 1, 1, 4)),
    *renamed(("proj_out", "linear2"), ("norm.linear", "modulation.lin")),
)
_EMBEDDER_NAMES = tuple(
    row
    for name, native in (("timestep", "time"), ("guidance", "guidance"), ("text", "vector"))
    for row in below(
        *(f"time_text_embed.{name}_embedder", f"{native}_in"),
        *renamed(("linear_1", "in_layer"), ("linear_2", "out_layer")),
    )
)
_OUT_NAMES = (
    *renamed(("proj_out", "final_layer.linear")),
    Alias("norm_out.linear", "final_layer.adaLN_modulation.1", post="swap"),
)
_IN_NAMES = renamed(("x_embedder", "img_in"), ("context_embedder", "txt_in"))
# XLabs' trainer names the attention's two streams by a number and adapts a part of the fused layers.
_XLABS_NAMES = (
    *below(
        "double_blocks.#.processor",
        "double_blocks.#",
        *renamed(
            *(("qkv_lora1", "img_attn.qkv"), ("qkv_lora2", "txt_attn.qkv")),
            *(("proj_lora1", "img_attn.proj"), ("proj_lora2", "txt_attn.proj")),
            style="read",
        ),
    ),
    Alias("single_blocks.#.processor.qkv", "single_blocks.#.linear1", (0, 3, 7), style="read"),
    Alias("single_blocks.#.processor.proj", "single_blocks.#.linear2", style="read"),
)
STREAM_NAMES = (*_DOUBLE_NAMES, *_WITH_MOD_NAMES, *_SINGLE_NAMES, *_SINGLE_NORM_NAMES, *_EMBEDDER_NAMES, *_OUT_NAMES)
_FLUX_NAMES = (*STREAM_NAMES, *_IN_NAMES, *_XLABS_NAMES)
_GUIDANCE_NAMES = below(
    *("distilled_guidance_layer", "distilled_guidance_layer"),
    *renamed(("layers.#.linear_1", "layers.#.in_layer"), ("layers.#.linear_2", "layers.#.out_layer")),
    *same("in_proj", "out_proj", "norms.#"),
)
_FLUX2_NAMES = (
    *_DOUBLE_NAMES,
    *_SINGLE_NORM_NAMES,
    *_IN_NAMES,
    *_OUT_NAMES,
    *below(
        *("transformer_blocks.#", "double_blocks.#"),
        *renamed(
            *(("ff.linear_in", "img_mlp.0"), ("ff.linear_out", "img_mlp.2")),
            *(("ff_context.linear_in", "txt_mlp.0"), ("ff_context.linear_out", "txt_mlp.2")),
        ),
    ),
    *renamed(
        ("single_transformer_blocks.#.attn.to_qkv_mlp_proj", "single_blocks.#.linear1"),
        ("single_transformer_blocks.#.attn.to_out", "single_blocks.#.linear2"),
        ("double_stream_modulation_img.linear", "double_stream_modulation_img.lin"),
        ("double_stream_modulation_txt.linear", "double_stream_modulation_txt.lin"),
        ("single_stream_modulation.linear", "single_stream_modulation.lin"),
        *(
            (f"time_guidance_embed.{name}_embedder.linear_{n}", f"{native}_in.{layer}")
            for name, native in (("timestep", "time"), ("guidance", "guidance"))
            for n, layer in ((1, "in_layer"), (2, "out_layer"))
        ),
    ),
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
        names=_FLUX2_NAMES,
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
        names=(*_FLUX_NAMES, *_GUIDANCE_NAMES),
        encoders=("t5",),
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
        names=_FLUX_NAMES,
        encoders=("te1", "t5"),
    ),
)
