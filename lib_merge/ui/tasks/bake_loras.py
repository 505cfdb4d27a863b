"""Bake LoRAs into a checkpoint: the result does without them what the checkpoint does with them."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import BLOCKS, EXCLUDE, GLOB, INCLUDE_MODE, LORA_ALPHA, LORAS, OVERRIDE_DTYPE, SAVE_DTYPE

BAKE_LORAS = Task(
    id="bake",
    label="Bake LoRAs into a checkpoint",
    fields=(
        Field(
            "A",
            "Checkpoint",
            "model",
            "the result has its tensors, its metadata and its precision",
            section=FIRST_SCREEN,
            needed=True,
        ),
        LORAS,
        BLOCKS,
        EXCLUDE,
        INCLUDE_MODE,
        GLOB,
        LORA_ALPHA,
        SAVE_DTYPE,
        OVERRIDE_DTYPE,
    ),
    verb="Bake",
    ending="baked",
)
