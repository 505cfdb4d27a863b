"""Measures: sums against exact ones, the same whatever the tiles, and the finite gate on every bit pattern there is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib_merge.files.dtypes import DTYPES
from lib_merge.kernels.measure import (
    BLOCK,
    all_finite,
    bits_finite,
    block_dots,
    change_sums,
    compare_sums,
    dot,
    pair_dots,
    row_block,
)

FLOAT_FORMATS = [dtype for dtype in DTYPES.values() if dtype.kind == "float"]
SMALL_FORMATS = [dtype for dtype in FLOAT_FORMATS if dtype.bits <= 16]
LARGE_FORMATS = [dtype for dtype in FLOAT_FORMATS if dtype.bits > 16]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def drawn(count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


# Sums.


@dtypes
@pytest.mark.parametrize("count", [0, 1, 63, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 777])
def test_a_dot_product_is_the_exact_sum_within_float64(dtype, count):
    x, y = drawn(count, 1, dtype), drawn(count, 2, dtype)
    products = [left * right for left, right in zip(x.tolist(), y.tolist(), strict=True)]
    exact, size = math.fsum(products), math.fsum(map(abs, products))
    assert abs(dot(x, y) - exact) <= 1e-13 * size
    xx, xy, yy = pair_dots(x, y)
    assert (xx, xy, yy) == (dot(x, x), dot(x, y), dot(y, y))


def test_a_dot_product_of_an_empty_or_a_scalar_tensor():
    assert dot(torch.zeros(0), torch.zeros(0)) == 0
    assert pair_dots(torch.zeros(0), torch.zeros(0)) == (0, 0, 0)
    assert dot(torch.tensor(3.0), torch.tensor(-2.0)) == -6


def test_a_dot_product_survives_large_numbers_and_cancellation():
    large = torch.full((1000,), 3e38)
    assert dot(large, large) == pytest.approx(1000 * float(large[0]) ** 2, rel=1e-14)
    x = torch.tensor([1e8, 1, -1e8] * 1000)
    assert dot(x, torch.ones(3000)) == 1000


@dtypes
@pytest.mark.parametrize("borders", [(1,), (2, 3), (1, 2, 3, 4)])
def test_tiles_cut_at_block_borders_add_up_to_the_same_sums(dtype, borders):
    count = 4 * BLOCK + 12345
    a, b, c, out = (drawn(count, seed, dtype) for seed in range(4))
    ends = itertools.pairwise([0, *(border * BLOCK for border in borders), count])
    parts = [slice(low, high) for low, high in ends]
    assert [sum for part in parts for sum in block_dots(a[part], b[part])] == block_dots(a, b)
    for measure, tensors in ((compare_sums, (a, b, c)), (change_sums, (a, out))):
        tiles = [measure(*(tensor[part] for tensor in tensors)) for part in parts]
        for name, whole in measure(*tensors).items():
            add = max if name == "max_change" else math.fsum
            assert add(tile[name] for tile in tiles) == pytest.approx(whole, rel=1e-15)


def test_sums_depend_on_blocks_alone_not_on_shape():
    x, y = drawn(3 * BLOCK // 2), drawn(3 * BLOCK // 2, 2)
    assert dot(x, y) == dot(x.reshape(-1, 64), y.reshape(64, -1))


@pytest.mark.parametrize(
    ("columns", "rows"),
    [(0, BLOCK), (1, BLOCK), (2, BLOCK // 2), (320, 204), (BLOCK, 1), (BLOCK + 1, 1), (10 * BLOCK, 1)],
)
def test_a_block_of_rows_fills_a_block_of_elements(columns, rows):
    assert row_block(columns) == rows


@dtypes
@pytest.mark.parametrize("count", [0, 1, 500, BLOCK + 5])
def test_compare_sums_are_numpys(dtype, count):
    a, b, c = (drawn(count, seed, dtype) for seed in range(3))
    b[::7], c[::5] = a[::7], a[::5]
    x, y, z = (tensor.double().numpy() for tensor in (a, b, c))
    two = {"aa": x @ x, "bb": y @ y, "ab": x @ y, "dd": (y - x) @ (y - x)}
    signs = np.sign(y - x) * np.sign(z - x)
    three = {
        "ee": (z - x) @ (z - x),
        "de": (y - x) @ (z - x),
        "conflicts": (signs == -1).sum(),
        "both": (signs != 0).sum(),
    }
    if count:
        size = {name: pytest.approx(float(value), rel=1e-12, abs=1e-12 * count) for name, value in two.items()}
        assert compare_sums(a, b) == size
        size |= {name: pytest.approx(float(value), rel=1e-12, abs=1e-12 * count) for name, value in three.items()}
        found = compare_sums(a, b, c)
        assert found == size
        assert found["conflicts"] == three["conflicts"]
        assert found["both"] == three["both"]
    else:
        assert not any(compare_sums(a, b, c).values())


def test_sign_conflicts_counted_by_hand():
    a = torch.tensor([0.0, 1, 1, 1, 1, -1, 5, 0, 0])
    b = torch.tensor([1.0, 2, 0, 1, 2, -2, 6, 1e-45, -1e-30])
    c = torch.tensor([1.0, 0, 2, 0, 1, -3, 4, -1e-45, -1e-45])
    #                 yes  no no  -  -  yes no no     yes: do both differ from A on one side?
    found = compare_sums(a, b, c)
    assert (found["conflicts"], found["both"]) == (4, 7)


@dtypes
@pytest.mark.parametrize("shape", [(1,), (30, 20), (BLOCK + 3,), ()], ids=str)
def test_change_sums_are_numpys(dtype, shape):
    count = math.prod(shape)
    a, out = drawn(count, 1, dtype).reshape(shape), drawn(count, 2, dtype).reshape(shape)
    x, y = a.double().numpy().ravel(), out.double().numpy().ravel()
    found = change_sums(a, out)
    assert found["oo"] == pytest.approx(y @ y, rel=1e-12)
    assert found["cc"] == pytest.approx((y - x) @ (y - x), rel=1e-12)
    assert found["max_change"] == np.abs(y - x).max()


def test_change_sums_of_no_change_and_of_nothing():
    a = drawn(100)
    assert change_sums(a, a.clone()) == {"oo": dot(a, a), "cc": 0, "max_change": 0}
    assert change_sums(torch.zeros(0), torch.zeros(0)) == {"oo": 0, "cc": 0, "max_change": 0}
    assert change_sums(a, a - 3)["max_change"] == pytest.approx(3)


@dtypes
def test_measuring_changes_no_tensor(dtype):
    tensors = [drawn(BLOCK + 9, seed, dtype) for seed in range(3)]
    before = [tensor.clone() for tensor in tensors]
    compare_sums(*tensors)
    change_sums(*tensors[:2])
    pair_dots(*tensors[:2])
    assert all(torch.equal(one, two) for one, two in zip(before, tensors, strict=True))


# The finite gate.


def gate(raw: np.ndarray, dtype) -> bool:
    return bits_finite(np.ascontiguousarray(raw).view(np.uint8), dtype.bits, dtype.unbounded)


@pytest.mark.parametrize("dtype", SMALL_FORMATS, ids=lambda dtype: dtype.name)
def test_the_gate_is_right_about_every_pattern_of_a_small_format(dtype):
    patterns = np.arange(2**dtype.bits).astype(f"<u{dtype.bits // 8}")
    values = torch.from_numpy(patterns.view(np.uint8).copy()).view(getattr(torch, dtype.torch)).float()
    finite = torch.isfinite(values).numpy()
    assert finite.any()
    assert not finite.all()
    for pattern, wanted in zip(patterns, finite, strict=True):
        assert bits_finite(pattern.reshape(1).view(np.uint8), dtype.bits, dtype.unbounded) == wanted
    assert gate(patterns[finite], dtype)
    assert float(values[torch.from_numpy(finite)].max()) == dtype.largest


def special(dtype) -> np.ndarray:
    """Zeros, subnormals, the largest, infinities and NaNs of a format with both signs, and random patterns."""
    bits, kind = dtype.bits, np.dtype(f"u{dtype.bits // 8}").type
    infinity = {32: 0x7F800000, 64: 0x7FF0000000000000}[bits]
    quiet = infinity | infinity >> 1 & ~infinity
    ends = [0, 1, 2, infinity >> 8, infinity - 1, infinity, infinity + 1, quiet, quiet + 1, (1 << (bits - 1)) - 1]
    signed = [end | sign << (bits - 1) for end in ends for sign in (0, 1)]
    random = np.random.default_rng(3).integers(0, 2**bits, 5000, dtype=kind)
    return np.concatenate([np.array(signed, dtype=kind), random])


@pytest.mark.parametrize("dtype", LARGE_FORMATS, ids=lambda dtype: dtype.name)
def test_the_gate_is_right_about_a_large_format(dtype):
    patterns = special(dtype)
    values = patterns.view(f"f{dtype.bits // 8}")
    finite = np.isfinite(values)
    assert 4 < (~finite[:20]).sum() < 16
    for pattern, value, wanted in zip(patterns, values, finite, strict=True):
        assert bits_finite(pattern.reshape(1).view(np.uint8), dtype.bits, dtype.unbounded) == wanted
        assert all_finite(torch.from_numpy(value.reshape(1))) == wanted
    assert gate(patterns[finite], dtype)
    assert all_finite(torch.from_numpy(values[finite]))
    assert values[finite].max() <= dtype.largest == np.finfo(values.dtype).max


@pytest.mark.parametrize("dtype", FLOAT_FORMATS, ids=lambda dtype: dtype.name)
@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 3000), at=st.integers(0, 2999), sign=st.integers(0, 1), data=st.data())
def test_one_bad_element_anywhere_is_seen(dtype, count, at, sign, data):
    kind = np.dtype(f"u{dtype.bits // 8}").type
    good = data.draw(st.integers(0, dtype.unbounded - 1)) | data.draw(st.integers(0, 1)) << (dtype.bits - 1)
    patterns = np.full(count, good, dtype=kind)
    assert gate(patterns, dtype)
    bad = data.draw(st.integers(dtype.unbounded, (1 << (dtype.bits - 1)) - 1))
    patterns[at % count] = bad | sign << (dtype.bits - 1)
    assert not gate(patterns, dtype)


def test_nothing_is_finite():
    assert bits_finite(np.empty(0, np.uint8), 16, 0x7C00)
    assert all_finite(torch.zeros(0))


@dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan], ids=str)
def test_all_finite_sees_one_bad_element_anywhere(dtype, bad):
    for count in (1, 2, 7, 33, 1000):
        for at in {0, count // 2, count - 1}:
            x = drawn(count, 1, dtype)
            assert all_finite(x)
            x[at] = bad
            assert not all_finite(x)
