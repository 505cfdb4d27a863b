"""Bakes of adapters that PEFT and LyCORIS made, held against what these packages do with their own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lib_merge

pytestmark = pytest.mark.peers


class Net(nn.Module):
    """A linear layer of either shape, two convolutions and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.fc = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16, bias=False)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.point = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.fc(x))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def randomised(parameters: Any) -> None:
    """Values of their size, so that no factor is left at the zeros that training starts from."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))


def stored(model: nn.Module, path: Path) -> Path:
    save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, path)
    return path


def baked(base: Path, adapter: Path, out: Path, strength: float = 1.0) -> dict[str, torch.Tensor]:
    made = lib_merge.bake(base, (adapter, strength), out=out, overwrite=True, fsync=False)
    assert not made.unused
    return load_file(out)


LAYERS = ["fc", "back"]
PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": [*LAYERS, "conv", "point"]}),
    "rslora": ("LoraConfig", {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": LAYERS}),
    "dora": ("LoraConfig", {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": [*LAYERS, "conv"]}),
    "patterns": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "rank_pattern": {"fc": 2},
                                "alpha_pattern": {"back": 3}}),
    "bias": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "bias": "lora_only"}),
    "embedding": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ["tokens", "fc"]}),
    "modules_to_save": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ["fc"],
                                       "modules_to_save": ["back"]}),
    "loha": ("LoHaConfig", {"r": 2, "alpha": 4, "target_modules": [*LAYERS, "conv"]}),
    "lokr": ("LoKrConfig", {"r": 2, "alpha": 4, "target_modules": [*LAYERS, "conv"]}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": LAYERS}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "target_modules": LAYERS}),
    "ia3": ("IA3Config", {"target_modules": LAYERS, "feedforward_modules": ["back"]}),
    "hra": ("HRAConfig", {"r": 4, "target_modules": LAYERS}),
}  # fmt: skip


def test_peft(tmp_path, capsys):
    import peft

    base, compared = stored(net(), tmp_path / "base.safetensors"), 0
    for name, (config, fields) in PEFT.items():
        folder = tmp_path / name
        made = peft.get_peft_model(net(), getattr(peft, config)(**fields))
        randomised(parameter for parameter in made.parameters() if parameter.requires_grad)
        made.save_pretrained(folder)
        theirs = peft.PeftModel.from_pretrained(net(), folder).merge_and_unload().state_dict()
        ours = baked(base, folder, tmp_path / "out.safetensors")
        assert set(ours) == set(theirs), name
        changed = [key for key, value in load_file(base).items() if not torch.equal(value, theirs[key])]
        assert changed, name
        for key, value in theirs.items():
            assert torch.allclose(ours[key], value, rtol=1e-5, atol=2e-6), (name, key)
        compared += 1
    with capsys.disabled():
        print(f" {compared} adapters of PEFT {peft.__version__}", end="")
    assert compared == len(PEFT)


LYCORIS: dict[str, dict[str, Any]] = {
    "lora": {"linear_dim": 4, "linear_alpha": 2, "conv_dim": 4, "conv_alpha": 2},
    "loha": {"linear_dim": 2, "linear_alpha": 1, "conv_dim": 2, "conv_alpha": 1},
    "lokr": {"linear_dim": 2, "linear_alpha": 1, "conv_dim": 2, "conv_alpha": 1, "factor": 4},
    "full": {},
    "diag-oft": {"linear_dim": 4, "linear_alpha": 0, "conv_dim": 4, "conv_alpha": 0},
    "boft": {"linear_dim": 4, "linear_alpha": 0, "conv_dim": 4, "conv_alpha": 0},
    "glora": {"linear_dim": 4, "linear_alpha": 2},
}


def outputs(model: Net) -> dict[str, torch.Tensor]:
    """What each layer makes of fixed inputs."""
    torch.manual_seed(3)
    image = torch.randn(2, 16, 5, 5)
    with torch.no_grad():
        return {
            "fc": model.fc(torch.eye(16)),
            "back": model.back(torch.eye(32)),
            "conv": model.conv(image),
            "point": model.point(torch.randn(2, 16, 3, 3)),
        }


def test_lycoris(tmp_path, capsys):
    from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights

    base, compared = stored(net(), tmp_path / "base.safetensors"), 0
    plain = outputs(net())
    for algorithm, fields in LYCORIS.items():
        LycorisNetwork.apply_preset({"target_module": ["Linear", "Conv2d"], "target_name": [".*"]})
        made = create_lycoris(net(), 1.0, algo=algorithm, **fields)
        made.apply_to()  # its layers are its own only now
        randomised(made.parameters())
        path = tmp_path / f"{algorithm}.safetensors"
        made.save_weights(str(path), torch.float32, {})
        wrapped = net()
        again, _ = create_lycoris_from_weights(1.0, str(path), wrapped)
        again.apply_to()
        theirs = outputs(wrapped)
        assert any(not torch.allclose(theirs[name], plain[name], atol=1e-3) for name in plain), algorithm
        ours = net()
        ours.load_state_dict(baked(base, path, tmp_path / "out.safetensors"))
        for name, value in outputs(ours).items():
            assert torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5), (algorithm, name)
        compared += 1
    with capsys.disabled():
        print(f" {compared} adapters of LyCORIS", end="")
    assert compared == len(LYCORIS)
