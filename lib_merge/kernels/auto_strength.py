"""How strong a merge is against what went into it, and the strength that evens that out."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_MAX = 1.0


def auto_scale(input_norms: Sequence[float], merged_norm: float) -> float:
    """min(1, largest ‖s·d‖ / ‖merged‖): a merge becomes no larger than the largest of its inputs, and never grows.

    Args:
        input_norms: |s|·‖d‖ of a group's LoRAs; a group of one is left alone.
        merged_norm: of what they were merged into.
    """
    if len(input_norms) < 2 or merged_norm <= 0:
        return 1.0
    return min(1.0, max(input_norms) / merged_norm)


def suggested_max(merged_norms: Sequence[float], input_norms: Sequence[Sequence[float]], cap: float = 3.0) -> float:
    """The strength up to which the merged LoRA stays within its inputs: 1 / norm ratio, at least 1 and at most `cap`.

    The norm ratio is Σ merged norms / Σ mean input norms over all groups.

    Args:
        merged_norms: one for each group.
        input_norms: for each group those of its LoRAs, not scaled by strengths.
        cap: 3 for Stable Diffusion and language models, 5 for diffusion transformers.
    """
    merged = sum(merged_norms)
    inputs = sum(sum(norms) / len(norms) for norms in input_norms if norms)
    if not merged > 0 or not inputs > 0:
        return _LEAST_MAX
    return max(_LEAST_MAX, min(inputs / merged, cap))
