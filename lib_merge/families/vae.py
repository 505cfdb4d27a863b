"""VAEs in files of their own."""

from __future__ import annotations

from ._family import Family, Sign

_DIFFUSERS = ("encoder.down_blocks.", "decoder.up_blocks.")

FAMILY = Family(
    "vae",
    "VAE",
    300,
    signs=(
        *(Sign(has=(name,), naming="diffusers") for name in _DIFFUSERS),
        Sign(has=("post_quant_conv.weight",)),
        Sign(has=("decoder.conv_in.weight",)),
        Sign(has=("decoder.middle.0.residual.0.gamma",)),
    ),
    rest=("VAE",),
    kind="vae",
    prefixes=("first_stage_model.", "vae.", "vae/", ""),
)
