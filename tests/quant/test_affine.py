"""MLX affine codes: equal to what MLX itself made, and to an independent implementation of its rules, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.errors import NumberError
from lib_merge.quant.affine import BITS, GROUPS, Coded, dequantize, pack, quantize, unpack
from tests.data.mlx_ref import DATA, load, params, quantized, widened

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# made by MLX on a CPU; the two others by an implementation of the same rules in numpy
MADE_BY = {"b": "even", "seed": "away", "metal": "metal"}


def leaves(coded):
    """Bytes of words, scales and biases."""
    return tuple(
        each.contiguous().view(torch.uint8).numpy().tobytes() for each in (coded.words, coded.scales, coded.biases)
    )


def golden(dtype):
    tensors = load(DATA / "quant" / f"quant_{dtype}.safetensors")
    for key in tensors:
        if key.endswith(".weight"):
            stem = key.removesuffix(".weight")
            bits, group = (int(part[1:]) for part in stem.split(".")[-2:])
            maker = stem.split(".")[0].rstrip("0123456789")
            yield (
                bits,
                group,
                MADE_BY[maker],
                tensors["dense"],
                [tensors[f"{stem}.{leaf}"] for leaf in ("weight", "scales", "biases")],
            )


@pytest.mark.parametrize("dtype", TORCH)
def test_codes_scales_and_biases_are_those_of_mlx(dtype):
    seen = set()
    for bits, group, rounding, dense, expected in golden(dtype):
        got = quantize(torch.from_numpy(widened(dense)), bits=bits, group=group, rounding=rounding, dtype=TORCH[dtype])
        assert leaves(got) == tuple(each.tobytes() for each in expected), (bits, group, rounding)
        seen.add((bits, group, rounding))
    assert {bits for bits, _, _ in seen} == set(BITS)
    assert {group for _, group, _ in seen} == set(GROUPS)
    assert {rounding for _, _, rounding in seen} == {"even", "away", "metal"}


FAMILIES = {
    "gauss": lambda rng, shape: 0.02 * rng.standard_normal(shape),
    "ties": lambda rng, shape: np.round(4 * rng.standard_normal(shape)) / 128,
    "negative": lambda rng, shape: -np.abs(0.02 * rng.standard_normal(shape)),
    "positive": lambda rng, shape: np.abs(0.02 * rng.standard_normal(shape)),
    "flat": lambda rng, shape: np.broadcast_to(0.37 * rng.standard_normal((shape[0], 1)), shape),
    "tiny": lambda rng, shape: 1e-7 * rng.standard_normal(shape),
    "sparse": lambda rng, shape: np.where(rng.random(shape) < 0.9, 0.0, rng.standard_normal(shape)),
    "zeros": lambda rng, shape: np.zeros(shape) * rng.choice([-1.0, 1.0], shape),
    "heavy": lambda rng, shape: 0.02 * rng.standard_t(3, shape),
}


@pytest.mark.parametrize("rounding", ["even", "away", "metal"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_a_plain_implementation(family, bits, rounding):
    weights = FAMILIES[family](np.random.default_rng(bits), (6, 256)).astype(np.float32)
    for group in GROUPS:
        for dtype in TORCH.values():
            rounded = torch.from_numpy(weights).to(dtype)
            words, scales, biases = quantized(rounded.float().numpy(), bits, group, rounding)
            got = quantize(rounded.float(), bits=bits, group=group, rounding=rounding, dtype=dtype)
            assert got.words.numpy().tobytes() == words.tobytes()
            assert torch.equal(got.scales, torch.from_numpy(scales).to(dtype))
            assert torch.equal(got.biases, torch.from_numpy(biases).to(dtype))


def test_rows_may_be_coded_in_any_portions():
    weights = torch.from_numpy(FAMILIES["gauss"](np.random.default_rng(1), (9, 128)).astype(np.float32))
    whole = leaves(quantize(weights.clone(), bits=4, group=32, rounding="away"))
    cut = [leaves(quantize(part.clone(), bits=4, group=32, rounding="away")) for part in weights.split([1, 3, 5])]
    assert tuple(b"".join(parts) for parts in zip(*cut, strict=True)) == whole


def test_the_scale_that_codes_are_made_with_is_not_the_stored_one():
    """A group where codes from the scale rounded to bf16 would be others."""
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((200, 32)).astype(np.float32)
    got = quantize(torch.from_numpy(weights.copy()), bits=8, group=32, rounding="even", dtype=torch.bfloat16)
    scale, bias = got.scales.float().numpy(), got.biases.float().numpy()
    from_stored = np.clip(np.rint((weights - bias) / scale), 0, 255)
    assert (unpack(got.words.numpy(), 8) != from_stored).any()


@pytest.mark.parametrize("bits", BITS)
def test_dequantizing_is_scale_times_code_plus_bias(bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (3, 128)).astype(np.uint8)
    scales, biases = (torch.from_numpy(rng.standard_normal((3, 2)).astype(np.float32)) for _ in range(2))
    coded = Coded(torch.from_numpy(pack(codes.copy(), bits)), scales, biases)
    expected = codes.astype(np.float32) * np.repeat(scales.numpy(), 64, 1) + np.repeat(biases.numpy(), 64, 1)
    assert np.array_equal(dequantize(coded, bits=bits, group=64).numpy(), expected)


@pytest.mark.parametrize("bits", BITS)
def test_an_error_is_at_most_half_a_step(bits):
    weights = torch.from_numpy(FAMILIES["gauss"](np.random.default_rng(2), (20, 128)).astype(np.float32))
    coded = quantize(weights.clone(), bits=bits, group=64, rounding="even")
    error = (dequantize(coded, bits=bits, group=64) - weights).abs().view(20, 2, 64)
    # the edge is on the grid exactly, so the far side may miss by up to one step
    assert (error <= 1.01 * coded.scales.abs().unsqueeze(-1)).all()
    assert float(error.mean() / coded.scales.abs().mean()) < 0.3


@given(st.sampled_from(BITS), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_stream_is_lowest_bit_first(bits, rows, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32)).astype(np.uint8)
    packed = pack(codes.copy(), bits)
    for row, line in zip(codes, packed, strict=True):
        number = sum(int(code) << (bits * at) for at, code in enumerate(row))
        assert line.tobytes() == number.to_bytes(4 * bits, "little")
    assert np.array_equal(unpack(packed, bits), codes)


def refused(weights, dtype=torch.bfloat16, rounding="even", first_row=0):
    rows = np.full((2, 64), 0.01, np.float32)
    rows[1, 32:] = weights
    with pytest.raises(NumberError) as caught:
        quantize(torch.from_numpy(rows), bits=4, group=32, rounding=rounding, dtype=dtype, first_row=first_row)
    assert f"group 1 of row {first_row + 1}" in caught.value.what
    assert "columns 32 to 63" in caught.value.what
    return caught.value.what


@pytest.mark.parametrize("rounding", ["even", "away", "metal"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_group(value, rounding):
    weights = np.full(32, 0.5, np.float32)
    weights[17] = value
    assert "not finite" in refused(weights, rounding=rounding, first_row=256)


@pytest.mark.parametrize("rounding", ["even", "away", "metal"])
def test_a_range_beyond_float32_is_refused_by_group(rounding):
    assert "range" in refused(np.where(np.arange(32) % 2, 3e38, -3e38), torch.float32, rounding)


@pytest.mark.parametrize("value", [1e32, -1e32])
def test_a_scale_that_becomes_zero_is_refused_by_group(value):
    assert "scale becomes 0" in refused(np.full(32, value, np.float32), torch.float32)


def test_a_bias_beyond_the_stored_dtype_is_refused_by_group():
    ramp = np.linspace(0, 1, 32, dtype=np.float32)
    assert "beyond bfloat16" in refused(3.4e38 * ramp)
    assert "beyond float16" in refused(7e4 * ramp, torch.float16)
    for dtype, top in ((torch.bfloat16, 3.38e38), (torch.float16, 65504.0), (torch.float32, 3.4e38)):
        coded = quantize(torch.from_numpy((top * ramp)[None]), bits=4, group=32, rounding="even", dtype=dtype)
        assert torch.isfinite(coded.biases).all()


def test_the_limit_of_a_stored_bias_is_where_bf16_rounds_to_infinity():
    below, above = np.float32(float.fromhex("0x1.FEFFFEp127")), np.float32(float.fromhex("0x1.FFp127"))
    ramp = np.linspace(0, 1, 32, dtype=np.float32)
    assert "beyond bfloat16" in refused(above * ramp)
    coded = quantize(torch.from_numpy((below * ramp)[None]), bits=4, group=32, rounding="even", dtype=torch.bfloat16)
    assert torch.isfinite(coded.biases).all()


def test_the_plain_implementation_is_checked_by_mlx_too():
    """What other tests compare with gives MLX's own results."""
    for bits, group, rounding, dense, expected in golden("f32"):
        assert [each.tobytes() for each in quantized(dense, bits, group, rounding)] == [
            each.tobytes() for each in expected
        ]
    scale, bias = params(np.array([[0.0, 1.0] * 16], np.float32), 4, 32, "even")
    assert (float(bias[0, 0, 0]), float(scale[0, 0, 0])) == (1.0, np.float32(1) / np.float32(-15))
