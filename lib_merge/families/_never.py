"""Tensors that an average would only damage: constants, counters and markers, by name."""

from __future__ import annotations

import re

from ._components import PREFIXES, SAMPLING_BUFFERS
from ._family import Detected

_ROOT = "(?:" + "|".join(re.escape(prefix) for prefix in PREFIXES) + ")"

# (why, pattern on the full key)
_NEVER = tuple(
    (why, re.compile(pattern))
    for why, pattern in (
        ("sampling schedule", rf"(?:.*\.)?(?:{'|'.join(SAMPLING_BUFFERS)})$"),
        ("sampling schedule", r"denoiser\.(?:log_)?sigmas$"),
        ("data statistics", r"(?:edm_(?:mean|std)|noise_augmentor\.data_(?:mean|std))$"),
        ("copy of the weights kept by training (EMA)", r"model_ema(?:\.|$)"),
        ("marker of the prediction type", r"(?:v_pred|ztsnr|edm_vpred\.sigma_(?:max|min))$"),
        ("temperature of CLIP's training", r"(?:.*\.)?logit_scale$"),
        ("latent format", rf"{_ROOT}latent_format(?:\.|$)"),
        ("fixed table of positions", rf"{_ROOT}pos_embed(?:\.pos_embed)?$"),
        ("fixed rotary frequencies", r"(?:.*\.)?(?:inv_freq|original_inv_freq|rotary_emb\.freqs)$"),
        ("position numbers", r"(?:.*\.)?position_ids$"),
        ("attention mask", r"(?:.*\.)?attn_mask$"),
    )
)


def never_merged(key: str, dtype: str, shape: tuple[int, ...], found: Detected | None = None) -> str | None:
    """Why a tensor is copied and never averaged.

    Integers and the side tensors of coded storages are not decided here: their dtype and their storage tell.

    Args:
        key: full tensor name.
        dtype: as safetensors names it.
        shape: of the tensor.
        found: what the file is; without it a trained table of positions is taken for a fixed one.

    Returns:
        the reason, or None when the tensor may be merged.
    """
    if 0 in shape:
        return f"empty {dtype} tensor: a marker"
    if found is not None and found.family is not None:
        name = key[len(found.prefix) :] if key.startswith(found.prefix) else key
        if name.startswith(found.family.learned):
            return None
    return next((why for why, pattern in _NEVER if pattern.match(key)), None)
