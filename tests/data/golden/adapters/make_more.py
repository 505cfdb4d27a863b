"""Makes `more/`: formats that need LyCORIS 4.1.3 or PEFT 0.21.2 to be trusted, one small file for each.

Run in an environment that has both; the tests need neither. A file holds `base`, `expected` (float64) and the adapter's
own keys under `adapter.`; its metadata holds the adapter's configuration as `config` and the strength.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lycoris.modules.boft import ButterflyOFTModule
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from peft import HRAConfig, IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent / "more"


def save(name, base, expected, adapter, config=None, strength=1.0, metadata=None):
    HERE.mkdir(exist_ok=True)
    tensors = {"base": base, "expected": expected, **{f"adapter.{key}": value for key, value in adapter.items()}}
    info = {"config": json.dumps(config or {}), "strength": str(strength), "metadata": json.dumps(metadata or {})}
    save_file(
        {key: value.detach().contiguous().clone() for key, value in tensors.items()}, HERE / f"{name}.safetensors", info
    )


def response(module, layer):
    """The weight that a module without bias acts with, read off its answers to unit inputs."""
    weight = layer.weight
    count = weight[0].numel()
    unit = torch.eye(count, dtype=weight.dtype).reshape(count, *weight.shape[1:])
    with torch.no_grad():
        return module(unit).reshape(count, -1).T.reshape(weight.shape)


def lycoris(name, kind, conv, strength=1.0, metadata=None, **options):
    torch.manual_seed(len(name))
    dtype = torch.float32 if kind is ButterflyOFTModule else torch.float64  # it inverts in float32
    layer = (nn.Conv2d(8, 16, 3, bias=False) if conv else nn.Linear(24, 16, bias=False)).to(dtype)
    base = layer.weight.detach().clone()
    module = kind("lora_unet_m", layer, multiplier=strength, **options).to(dtype).eval()
    with torch.no_grad():
        for key, value in module.named_parameters():
            if not key.startswith("org"):
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if key in ("dora_scale", "rescale") else 0.0))
    module.apply_to()
    adapter = {f"lora_unet_m.{key}": value for key, value in module.state_dict().items()}
    save(name, base, response(layer, layer), adapter, None, strength, metadata)


class Experts(nn.Module):
    def __init__(self, is_transposed):
        super().__init__()
        self.is_transposed = is_transposed
        up, down = ((3, 4, 10), (3, 5, 4)) if is_transposed else ((3, 10, 4), (3, 4, 5))
        self.gate_up_proj = nn.Parameter(torch.randn(*up).double())
        self.down_proj = nn.Parameter(torch.randn(*down).double())


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def peft(name, model, config, tensor):
    base = {key: value.clone() for key, value in model.state_dict().items()}
    tuned = get_peft_model(model, config).double()
    with torch.no_grad():
        for key, value in tuned.named_parameters():
            if value.requires_grad:
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if "ia3" in key else 0.0))
    adapter = get_peft_model_state_dict(tuned)
    values = {key: list(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    values = {key: value for key, value in values.items() if isinstance(value, (str, int, float, list, bool))}
    merged = tuned.merge_and_unload().state_dict()
    save(name, base[tensor], merged[tensor], adapter, values)


def main():
    torch.set_grad_enabled(True)
    lycoris("boft", ButterflyOFTModule, False, lora_dim=4, alpha=0, constraint=0)
    lycoris("boft_half", ButterflyOFTModule, False, 0.7, lora_dim=4, alpha=0, constraint=0)
    lycoris("boft_conv_rescaled", ButterflyOFTModule, True, lora_dim=4, alpha=0, constraint=0, rescaled=True)
    for conv in (False, True):
        end = "_conv" if conv else ""
        lycoris(f"glora{end}", GLoRAModule, conv, 0.7, lora_dim=4, alpha=2)
        lycoris(f"ia3_out{end}", IA3Module, conv, 0.7, train_on_input=False)
        lycoris(
            f"dora_lokr_out{end}",
            LokrModule,
            conv,
            lora_dim=2,
            alpha=1,
            factor=4,
            weight_decompose=True,
            wd_on_out=True,
        )
        lycoris(f"dora_lora_out{end}", LoConModule, conv, lora_dim=3, alpha=1, weight_decompose=True, wd_on_out=True)
    lycoris(
        "glora_rslora",
        GLoRAModule,
        False,
        metadata={"ss_network_args": '{"rs_lora": true}'},
        lora_dim=4,
        alpha=2,
        rs_lora=True,
    )
    lycoris("locon_tucker", LoConModule, True, 0.7, lora_dim=4, alpha=2, use_tucker=True)
    lycoris("loha_tucker", LohaModule, True, 0.7, lora_dim=3, alpha=1.5, use_tucker=True)
    lycoris("lokr_tucker", LokrModule, True, 0.7, lora_dim=2, alpha=1, factor=2, use_tucker=True)
    for is_transposed in (True, False):
        end = "_in_out" if is_transposed else "_out_in"
        for param in ("gate_up_proj", "down_proj"):
            torch.manual_seed(5)
            config = LoraConfig(
                r=2, lora_alpha=6, target_modules=[], target_parameters=["experts.down_proj", "experts.gate_up_proj"]
            )
            peft(
                f"peft_moe_{param}{end}",
                Net(experts=Experts(is_transposed), lin=nn.Linear(4, 4)),
                config,
                f"experts.{param}",
            )
    torch.manual_seed(6)
    peft(
        "peft_hra_orthogonal",
        Net(fc=nn.Linear(8, 6).double()),
        HRAConfig(r=4, apply_GS=True, target_modules=["fc"]),
        "fc.weight",
    )
    for ff in ([], ["cv"]):
        net = Net(cv=nn.Conv2d(4, 6, 3).double())
        for tensor in ("cv.weight", "cv.bias") if not ff else ("cv.weight",):
            torch.manual_seed(7)
            net = Net(cv=nn.Conv2d(4, 6, 3).double())
            name = f"peft_ia3_conv_{'in' if ff else 'out'}{'_bias' if 'bias' in tensor else ''}"
            peft(name, net, IA3Config(target_modules=["cv"], feedforward_modules=ff), tensor)


main()
