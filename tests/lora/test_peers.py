"""LoRAs that we write, loaded and applied by PEFT and LyCORIS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lib_merge import extract_lora, merge_loras, resize_lora
from tests.lora.files import relative

pytestmark = pytest.mark.peers


class Net(nn.Module):
    """Two linear layers and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16, bias=False)
        self.conv = nn.Conv2d(16, 24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.fc(x))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


WEIGHTS = ("fc.weight", "back.weight", "conv.weight")


def peft_folder(path: Path, seed: int, **config: Any) -> Path:
    """An adapter with random factors, saved by PEFT."""
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(net(), LoraConfig(target_modules=["fc", "back", "conv"], **config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value.copy_(torch.randn_like(value) * 0.2)
    tuned.save_pretrained(path)
    return path


def by_peft(path: Path) -> dict[str, torch.Tensor]:
    """What PEFT makes of an adapter: the change of each weight."""
    from peft import PeftModel

    before = {name: value.clone() for name, value in net().state_dict().items()}
    after = PeftModel.from_pretrained(net(), path).merge_and_unload().state_dict()
    return {name: (after[name] - before[name]).double() for name in WEIGHTS}


@pytest.mark.parametrize("rank", [None, 5])
def test_peft_loads_a_merged_adapter(tmp_path, rank):
    a = peft_folder(tmp_path / "a", 2, r=4, lora_alpha=8)
    b = peft_folder(tmp_path / "b", 3, r=6, lora_alpha=3, rank_pattern={"back": 2}, use_rslora=True)
    merge_loras((a, 0.7), (b, -0.4), out=tmp_path / "out", rank=rank)
    one, two, got = by_peft(a), by_peft(b), by_peft(tmp_path / "out")
    for name in WEIGHTS:
        want = (0.7 * one[name] - 0.4 * two[name]).reshape(len(one[name]), -1)
        best = 0.0
        if rank is not None:
            s = torch.linalg.svdvals(want)
            best = float((s[rank:] ** 2).sum().sqrt() / s.norm())
        assert abs(relative(got[name].reshape(want.shape), want) - best) <= 1e-5


def test_peft_loads_a_resized_adapter(tmp_path):
    a = peft_folder(tmp_path / "a", 2, r=8, lora_alpha=8)
    made = resize_lora(a, out=tmp_path / "out", keep=0.9)
    got, want = by_peft(tmp_path / "out"), by_peft(a)
    assert len(made.ranks) >= 1
    assert max(made.ranks) < 8
    assert all(relative(got[name], want[name]) <= (1 - 0.9**2) ** 0.5 + 1e-5 for name in WEIGHTS)


class Attention(nn.Module):
    """As a language model calls it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": nn.Linear(16, 32, bias=False)})})
        self.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_peft_loads_an_extracted_adapter(tmp_path):
    from peft import PeftModel

    torch.manual_seed(4)
    model = Attention()
    (name,) = model.state_dict()
    before = model.state_dict()[name].clone()
    after = before + 0.01 * torch.randn_like(before)
    save_file({name: before}, tmp_path / "base.safetensors")
    save_file({name: after}, tmp_path / "tuned.safetensors")
    extract_lora(tmp_path / "tuned.safetensors", tmp_path / "base.safetensors", out=tmp_path / "out", rank=16)
    (got,) = PeftModel.from_pretrained(model, tmp_path / "out").merge_and_unload().state_dict().values()
    assert relative((got - before).double(), (after - before).double()) <= 1e-5


@pytest.mark.parametrize("rank", [None, 3])
def test_lycoris_loads_a_merged_lora(tmp_path, rank):
    from lycoris import create_lycoris_from_weights

    random = torch.Generator().manual_seed(5)
    paths = []
    for number, (size, alpha) in enumerate(((4, 2.0), (6, None))):
        tensors = {}
        for name, (out, in_, *kernel) in {"fc": (32, 16), "back": (16, 32), "conv": (24, 16, 3, 3)}.items():
            ones = [1] * len(kernel)
            tensors[f"lycoris_{name}.lora_up.weight"] = torch.randn(out, size, *ones, generator=random) * 0.2
            tensors[f"lycoris_{name}.lora_down.weight"] = torch.randn(size, in_, *kernel, generator=random) * 0.2
            if alpha is not None:
                tensors[f"lycoris_{name}.alpha"] = torch.tensor(alpha)
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(tensors, paths[-1])
    out = tmp_path / "out.safetensors"
    merge_loras((paths[0], 0.7), (paths[1], -0.4), out=out, rank=rank)

    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    network, _ = create_lycoris_from_weights(1.0, None, model, weights_sd=load_file(out))
    network.merge_to(1.0)
    after = model.state_dict()
    first, second = (load_file(path) for path in paths)
    for name in ("fc", "back", "conv"):

        def delta(tensors, scale, name=name):
            up, down = (tensors[f"lycoris_{name}.lora_{part}.weight"].double().flatten(1) for part in ("up", "down"))
            return scale * (up @ down)

        want = 0.7 * delta(first, 0.5) - 0.4 * delta(second, 1.0)
        best = 0.0
        if rank is not None:
            s = torch.linalg.svdvals(want)
            best = float((s[rank:] ** 2).sum().sqrt() / s.norm())
        key = next(key for key in after if key.startswith(f"{name}.") and key.endswith("weight"))
        got = (after[key] - before[f"{name}.weight"]).double().reshape(want.shape)
        assert abs(relative(got, want) - best) <= 1e-5
