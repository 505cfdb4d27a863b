"""What a report says of a weight that LoRAs change: their number, how they relate, and what is done with them."""

from __future__ import annotations

import math
from typing import Any

from ..choose import Choice
from ._metrics import Relations

# How TIES elected signs, for the reason.
_VOTES = {"frequency": "; in the vote on signs each LoRA counts once", "total": "; in the vote on signs sizes count"}


def facts_of(relations: Relations, choice: Choice) -> dict[str, Any]:
    """Columns of a report's row; what needs two LoRAs is NaN where there is one.

    Norms are those of the changes at their strengths.
    """
    numbers, several = relations.numbers(), len(relations.members) > 1
    sizes = [abs(s) * norm for s, norm in zip(relations.strengths, relations.norms, strict=True)]
    return {
        "strategy": choice.strategy,
        "reason": choice.reason + _VOTES[choice.vote] * (choice.strategy == "ties" and several),
        "n": len(relations.members),
        "norm_a": sizes[0] if sizes else math.nan,
        "norm_b": sizes[1] if several else math.nan,
        "norms_in": " ".join(f"{size:.4g}" for size in sizes),
        "cosine": numbers.cos if several else math.nan,
        "sign_conflict": numbers.conflict if several else math.nan,
        "conflict_expected": numbers.expected if several else math.nan,
        "overlap": numbers.overlap if several else math.nan,
        "ratio": numbers.ratio if several else math.nan,
    }
