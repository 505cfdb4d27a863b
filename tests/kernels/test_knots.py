"""The shared basis: deltas come back from it whole, and merges in it are as low in rank as the factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.kernels import combinations, votes
from lib_merge.kernels.knots import shared_basis
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS

RANKS = ((3, 3, 3), (1, 5), (8, 2, 4, 6))
SIZES = ((24, 20), (20, 40), (6, 50), (50, 6))  # the last two have fewer rows or columns than ranks

stacks = pytest.mark.parametrize(("ranks", "size"), [(r, s) for r in RANKS for s in SIZES], ids=str)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def factors(ranks, size, dtype=torch.float64):
    rng = np.random.default_rng([*ranks, *size])
    ups = [torch.from_numpy(rng.standard_normal((size[0], rank)) / rank).to(dtype) for rank in ranks]
    downs = [torch.from_numpy(rng.standard_normal((rank, size[1]))).to(dtype) for rank in ranks]
    return ups, downs


def dense(ups, downs):
    return [up.double() @ down.double() for up, down in zip(ups, downs, strict=True)]


@stacks
@dtypes
def test_deltas_come_back_whole(ranks, size, dtype):
    ups, downs = factors(ranks, size, dtype)
    basis, coords = shared_basis(ups, downs)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    wide = basis.double()
    torch.testing.assert_close(wide.T @ wide, torch.eye(wide.shape[1], dtype=torch.float64), rtol=0, atol=exact)
    for delta, coord in zip(dense(ups, downs), coords, strict=True):
        assert float((wide @ coord.double() - delta).norm()) <= exact * float(delta.norm())
    assert basis.shape[1] == np.linalg.matrix_rank(torch.cat(dense(ups, downs), 1).numpy(), rtol=1e-6)
    assert basis.dtype == coords[0].dtype == dtype


@stacks
def test_the_basis_is_the_oracles_up_to_signs(ranks, size):
    ups, downs = factors(ranks, size)
    _, coords = shared_basis(ups, downs)
    _, wanted = oracle.knots_factors([(up.numpy(), down.numpy(), None) for up, down in zip(ups, downs, strict=True)])
    for coord, want in zip(coords, wanted, strict=True):
        np.testing.assert_allclose(coord.abs().numpy(), np.abs(want), atol=1e-9)


@stacks
@dtypes
def test_ties_in_the_basis_is_the_oracles_and_of_low_rank(ranks, size, dtype):
    ups, downs = factors(ranks, size, dtype)
    strengths = [1.0, -0.5, 0.7, 0.4][: len(ranks)]
    basis, coords = shared_basis(ups, downs)
    merged = basis @ votes.ties(*combinations.oriented(coords, strengths), 0.5, "total")
    deltas = dense(ups, downs)
    wanted = oracle.knots_merge([d.numpy() for d in deltas], strengths, lambda xs, s: oracle.ties(xs, s, 0.5, "total"))
    largest = max(float(delta.norm()) for delta in deltas)
    share = 1e-9 if dtype == torch.float64 else 1e-5
    assert np.linalg.norm(merged.double().numpy() - wanted[0]) <= share * largest
    assert np.linalg.matrix_rank(merged.double().numpy(), rtol=1e-5) <= sum(ranks)


def test_norms_and_inner_products_are_those_of_the_deltas():
    ups, downs = factors((3, 4, 5), (24, 20))
    _, coords = shared_basis(ups, downs)
    np.testing.assert_allclose(combinations.gram(coords), combinations.gram(dense(ups, downs)), rtol=1e-10)


def test_equal_loras_need_one_basis_of_their_rank():
    (up, _), (down, _) = factors((3, 3), (24, 20))
    basis, coords = shared_basis([up, up, up], [down, down, 2 * down])
    assert basis.shape == (24, 3)
    torch.testing.assert_close(coords[2], 2 * coords[0])


def test_zeros_take_one_direction():
    basis, coords = shared_basis([torch.zeros(6, 2), torch.zeros(6, 1)], [torch.ones(2, 5), torch.ones(1, 5)])
    assert basis.shape == (6, 1)
    assert all(torch.equal(coord, torch.zeros(1, 5)) for coord in coords)
