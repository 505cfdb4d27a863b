"""Which part of a model a tensor belongs to, by the start of its key."""

from __future__ import annotations

import re

from ._family import Detected

# Known denoiser prefixes, longest first; the last one is none at all.
PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer_2/",
    "transformer_2.",
    "transformer/",
    "transformer.",
    "prior/",
    "model.",
    "unet/",
    "unet.",
    "net.",
    "",
)

_ADAPTER_UNET = (
    *("lora_prior_unet_", "lora_transformer_", "lora_unet__", "lora_unet_", "oft_unet_", "lycoris_"),
    *("unet.base_model.model.", "transformer.base_model.model.", "base_model.model."),
)

_PREFIX_OF = {
    "unet": (*PREFIXES[:-1], *_ADAPTER_UNET),
    "te1": (
        *("cond_stage_model.", "conditioner.embedders.0.", "text_encoders.", "text_encoder/", "text_encoder."),
        *("lora_te_", "lora_te1_", "lora_prior_te_"),
    ),
    "te2": (
        *("conditioner.embedders.1.", "text_encoders.clip_g.", "text_encoder_2/", "text_encoder_2."),
        "lora_te2_",
    ),
    "te3": ("text_encoders.t5xxl.", "text_encoder_3/", "text_encoder_3.", "lora_te3_"),
    "te4": ("text_encoders.llama.", "text_encoder_4/", "text_encoder_4."),
    "vae": ("first_stage_model.", "vae.", "vae/", "movq/", "vqgan/"),
    "ema": ("model_ema.",),
    "other": (
        *("conditioner.", "denoiser.", "noise_augmentor.", "control_model.", "embedder."),
        *("image_encoder/", "image_encoder.", "feature_extractor/", "safety_checker/", "scheduler/"),
    ),
}
_PART_OF = {prefix: part for part, prefixes in _PREFIX_OF.items() for prefix in prefixes}
# The longest prefix wins.
_PREFIX = re.compile("|".join(map(re.escape, sorted(_PART_OF, key=len, reverse=True))))

# What the DDPM schedule leaves in a checkpoint.
SAMPLING_BUFFERS = (
    *("betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod"),
    *("log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod"),
    *("posterior_variance", "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2"),
    "lvlb_weights",
)

_LLM = (
    r"(?:(?:language_model\.)?model\.(?:language_model\.)?"
    r"(?:layers\.\d+\.(?:self_attn|linear_attn|mlp|block_sparse_moe|input_layernorm|\w+_layernorm)\b"
    r"|embed_tokens\.|norm\.)|lm_head\.|(?:transformer\.)?(?:h\.\d+\.|wte\.|wpe\.|ln_f\.)|gpt_neox\.)"
)
# Keys that the prefixes would misread, then those that have no prefix.
_BARE_FIRST = (
    ("llm", re.compile(_LLM)),
    ("te1", re.compile(r"transformer\.resblocks\.")),
)
_BARE_LAST = (
    ("other", re.compile(rf"(?:{'|'.join(SAMPLING_BUFFERS)})$")),
    ("other", re.compile(r"(?:v_pred|ztsnr|edm_mean|edm_std|edm_vpred\b.*|scaled_fp8)$")),
    ("te1", re.compile(r"(?:encoder|decoder)\.(?:block\.\d|final_layer_norm\.|embed_tokens\.)|shared\.weight")),
    (
        "te1",
        re.compile(r"text_model\.|token_embedding\.|(?:positional_embedding|text_projection|logit_scale)\b|ln_final\."),
    ),
    ("vae", re.compile(r"(?:encoder|decoder|quant_conv|post_quant_conv)\.")),
)
_WHOLE = {"vae": "vae", "text encoder": "te1", "llm": "llm"}


def component_of(key: str, found: Detected | None = None) -> str:
    """The part of the model that a tensor belongs to.

    Args:
        key: full tensor name in a checkpoint, a folder (`unet/…`), a component's own file or an adapter.
        found: what the file is; without it a bare name is judged by itself.

    Returns:
        "unet" (any denoiser), "te1" … "te4", "vae", "ema", "llm" or "other". A single text encoder is te1.
    """
    if found is not None and found.kind in _WHOLE and key.startswith(found.prefix):
        return _WHOLE[found.kind]
    bare_file = found is not None and found.kind in ("checkpoint", "denoiser") and not found.prefix
    for part, pattern in () if bare_file else _BARE_FIRST:
        if pattern.match(key):
            return part
    if prefix := _PREFIX.match(key):
        return _adapted(key, prefix[0])
    for part, pattern in _BARE_LAST[:2] if bare_file else _BARE_LAST:
        if pattern.match(key):
            return part
    return "other" if found is not None and found.prefix else "unet"


def _adapted(key: str, prefix: str) -> str:
    """`base_model.model.` stands before names of any kind."""
    rest = key[len(prefix) :]
    if prefix != "base_model.model." or not rest:
        return _PART_OF[prefix]
    return component_of(rest)


# What takes the latents in; models for inpainting and the like have more input channels there.
_FIRST_LAYERS = frozenset({"input_blocks.0.0.weight", "conv_in.weight", "img_in.weight"})


def is_first_layer(key: str, found: Detected | None = None) -> bool:
    """True for the denoiser's weight whose input channels tell what it works on; arguments as for `component_of`."""
    return component_of(key, found) == "unet" and strip_denoiser(key, found) in _FIRST_LAYERS


def strip_denoiser(key: str, found: Detected | None = None) -> str:
    """The denoiser tensor's name below its prefix, an adapter's prefix taken off as well."""
    if found is not None and found.kind in ("checkpoint", "denoiser"):
        if not found.prefix:
            return key
        if key.startswith(found.prefix):
            return key[len(found.prefix) :]
    prefix = _PREFIX.match(key)
    return key[prefix.end() :] if prefix and _PART_OF[prefix[0]] == "unet" else key
