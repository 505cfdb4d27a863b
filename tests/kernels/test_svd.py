"""Each way to singular values against NumPy, and what happens when one fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.kernels.svd import WAYS, svd
from tests.kernels.deltas import FLOATS, low_rank

SHAPES = ((24, 20), (20, 24), (7, 7), (1, 5), (5, 1))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_way_finds_the_singular_values(way, shape, dtype):
    matrix = low_rank(1, shape, dtype, rank=9)[0]
    u, s, v = svd(matrix, [way])
    wanted = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    exact = 1e-9 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(s.double().numpy(), wanted, atol=max(exact, 1e-7) * wanted[0])
    torch.testing.assert_close(u * s @ v, matrix, rtol=0, atol=exact * wanted[0])
    assert (u.dtype, s.dtype, v.dtype) == (dtype,) * 3
    assert (s[:-1] >= s[1:]).all()
    for vectors in (u.T[:9], v[:9]):  # of the matrix's rank; beyond it any will do
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(vectors), dtype=dtype), rtol=0, atol=exact)


def fails(matrix):
    raise torch.linalg.LinAlgError("does not converge")


def has_no_room(matrix):
    raise torch.cuda.OutOfMemoryError("no memory")


@pytest.mark.parametrize("first", [fails, has_no_room])
def test_the_next_way_is_tried(first):
    matrix = low_rank(1, (9, 6))[0]
    u, s, v = svd(matrix, [first, first, *WAYS])
    torch.testing.assert_close(u * s @ v, matrix)


def test_what_no_way_can_do_is_an_error():
    with pytest.raises(RuntimeError):
        svd(torch.full((4, 3), float("nan")))
    assert svd(torch.zeros(4, 3))[1].tolist() == [0, 0, 0]
