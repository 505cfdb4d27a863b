"""HunyuanVideo: double and single blocks as in Flux, behind a refiner of the text."""

from __future__ import annotations

from ._alias import below, fused, renamed, same
from ._family import Family, Mark, Sign
from .flux import RULES, STREAM_NAMES

# The refiner of the text, in diffusers' words.
_REFINER_NAMES = (
    *renamed(
        ("x_embedder.proj", "img_in.proj"),
        ("context_embedder.proj_in", "txt_in.input_embedder"),
        *(
            (f"context_embedder.time_text_embed.{name}_embedder.linear_{n}", f"txt_in.{native}_embedder.{layer}")
            for name, native in (("timestep", "t"), ("text", "c"))
            for n, layer in ((1, "in_layer"), (2, "out_layer"))
        ),
    ),
    *below(
        "context_embedder.token_refiner.refiner_blocks.#",
        "txt_in.individual_token_refiner.blocks.#",
        *fused("self_attn.qkv", "attn.to_q", "attn.to_k", "attn.to_v"),
        *renamed(
            *(("attn.to_out.0", "self_attn.proj"), ("norm_out.linear", "adaLN_modulation.1")),
            *(("ff.net.0.proj", "mlp.0"), ("ff.net.2", "mlp.2")),
        ),
        *same("norm1", "norm2"),
    ),
)
# The words of the authors' own code, which musubi-tuner keeps.
_OFFICIAL_NAMES = (
    *below(
        *("double_blocks.#", "double_blocks.#"),
        *(
            row
            for stream in ("img", "txt")
            for row in renamed(
                *((f"{stream}_mlp.fc1", f"{stream}_mlp.0"), (f"{stream}_mlp.fc2", f"{stream}_mlp.2")),
                *((f"{stream}_mod.linear", f"{stream}_mod.lin"), (f"{stream}_attn_proj", f"{stream}_attn.proj")),
                (f"{stream}_attn_qkv", f"{stream}_attn.qkv"),
                style="kohya",
            )
        ),
    ),
    *renamed(
        ("single_blocks.#.modulation.linear", "single_blocks.#.modulation.lin"),
        (
            "txt_in.individual_token_refiner.blocks.#.self_attn_qkv",
            "txt_in.individual_token_refiner.blocks.#.self_attn.qkv",
        ),
        (
            "txt_in.individual_token_refiner.blocks.#.self_attn_proj",
            "txt_in.individual_token_refiner.blocks.#.self_attn.proj",
        ),
        ("txt_in.individual_token_refiner.blocks.#.mlp.fc1", "txt_in.individual_token_refiner.blocks.#.mlp.0"),
        ("txt_in.individual_token_refiner.blocks.#.mlp.fc2", "txt_in.individual_token_refiner.blocks.#.mlp.2"),
        *(
            (f"{name}_in.mlp.{n}", f"{name}_in.{layer}")
            for name in ("time", "guidance")
            for n, layer in ((0, "in_layer"), (2, "out_layer"))
        ),
        *(
            (f"txt_in.t_embedder.mlp.{n}", f"txt_in.t_embedder.{layer}")
            for n, layer in ((0, "in_layer"), (2, "out_layer"))
        ),
        *(
            (f"txt_in.c_embedder.linear_{n}", f"txt_in.c_embedder.{layer}")
            for n, layer in ((1, "in_layer"), (2, "out_layer"))
        ),
        style="kohya",
    ),
)

FAMILY = Family(
    "hunyuan_video",
    "HunyuanVideo",
    22,
    signs=(
        Sign(has=("txt_in.individual_token_refiner.blocks.#.norm1.weight",)),
        Sign(has=("context_embedder.token_refiner.refiner_blocks.#.attn.to_q.weight",), naming="diffusers"),
    ),
    rules=RULES,
    adapter=(
        Mark(r"(?:txt_in.individual_token_refiner|context_embedder.token_refiner)"),
        Mark(r"double_blocks.\d+.(?:img|txt)_(?:mlp.fc[12]|mod.linear)"),
        Mark(r"(?:double|transformer)_blocks.19.(?:img_attn|attn.add)"),
    ),
    names=(*STREAM_NAMES, *_REFINER_NAMES, *_OFFICIAL_NAMES),
)
