"""Consensus: against the oracle, by hand, and its norm and directions for any deltas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import consensus as kernel
from lib_merge.kernels.combinations import mean_norm, oriented
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS, SHAPES, STRENGTHS, arrays, close, low_rank, patient, stacks

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
stages = pytest.mark.parametrize(("cleanup", "recalibrate"), [(False, False), (True, False), (True, True)])


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@stages
@dtypes
def test_the_oracles(strengths, shape, cleanup, recalibrate, dtype):
    deltas = low_rank(len(strengths), shape, dtype)
    found = kernel.consensus(*oriented(deltas, strengths), cleanup, recalibrate)
    close(found, oracle.consensus(arrays(deltas), strengths, cleanup, recalibrate), deltas)


def test_by_hand():
    gs = [torch.tensor([1.0, 0]), torch.tensor([3.0, 0])]
    assert kernel.consensus(gs, [1, 1], cleanup=False).tolist() == pytest.approx([2, 0])  # 28/10, the norm set to 2
    gs = [torch.tensor([2.0, 0, 0]), torch.tensor([1.0, -1, 0])]
    entries = torch.tensor([9 / 5, -1, 0])  # (8 + 1)/(4 + 1); −1/1; nothing
    wanted = entries / entries.norm() * (2 + math.sqrt(2)) / 2
    torch.testing.assert_close(kernel.consensus(gs, [1, 1], cleanup=False), wanted)


@pytest.mark.parametrize(("values", "wanted"), [([1, 1, 1, 1], 4), ([5, 0, 0], 1), ([0, 0], 0), ([2, 1, 1], 2**1.5)])
def test_effective_rank_by_hand(values, wanted):
    assert kernel.effective_rank(torch.tensor(values, dtype=torch.float32)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "kept"), [([1, 1, 1, 1], 4), ([5, 0, 0, 0], 1), ([2, 1, 1, 0], 3), ([9, 1, 0, 0], 2)]
)
@dtypes
def test_cleanup_keeps_the_effective_rank_rounded_up(values, kept, dtype):
    turned = [np.linalg.qr(np.random.default_rng(k).standard_normal((4, 4)))[0] for k in (1, 2)]
    matrix = torch.from_numpy(turned[0] @ np.diag(values) @ turned[1].T).to(dtype)
    wanted = sorted(values, reverse=True)[:kept] + [0] * (4 - kept)
    found = torch.linalg.svdvals(kernel.spectral_cleanup(matrix))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=dtype), rtol=1e-5, atol=1e-5)


@patient
@given(stack=stacks())
@stages
def test_a_negative_strength_is_a_negated_delta(stack, cleanup, recalibrate):
    deltas, strengths = stack
    turned = [d * math.copysign(1, s) for d, s in zip(deltas, strengths, strict=True)]
    found = kernel.consensus(turned, [abs(s) for s in strengths], cleanup, recalibrate)
    assert torch.equal(found, kernel.consensus(*oriented(deltas, strengths), cleanup, recalibrate))


@patient
@given(stack=stacks(), data=st.data())
def test_the_order_of_deltas_changes_nothing(stack, data):
    gs, ws = oriented(*stack)
    order = data.draw(st.permutations(range(len(gs))))
    found = kernel.consensus([gs[k] for k in order], [ws[k] for k in order], cleanup=False)
    torch.testing.assert_close(found, kernel.consensus(gs, ws, cleanup=False), rtol=1e-9, atol=1e-9)


@patient
@given(stack=stacks())
def test_the_norm_is_the_mean_of_the_inputs_unless_all_cancels(stack):
    gs, ws = oriented(*stack)
    found = kernel.consensus(gs, ws)
    wanted = mean_norm([float(g.norm()) for g in gs], ws)
    assert float(found.norm()) == pytest.approx(wanted) or float(found.norm()) <= 1e-9 * wanted


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("shape", [(37,), (12, 9), (6, 4, 3, 3)], ids=str)
@dtypes
def test_the_same_delta_many_times_is_that_delta(count, shape, dtype):
    delta = low_rank(1, shape, dtype, rank=1)[0]  # of rank 1: the cleanup leaves all of it
    torch.testing.assert_close(kernel.consensus([delta] * count, [1.0] * count), delta)
    torch.testing.assert_close(kernel.consensus([delta] * count, [0.3] * count, cleanup=False), delta)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e30])
def test_neither_small_nor_large_numbers_leave_the_range_of_float32(size):
    deltas = low_rank(2, (12, 9), torch.float32)
    found = kernel.consensus([delta * size for delta in deltas], [1.0, 0.5], cleanup=False)
    torch.testing.assert_close(
        found.double() / size, kernel.consensus(deltas, [1.0, 0.5], cleanup=False).double(), rtol=1e-5, atol=1e-5
    )


def test_zeros_stay_zeros_and_opposites_cancel():
    nothing, delta = torch.zeros(6, 5), low_rank(1, (6, 5), torch.float32)[0]
    assert torch.equal(kernel.consensus([nothing, nothing], [1, 1]), nothing)
    assert torch.equal(kernel.consensus([delta, -delta], [1, 1]), nothing)
    torch.testing.assert_close(kernel.consensus([delta, nothing], [1, 1], cleanup=False), delta / 2)
