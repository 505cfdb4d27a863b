"""Combine LoRAs into one that does what they do together."""

from __future__ import annotations

from ..task import FIRST_SCREEN, Field, Task
from .fields import LORA_ALPHA, LORAS, RESULT_DTYPE, SEED

# The optimizer's fields belong to all methods but the plain sum.
CHOSEN = ("auto", "weighted_average", "slerp", "consensus", "ties")
OPTIMIZER = "How LoRAs are put together"

COMBINE_LORAS = Task(
    id="lora_merge",
    label="Combine LoRAs into one",
    fields=(
        LORAS,
        Field(
            "method",
            "Method",
            "choice",
            default="auto",
            choices=(
                ("what suits each weight (auto)", "auto"),
                ("the exact sum (concat)", "concat"),
                ("the average by strength (weighted_average)", "weighted_average"),
                ("along the arc between them, sizes kept (slerp)", "slerp"),
                ("what they agree on, for LoRAs much alike (consensus)", "consensus"),
                ("a vote on signs, for LoRAs in conflict (ties)", "ties"),
            ),
            section=FIRST_SCREEN,
        ),
        Field(
            "scope",
            "Decide",
            "choice",
            default="per_prefix",
            choices=(
                ("for each weight (per_prefix)", "per_prefix"),
                ("once for all (global)", "global"),
                ("nothing: sums everywhere (additive)", "additive"),
            ),
            section=OPTIMIZER,
            only_with=("auto", "ties"),
        ),
        Field(
            "profile",
            "Strategies to choose from",
            "choice",
            default="v1.2",
            choices=(
                ("all of them (v1.2)", "v1.2"),
                ("averages instead of SLERP and consensus (no_slerp)", "no_slerp"),
                ("sums, averages and TIES (classic)", "classic"),
            ),
            section=OPTIMIZER,
            only_with=("auto",),
        ),
        Field(
            "rules",
            "Decide by",
            "choice",
            default="ordered",
            choices=(
                ("what conflict is beyond chance (ordered)", "ordered"),
                ("the documented thresholds, taken literally (document)", "document"),
            ),
            section=OPTIMIZER,
            only_with=("auto",),
        ),
        Field(
            "refinement",
            "Refinement",
            "choice",
            default="standard",
            choices=(
                ("none (standard)", "standard"),
                ("protect what one LoRA alone brings (enhanced)", "enhanced"),
                ("the same in a common basis, stored exactly (maximum)", "maximum"),
            ),
            section=OPTIMIZER,
            only_with=CHOSEN,
        ),
        Field(
            "sparsify",
            "Drop entries by chance first",
            "choice",
            default="none",
            choices=(
                ("no (none)", "none"),
                ("evenly (dare)", "dare"),
                ("small ones sooner (della)", "della"),
                ("evenly, where LoRAs conflict (dare_conflict)", "dare_conflict"),
                ("small ones sooner, where LoRAs conflict (della_conflict)", "della_conflict"),
            ),
            section=OPTIMIZER,
            only_with=CHOSEN,
        ),
        Field(
            "density",
            "Share of entries that is kept",
            "number",
            "0 to 1; empty: 0.5 by TIES, 0.7 when entries are dropped by chance",
            section=OPTIMIZER,
            param=True,
            only_with=CHOSEN,
        ),
        Field(
            "auto_density",
            "Measure that share for each weight",
            "check",
            default=False,
            section=OPTIMIZER,
            param=True,
            only_with=CHOSEN,
        ),
        Field(
            "smoothing",
            "Smoothing over blocks",
            "number",
            "0 to 1: how far each weight's numbers are drawn to its block's; empty: 0.25",
            section=OPTIMIZER,
            param=True,
            only_with=("auto", "ties"),
        ),
        Field(
            "output_strength",
            "Strength of the whole result",
            "number",
            "empty: 1",
            section=OPTIMIZER,
            param=True,
            only_with=CHOSEN,
        ),
        Field(
            "auto_output_strength",
            "Find the largest strength that is advised",
            "check",
            default=False,
            section=OPTIMIZER,
            param=True,
            only_with=CHOSEN,
        ),
        Field(
            "lossless",
            "Store whole what a LoRA's factors cannot hold",
            "check",
            "large files; loaded by Forge, reForge and ComfyUI",
            default=False,
            section=OPTIMIZER,
            param=True,
            only_with=CHOSEN,
        ),
        Field(
            "rank",
            "Rank",
            "count",
            "every module is cut to it; empty: the ranks add up, less where nothing is lost by it",
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
        SEED,
    ),
    writes="lora",
    verb="Combine",
    ending="combined",
)
