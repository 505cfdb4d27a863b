"""Small LoRAs for the sample checkpoints, in kohya's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import values, write

_STEM = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_"
_WIDTH = 20  # of these layers in the samples
RANK = 4


def make_lora(path: Path, seed: int) -> Path:
    """A LoRA of rank 4 on three linear layers of the denoiser."""
    tensors: dict[str, Any] = {}
    for number, name in enumerate("qkv"):
        tensors[f"{_STEM}{name}.lora_down.weight"] = values((RANK, _WIDTH), 10 * seed + number)
        tensors[f"{_STEM}{name}.lora_up.weight"] = values((_WIDTH, RANK), 10 * seed + number + 5)
    return write(path, tensors)
