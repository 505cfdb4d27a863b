"""Folding into scaled fp8: codes anew under the scales that are there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lib_merge
from lib_merge.errors import PlanError
from tests.data.mlx_ref import merged, widened
from tests.fold.making import DOWN, Pair, Q, contents, entry, places, raw_tensors, write_folder, write_mlx

FORMATS = {"F8_E4M3": (torch.float8_e4m3fn, 448.0), "F8_E5M2": (torch.float8_e5m2, 57344.0)}
LAYOUTS = {
    "one": lambda rows, columns: (),
    "rows": lambda rows, columns: (rows, 1),
    "squares": lambda rows, columns: (-(-rows // 128), -(-columns // 128)),
}


def spread(scale, shape):
    """A scale for each weight, by repetition."""
    if scale.ndim < 2:
        return np.broadcast_to(scale.reshape(1, 1), shape)
    if scale.shape[1] == 1 and scale.shape[0] == shape[0]:
        return np.broadcast_to(scale, shape)
    return scale.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]


def coded(values, scale, format):
    """Codes of float32 weights, by numpy and torch's cast."""
    dtype, largest = FORMATS[format]
    steps = np.clip(values / spread(scale, values.shape), -largest, largest)
    return torch.from_numpy(steps.astype(np.float32)).to(dtype).view(torch.uint8).numpy()


def shipped(pair, format, layout, name, room=1.5):
    """A scaled fp8 checkpoint whose scales leave some room above the largest weight."""
    scales, tensors = {}, {f"{module}.weight": entry(array) for module, array in pair.plain.items()}
    for module, (rows, columns) in pair.shapes.items():
        values = widened(pair.weights[module])
        scale = np.full(LAYOUTS[layout](rows, columns), room * np.abs(values).max() / FORMATS[format][1], np.float32)
        scale *= np.random.default_rng(1).uniform(1, 2, scale.shape).astype(np.float32)
        scales[module] = scale
        tensors[f"{module}.weight"] = (format, (rows, columns), coded(values, scale, format).tobytes())
        tensors[f"{module}.{name}"] = ("F32", scale.shape, scale.tobytes())
    for path in pair.shipped.iterdir():
        path.unlink()
    write_folder(pair.shipped, [tensors])
    return scales


@pytest.mark.parametrize("name", ["weight_scale", "scale_weight", "weight_scale_inv"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_sum_under_the_scales_that_are_there(tmp_path, format, layout, name):
    pair = Pair(tmp_path, shapes={Q: (200, 320), DOWN: (48, 256)})
    scales = shipped(pair, format, layout, name)
    made = lib_merge.fold(pair.dense, pair.adapter(), tmp_path / "out", quantize=pair.shipped, tile=900)
    assert made.rounding.share == 1
    ours, theirs = raw_tensors(tmp_path / "out"), raw_tensors(pair.shipped)
    for module in (Q, DOWN):
        down, up = pair.factors[module]
        values = merged(widened(pair.weights[module]), down, up, 1.5)
        assert ours[f"{module}.weight"] == coded(values, scales[module], format).tobytes()
    assert {key for key in ours if ours[key] != theirs[key]} == {f"{Q}.weight", f"{DOWN}.weight"}
    assert lib_merge.fold_check(pair.dense, pair.root / "adapter", tmp_path / "out", pair.shipped).ok


@pytest.mark.parametrize("format", FORMATS)
def test_an_adapter_without_effect_leaves_every_byte(tmp_path, format):
    pair = Pair(tmp_path)
    shipped(pair, format, "one", "weight_scale")
    lib_merge.fold(pair.dense, pair.adapter(alpha=0), tmp_path / "out", quantize=pair.shipped)
    assert contents(tmp_path / "out") == contents(pair.shipped)


def test_weights_beyond_the_scale_are_cut_and_counted(tmp_path):
    pair = Pair(tmp_path)
    scales = shipped(pair, "F8_E4M3", "one", "weight_scale", room=0.3)
    made = lib_merge.fold(pair.dense, pair.adapter(alpha=0, modules=[Q]), tmp_path / "out", quantize=pair.shipped)
    steps = np.abs(widened(pair.weights[Q])) / scales[Q]
    count = int((steps > 464).sum())
    assert count > 0
    assert any(f"{count} weights of 1 modules are beyond" in text for text in made.warnings)


def test_the_report_knows_the_distance_of_codes(tmp_path):
    """E4M3 has 3 bits after the point: the distance is 2^(exponent − 3), of subnormals 2^−9."""
    pair = Pair(tmp_path)
    scales = shipped(pair, "F8_E4M3", "one", "weight_scale")
    made = lib_merge.fold(pair.dense, pair.adapter(), tmp_path / "out", quantize=pair.shipped, report=True)
    codes = np.frombuffer(raw_tensors(pair.shipped)[f"{Q}.weight"], np.uint8)
    exponents = np.maximum((codes.astype(int) & 0x7F) >> 3, 1) - 7
    row = next(row for row in made.rows if row["key"] == f"{Q}.weight")
    assert row["step"] == pytest.approx(float((2.0 ** (exponents - 3)).mean() * scales[Q]), rel=1e-6)


def test_names_of_image_model_trainers_lead_to_the_modules(tmp_path):
    """Kohya's names and alphas, a dense checkpoint with the prefix, a quantized one without."""
    stem = "double_blocks.0.img_attn.proj"
    prefix = "model.diffusion_model."
    pair = Pair(tmp_path, shapes={f"{prefix}{stem}": (64, 64), f"{prefix}double_blocks.0.img_attn.qkv": (192, 64)})
    (module, other) = pair.shapes
    values = widened(pair.weights[module])
    scale = np.float32(2 * np.abs(values).max() / 448)
    tensors = {f"{stem}.weight": ("F8_E4M3", (64, 64), coded(values, scale.reshape(()), "F8_E4M3").tobytes())}
    tensors[f"{stem}.scale_weight"] = entry(np.array(scale))
    write_mlx(tmp_path / "shipped.safetensors", tensors)
    down, up = (np.random.default_rng(2).standard_normal(shape).astype(np.float32) for shape in ((4, 64), (64, 4)))
    name = f"lora_unet_{stem.replace('.', '_')}"
    adapter = {f"{name}.lora_down.weight": entry(down), f"{name}.lora_up.weight": entry(up)}
    for alpha, factor in ((np.array(2.0, np.float32), 0.5), (None, 1.0)):
        parts = adapter | ({} if alpha is None else {f"{name}.alpha": entry(alpha)})
        write_mlx(tmp_path / "lora.safetensors", parts)
        out = tmp_path / f"out{factor}.safetensors"
        made = lib_merge.fold(pair.dense, tmp_path / "lora.safetensors", out, quantize=tmp_path / "shipped.safetensors")
        content, begin, end = places(out)[f"{stem}.weight"]
        expected = coded(merged(values, down, up, factor), scale.reshape(()), "F8_E4M3")
        assert content[begin:end] == expected.tobytes()
        assert any("no alpha" in note for note in made.notes) == (alpha is None)
        assert other not in {module.dense for module in made.modules}


def test_a_part_of_a_fused_weight_is_refused(tmp_path):
    prefix = "model.diffusion_model.double_blocks.0.img_attn"
    pair = Pair(tmp_path, shapes={f"{prefix}.qkv": (192, 64), f"{prefix}.proj": (64, 64)})
    shipped(pair, "F8_E4M3", "one", "scale_weight")
    name = "transformer.transformer_blocks.0.attn.to_q"
    write_mlx(
        tmp_path / "lora.safetensors",
        {f"{name}.lora_A.weight": entry(np.ones((4, 64), np.float32)),
         f"{name}.lora_B.weight": entry(np.ones((64, 4), np.float32))},
    )  # fmt: skip
    with pytest.raises(PlanError, match="no whole weight") as caught:
        lib_merge.fold(pair.dense, tmp_path / "lora.safetensors", tmp_path / "out", quantize=pair.shipped)
    assert "lora convert" in caught.value.hint
