"""Small LoRA files with real names, and what they change, worked out plainly."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LINEAR = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
CONV = "lora_unet_down_blocks_0_resnets_0_conv1"
TEXT = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
SIZES = {LINEAR: (24, 36), CONV: (24, 20, 3, 3), TEXT: (24, 24)}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(
    path: Path,
    rank: int = 4,
    alpha: float | None = 2.0,
    seed: int = 0,
    dtype=torch.float32,
    stems=tuple(SIZES),
    metadata=None,
) -> Path:
    """A LoRA in kohya's names."""
    random = generator(seed)
    tensors = {}
    for stem in stems:
        out, in_, *kernel = SIZES[stem]
        ones = [1] * len(kernel)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(out, rank, *ones, generator=random).to(dtype)
        tensors[f"{stem}.lora_down.weight"] = torch.randn(rank, in_, *kernel, generator=random).to(dtype)
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha, dtype=dtype)
    save_file(tensors, path, metadata)
    return path


def deltas(path: Path) -> dict[str, torch.Tensor]:
    """Module -> ΔW in float64, by the plainest reading of up, down and alpha or of a whole difference."""
    tensors = load_file(path)
    found = {}
    for key, tensor in tensors.items():
        if match := re.fullmatch(r"(.*)\.(?:lora_down|lora_A)\.weight", key):
            stem = match[1]
            up = tensors.get(f"{stem}.lora_up.weight", tensors.get(f"{stem}.lora_B.weight")).double()
            down = tensor.double()
            rank = down.shape[0]
            scale = float(tensors.get(f"{stem}.alpha", torch.tensor(float(rank)))) / rank
            found[stem] = (up.reshape(up.shape[0], -1) @ down.reshape(rank, -1)) * scale
        elif key.endswith((".diff", ".diff_b")):
            found[key] = tensor.double()
    return found


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())
