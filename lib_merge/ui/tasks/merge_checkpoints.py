"""Merge two or three checkpoints by any method of the registry."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.registry import all_methods
from ..task import FIRST_SCREEN, Field, Task
from .fields import (
    ALLOW_MIXED_PREDICTION,
    BLOCKS,
    DISCARD,
    EXCLUDE,
    GLOB,
    INCLUDE_MODE,
    LORA_ALPHA,
    LORAS,
    MISMATCH,
    OVERRIDE_DTYPE,
    RULE,
    SAVE_DTYPE,
    SEED,
    VAE,
)

MERGE_CHECKPOINTS = Task(
    id="merge",
    label="Merge checkpoints",
    fields=(
        Field(
            "A",
            "Model A (base)",
            "model",
            "the result has its tensors, its metadata and its precision",
            section=FIRST_SCREEN,
            needed=True,
        ),
        Field(
            "B",
            "Model B",
            "model",
            "what is mixed into A",
            section=FIRST_SCREEN,
            needed=True,
        ),
        Field(
            "C",
            "Model C",
            "model",
            "the model that B and A, or B alone, are compared with",
            section=FIRST_SCREEN,
            needed=True,
        ),
        replace(LORAS, label="LoRAs on top of the merge", section="LoRAs", needed=False),
        replace(LORA_ALPHA, section="LoRAs"),
        BLOCKS,
        RULE,
        EXCLUDE,
        INCLUDE_MODE,
        DISCARD,
        GLOB,
        MISMATCH,
        ALLOW_MIXED_PREDICTION,
        VAE,
        SAVE_DTYPE,
        OVERRIDE_DTYPE,
        SEED,
    ),
    methods=tuple(method for method in all_methods().values() if set(method.inputs) <= set("ABC")),
    first_method="weighted_sum",
)
