"""Scaled fp8 against the definition: value of the code, by the format's bits, times the scale of its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.quant.fp8 import FORMATS, encode, fresh_scale, is_layout, scaled, scales_of, sides_of, widen
from tests.support import decode

SHAPE = (130, 260)
LAYOUTS = [(), (1,), (1, 1), (130,), (130, 1), (130, 4, 1), (2, 3)]


def factor(scale, row, column):
    """The scale of one weight, by its place."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.shape == (2, 3):
        return scale[row // 128, column // 128]
    pieces = scale.reshape(130, -1)
    return pieces[row, column * pieces.shape[1] // 260]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_codes_times_scale_by_place(layout, dtype):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x78, SHAPE, dtype=np.uint8) | rng.integers(0, 2, SHAPE, dtype=np.uint8) << 7
    scale = rng.uniform(0.001, 2, layout).astype("<f4")
    plain = decode(dtype, codes.tobytes())
    expected = [
        plain[260 * row + column] * factor(scale, row, column) for row in range(SHAPE[0]) for column in range(SHAPE[1])
    ]
    expected = np.array(expected, "<f4")
    numbers = torch.from_numpy(codes.reshape(-1)).view(getattr(torch, FORMATS[dtype][0])).float()
    assert scaled(numbers.clone(), torch.from_numpy(scale), SHAPE).numpy().tobytes() == expected.tobytes()
    for low, high in ((0, 1), (7, 300), (259, 521), (33280, 33281), (33700, 33800)):
        part = scaled(numbers[low:high].clone(), torch.from_numpy(scale), SHAPE, low)
        assert part.numpy().tobytes() == expected[low:high].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_encoding_loses_no_more_than_half_a_step(layout, dtype):
    name, largest = FORMATS[dtype]
    values = 0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    codes, scale = encode(values, dtype, layout)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (getattr(torch, name), SHAPE, torch.float32, layout)
    back = scaled(codes.float().reshape(-1), scale, SHAPE).reshape(SHAPE)
    factors = scaled(torch.ones(values.numel()), scale, SHAPE).reshape(SHAPE)
    steps = {"F8_E4M3": (2.0**-4, 2.0**-10), "F8_E5M2": (2.0**-3, 2.0**-17)}[dtype]  # of a normal; of a subnormal
    bound = torch.maximum(values.abs() * steps[0], factors * steps[1]) * 1.0001
    assert bool(((back - values).abs() <= bound).all())
    assert float(codes.float().abs().max()) == largest  # the scale is as fine as it can be


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 50, 128])
def test_the_scale_of_a_weight_that_comes_in_rows(layout, rows):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    reach = torch.zeros(layout)
    for low in range(0, SHAPE[0], rows):
        widen(reach, values[low : low + rows].reshape(-1), SHAPE, low * SHAPE[1])
    numbers = np.arange(reach.numel()).reshape(layout)
    mine = [int(factor(numbers, row, column)) for row in range(SHAPE[0]) for column in range(SHAPE[1])]
    largest = np.zeros(reach.numel(), "<f4")
    np.maximum.at(largest, mine, values.abs().numpy().reshape(-1))
    assert reach.numpy().tobytes() == largest.tobytes()
    assert fresh_scale(reach, "F8_E4M3").numpy().tobytes() == (largest / np.float32(448)).tobytes()


def test_encoding_keeps_what_has_codes():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    again, scale = encode(codes.float()[None], "F8_E4M3")
    assert scale.item() == 1
    assert torch.equal(again.view(torch.uint8)[0], codes.view(torch.uint8))


def test_a_weight_of_zeros_has_scale_one():
    codes, scale = encode(torch.zeros(4, 8), "F8_E4M3", (4, 1))
    assert scale.tolist() == [[1.0]] * 4
    assert not codes.float().any()


def test_a_layout_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="does not fit"):
        encode(torch.zeros(4, 8), "F8_E4M3", (3,))


@pytest.mark.parametrize(
    ("shape", "scale", "fits"),
    [
        ((8, 16), (), True),
        ((8, 16), (8,), True),
        ((8, 16), (8, 1), True),
        ((8, 16), (8, 4, 1), True),
        ((8, 3, 3, 3), (8, 1, 1, 1), True),
        ((256, 384), (2, 3), True),
        ((257, 384), (3, 3), True),
        ((8, 16), (16,), False),
        ((8, 16), (8, 16), False),
        ((8, 16), (8, 5, 1), False),
        ((8, 16), (8, 2), False),
        ((0, 16), (), False),
    ],
)
def test_layouts(shape, scale, fits):
    assert is_layout(shape, scale) is fits


def test_weights_and_their_scales_are_found_by_name_dtype_and_shape():
    tensors = {
        "a.weight": ("F8_E4M3", (8, 16)),
        "a.scale_weight": ("F32", (1,)),
        "a.scale_input": ("F32", (1,)),
        "b.weight": ("F8_E5M2", (8, 16)),
        "b.weight_scale": ("BF16", (8, 1)),
        "b.input_scale": ("BF16", ()),
        "b.comfy_quant": ("U8", (27,)),
        "c.weight": ("F8_E4M3", (8, 16)),  # no scale
        "d.weight": ("F8_E4M3", (8, 16)),
        "d.weight_scale": ("F8_E8M0", (8, 1)),  # another storage
        "e.weight": ("F16", (8, 16)),
        "e.weight_scale": ("F32", ()),
        "model.scaled_fp8": ("F8_E4M3", (2,)),
    }
    scales = scales_of(tensors)
    assert scales == {"a.weight": "a.scale_weight", "b.weight": "b.weight_scale"}
    assert sides_of(tensors, scales) == {
        *("a.scale_weight", "a.scale_input", "b.weight_scale", "b.input_scale", "b.comfy_quant", "model.scaled_fp8"),
    }
    assert sides_of(tensors, {}) == set()
