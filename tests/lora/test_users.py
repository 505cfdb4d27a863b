"""Faults that users of comparable tools reported of LoRA merges, extractions and resizes, tried on ours."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge import bake, extract_lora, merge_loras, resize_lora
from lib_merge.adapters import read
from lib_merge.lora._compat import COMPATIBLE
from tests.adapters.golden import ROOT, header
from tests.lora.files import LINEAR, deltas, make, relative
from tests.lora.test_extract import EPS, FLUX, SD15, K, tuned


def test_factors_are_not_added_by_themselves(tmp_path):
    """Two LoRAs of rank 4 on 16×16 at 0.7 and 0.4: the sum of the changes, not of the factors."""
    random = torch.Generator().manual_seed(1)
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"{number}.safetensors")
        stem = "lora_unet_input_blocks_1_1_proj_in"
        up, down = torch.randn(16, 4, generator=random), torch.randn(4, 16, generator=random)
        save_file({f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}, paths[-1])
    merge_loras((paths[0], 0.7), (paths[1], 0.4), out=tmp_path / "out.safetensors")
    (got,), (one,), (two,) = (deltas(path).values() for path in (tmp_path / "out.safetensors", *paths))
    assert relative(got, 0.7 * one + 0.4 * two) < 1e-5


def test_what_is_written_reads_back_with_ranks_and_alphas_that_agree(tmp_path):
    """LoRAs of ranks that differ from module to module, in kohya's names and in a PEFT folder."""
    a, b = make(tmp_path / "a.safetensors", 4, stems=(LINEAR,)), make(tmp_path / "b.safetensors", 8, seed=1)
    merge_loras(a, b, out=tmp_path / "out.safetensors")
    for piece in read(*header(tmp_path / "out.safetensors")).pieces:
        assert piece.rank == (12 if piece.stem == LINEAR else 8)
        stored = float(load_file(tmp_path / "out.safetensors")[piece.keys["alpha"]])
        assert stored == (12 if piece.stem == LINEAR else 2)
    merge_loras(ROOT / "peft_patterns", ROOT / "peft_lora", out=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    pieces = read(*header(tmp_path / "out" / "adapter_model.safetensors"), config).pieces
    assert len({piece.rank for piece in pieces}) > 1
    assert all(piece.settings["rank"] == piece.settings["alpha"] == piece.rank for piece in pieces)


SENSITIVE = [("rank", (2, 3)), ("max_rank", (2, 3)), ("max_error", (0.2, 0.5))]


@pytest.mark.parametrize(("name", "values"), SENSITIVE, ids=[name for name, _ in SENSITIVE])
def test_every_option_of_a_merge_changes_the_result(tmp_path, name, values):
    a, b = make(tmp_path / "a.safetensors"), make(tmp_path / "b.safetensors", seed=1)
    made = [merge_loras(a, b, out=tmp_path / f"{value}.safetensors", **{name: value}).output for value in values]
    assert made[0].read_bytes() != made[1].read_bytes()
    one, two = (deltas(path)[LINEAR] for path in made)
    assert relative(one, two) > 1e-3


INNER = {"rank": (2, 3), "clamp": (0.7, 0.8), "density": (0.4, 0.6), "frequency": (False, True)}
CASES = [(method, name) for method, params in COMPATIBLE.items() for name in params]


@pytest.mark.parametrize(("method", "name"), CASES, ids=[f"{method}-{name}" for method, name in CASES])
def test_every_parameter_of_another_program_s_merge_changes_the_result(tmp_path, method, name):
    loras = [make(tmp_path / f"{n}.safetensors", seed=n, stems=(LINEAR,)) for n in range(3)]
    base = {"rank": 4} if "rank" in COMPATIBLE[method] else {}
    made = []
    for value in INNER[name]:
        out = tmp_path / f"out_{value}.safetensors"
        merge_loras(*loras, out=out, method=method, params={**base, name: value})
        made.append(deltas(out)[LINEAR])
    assert relative(*made) > 1e-4


EXTRACTION = {"rank": (2, 3), "keep": (0.5, 0.8), "clamp": (0.7, 0.9), "min_diff": (0.0, 0.036), "conv_rank": (1, 2)}


@pytest.mark.parametrize(("name", "values"), EXTRACTION.items(), ids=EXTRACTION)
def test_every_option_of_an_extraction_changes_the_result(tmp_path, name, values):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    made = []
    for value in values:
        out = tmp_path / f"{value}.safetensors"
        extract_lora(after, before, out=out, **{"rank": 4, name: value})
        made.append({key: tensor.clone() for key, tensor in load_file(out).items()})
    same = made[0].keys() == made[1].keys() and all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    assert not same


@pytest.mark.parametrize("keep", [0.5, 0.9])
@pytest.mark.parametrize("rule", ["ratio", "cumulative", "frobenius"])
def test_a_layer_smaller_than_the_rank_is_no_obstacle(tmp_path, rule, keep):
    random = torch.Generator().manual_seed(1)
    stem = "lora_unet_input_blocks_1_1_proj_in"
    tensors = {
        f"{stem}.lora_up.weight": torch.randn(8, 6, generator=random),
        f"{stem}.lora_down.weight": torch.randn(6, 6, generator=random),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    resize_lora(tmp_path / "a.safetensors", out=tmp_path / "share.safetensors", rule=rule, keep=keep)
    resize_lora(tmp_path / "a.safetensors", out=tmp_path / "all.safetensors", rank=64)
    assert torch.equal(deltas(tmp_path / "all.safetensors")[stem], deltas(tmp_path / "a.safetensors")[stem])


def test_an_extraction_by_default_is_the_difference_at_full_strength(tmp_path):
    """No strengths, quantiles or thresholds of another page: base + LoRA = tuned where the rank reaches."""
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    made = extract_lora(after, before, out=tmp_path / "lora.safetensors")
    small = {
        key: tensor
        for key, tensor in load_file(after).items()
        if tensor.dim() > 1 and min(tensor.flatten(1).shape) <= 32
    }
    bake(before, tmp_path / "lora.safetensors", out=tmp_path / "baked.safetensors")
    got = load_file(tmp_path / "baked.safetensors")
    assert len(small) == made.modules
    for key, tensor in small.items():
        torch.testing.assert_close(got[key], tensor, rtol=2**-22, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_saved_and_loaded_it_does_what_it_did(tmp_path, dtype):
    """A linear layer, a convolution and a fused projection: what is baked from the file is what was computed."""
    for model in (SD15, FLUX):
        after, before = tuned(model, tmp_path / f"{model.stem}.safetensors", dtype=dtype)
        lora, baked = tmp_path / f"{model.stem}_lora.safetensors", tmp_path / f"{model.stem}_baked.safetensors"
        extract_lora(after, before, out=lora, rank=4096)
        bake(before, lora, out=baked)
        tensors = load_file(lora)
        kinds = {tensor.dtype for key, tensor in tensors.items() if not key.endswith(".alpha")}
        assert kinds == {dtype}
        start = load_file(before)
        for key, tensor in load_file(after).items():
            if tensor.dim() > 1:
                change = (tensor.double() - start[key].double()).abs()
                off = (load_file(baked)[key].double() - tensor.double()).abs()
                ulp = EPS[dtype] * tensor.double().abs().clamp(min=2.0**-14)
                assert bool((off <= ulp + EPS[dtype] / 2 * change).all()), key


def test_a_stored_alpha_of_0_counts_as_the_rank_and_is_told(tmp_path):
    a = make(tmp_path / "a.safetensors", 4, 0.0)
    made = merge_loras((a, 0.5), out=tmp_path / "out.safetensors")
    assert any("alpha 0" in text for text in made.warnings)
    tensors = load_file(a)
    up, down = (tensors[f"{LINEAR}.lora_{part}.weight"].double() for part in ("up", "down"))
    assert relative(deltas(tmp_path / "out.safetensors")[LINEAR], 0.5 * up @ down) <= 1e-12


def test_another_device_is_not_taken_in_silence(tmp_path):
    if not torch.cuda.is_available():
        return
    made = merge_loras(make(tmp_path / "a.safetensors"), out=tmp_path / "out.safetensors", device="cuda")
    assert any("CPU" in text for text in made.warnings)


def test_bf16_and_fp16_models_are_no_obstacle_to_a_singular_value_decomposition(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        after, before = tuned(SD15, tmp_path / f"{dtype}.safetensors", dtype=dtype, only={K})
        for exact in (False, True):
            out = tmp_path / f"{dtype}{exact}.safetensors"
            assert extract_lora(after, before, out=out, rank=2, exact=exact).modules == 1
