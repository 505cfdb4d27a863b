"""Resize a LoRA: cut its modules to a smaller rank."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import LORA_ALPHA, RESULT_DTYPE

SHARES = ("frobenius", "cumulative", "ratio")
RESIZE_LORA = Task(
    id="lora_resize",
    label="Resize a LoRA",
    fields=(
        Field("lora1", "LoRA", "model", "no module ever grows", models="lora", section=FIRST_SCREEN, needed=True),
        Field(
            "method",
            "Cut",
            "choice",
            default="rank",
            choices=(
                ("to one rank", "rank"),
                ("to a share of the norm (frobenius)", "frobenius"),
                ("to a share of the sum of singular values (cumulative)", "cumulative"),
                ("where singular values fall below a share of the largest (ratio)", "ratio"),
            ),
            section=FIRST_SCREEN,
        ),
        Field(
            "rank",
            "Rank",
            "count",
            "for every module",
            default="16",
            section=FIRST_SCREEN,
            param=True,
            only_with=("rank",),
        ),
        Field(
            "keep",
            "Share",
            "number",
            "0 to 1, reached by the smallest rank that does",
            default="0.9",
            section=FIRST_SCREEN,
            param=True,
            only_with=SHARES,
        ),
        Field(
            "max_rank",
            "No module gets a rank above",
            "count",
            "empty: no limit",
            section=FIRST_SCREEN,
            param=True,
            only_with=SHARES,
        ),
        LORA_ALPHA,
        RESULT_DTYPE,
    ),
    writes="lora",
    verb="Resize",
    ending="resized",
)
