"""What a tuned model has more than its base, as a LoRA: names, ranks, errors, and what it cannot hold."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge.errors import MergeError
from lib_merge.lora import extract_lora
from lib_merge.merge import bake
from tests.adapters.golden import ROOT
from tests.lora.files import deltas, generator, relative

SD15, CLIP_G, FLUX, LLAMA = (
    ROOT / f"base_{name}_tiny.safetensors" for name in ("sd15", "sdxl_clip_g", "flux", "llama")
)
K = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def tuned(base, path, change=None, dtype=torch.float32, size=0.01, only=None):
    """The base with random changes, in that dtype; returns path and base in the same dtype."""
    random = generator(5)
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(base).items()}
    own = path.with_name(f"base_{path.name}")
    save_file(tensors, own)
    moved = {}
    for key, tensor in tensors.items():
        step = change(key, tensor) if change else torch.randn(tensor.shape, generator=random) * size
        moved[key] = tensor if only is not None and key not in only else (tensor.float() + step).to(dtype)
    save_file(moved, path)
    return path, own


@pytest.mark.parametrize("model", [SD15, CLIP_G, FLUX], ids=["sd15", "clip_g", "flux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_at_full_rank_base_and_lora_are_the_tuned_model(tmp_path, model, dtype):
    after, before = tuned(model, tmp_path / "tuned.safetensors", dtype=dtype)
    out = tmp_path / "lora.safetensors"
    extract_lora(after, before, out=out, rank=4096, store_diffs=True)
    bake(before, out, out=tmp_path / "baked.safetensors")
    want, start, got = (load_file(path) for path in (after, before, tmp_path / "baked.safetensors"))
    for key, tensor in want.items():
        change = (tensor.double() - start[key].double()).abs()
        if tensor.dim() > 1 and "embedding" not in key:
            ulp = EPS[dtype] * tensor.double().abs().clamp(min=1e-30)
            off = (got[key].double() - tensor.double()).abs()
            if dtype == torch.float32:
                assert bool((off <= 4e-6 * change.max() + ulp).all()), key
            else:
                matrix = (tensor.double() - start[key].double()).reshape(tensor.shape[0], -1)
                spectral = float(torch.linalg.matrix_norm(matrix, 2))
                error = torch.linalg.matrix_norm((got[key].double() - tensor.double()).reshape(matrix.shape), 2)
                rounding = float(ulp.norm())
                assert float(error) <= 4 * EPS[dtype] * spectral + rounding, key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models_work(tmp_path, dtype):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", dtype=dtype)
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=4)
    tensors = load_file(tmp_path / "lora.safetensors")
    assert {tensor.dtype for key, tensor in tensors.items() if "lora_" in key and "alpha" not in key} == {dtype}
    assert made.modules == len(deltas(tmp_path / "lora.safetensors"))


@pytest.mark.parametrize("exact", [False, True])
def test_a_difference_of_low_rank_comes_back(tmp_path, exact):
    random = generator(6)

    def change(key, tensor):
        matrix = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[:, None]
        if tensor.dim() < 2:
            return torch.zeros_like(tensor)
        up, down = (torch.randn(n, m, generator=random) for n, m in ((matrix.shape[0], 4), (4, matrix.shape[1])))
        return (up @ down).reshape(tensor.shape) * 0.01

    after, before = tuned(SD15, tmp_path / "tuned.safetensors", change)
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=4, exact=exact)
    assert made.ranks == {4: 6}
    assert made.error <= 1e-4
    assert made.worst[1] <= 1e-4
    clamped = extract_lora(after, before, out=tmp_path / "clamped.safetensors", rank=4, clamp=0.95)
    assert clamped.error > 0.01  # clamping is off unless it is asked for


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_a_fixed_rank_is_the_best_of_that_rank_and_its_error_is_told(tmp_path, rank):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K})
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=rank)
    change = load_file(after)[K].double() - load_file(before)[K].double()
    s = torch.linalg.svdvals(change)
    best = float((s[rank:] ** 2).sum().sqrt() / s.norm())
    (delta,) = deltas(tmp_path / "lora.safetensors").values()
    assert abs(relative(delta, change) - best) <= 1e-5
    assert made.worst == (pytest.approx(made.worst[0]), pytest.approx(relative(delta, change), rel=1e-3))
    assert float(load_file(tmp_path / "lora.safetensors")[f"{made.worst[0]}.alpha"]) == rank


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
def test_keep_takes_the_smallest_rank_that_holds_the_share(tmp_path, keep):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K})
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors", keep=keep, rank=2)
    s = torch.linalg.svdvals(load_file(after)[K].double() - load_file(before)[K].double()) ** 2
    want = int((s.cumsum(0) < keep**2 * s.sum()).sum()) + 1
    assert made.ranks == {want: 1}
    assert made.error <= math.sqrt(1 - keep**2) + 1e-6


def test_names_are_those_that_web_uis_load(tmp_path):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=4, conv_rank=2)
    tensors = load_file(tmp_path / "lora.safetensors")
    stems = {key.split(".")[0] for key in tensors}
    assert {key.split(".", 1)[1] for key in tensors} == {"lora_up.weight", "lora_down.weight", "alpha"}
    assert "lora_te_text_model_encoder_layers_0_self_attn_q_proj" in stems
    assert "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k" in stems
    conv = "lora_unet_down_blocks_0_resnets_0_conv1"
    assert tensors[f"{conv}.lora_down.weight"].shape == (2, 20, 3, 3)
    assert tensors[f"{conv}.lora_up.weight"].shape == (24, 2, 1, 1)
    proj = "lora_unet_down_blocks_0_attentions_0_proj_in"
    assert tensors[f"{proj}.lora_down.weight"].shape == (4, 24, 1, 1)  # the rank of matrices


def test_open_clip_s_projections_are_split_into_q_k_and_v(tmp_path):
    key = "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"
    after, before = tuned(CLIP_G, tmp_path / "tuned.safetensors", only={key})
    extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=8)
    change = load_file(after)[key].double() - load_file(before)[key].double()
    got = deltas(tmp_path / "lora.safetensors")
    stem = "lora_te2_text_model_encoder_layers_0_self_attn_{}_proj"
    assert got.keys() == {stem.format(part) for part in "qkv"}
    for number, part in enumerate("qkv"):
        assert relative(got[stem.format(part)], change[8 * number : 8 * number + 8]) <= 1e-6


def test_a_language_model_gives_a_peft_folder(tmp_path):
    after, before = tuned(LLAMA, tmp_path / "tuned.safetensors")
    made = extract_lora(after, before, out=tmp_path / "lora", rank=3)
    assert (tmp_path / "lora" / "adapter_config.json").is_file()
    got = deltas(tmp_path / "lora" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.mlp.down_proj"
    change = (
        load_file(after)["model.layers.1.mlp.down_proj.weight"].double()
        - load_file(before)["model.layers.1.mlp.down_proj.weight"].double()
    )
    s = torch.linalg.svdvals(change)
    assert abs(relative(got[stem], change) - float((s[3:] ** 2).sum().sqrt() / s.norm())) <= 1e-5
    assert {row["key"] for row in made.rows if row["action"] == "not in LoRA"} >= {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }


def test_what_a_lora_cannot_hold_is_listed_with_its_size_and_stored_on_request(tmp_path):
    norm = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.norm2.weight"
    bias = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.2.bias"
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K, norm, bias})
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors", rank=64)
    lost = {row["key"]: row for row in made.rows if row["action"] == "not in LoRA"}
    assert lost.keys() == {norm, bias}
    for key, row in lost.items():
        change = load_file(after)[key].double() - load_file(before)[key].double()
        assert row["norm_diff"] == pytest.approx(float(change.norm()), rel=1e-5)
    assert any("2 differences" in text for text in made.warnings)
    stored = extract_lora(after, before, out=tmp_path / "all.safetensors", rank=64, store_diffs=True)
    assert not [row for row in stored.rows if row["action"] == "not in LoRA"]
    got = load_file(tmp_path / "all.safetensors")
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_"
    for key, name in ((norm, f"{stem}norm2.diff"), (bias, f"{stem}ff_net_2.diff_b")):
        torch.testing.assert_close(got[name], load_file(after)[key] - load_file(before)[key])


def test_unchanged_tensors_and_small_ones_are_left_out(tmp_path):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K})
    assert extract_lora(after, before, out=tmp_path / "a.safetensors", rank=2).modules == 1
    with pytest.raises(MergeError, match="no difference"):
        extract_lora(after, before, out=tmp_path / "b.safetensors", rank=2, min_diff=1.0)
    with pytest.raises(MergeError, match="no difference"):
        extract_lora(before, before, out=tmp_path / "c.safetensors", rank=2)


def test_the_same_bytes_for_any_number_of_threads(tmp_path):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    outs = [tmp_path / f"{threads}.safetensors" for threads in (1, 3)]
    for out, threads in zip(outs, (1, 3), strict=True):
        extract_lora(after, before, out=out, rank=2, threads=threads)
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"), [({"rank": 0}, "rank must"), ({"keep": 2.0}, "keep must"), ({"clamp": -1}, "clamp must")]
)
def test_wrong_wishes_are_refused(tmp_path, arguments, said):
    with pytest.raises(MergeError, match=said):
        extract_lora(SD15, SD15, out=tmp_path / "out.safetensors", **arguments)


def test_models_of_different_families_have_nothing_in_common(tmp_path):
    with pytest.raises(MergeError, match="no tensors in common"):
        extract_lora(SD15, FLUX, out=tmp_path / "out.safetensors")
