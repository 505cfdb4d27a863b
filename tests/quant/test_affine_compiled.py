"""Codes that numba makes are those of the plain path, bit for bit; without numba there is only the plain path."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import lib_merge
from lib_merge.errors import NumberError
from lib_merge.quant import affine_compiled
from lib_merge.quant.affine import BITS, GROUPS, ROUNDINGS, quantize
from tests.data.mlx_ref import merged, quantized, widened
from tests.fold.making import DOWN, Pair, Q, contents, raw_tensors
from tests.quant.test_affine import FAMILIES, leaves

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def without_numba(monkeypatch):
    """As on a machine that has none."""
    monkeypatch.setattr(affine_compiled, "compiled", lambda: None)


def test_without_numba_the_plain_path_is_taken(tmp_path, without_numba):
    zeros = torch.zeros(2, 64)
    made = affine_compiled.quantize_sum(zeros, zeros.double(), bits=4, group=64, rounding="even", dtype=torch.bfloat16)
    assert made is None
    pair = Pair(tmp_path)
    lib_merge.fold(pair.dense, pair.adapter(), tmp_path / "out", quantize=pair.shipped)
    found = raw_tensors(tmp_path / "out")
    for module in (Q, DOWN):
        for leaf, (_, _, data) in pair.expected(module, 1.5).items():
            assert found[f"{module}.{leaf}"] == data


@pytest.mark.peers
def test_numba_gives_the_same_bytes(capsys):
    compared = 0
    for (family, draw), bits in itertools.product(FAMILIES.items(), BITS):
        rng = np.random.default_rng(bits)
        weights = torch.from_numpy(draw(rng, (6, 256)).astype(np.float32))
        change = torch.from_numpy(draw(rng, (6, 256)).astype(np.float64) * 0.3)
        for group, rounding, dtype in itertools.product(GROUPS, ROUNDINGS, DTYPES):
            dense = weights.to(dtype)
            ours = affine_compiled.quantize_sum(dense, change, bits=bits, group=group, rounding=rounding, dtype=dtype)
            assert ours is not None, "numba is not installed"
            summed = (dense.double() + change).float()
            plain = quantize(summed.clone(), bits=bits, group=group, rounding=rounding, dtype=dtype)
            assert leaves(ours) == leaves(plain), (family, bits, group, rounding)
            words, scales, _ = quantized(summed.numpy(), bits, group, rounding)
            assert ours.words.numpy().tobytes() == words.tobytes()
            assert torch.equal(ours.scales, torch.from_numpy(scales).to(dtype))
            compared += dense.numel() // group
    with capsys.disabled():
        print(f" {compared} groups", end="")
    assert compared == len(FAMILIES) * len(BITS) * len(ROUNDINGS) * len(DTYPES) * 6 * sum(256 // g for g in GROUPS)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("columns", "values"),
    [
        (slice(70, 71), np.nan),
        (slice(70, 71), np.inf),
        (slice(127, 128), -np.inf),
        (slice(64, 66), torch.tensor([3e38, -3e38], dtype=torch.float64)),
        (slice(64, 128), 1e32),
    ],
    ids=["NaN", "infinite", "infinite below", "range", "scale of 0"],
)
def test_numba_refuses_the_same_groups_in_the_same_words(columns, values):
    change = torch.zeros(3, 128, dtype=torch.float64)
    change[1, columns] = values
    how = {"bits": 4, "group": 64, "rounding": "even", "dtype": torch.bfloat16, "first_row": 5}
    with pytest.raises(NumberError) as plain:
        quantize(change.float(), **how)
    with pytest.raises(NumberError) as ours:
        affine_compiled.quantize_sum(torch.zeros(3, 128), change, **how)
    assert ours.value.what == plain.value.what
    assert "row 6" in ours.value.what


@pytest.mark.peers
@pytest.mark.parametrize("rounding", ["even", "away", "metal"])
def test_a_fold_with_numba_is_a_fold_without_it(tmp_path, monkeypatch, rounding):
    pair = Pair(tmp_path, rounding=rounding)
    adapter = pair.adapter()
    calls = []
    kernel = affine_compiled.compiled()
    assert kernel is not None, "numba is not installed"
    monkeypatch.setattr(affine_compiled, "compiled", lambda: lambda *all: calls.append(kernel(*all)))
    lib_merge.fold(pair.dense, adapter, tmp_path / "with", quantize=pair.shipped)
    assert calls
    assert lib_merge.fold_check(pair.dense, adapter, tmp_path / "with", pair.shipped).ok
    monkeypatch.setattr(affine_compiled, "compiled", lambda: None)
    lib_merge.fold(pair.dense, adapter, tmp_path / "without", quantize=pair.shipped)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")
    down, up = pair.factors[Q]
    words, *_ = quantized(merged(widened(pair.weights[Q]), down, up, 1.5), 4, 64, rounding)
    assert raw_tensors(tmp_path / "with")[f"{Q}.weight"] == words.tobytes()
