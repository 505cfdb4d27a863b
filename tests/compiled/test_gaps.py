"""Differences of stored tensors and their sums down the columns, against numpy and the sums of torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from lib_merge.compiled import gaps
from lib_merge.kernels.column_sums import column_sums
from lib_merge.kernels.measure import row_block


def stored(shape, seed=1):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 2, shape)).astype(np.float16) for _ in "ab"]


@pytest.mark.parametrize("wide", [False, True])
def test_the_largest_difference(wide):
    a, b = stored(10_007)
    number = np.float64 if wide else np.float32
    found = (gaps.widest_of if wide else gaps.largest_of)(a.view(np.uint16), b.view(np.uint16))
    assert found == float(np.abs(a.astype(number) - b.astype(number)).max())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_not_measured(bad, side):
    pair = stored((50, 40))
    pair[side][33, 7] = bad
    flat = [each.reshape(-1).view(np.uint16) for each in pair]
    for ask in (gaps.largest_of, gaps.widest_of, lambda a, b: gaps.column_gaps(a, b, 40, False)):
        with pytest.raises(ArithmeticError):
            ask(*flat)


@pytest.mark.parametrize(
    "shape", [(1, 1), (700, 1), (1, 700), (3, 70_000), (5000, 36), (2500, 320), (40, 11_520), (700, 2)]
)
@pytest.mark.parametrize("wide", [False, True])
def test_sums_down_the_columns_are_torchs_bit_for_bit(shape, wide):
    pair = stored(shape)
    number = torch.float64 if wide else torch.float32
    a, b = (torch.from_numpy(each).to(number) for each in pair)
    size, (rows, columns) = row_block(shape[1]), shape
    differences = (a - b).abs().double()
    sums = torch.stack([differences[low : low + size].sum(0) for low in range(0, rows, size)])
    wanted = column_sums(sums, size * float(differences.max()))
    largest, found = gaps.column_gaps(*(each.reshape(-1).view(np.uint16) for each in pair), columns, wide)
    assert largest == float(differences.max())
    assert found.top == wanted.top
    assert len(found.multiples) == len(wanted.multiples)
    assert all(map(torch.equal, found.multiples, wanted.multiples))


def test_no_elements_have_no_sums():
    assert gaps.column_gaps(*[np.empty(0, np.uint16)] * 2, 5, False) == (0.0, None)
