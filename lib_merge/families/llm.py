"""Language models in the layout of Hugging Face, in files of their own."""

from __future__ import annotations

from ._family import Family, Mark, Rule, Sign, starting

_LAYER = "model.layers.#."
_ROOTS = ("model.", "language_model.model.", "model.language_model.", "transformer.", "gpt_neox.", "")

RULES = (
    *(Rule(f"{root}{name}.#.", ("L",), (0, 1)) for root in _ROOTS for name in ("layers", "h")),
    *starting(("EMBED",), *(f"{root}{name}." for root in _ROOTS for name in ("embed_tokens", "wte", "wpe"))),
    *starting(("EMBED",), "gpt_neox.embed_in."),
    *starting(("NORM",), *(f"{root}{name}." for root in _ROOTS for name in ("norm", "ln_f", "final_layer_norm"))),
    *starting(("HEAD",), "lm_head.", "embed_out.", "language_model.lm_head."),
    *starting(("VISION", "BASE"), "visual.", "model.visual.", "vision_tower.", "model.vision_tower."),
)
_EXPERTS = ("mlp.experts.", "block_sparse_moe.experts.")
_ADAPTER = r"(?:\w+\.)*?layers.\d+.(?:self_attn|mlp|linear_attn)"


def _llm(family_id: str, name: str, priority: int, *signs: Sign, adapter: tuple[Mark, ...] = ()) -> Family:
    return Family(
        family_id,
        name,
        priority,
        signs,
        variants=tuple(("moe", Sign(has=(f"{_LAYER}{experts}",))) for experts in _EXPERTS),
        rules=RULES,
        rest=("BASE",),
        adapter=adapter,
        kind="llm",
        prefixes=("",),
    )


FAMILIES = (
    _llm("gemma", "Gemma", 10, Sign(has=(f"{_LAYER}pre_feedforward_layernorm.weight",))),
    _llm(
        "qwen3",
        "Qwen3",
        11,
        Sign(has=(f"{_LAYER}self_attn.q_norm.weight",), lacks=(f"{_LAYER}post_feedforward_layernorm.weight",)),
    ),
    _llm("qwen2", "Qwen2", 12, Sign(has=(f"{_LAYER}self_attn.q_proj.bias",))),
    _llm(
        "llm",
        "LLM",
        13,
        *(
            Sign(has=(name,))
            for name in (
                *(f"{_LAYER}self_attn.q_proj.weight", f"{_LAYER}self_attn.qkv_proj.weight"),
                *(f"model.language_{_LAYER}self_attn.q_proj.weight", f"language_model.{_LAYER}self_attn.q_proj.weight"),
                *("transformer.h.#.attn.c_attn.weight", "h.#.attn.c_attn.weight"),
                "gpt_neox.layers.#.attention.query_key_value.weight",
            )
        ),
        adapter=(Mark(_ADAPTER), Mark(r"(?:transformer.)?h.\d+.attn.c_attn")),
    ),
)
