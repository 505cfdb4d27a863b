"""Extract a LoRA: what a tuned checkpoint has more than its base."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import RESULT_DTYPE

EXTRACT_LORA = Task(
    id="lora_extract",
    label="Extract a LoRA from two checkpoints",
    fields=(
        Field("A", "Tuned checkpoint", "model", "what the LoRA shall lead to", section=FIRST_SCREEN, needed=True),
        Field("B", "Base checkpoint", "model", "what it was tuned from", section=FIRST_SCREEN, needed=True),
        Field("rank", "Rank", "count", "of matrices; empty: 64", section=FIRST_SCREEN, param=True),
        Field(
            "conv_rank", "Rank of convolutions", "count", "of 3×3 and larger; empty: the rank above, or 32", param=True
        ),
        Field(
            "keep",
            "Share of each change to keep",
            "number",
            "0 to 1, of its norm, at the smallest rank that does; empty: the ranks as given",
            param=True,
        ),
        Field(
            "clamp",
            "Keep changes within this quantile of their sizes",
            "number",
            "0 to 1; 1 changes nothing",
            default="1",
            param=True,
        ),
        Field(
            "min_diff",
            "Leave out tensors that change by no more than",
            "number",
            "0: all that change",
            default="0",
            param=True,
        ),
        Field(
            "exact", "Full singular value decompositions: slower, the best there is", "check", default=False, param=True
        ),
        Field(
            "store_diffs", "Store norms, biases and embeddings as whole differences", "check", default=False, param=True
        ),
        Field(
            "names",
            "Module names of",
            "choice",
            choices=(
                ("what its kind usually has", ""),
                ("kohya: A1111, Forge, ComfyUI", "kohya"),
                ("diffusers", "diffusers"),
                ("PEFT: LLMs", "peft"),
            ),
        ),
        RESULT_DTYPE,
    ),
    writes="lora",
    verb="Extract",
    ending="extracted",
    joined_by="-",
)
