"""Markers of what a denoiser predicts: models that predict different things cannot be averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import Problem
from .steps import Node

# Last names of empty tensors: what the model predicts, and that its noise schedule ends at zero signal.
MARKERS = ("v_pred", "ztsnr")


def prediction_problems(base: Mapping[str, Node], donor: Mapping[str, Node], *, allowed: bool) -> Iterable[Problem]:
    """An error for each marker that only one of A and B has; a warning where that is allowed."""
    for marker in MARKERS:
        holders = {slot: key for slot, keys in (("A", base), ("B", donor)) if (key := _find(marker, keys))}
        if len(holders) != 1:
            continue
        ((slot, key),) = holders.items()
        what = f"only model {slot} has the marker {marker}: the two predict different things"
        kept = "kept" if slot == "A" else "not taken over"
        yield Problem(
            "warning" if allowed else "error",
            f"{what}; it is {kept}, as A has it" if allowed else what,
            tensor=key,
            hint=None
            if allowed
            else "merge models of one prediction type, or --allow-mixed-prediction keeps A's markers",
        )


def _find(marker: str, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if key.rpartition(".")[2] == marker), None)
