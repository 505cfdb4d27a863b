"""The values of a tensor: sums and counts by hand and by numpy, large tensors in pieces, codes told or decoded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lib_merge import values as module
from lib_merge.errors import FileError
from lib_merge.files.open import open_model
from lib_merge.values import BINS, histogram, pieces, read_values
from tests.support import STORAGES, raw, write, write_raw


def read(path, key):
    return read_values(open_model(path), key)


def test_sums_by_hand(tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": np.array([[-2, 0, 0], [1, 3, 4]], "<f4")})
    one = read(path, "w").summary
    assert (one.total, one.read, one.broken) == (6, 6, 0)
    assert (one.low, one.high, one.mean) == (-2.0, 4.0, 1.0)
    # squares around the mean: 9 + 1 + 1 + 0 + 4 + 9 = 24, over 6
    assert one.deviation == pytest.approx(2.0, rel=1e-15)
    assert one.zeros == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I8", "U8", "U32", "BOOL"])
def test_every_dtype_of_numbers_is_read(tmp_path, dtype):
    wanted = [0, 1, 1, 0] if dtype == "BOOL" else [0, 1, 2, 4] if dtype[0] == "U" else [-2, 0, 1, 4]
    path = write_raw(tmp_path / "a.safetensors", {"w": raw(dtype, wanted)})
    assert read(path, "w").finite.tolist() == wanted


def test_what_is_not_finite_is_counted_and_left_out(tmp_path):
    path = write(tmp_path / "a.safetensors", {
        "w": np.array([1, np.nan, 3, np.inf, -np.inf], "<f4"),
        "none": np.array([np.nan], "<f2"),
    })  # fmt: skip
    one = read(path, "w").summary
    assert (one.read, one.broken, one.low, one.high, one.mean) == (5, 3, 1.0, 3.0, 2.0)
    none = read(path, "none")
    assert none.summary.broken == 1
    assert math.isnan(none.summary.mean)
    assert none.finite.size == 0


def test_large_tensors_are_read_in_even_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "READ", 640)
    path = write(tmp_path / "a.safetensors", {"w": np.arange(64000, dtype="<f4")})
    found = read(path, "w")
    assert (found.summary.total, found.summary.read) == (64000, 640)
    assert (found.summary.low, found.summary.high) == (0.0, 63999.0)
    starts = found.finite[::10]
    assert set(np.diff(starts)) <= {1015.0, 1016.0}  # (64000 − 10) / 63 apart
    assert np.array_equal(found.finite.reshape(64, 10) - starts[:, None], np.tile(np.arange(10.0), (64, 1)))


@pytest.mark.parametrize("numel", [1, 1 << 22, (1 << 22) + 1, 1 << 31])
def test_pieces_lie_within_the_tensor_and_do_not_overlap(numel):
    found = pieces(numel)
    assert sum(count for _, count in found) == min(numel, 1 << 22)
    assert all(start + count <= after for (start, count), (after, _) in itertools.pairwise(found))
    assert found[0][0] == 0
    assert sum(found[-1]) == numel


def test_counts_are_those_of_numpy():
    finite = np.random.default_rng(0).standard_normal(10_000)
    low, high = float(finite.min()), float(finite.max())
    assert histogram(finite, low, high) == np.histogram(finite, BINS, (low, high))[0].tolist()


@pytest.mark.parametrize(
    ("finite", "filled"),
    [
        ([3.0, 3.0], {0: 2}),
        ([0.0, 63.99, 64.0], {0: 1, 63: 2}),
        ([-1.7e308, 0.0, 1.7e308], {0: 1, 32: 1, 63: 1}),  # the difference is beyond float64
        ([0.0, 5e-324], {0: 1, 63: 1}),
    ],
)
def test_counts_by_hand(finite, filled):
    counts = histogram(np.array(finite), min(finite), max(finite))
    assert {place: count for place, count in enumerate(counts) if count} == filled
    assert len(counts) == BINS


def test_scaled_fp8_is_decoded_with_the_scale_of_its_rows(tmp_path):
    path = write_raw(
        tmp_path / "a.safetensors",
        {"l.weight": raw("F8_E4M3", [[1, 2], [-1, 4]]), "l.weight_scale": raw("F32", [[0.5], [2.0]])},
    )
    assert read(path, "l.weight").finite.tolist() == [0.5, 1.0, -2.0, 8.0]


@pytest.mark.parametrize("storage", ["mlx", "nvfp4", "4-bit floats"])
def test_codes_are_not_taken_for_numbers(tmp_path, storage):
    bits = {"F4": 4, "F8_E4M3": 8, "U8": 8}
    tensors = {
        key: (dtype, (8,), bytes(bits.get(dtype, 32 if dtype[1:] == "32" else 16)))
        for key, dtype in STORAGES[storage][0].items()
    }
    path = write_raw(tmp_path / "a.safetensors", tensors)
    with pytest.raises(FileError, match="stored as codes"):
        read(path, "l.weight")


def test_a_tensor_without_values_is_told(tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": np.zeros((0, 4), "<f4")})
    with pytest.raises(FileError, match="no values"):
        read(path, "w")
