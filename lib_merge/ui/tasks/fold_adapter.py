"""Fold a LoRA into a quantized checkpoint, by way of the dense one that it was made from."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import LORA_ALPHA

FOLD_ADAPTER = Task(
    id="fold",
    label="Fold a LoRA into a quantized model",
    fields=(
        Field(
            "SHIPPED",
            "Quantized model",
            "model",
            "MLX, or fp8 with scales; the result is a copy of it, but for the weights that the LoRA changes",
            section=FIRST_SCREEN,
            needed=True,
        ),
        Field(
            "DENSE",
            "Dense model",
            "model",
            "the 16- or 32-bit model that the quantized one was made from",
            section=FIRST_SCREEN,
            needed=True,
        ),
        Field("lora1", "LoRA", "model", "of PEFT or mlx-lm", models="lora", section=FIRST_SCREEN, needed=True),
        Field(
            "method",
            "Rounding of codes",
            "choice",
            default="auto",
            choices=(
                ("the one that reproduces the quantized model (auto)", "auto"),
                ("half to even (even)", "even"),
                ("half away from zero (away)", "away"),
                ("as Apple's GPUs do (metal)", "metal"),
            ),
        ),
        Field(
            "round_dense",
            "Round each sum to the dense precision first, as merging with PEFT and converting does",
            "check",
            default=False,
            param=True,
        ),
        LORA_ALPHA,
    ),
    verb="Fold",
    ending="folded",
    shaped_by="SHIPPED",
    named_after=("SHIPPED", "lora1"),
    gpu=False,
)
