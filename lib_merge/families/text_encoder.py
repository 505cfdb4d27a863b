"""Text encoders in files of their own: CLIP, under its two namings, and T5."""

from __future__ import annotations

from ._alias import Alias, below, fused, renamed, same
from ._family import Family, Rule, Sign

_TABLE = ("text_model.embeddings.token_embedding.weight", "token_embedding.weight")
_WIDTHS = (("l", 768), ("g", 1280), ("h", 1024))
_FOLDERS = ("text_encoder/", "text_encoder_2/", "text_encoder_3/")

# CLIP as transformers names it, of CLIP as open_clip names and fuses it; then T5, whose names are the same everywhere.
NAMES = (
    *below(
        "text_model.encoder.layers.#",
        "transformer.resblocks.#",
        *fused("attn.in_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *fused("attn.in_proj", "self_attn.to_q", "self_attn.to_k", "self_attn.to_v", style="read"),
        *renamed(
            *(("self_attn.out_proj", "attn.out_proj"), ("layer_norm1", "ln_1"), ("layer_norm2", "ln_2")),
            *(("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj")),
        ),
        *renamed(("self_attn.to_out", "attn.out_proj"), style="read"),
    ),
    *renamed(
        ("text_model.final_layer_norm", "ln_final"),
        ("text_model.embeddings.token_embedding", "token_embedding"),
        ("text_model.embeddings.position_embedding", "=positional_embedding"),
    ),
    Alias("text_projection", "=text_projection", post="transpose"),
    *below(
        *("encoder.block.#", "encoder.block.#"),
        *same(*(f"layer.0.SelfAttention.{name}" for name in "qkvo"), "layer.0.layer_norm", "layer.1.layer_norm"),
        *same(*(f"layer.1.DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1", "wo"))),
        *same("layer.0.SelfAttention.relative_attention_bias"),
    ),
    *same("shared", "encoder.embed_tokens", "encoder.final_layer_norm"),
)

FAMILIES = (
    Family(
        "clip",
        "CLIP text encoder",
        310,
        signs=(
            Sign(has=("text_model.encoder.layers.#.self_attn.q_proj.weight",)),
            Sign(has=("transformer.resblocks.#.attn.in_proj_weight",)),
        ),
        variants=tuple((name, Sign(sizes=((table, 1, (width,)),))) for name, width in _WIDTHS for table in _TABLE),
        rules=(
            Rule("text_model.encoder.layers.#.", ("L", "BASE"), (0, 1)),
            Rule("transformer.resblocks.#.", ("L", "BASE"), (0, 1)),
        ),
        rest=("BASE",),
        kind="text encoder",
        prefixes=(
            *("cond_stage_model.transformer.", "cond_stage_model.model."),
            *("conditioner.embedders.0.transformer.", "conditioner.embedders.0.model."),
            *("conditioner.embedders.1.model.", "text_encoders.clip_l.transformer."),
            *("text_encoders.clip_g.transformer.", *_FOLDERS, ""),
        ),
    ),
    Family(
        "t5",
        "T5 text encoder",
        311,
        signs=(Sign(has=("encoder.block.#.layer.0.SelfAttention.q.weight",)),),
        rules=(Rule("encoder.block.#.", ("L", "BASE"), (0, 1)),),
        rest=("BASE",),
        kind="text encoder",
        prefixes=("text_encoders.t5xxl.transformer.", *_FOLDERS, ""),
    ),
)
