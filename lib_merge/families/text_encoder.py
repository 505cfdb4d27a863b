"""Text encoders in files of their own: CLIP, under its two namings, and T5."""

from __future__ import annotations

from ._family import Family, Rule, Sign

_TABLE = ("text_model.embeddings.token_embedding.weight", "token_embedding.weight")
_WIDTHS = (("l", 768), ("g", 1280), ("h", 1024))
_FOLDERS = ("text_encoder/", "text_encoder_2/", "text_encoder_3/")

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
