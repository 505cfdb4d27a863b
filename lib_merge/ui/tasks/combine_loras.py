"""Combine LoRAs into one that does what they do together."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import LORA_ALPHA, LORAS, RESULT_DTYPE

COMBINE_LORAS = Task(
    id="lora_merge",
    label="Combine LoRAs into one",
    fields=(
        LORAS,
        Field(
            "method",
            "Method",
            "choice",
            default="concat",
            choices=(
                ("the exact sum (concat)", "concat"),
                ("the average by strength (weighted_average)", "weighted_average"),
            ),
            section=FIRST_SCREEN,
        ),
        Field(
            "rank",
            "Rank",
            "count",
            "every module is cut to it; empty: nothing is cut, the ranks add up",
            section=FIRST_SCREEN,
            param=True,
        ),
        Field(
            "auto",
            "Choose each module's rank by the error that is allowed",
            "check",
            default=False,
            section=FIRST_SCREEN,
            param=True,
        ),
        Field("max_error", "Relative error that is allowed", "number", "0 to 1; empty: 0.05", param=True),
        Field("max_rank", "No module gets a rank above", "count", "empty: no limit", param=True),
        Field(
            "A", "Base checkpoint", "model", "only for adapters that are no sums: DoRA, OFT, (IA)³, GLoRA, full copies"
        ),
        LORA_ALPHA,
        RESULT_DTYPE,
    ),
    writes="lora",
    verb="Combine",
    ending="combined",
)
