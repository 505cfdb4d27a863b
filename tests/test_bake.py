"""Baking end to end: numbers against float64 formulas, order, filters, recipes, folders, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lib_merge
from lib_merge import NumberError, PlanError, RecipeError
from lib_merge.cli import main
from lib_merge.cli.parse import lora_argument
from tests.support import raw, read, read_raw, values, write, write_raw

UNET = "model.diffusion_model."
BLOCK = "input_blocks.1.1.transformer_blocks.0"
Q, K, V = (f"{UNET}{BLOCK}.attn1.to_{name}.weight" for name in "qkv")
CROSS = f"{UNET}{BLOCK}.attn2.to_k.weight"
CONV = f"{UNET}input_blocks.0.0.weight"
BIAS = f"{UNET}{BLOCK}.attn1.to_out.0.bias"
OUT = f"{UNET}{BLOCK}.attn1.to_out.0.weight"
SD = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_"
STEM = {Q: f"{SD}attn1_to_q", K: f"{SD}attn1_to_k", V: f"{SD}attn1_to_v", CROSS: f"{SD}attn2_to_k"}
STEM |= {OUT: f"{SD}attn1_to_out_0", CONV: "lora_unet_conv_in"}
SIZE = {Q: (900, 640), K: (640, 640), V: (8, 8), CROSS: (24, 768), CONV: (8, 4, 3, 3), OUT: (8, 8), BIAS: (8,)}
# The largest take several blocks of rows.


def base(path: Path, dtype: str = "F32", **more: Any) -> Path:
    tensors = {key: raw(dtype, values(shape, number)) for number, (key, shape) in enumerate(SIZE.items())}
    return write_raw(path, {**tensors, **more})


def lora(path: Path, *keys: str, seed: int = 50, rank: int = 4, **more: Any) -> Path:
    tensors: dict[str, Any] = {}
    for number, key in enumerate(keys):
        out, into, *kernel = SIZE[key]
        tensors[f"{STEM[key]}.lora_down.weight"] = values((rank, into, *kernel), seed + number)
        tensors[f"{STEM[key]}.lora_up.weight"] = values((out, rank, *[1 for _ in kernel]), seed + 20 + number)
        tensors[f"{STEM[key]}.alpha"] = np.float32(rank / 2)
    return write(path, {**tensors, **more})


def delta(path: Path, key: str) -> np.ndarray:
    """alpha/rank·up·down in float64, in the shape of the weight."""
    tensors = read(path)
    up, down, alpha = (tensors[f"{STEM[key]}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
    rank = down.shape[0]
    product = up.reshape(len(up), rank).astype(np.float64) @ down.reshape(rank, -1).astype(np.float64)
    return product.reshape(-1, *down.shape[1:]) * (alpha.item() / rank)


def baked(tmp_path: Path, checkpoint: Path, *loras: Any, **how: Any) -> Path:
    out = tmp_path / "out.safetensors"
    lib_merge.bake(checkpoint, *loras, out=out, overwrite=True, fsync=False, **how)
    return out


def same_but(one: Path, other: Path) -> set[str]:
    """Keys that differ in a byte, in dtype or in shape."""
    first, second = read_raw(one)[1], read_raw(other)[1]
    assert list(first) == list(second)
    return {key for key in first if first[key] != second[key]}


# Numbers


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_two_loras_are_the_exact_sum_rounded_once(dtype, tmp_path):
    a, one = base(tmp_path / "a.safetensors", dtype), lora(tmp_path / "one.safetensors", Q, K, CONV)
    two = lora(tmp_path / "two.safetensors", Q, V, seed=90, rank=8)
    out = baked(tmp_path, a, (one, 0.7), (two, -0.4))
    assert same_but(a, out) == {Q, K, V, CONV}
    before, after = read(a), read(out)
    for key in (Q, K, V, CONV):
        total = before[key].astype(np.float64)
        total += 0.7 * delta(one, key) if key != V else 0
        total += -0.4 * delta(two, key) if key in (Q, V) else 0
        names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        want = torch.from_numpy(total).to(names[dtype]).double().numpy()
        got = after[key].astype(np.float64)
        if dtype in ("F64", "F32"):  # computed in float64
            np.testing.assert_allclose(
                got, want, rtol=1e-13 if dtype == "F64" else 0, atol=1e-15 if dtype == "F64" else 0
            )
        else:  # float32 may fall on the other side of a tie
            away = got != want
            assert away.mean() < 1e-3
            np.testing.assert_allclose(got, want, rtol=2 ** (-10 if dtype == "F16" else -7), atol=1e-7)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_the_same_bytes_for_any_number_of_threads_and_any_tile(dtype, tmp_path):
    a, one = base(tmp_path / "a.safetensors", dtype), lora(tmp_path / "one.safetensors", *STEM)
    more = {f"{STEM[V]}.dora_scale": np.abs(values((8, 1), 5)) + 1}
    two = lora(tmp_path / "two.safetensors", Q, V, seed=90, rank=8, **more)
    first = read_raw(baked(tmp_path, a, one, (two, 0.3), threads=1))
    for how in ({"threads": 2}, {"threads": 5}, {"threads": 2, "tile": 1 << 10}, {"threads": 1, "report": True}):
        assert read_raw(baked(tmp_path, a, one, (two, 0.3), **how)) == first


def test_full_differences_norms_and_biases(tmp_path):
    norm = f"{UNET}{BLOCK}.norm1.weight"
    a = base(tmp_path / "a.safetensors", **{norm: raw("F32", values((8,), 70))})
    diff, diff_b, w_norm = values(SIZE[Q], 1), values((8,), 2), values((8,), 3)
    one = write(
        tmp_path / "full.safetensors",
        {f"{STEM[Q]}.diff": diff, f"{STEM[OUT]}.diff_b": diff_b, f"{SD}norm1.w_norm": w_norm},
    )
    before, after = read(a), read(out := baked(tmp_path, a, (one, 0.5)))
    assert same_but(a, out) == {Q, BIAS, norm}
    for key, change in ((Q, diff), (BIAS, diff_b), (norm, w_norm)):
        np.testing.assert_array_equal(after[key], (before[key] + 0.5 * change.astype(np.float64)).astype("f4"))


@pytest.mark.parametrize("second", ["whole", "low rank"])
def test_lokr_over_several_blocks_of_rows(second, tmp_path):
    a = base(tmp_path / "a.safetensors")
    left, right = values((9, 8), 1), values((100, 80), 2)
    if second == "whole":
        parts = {"lokr_w1": left, "lokr_w2": right}
    else:
        parts = {"lokr_w1": left, "lokr_w2_a": values((100, 4), 3), "lokr_w2_b": values((4, 80), 4)}
        right = parts["lokr_w2_a"].astype(np.float64) @ parts["lokr_w2_b"]
    one = write(tmp_path / "lokr.safetensors", {f"{STEM[Q]}.{name}": value for name, value in parts.items()})
    want = read(a)[Q] + 0.5 * np.kron(left.astype(np.float64), right)
    np.testing.assert_array_equal(read(baked(tmp_path, a, (one, 0.5)))[Q], want.astype("f4"))


def test_what_replaces_comes_first_then_sums_then_dora_whatever_the_order_of_the_files(tmp_path):
    a = base(tmp_path / "a.safetensors")
    magnitude = np.abs(values((8, 1), 5)) + 1
    dora = lora(tmp_path / "dora.safetensors", V, seed=1, **{f"{STEM[V]}.dora_scale": magnitude})
    plain = lora(tmp_path / "plain.safetensors", V, seed=2)
    value = values((8, 8), 3)
    setter = write(tmp_path / "set.safetensors", {f"{STEM[V]}.set_weight": value})
    after = read(baked(tmp_path, a, dora, (plain, 0.5), setter))[V]
    weight = value.astype(np.float64) + 0.5 * delta(plain, V)
    summed = weight + delta(dora, V)
    want = magnitude * summed / np.sqrt((summed**2).sum(1, keepdims=True))
    np.testing.assert_allclose(after, want, rtol=3e-7)


def test_merge_with_a_lora_rounds_once(tmp_path):
    a, b = base(tmp_path / "a.safetensors", "BF16"), tmp_path / "b.safetensors"
    write_raw(b, {key: raw("BF16", values(shape, 30 + n)) for n, (key, shape) in enumerate(SIZE.items())})
    one, out = lora(tmp_path / "one.safetensors", Q, CONV), tmp_path / "out.safetensors"
    words = ["merge", a, b, "--alpha", 0.25, "--lora", f"{one}@0.5", "-o", out, "--no-fsync"]
    assert main([str(word) for word in words]) == 0
    left, right, got = read(a), read(b), read(out)
    for key in SIZE:
        mixed = left[key].astype(np.float64) + 0.25 * (right[key].astype(np.float64) - left[key])
        total = mixed + (0.5 * delta(one, key) if key in (Q, CONV) else 0)
        want = torch.from_numpy(total).to(torch.bfloat16).float().numpy()
        assert (got[key] != want).mean() < 1e-3
        np.testing.assert_allclose(got[key], want, rtol=2**-7, atol=1e-7)
    assert lib_merge.verify(out).ok


def test_a_method_that_measures_first_takes_loras_too(tmp_path):
    a, b = base(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    write_raw(b, {key: raw("F32", values(shape, 30 + n)) for n, (key, shape) in enumerate(SIZE.items())})
    one, plain, out = (
        lora(tmp_path / "one.safetensors", Q),
        tmp_path / "plain.safetensors",
        tmp_path / "out.safetensors",
    )
    how = {"method": "comparative_interpolation", "alpha": 0.3, "fsync": False}
    lib_merge.merge(a, b, out=plain, **how)
    lib_merge.merge(a, b, out=out, loras=[(one, 0.5)], **how)
    assert same_but(plain, out) == {Q}
    np.testing.assert_allclose(read(out)[Q], read(plain)[Q] + 0.5 * delta(one, Q), rtol=1e-6, atol=1e-7)


def test_a_recipe_as_model_may_bake(tmp_path):
    a = base(tmp_path / "a.safetensors")
    one, two = lora(tmp_path / "one.safetensors", Q, CONV), lora(tmp_path / "two.safetensors", Q, seed=80)
    inner = {"lib_merge": 1, "task": "bake", "models": {"A": {"file": a.name}}, "loras": [{"file": one.name}]}
    text = {"lib_merge": 1, "task": "bake", "models": {"A": {"recipe": inner}}, "loras": [{"file": two.name}]}
    (tmp_path / "chain.json").write_text(json.dumps(text))
    out = tmp_path / "out.safetensors"
    assert main(["run", str(tmp_path / "chain.json"), "-o", str(out), "--no-fsync"]) == 0
    np.testing.assert_array_equal(
        read(out)[Q], (read(a)[Q].astype(np.float64) + delta(one, Q) + delta(two, Q)).astype("f4")
    )
    assert same_but(a, out) == {Q, CONV}
    assert lib_merge.verify(out).ok


# Shapes


def test_an_adapter_of_four_channels_on_an_inpainting_model(tmp_path):
    wide = values((8, 9, 3, 3), 40)
    a = base(tmp_path / "a.safetensors", **{CONV: raw("F32", wide)})
    one = lora(tmp_path / "one.safetensors", CONV)
    got = read(baked(tmp_path, a, one))[CONV]
    np.testing.assert_array_equal(got[:, :4], (wide[:, :4] + delta(one, CONV)).astype("f4"))
    assert got[:, 4:].tobytes() == wide[:, 4:].tobytes()


def test_an_adapter_with_more_channels_makes_the_first_layer_grow(tmp_path, capsys):
    a = base(tmp_path / "a.safetensors")
    stem = STEM[CONV]
    down, up = values((4, 8, 3, 3), 1), values((8, 4, 1, 1), 2)
    one = write(tmp_path / "one.safetensors", {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up})
    out = tmp_path / "out.safetensors"
    assert main(["bake", str(a), str(one), "-o", str(out), "--no-fsync"]) == 0
    assert "grows from 4 to 8 channels" in capsys.readouterr().out
    want = np.einsum("or,rikl->oikl", up[:, :, 0, 0].astype(np.float64), down.astype(np.float64))
    want[:, :4] += read(a)[CONV]
    np.testing.assert_array_equal(read(out)[CONV], want.astype("f4"))
    assert lib_merge.verify(out).ok


def test_convolution_weights_of_a_linear_layer_and_the_reverse(tmp_path):
    a = base(tmp_path / "a.safetensors", **{V: raw("F32", values((8, 8, 1, 1), 2))})
    one, flat = lora(tmp_path / "one.safetensors", V), lora(tmp_path / "flat.safetensors", OUT)
    stem = STEM[OUT]
    parts = {key: value.reshape(*value.shape, 1, 1) if value.ndim == 2 else value for key, value in read(flat).items()}
    write(tmp_path / "conv.safetensors", parts)
    before, after = read(a), read(baked(tmp_path, a, one, tmp_path / "conv.safetensors"))
    np.testing.assert_array_equal(after[V], (before[V] + delta(one, V)[..., None, None]).astype("f4"))
    np.testing.assert_array_equal(after[OUT], (before[OUT] + delta(flat, OUT)).astype("f4"))
    assert f"{stem}.alpha" in parts


def test_shapes_that_do_not_fit_are_refused_with_both(tmp_path):
    a = base(tmp_path / "a.safetensors")
    stem = STEM[Q]
    wrong = {f"{stem}.lora_down.weight": values((4, 320), 1), f"{stem}.lora_up.weight": values((900, 4), 2)}
    one = write(tmp_path / "one.safetensors", wrong)
    with pytest.raises(PlanError) as caught:
        baked(tmp_path, a, one)
    assert f"{stem} changes [900, 320], but there are [900, 640]" in caught.value.what
    assert caught.value.file == str(one)
    assert not (tmp_path / "out.safetensors").exists()


ODD: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "other ranks": ({"lora_down.weight": (2, 8), "lora_up.weight": (8, 3)}, "different ranks: up 3, down 2"),
    "no rank": ({"lora_down.weight": (0, 8), "lora_up.weight": (8, 0)}, "one of its parts is empty"),
    "loha": ({"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 3), "hada_w2_b": (2, 8)}, "do not fit"),
    "lokr": ({"lokr_w1": (2, 2), "lokr_w2_a": (4, 3), "lokr_w2_b": (2, 4)}, "do not fit"),
    "dora": ({"lora_down.weight": (2, 8), "lora_up.weight": (8, 2), "dora_scale": (5, 1)}, "do not fit"),
}


@pytest.mark.parametrize("name", ODD)
def test_parts_that_contradict_each_other_are_an_error_that_names_the_file(name, tmp_path):
    shapes, said = ODD[name]
    a = base(tmp_path / "a.safetensors")
    one = write(tmp_path / "odd.safetensors", {f"{STEM[V]}.{part}": values(shape, 1) for part, shape in shapes.items()})
    with pytest.raises(lib_merge.MergeError) as caught:
        baked(tmp_path, a, one)
    assert said in caught.value.what
    assert caught.value.file == str(one)
    assert not (tmp_path / "out.safetensors").exists()


def test_the_checkpoint_comes_first(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", V)
    with pytest.raises(lib_merge.MergeError) as caught:
        baked(tmp_path, one, a)
    assert caught.value.hint == "name the checkpoint first, then the LoRAs"


def test_rows_of_a_fused_weight_and_a_fused_module_over_several_weights(tmp_path):
    start = "double_blocks.0.img_attn"
    native = write(
        tmp_path / "native.safetensors",
        {
            f"{start}.qkv.weight": values((24, 8), 1),
            f"{start}.norm.key_norm.scale": values((4,), 2),
            "guidance_in.in_layer.weight": values((8, 8), 3),
            "img_in.weight": values((8, 64), 4),
        },
    )
    attention = "transformer_blocks.0.attn"
    parts = {f"{attention}.to_{name}.weight": values((8, 8), 5 + number) for number, name in enumerate("qkv")}
    parts |= {f"{attention}.add_{name}_proj.weight": values((8, 8), 9) for name in "qkv"}
    parts |= {
        "single_transformer_blocks.0.attn.to_q.weight": values((8, 8), 10),
        "x_embedder.weight": values((8, 64), 11),
    }
    split = write(tmp_path / "split.safetensors", parts)
    up, down = values((8, 2), 20), values((2, 8), 21)
    prefix = "transformer.transformer_blocks.0.attn.to_k"
    one = write(tmp_path / "k.safetensors", {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up})
    got, before = read(baked(tmp_path, native, one)), read(native)
    want = before[f"{start}.qkv.weight"].astype(np.float64)
    want[8:16] += up.astype(np.float64) @ down
    np.testing.assert_array_equal(got[f"{start}.qkv.weight"], want.astype("f4"))
    up = values((24, 2), 22)
    prefix = "lora_unet_double_blocks_0_img_attn_qkv"
    fused = write(tmp_path / "f.safetensors", {f"{prefix}.lora_down.weight": down, f"{prefix}.lora_up.weight": up})
    got, before = read(baked(tmp_path, split, fused)), read(split)
    for number, name in enumerate(("to_q", "to_k", "to_v")):
        key = f"transformer_blocks.0.attn.{name}.weight"
        change = up[8 * number : 8 * number + 8].astype(np.float64) @ down
        np.testing.assert_array_equal(got[key], (before[key] + change).astype("f4"))


def test_a_file_with_a_fused_and_a_split_copy_is_baked_once(tmp_path, capsys):
    layer = "layers.0.attention"
    a = write(
        tmp_path / "a.safetensors",
        {
            f"{layer}.qkv.weight": values((24, 8), 1),
            f"{layer}.out.weight": values((8, 8), 2),
            "cap_embedder.1.weight": values((8, 8), 3),
            "layers.0.adaLN_modulation.0.weight": values((8, 8), 4),
        },
    )
    up, down = values((24, 2), 5), values((2, 8), 6)
    parts = {f"diffusion_model.{layer}.qkv.lora_A.weight": down, f"diffusion_model.{layer}.qkv.lora_B.weight": up}
    for number, name in enumerate("qkv"):
        stem = f"diffusion_model.{layer}.to_{name}"
        parts |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up[8 * number : 8 * number + 8].copy()}
    one, out = write(tmp_path / "one.safetensors", parts), tmp_path / "out.safetensors"
    assert main(["bake", str(a), str(one), "-o", str(out), "--no-fsync"]) == 0
    assert "are left out" in capsys.readouterr().out
    want = values((24, 8), 1) + up.astype(np.float64) @ down
    np.testing.assert_array_equal(read(out)[f"{layer}.qkv.weight"], want.astype("f4"))


def test_scaled_fp8_is_decoded_before_something_is_added(tmp_path, capsys):
    codes = np.array([[1.0, -2.0, 0.5, 448.0]] * 4, "f4")
    coded = {V: raw("F8_E4M3", codes), V.replace(".weight", ".scale_weight"): raw("F32", np.array([0.01], "f4"))}
    a = base(tmp_path / "a.safetensors", **coded)
    stem = STEM[V]
    up, down = values((4, 2), 1), values((2, 4), 2)
    one = write(tmp_path / "one.safetensors", {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up})
    out = tmp_path / "out.safetensors"
    assert main(["bake", str(a), str(one), "-o", str(out), "--no-fsync"]) == 0
    assert "decoded" in capsys.readouterr().out
    got = read_raw(out)[1]
    assert got[V][0] == "BF16"
    assert V.replace(".weight", ".scale_weight") not in got
    want = codes.astype(np.float64) * np.float32(0.01) + up.astype(np.float64) @ down
    np.testing.assert_allclose(read(out)[V], want, rtol=2**-8)
    forced = baked(tmp_path, a, one, save_dtype="fp32", override_dtype=True)
    np.testing.assert_allclose(read(forced)[V], want, rtol=1e-6)


# What is baked, and where


def test_filters_keep_tensors_as_they_are(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q, K, V)
    assert same_but(a, baked(tmp_path, a, one, exclude="to_q")) == {K, V}
    assert same_but(a, baked(tmp_path, a, one, exclude="*.to_q.*", glob=True, include_mode=True)) == {Q}
    with pytest.raises(PlanError, match="nothing would be baked"):
        baked(tmp_path, a, one, exclude="attn1")


def test_dtype_rules_hold_for_baked_tensors(tmp_path):
    a, one = base(tmp_path / "a.safetensors", "F16"), lora(tmp_path / "one.safetensors", Q)
    kept = read_raw(baked(tmp_path, a, one))[1]
    assert {entry[0] for entry in kept.values()} == {"F16"}
    forced = read_raw(baked(tmp_path, a, one, save_dtype="bf16", override_dtype=True))[1]
    assert {entry[0] for entry in forced.values()} == {"BF16"}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["lora_down.weight", "lora_up.weight", "alpha"])
def test_a_value_that_is_not_finite_fails_the_run(bad, part, tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q, V)
    tensors = {key: np.array(value) for key, value in read(one).items()}
    tensors[f"{STEM[V]}.{part}"].reshape(-1)[0] = bad
    damaged = write(tmp_path / "damaged.safetensors", tensors)
    with pytest.raises(NumberError) as caught:
        baked(tmp_path, a, damaged)
    assert (caught.value.tensor, caught.value.file) == (f"{STEM[V]}.{part}", str(damaged))
    assert not (tmp_path / "out.safetensors").exists()


def test_a_result_that_does_not_fit_fails_the_run(tmp_path):
    a, one = base(tmp_path / "a.safetensors", "F16"), lora(tmp_path / "one.safetensors", V)
    with pytest.raises(NumberError) as caught:
        baked(tmp_path, a, (one, 1e7))
    assert caught.value.tensor == V
    assert "does not fit fp16" in caught.value.what
    assert not (tmp_path / "out.safetensors").exists()


def test_coded_weights_are_refused(tmp_path):
    codes = {V: ("U8", (8, 8), bytes(64)), f"{V}.absmax": raw("F32", values((1,), 1))}
    a, one = base(tmp_path / "a.safetensors", **codes), lora(tmp_path / "one.safetensors", V)
    with pytest.raises(RecipeError, match="coded weights"):
        baked(tmp_path, a, one)


def test_weights_that_nobody_can_add_to_are_refused(tmp_path):
    a = base(tmp_path / "a.safetensors", **{V: ("I64", (8, 8), bytes(512))})
    with pytest.raises(RecipeError, match="I64"):
        baked(tmp_path, a, lora(tmp_path / "one.safetensors", V))


# Recipes, reports, plans


def test_recipe_run_and_verify(tmp_path, capsys):
    a, one = base(tmp_path / "a.safetensors", "F16"), lora(tmp_path / "one.safetensors", Q, K)
    out, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    words = ["bake", a, f"{one}@0.8@0.5:IN01=0.5", "--exclude", "to_v", "-o", out, "--no-fsync"]
    assert main([str(word) for word in words]) == 0
    capsys.readouterr()
    assert main(["recipe", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["task"] == "bake"
    assert {name: told["loras"][0][name] for name in ("file", "strength", "te_strength", "blocks")} == {
        "file": "one.safetensors", "strength": 0.8, "te_strength": 0.5, "blocks": "IN01=0.5"
    }  # fmt: skip
    assert len(told["loras"][0]["sha256"]) == 64
    assert main(["run", str(out), "-o", str(again), "--no-fsync"]) == 0
    assert again.read_bytes() == out.read_bytes()
    assert lib_merge.verify(out).ok
    changed = bytearray(out.read_bytes())
    changed[-5000] ^= 1
    out.write_bytes(changed)
    assert lib_merge.verify(out).differing


def test_a_lora_that_is_another_file_is_found_out(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", V)
    out = baked(tmp_path, a, one)
    lora(one, V, seed=99)
    assert lib_merge.verify(out).missing_inputs == ("one.safetensors",)


def test_the_configuration_of_an_adapter_is_part_of_what_is_verified(tmp_path):
    a, folder = base(tmp_path / "a.safetensors"), tmp_path / "adapter"
    folder.mkdir()
    stem = f"base_model.model.{Q.removeprefix(UNET).removesuffix('.weight')}"
    write(folder / "adapter_model.safetensors", {f"{stem}.lora_A.weight": values((4, 640), 1),
                                                 f"{stem}.lora_B.weight": values((900, 4), 2)})  # fmt: skip
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    out = baked(tmp_path, a, folder)
    assert lib_merge.verify(out).ok
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 9}))
    assert lib_merge.verify(out).missing_inputs == ("adapter",)


def test_no_recipe_names_no_lora(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "secret_style.safetensors", V)
    out = baked(tmp_path, a, one, keep_recipe=False)
    assert "secret_style" not in json.dumps(read_raw(out)[0])


def test_report_rows_of_baked_tensors(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q, V)
    two = lora(tmp_path / "two.safetensors", V, seed=80, rank=2)
    made = lib_merge.bake(a, (one, 0.5), two, out=tmp_path / "o.safetensors", fsync=False, report=True)
    rows = {row["key"]: row for row in made.rows}
    before, change = read(a)[V].astype(np.float64), 0.5 * delta(one, V) + delta(two, V)
    row = rows[V]
    assert (row["action"], row["method"], row["n"], row["rank"]) == ("merged", "bake", 2, 6)
    np.testing.assert_allclose(row["norm_a"], np.linalg.norm(before), rtol=1e-12)
    np.testing.assert_allclose(row["norm_out"], np.linalg.norm(before + change), rtol=1e-12)
    np.testing.assert_allclose(row["norm_change"], np.linalg.norm(change), rtol=1e-6)
    np.testing.assert_allclose(row["max_change"], np.abs(change).max(), rtol=1e-6)
    assert (rows[K]["action"], rows[K]["n"]) == ("copied", 0)
    assert np.isnan(rows[K]["rank"])


def test_dry_run_tells_which_lora_does_what(tmp_path, capsys):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q)
    words = ["bake", a, f"{one}@0.5", "-o", tmp_path / "out.safetensors", "--dry-run", "--json"]
    assert main([str(word) for word in words]) == 0
    plan = json.loads(capsys.readouterr().out)
    step = next(step for step in plan["steps"] if step["key"] == Q)
    assert (step["action"], step["method"]) == ("merged", "bake")
    assert step["loras"] == [{"lora": "lora1", "format": "lora", "rank": 4, "strength": 0.5}]
    assert plan["counts"]["merged"] == 1
    assert not (tmp_path / "out.safetensors").exists()
    assert main([str(word) for word in words[:-1]]) == 0
    assert "bake lora1@0.5" in capsys.readouterr().out


# Inputs of other kinds


def test_a_sharded_folder_stays_sharded(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    first = {
        "model.embed_tokens.weight": values((10, 8), 1),
        "model.layers.0.self_attn.q_proj.weight": values((8, 8), 2),
    }
    second = {"model.layers.0.mlp.up_proj.weight": values((12, 8), 3), "lm_head.weight": values((10, 8), 4)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, (first, second), strict=True):
        write(folder / name, tensors)
    index = {key: name for name, part in zip(names, (first, second), strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text("{}")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    up, down = values((12, 2), 5), values((2, 8), 6)
    stem = "base_model.model.model.layers.0.mlp.up_proj"
    write(adapter / "adapter_model.safetensors", {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up})
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    out = tmp_path / "out"
    assert main(["bake", str(folder), str(adapter), "-o", str(out), "--no-fsync"]) == 0
    assert same_but(folder / names[0], out / names[0]) == set()
    got = read(out / names[1])["model.layers.0.mlp.up_proj.weight"]
    want = second["model.layers.0.mlp.up_proj.weight"] + 2.0 * (up.astype(np.float64) @ down)
    np.testing.assert_array_equal(got, want.astype("f4"))
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == index
    assert lib_merge.verify(out).ok


def test_a_diffusers_folder_takes_unet_and_text_encoder(tmp_path):
    folder = tmp_path / "pipeline"
    for name in ("unet", "text_encoder"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "model_index.json").write_text("{}")
    inner = "down_blocks.0.attentions.0.transformer_blocks.0"
    unet = {"conv_in.weight": values((8, 4, 3, 3), 1), f"{inner}.attn2.to_k.weight": values((24, 768), 2)}
    unet["down_blocks.0.resnets.0.conv1.weight"] = values((8, 8, 3, 3), 3)
    layer = "text_model.encoder.layers.0.self_attn.q_proj.weight"
    write(folder / "unet" / "diffusion_pytorch_model.safetensors", unet)
    write(folder / "text_encoder" / "model.safetensors", {layer: values((8, 8), 4)})
    text = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    more = {f"{text}.lora_down.weight": values((2, 8), 5), f"{text}.lora_up.weight": values((8, 2), 6)}
    one, out = lora(tmp_path / "one.safetensors", CROSS, **more), tmp_path / "out"
    lib_merge.bake(folder, (one, 1.0, 0.5), out=out, fsync=False)
    got = read(out / "unet" / "diffusion_pytorch_model.safetensors")[f"{inner}.attn2.to_k.weight"]
    np.testing.assert_array_equal(got, (unet[f"{inner}.attn2.to_k.weight"] + delta(one, CROSS)).astype("f4"))
    change = 0.5 * (more[f"{text}.lora_up.weight"].astype(np.float64) @ more[f"{text}.lora_down.weight"])
    np.testing.assert_array_equal(
        read(out / "text_encoder" / "model.safetensors")[layer], (values((8, 8), 4) + change).astype("f4")
    )


def test_a_pickled_lora(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q, CONV)
    pickled = tmp_path / "one.pt"
    torch.save({key: torch.from_numpy(np.array(value)) for key, value in read(one).items()}, pickled)
    want = read_raw(baked(tmp_path, a, one))[1]
    assert read_raw(baked(tmp_path, a, pickled))[1] == want


def test_the_same_lora_twice_counts_twice(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", V)
    got = read(baked(tmp_path, a, (one, 0.25), (one, 0.5)))[V]
    np.testing.assert_array_equal(got, (read(a)[V] + 0.75 * delta(one, V)).astype("f4"))


def test_inputs_are_left_alone(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q)
    before = (a.read_bytes(), one.read_bytes())
    baked(tmp_path, a, one)
    assert (a.read_bytes(), one.read_bytes()) == before
    assert main(["bake", str(a), str(one), "-o", str(one), "--overwrite"]) == 1
    assert (a.read_bytes(), one.read_bytes()) == before


# Words of the command line


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("x.safetensors", ("x.safetensors", 1.0, None, "")),
        ("x.safetensors@0.8", ("x.safetensors", 0.8, None, "")),
        ("x.safetensors@-1e-1@.5", ("x.safetensors", -0.1, 0.5, "")),
        ("x.safetensors@1:IN00-IN05=0.2,OUT=0", ("x.safetensors", 1.0, None, "IN00-IN05=0.2,OUT=0")),
        ("x.safetensors@1@0:BASE=0", ("x.safetensors", 1.0, 0.0, "BASE=0")),
        ("C:\\loras\\x.safetensors@0.5", ("C:\\loras\\x.safetensors", 0.5, None, "")),
        ("mail@home.safetensors@2", ("mail@home.safetensors", 2.0, None, "")),
    ],
)
def test_a_loras_word(text, want):
    assert lora_argument(text) == want


def test_a_word_that_names_a_file_is_the_file(tmp_path):
    odd = tmp_path / "ink@0.5"
    odd.touch()
    assert lora_argument(str(odd)) == (str(odd), 1.0, None, "")
    assert lora_argument(f"{odd}@2") == (str(odd), 2.0, None, "")
    assert lora_argument(f"{odd}:BASE=0") == (str(odd), 1.0, None, "BASE=0")
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("loras", "how", "said"),
    [
        ((), {}, "bake needs a LoRA"),
        ((("one.safetensors", float("nan")),), {}, "no finite number"),
        ((("one.safetensors", 1.0, None, "IN00=alpha:2"),), {}, "alpha"),
        (("one.safetensors",), {"blocks": "IN00=0.1,IN00=0.2"}, "twice"),
        (("one.safetensors",), {"override_dtype": True}, "override_dtype"),
    ],
)
def test_recipes_that_cannot_be(loras, how, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base(tmp_path / "a.safetensors")
    lora(tmp_path / "one.safetensors", V)
    with pytest.raises(lib_merge.MergeError) as caught:
        baked(tmp_path, Path("a.safetensors"), *loras, **how)
    assert said in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("number", ["nan", "inf", "-Infinity", "1e999", "", "0,8", "0.5.5", "80%"])
@pytest.mark.parametrize("there", [True, False])
def test_a_strength_that_is_no_number_is_told_as_one(tmp_path, monkeypatch, number, there):
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "x.safetensors").touch()
    for text in (f"x.safetensors@{number}", f"x.safetensors@0.5@{number}", f"x.safetensors@{number}:BASE=0"):
        with pytest.raises(RecipeError, match=r"strength .*x.safetensors is (no finite number|missing)") as caught:
            lora_argument(text)
        assert caught.value.hint == "write x.safetensors@0.8"


def test_three_strengths_are_too_many(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"3 strengths are too many \(x@0.5@0.5@1\)"):
        lora_argument("x@0.5@0.5@1")
    (tmp_path / "x").touch()
    with pytest.raises(RecipeError, match="the strength 'strong' of x is no finite number"):
        lora_argument("x@strong")
    assert lora_argument("x@home.safetensors") == ("x@home.safetensors", 1.0, None, "")
    assert lora_argument("y@home.safetensors@0.5:OUT=0") == ("y@home.safetensors", 0.5, None, "OUT=0")


def said_of(tmp_path, *words):
    made = lib_merge.bake(*words, out=tmp_path / "out.safetensors", overwrite=True)
    return [problem.what for problem in made.plan.problems]


def test_loras_that_add_nothing_or_stand_there_twice_are_noted(tmp_path):
    a, one = base(tmp_path / "a.safetensors"), lora(tmp_path / "one.safetensors", Q)
    notes = said_of(tmp_path, a, (one, 0.0))
    assert "every LoRA has strength 0: the checkpoint gets nothing of them" in notes
    notes = said_of(tmp_path, a, one, (one, 0.5))
    assert "LoRA 1 and LoRA 2 are the same file; their strengths add up" in notes
