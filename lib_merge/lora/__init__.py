"""LoRAs made of LoRAs or of two checkpoints: merged into one, extracted, resized, compared, renamed.

Checkpoints are written elsewhere, and what a format does to a weight is a matter of `adapters`.
"""

from __future__ import annotations

from ._compare import Comparison, compare_loras
from ._convert import Converted, convert_lora
from ._planned import LoraPlan, Planned
from ._settings import VARIANTS
from ._work import LoraResult
from .api import TASKS, carry_out_recipe, differing, extract_lora, merge_loras, resize_lora

__all__ = [
    "TASKS",
    "VARIANTS",
    "Comparison",
    "Converted",
    "LoraPlan",
    "LoraResult",
    "Planned",
    "carry_out_recipe",
    "compare_loras",
    "convert_lora",
    "differing",
    "extract_lora",
    "merge_loras",
    "resize_lora",
]
