"""Other programs' merges, against what those programs made of the same files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from lib_merge.errors import MergeError
from lib_merge.lora import merge_loras, resize_lora
from lib_merge.lora._compat import COMPATIBLE, Part, made, spend
from tests.adapters.golden import ROOT
from tests.lora.files import deltas, make, relative

KOHYA = ROOT / "kohya_merge"
A, B, C = (KOHYA / f"{name}.safetensors" for name in ("a_r4_alpha4", "b_r4_alpha_1_2_missing", "c_r6_alpha3"))

MERGES = {
    "kohya_merge_a1.0": ("kohya_merge", [(A, 1.0)], {}),
    "kohya_merge_a0.5": ("kohya_merge", [(A, 0.5)], {}),
    "kohya_merge_a0.5_b0.5": ("kohya_merge", [(A, 0.5), (B, 0.5)], {}),
    "kohya_merge_a0.8_b-0.4": ("kohya_merge", [(A, 0.8), (B, -0.4)], {}),
    "kohya_concat_a0.5_b0.5": ("kohya_concat", [(A, 0.5), (B, 0.5)], {}),
    "kohya_concat_a1_c1": ("kohya_concat", [(A, 1.0), (C, 1.0)], {}),
}
SVDS = {
    "kohya_svd_a0.5_b0.5_r3": ([(A, 0.5), (B, 0.5)], {"rank": 3}),
    "kohya_svd_a0.5_b0.5_r8": ([(A, 0.5), (B, 0.5)], {"rank": 8}),
    "kohya_svd_a0.5_b0.5_r8_noclamp": ([(A, 0.5), (B, 0.5)], {"rank": 8, "clamp": 1.0}),
    "kohya_svd_a1_c1_r10": ([(A, 1.0), (C, 1.0)], {"rank": 10}),
}
RESIZES = {
    "kohya_resize_fixed2_c": {"rank": 2},
    "kohya_resize_ratio3_c": {"rank": 6, "ratio": 3},
    "kohya_resize_cum0.7_c": {"rank": 6, "cumulative": 0.7},
    "kohya_resize_fro0.9_c": {"rank": 6, "frobenius": 0.9},
}


@pytest.mark.parametrize("name", MERGES)
def test_kohya_s_merges_factor_by_factor(tmp_path, name):
    method, loras, params = MERGES[name]
    merge_loras(*loras, out=tmp_path / "out.safetensors", method=method, params=params)
    got, want = load_file(tmp_path / "out.safetensors"), load_file(KOHYA / f"{name}.safetensors")
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key].double(), tensor.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SVDS)
def test_kohya_s_svd(tmp_path, name):
    loras, params = SVDS[name]
    merge_loras(*loras, out=tmp_path / "out.safetensors", method="kohya_svd", params=params)
    got, want = deltas(tmp_path / "out.safetensors"), deltas(KOHYA / f"{name}.safetensors")
    assert got.keys() == want.keys()
    for stem in want:
        assert relative(got[stem], want[stem]) <= 1e-5, stem
        assert load_file(tmp_path / "out.safetensors")[f"{stem}.lora_down.weight"].shape == (
            load_file(KOHYA / f"{name}.safetensors")[f"{stem}.lora_down.weight"].shape
        )


@pytest.mark.parametrize("name", RESIZES)
def test_kohya_s_resize(tmp_path, name):
    resize_lora(C, out=tmp_path / "out.safetensors", rule="kohya_resize", params=RESIZES[name])
    got, want = load_file(tmp_path / "out.safetensors"), load_file(KOHYA / f"{name}.safetensors")
    assert {key: tensor.shape for key, tensor in got.items()} == {key: tensor.shape for key, tensor in want.items()}
    for key, tensor in want.items():
        if key.endswith(".alpha"):
            assert float(got[key]) == pytest.approx(float(tensor), rel=1e-6)
    changes, wanted = deltas(tmp_path / "out.safetensors"), deltas(KOHYA / f"{name}.safetensors")
    assert all(relative(changes[stem], wanted[stem]) <= 1e-5 for stem in wanted)


def test_one_lora_by_supermerger_s_same_strength_is_exact_and_two_are_not(tmp_path):
    out = tmp_path / "out.safetensors"
    merge_loras((A, -0.5), out=out, method="supermerger_same_strength")
    assert all(relative(delta, -0.5 * deltas(A)[stem]) <= 1e-6 for stem, delta in deltas(out).items())
    two = merge_loras((A, 0.5), (B, 0.5), out=tmp_path / "two.safetensors", method="supermerger_same_strength")
    assert all(row["svd_error"] > 0.1 for row in two.rows)
    # Hand calculation: factors weighted by √(αᵢ/α₁)·√|wᵢ|, added.
    got, a, b = load_file(tmp_path / "two.safetensors"), load_file(A), load_file(B)
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    ratio = (float(b[f"{stem}.alpha"]) / float(a[f"{stem}.alpha"])) ** 0.5
    for part in ("up", "down"):
        key = f"{stem}.lora_{part}.weight"
        torch.testing.assert_close(got[key], 0.5**0.5 * (a[key] + ratio * b[key]), rtol=1e-5, atol=1e-6)


def test_the_error_against_the_exact_sum_is_shown(tmp_path):
    for name, errors in {
        "kohya_merge_a0.5": {0.5},
        "kohya_concat_a0.5_b0.5": {0.75},
        "kohya_merge_a1.0": {0.0},
    }.items():
        method, loras, params = MERGES[name]
        done = merge_loras(*loras, out=tmp_path / f"{name}.safetensors", method=method, params=params)
        assert {round(row["svd_error"], 4) for row in done.rows} == errors
        assert all(("differs by" in row["note"]) == (row["svd_error"] > 1e-6) for row in done.rows)


def test_methods_for_one_rank_refuse_others(tmp_path):
    with pytest.raises(MergeError, match="one rank"):
        merge_loras((A, 1.0), (C, 1.0), out=tmp_path / "out.safetensors", method="kohya_merge")


PEFT = ROOT / "peft_add_weighted"
# file -> (method, parameters); the weights are 0.7 and −0.4, alphas 8 and 2 at rank 4.
PEFT_CASES = {
    "linear": ("peft_linear", {}),
    "cat": ("peft_cat", {}),
    "svd_r3": ("peft_svd", {"rank": 3}),
    "svd_r8": ("peft_svd", {"rank": 8}),
    "ties": ("peft_ties", {}),
    "ties_freq": ("peft_ties", {"frequency": True}),
    "ties_svd_r8": ("peft_ties_svd", {"rank": 8}),
    "magnitude_prune": ("peft_magnitude_prune", {}),
    "magnitude_prune_svd_r8": ("peft_magnitude_prune_svd", {"rank": 8}),
    "dare_linear": ("peft_dare_linear", {}),
    "dare_ties": ("peft_dare_ties", {}),
    "dare_linear_svd_r8": ("peft_dare_linear_svd", {"rank": 8}),
    "dare_ties_svd_r8": ("peft_dare_ties_svd", {"rank": 8}),
}


@pytest.mark.parametrize("name", PEFT_CASES)
def test_peft_s_merges(name):
    method, params = PEFT_CASES[name]
    inputs, want = load_file(PEFT / "inputs.safetensors"), load_file(PEFT / f"{name}.safetensors")
    draws = torch.Generator().manual_seed(11)  # as torch.manual_seed(11) right before PEFT's call
    rank = params.get("rank", 4)
    spend([(18, 12, rank), (8, 45, rank)], draws)
    for layer in ("fc", "cv"):
        parts = []
        for adapter, weight, scale in (("a", 0.7, 2.0), ("b", -0.4, 0.5)):
            up, down = (inputs[f"{layer}.{adapter}.{part}"].flatten(1) for part in "BA")
            parts.append(Part(up, down, scale * 4, weight, scale))
        up, down, alpha = made(method, parts, params, draws)
        assert alpha == down.shape[0]
        torch.testing.assert_close(up @ down, want[f"{layer}.delta"].flatten(1), rtol=1e-9, atol=1e-9)
        if not method.endswith("svd"):
            torch.testing.assert_close(up, want[f"{layer}.B"].flatten(1), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(down, want[f"{layer}.A"].flatten(1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [id for id, params in COMPATIBLE.items() if "rank" not in params])
def test_every_method_runs_on_files(tmp_path, method):
    a, b = make(tmp_path / "a.safetensors"), make(tmp_path / "b.safetensors", seed=1)
    done = merge_loras((a, 0.5), (b, 0.5), out=tmp_path / "out.safetensors", method=method, seed=3)
    assert done.modules == 3
    again = merge_loras((a, 0.5), (b, 0.5), out=tmp_path / "again.safetensors", method=method, seed=3)
    assert done.output.read_bytes() == again.output.read_bytes()
