"""Write a checkpoint anew: other precision, other VAE, fewer parts, or a pickle as safetensors."""

from __future__ import annotations

from dataclasses import replace

from ..task import FIRST_SCREEN, Field, Task
from .fields import DISCARD, GLOB, OVERRIDE_DTYPE, SAVE_DTYPE, VAE

CONVERT_CHECKPOINT = Task(
    id="convert",
    label="Convert a checkpoint",
    fields=(
        Field(
            "A", "Checkpoint", "model", "any container; the result is safetensors", section=FIRST_SCREEN, needed=True
        ),
        replace(SAVE_DTYPE, section=FIRST_SCREEN),
        replace(OVERRIDE_DTYPE, section=FIRST_SCREEN),
        replace(VAE, section=FIRST_SCREEN),
        Field(
            "only",
            "Parts to keep",
            "choice",
            choices=(
                ("all of them", ""),
                ("the denoiser alone (unet)", "unet"),
                ("the text encoders alone (te)", "te"),
                ("the VAE alone (vae)", "vae"),
            ),
            section=FIRST_SCREEN,
        ),
        DISCARD,
        GLOB,
    ),
    verb="Convert",
    ending="converted",
)
