"""Sums over the rank are taken in order, whatever matrix multiplication does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.kernels import in_order


def in_python(up, down):
    """The sum of each element in Python's own floats, which are float64."""
    out = np.zeros((len(up), down.shape[1]))
    for row in range(len(up)):
        for column in range(down.shape[1]):
            total = 0.0
            for number in range(len(down)):
                total += float(up[row, number]) * float(down[number, column])
            out[row, column] = total
    return out


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 7, 64, 300])
def test_the_sum_is_that_of_a_plain_loop(rank, fast):
    rng = np.random.default_rng(rank)
    up, down = (rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((5, rank), (rank, 9)))
    out = torch.full((5, 9), np.nan, dtype=torch.float64)
    assert in_order.product(torch.from_numpy(up), torch.from_numpy(down), out, fast=fast) is out
    assert np.array_equal(out.numpy(), in_python(up, down))


def test_the_order_is_that_of_the_rank():
    up = torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float64)
    down = torch.tensor([[1e20], [-1e20], [1.0]], dtype=torch.float64)
    assert float(in_order.product(up, down, torch.empty(1, 1, dtype=torch.float64))) == 1.0
    down = torch.tensor([[1.0], [1e20], [-1e20]], dtype=torch.float64)
    assert float(in_order.product(up, down, torch.empty(1, 1, dtype=torch.float64))) == 0.0


def test_multiplication_that_adds_in_another_order_is_not_used(monkeypatch):
    real = torch.mm

    def backwards(up, down, *, out=None):
        made = real(up.flip(1), down.flip(0)) * (1 + 2**-50)
        return made if out is None else out.copy_(made)

    in_order._multiplication_is_in_order.cache_clear()
    monkeypatch.setattr(torch, "mm", backwards)
    rng = np.random.default_rng(1)
    up, down = (rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((4, 33), (33, 6)))
    out = in_order.product(torch.from_numpy(up), torch.from_numpy(down), torch.empty(4, 6, dtype=torch.float64))
    assert np.array_equal(out.numpy(), in_python(up, down))
    in_order._multiplication_is_in_order.cache_clear()
