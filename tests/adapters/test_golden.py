"""Every golden adapter, baked in float64."""

from __future__ import annotations

import pytest
import torch

from tests.adapters import golden

# SD1 modules of the golden base by the names that trainers write.
SD15 = {
    "down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k": "input_blocks.1.1.transformer_blocks.0.attn2.to_k",
    "down_blocks_0_attentions_0_transformer_blocks_0_ff_net_2": "input_blocks.1.1.transformer_blocks.0.ff.net.2",
    "down_blocks_0_attentions_0_transformer_blocks_0_norm2": "input_blocks.1.1.transformer_blocks.0.norm2",
    "down_blocks_0_attentions_0_proj_in": "input_blocks.1.1.proj_in",
    "down_blocks_0_resnets_0_norm1": "input_blocks.1.0.in_layers.0",
    "down_blocks_0_resnets_0_conv1": "input_blocks.1.0.in_layers.2",
    "down_blocks_0_downsamplers_0_conv": "input_blocks.3.0.op",
}
# Rounded to float32 on the way: inside the program, or (the bias of `peft_bias_all`) in the adapter's file.
TOLERANCE = {
    **dict.fromkeys(("diag_oft", "diag_oft_rescaled", "peft_oft", "peft_oft_exact", "peft_oft_block_share"), 5e-7),
    **dict.fromkeys(("peft_boft", "peft_boft_two_stage"), 5e-7),
    **dict.fromkeys(("flux_kohya_fused", "flux_bfl_control"), 2e-7),
    "peft_bias_all": 6e-8,
}
# Fused weights and two sets of names: which rows a module means is no matter of the adapter.
BY_NAMES = {"flux_diffusers_peft", "sdxl_te2_openclip"}
# LyCORIS' DoRA at other strengths follows a rule under which strength 0 is not the base.
ONLY_FULL = {"dora_loha", "dora_lora_in"}


def tensor_name(stem: str, param: str, base: dict) -> str | None:
    """The base's tensor that a piece of a golden adapter means; None for none."""
    if stem.startswith("base_model.model."):
        name = f"{stem.removeprefix('base_model.model.')}.{param}"
    elif (module := SD15.get(stem.removeprefix("lora_unet_"))) is not None:
        name = f"model.diffusion_model.{module}.{param}"
    else:
        squashed = f"{stem}.{param}".replace(".", "_").removeprefix("lora_unet_")
        name = next((key for key in base if key.replace(".", "_") == squashed), "")
    return name if name in base else None


def widened(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Zeros beside the columns that the base has."""
    if weight.shape == shape:
        return weight
    wide = weight.new_zeros(shape)
    wide[tuple(slice(extent) for extent in weight.shape)] = weight
    return wide


@pytest.mark.parametrize("name", sorted(set(golden.CASES) - BY_NAMES))
def test_the_program_that_made_it_agrees(name):
    case = golden.load(name)
    assert case.adapter.leftover == ()
    assert [key for key, _ in case.adapter.ignored] == [key for key in case.tensors if ".base_layer.weight" in key]
    by_tensor: dict = {}
    for piece in case.adapter.pieces:
        target = tensor_name(piece.stem, piece.param, case.base)
        assert target is not None or piece.settings.get("optional"), piece
        by_tensor.setdefault(target, []).append(piece)
    by_tensor.pop(None, None)
    for strength, expected in case.expected.items():
        assert by_tensor.keys() == expected.keys()
        if name in ONLY_FULL and strength != "1.0":
            continue
        for key, want in expected.items():
            base = widened(case.base[key].double(), want.shape)
            got = golden.baked(base, by_tensor[key], case.tensors, float(strength))
            limit = TOLERANCE.get(name, 1e-12)
            error = (got - want).norm() / want.norm()
            assert error <= limit, f"{strength} {key}: {float(error)}"
            assert not torch.equal(base, want.double())


@pytest.mark.parametrize("name", sorted(golden.CASES))
def test_strength_0_is_the_base(name):
    case = golden.load(name)
    for piece in case.adapter.pieces:
        target = tensor_name(piece.stem, piece.param, case.base)
        format = golden.FORMATS[piece.format]
        if target is None or format.apply is None:
            continue
        weight = case.base[target].double()
        assert torch.equal(format.apply(weight, golden.parts_of(piece, case.tensors), piece.settings, 0.0), weight)


@pytest.mark.parametrize("name", golden.MORE)
def test_formats_that_are_seldom_met(name):
    case = golden.load_more(name)
    assert case.adapter.leftover == ()
    wanted = "bias" if name.endswith("_bias") else None
    for param in ("gate_up_proj", "down_proj"):
        wanted = param if param in name else wanted
    pieces = [piece for piece in case.adapter.pieces if piece.param == (wanted or "weight")]
    assert len(pieces) == 1
    got = golden.baked(case.base, pieces, case.tensors, case.strength)
    limit = 5e-7 if case.expected.dtype == torch.float32 else 1e-12
    assert (got - case.expected).norm() / case.expected.norm() <= limit
    assert (got - case.base).norm() / case.base.norm() > 1e-3
