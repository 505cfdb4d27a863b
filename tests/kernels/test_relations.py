"""Sizes, cosines, shared spaces and signs of low-rank changes, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.kernels.random import stream_key
from lib_merge.kernels.relations import GRIDS, SIDE, Products, entries, positions, sign_counts
from tests.data.oracles import optimizer_ref


def factors(seed: int, out: int, rest: int, *ranks: int):
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(out, rank, generator=random), torch.randn(rank, rest, generator=random) / rank**0.5)
        for rank in ranks
    ]


@pytest.mark.parametrize("ranks", [(3, 3), (1, 4, 9), (12, 5)])
def test_the_gram_matrix_is_that_of_the_dense_changes(ranks):
    pairs = factors(0, 24, 20, *ranks)
    got = Products.of(*zip(*pairs, strict=True)).gram()
    want = optimizer_ref.gram_from_factors([(up.numpy(), down.numpy(), None) for up, down in pairs])
    dense = torch.stack([(up.double() @ down.double()).flatten() for up, down in pairs])
    assert np.allclose(got, want, rtol=1e-12, atol=1e-12)
    assert torch.allclose(got, dense @ dense.T, rtol=1e-10)


@pytest.mark.parametrize("ranks", [(3, 3), (2, 12), (16, 16, 9)])
def test_the_overlap_is_that_of_the_first_singular_vectors(ranks):
    pairs = factors(1, 40, 30, *ranks)
    up, down = pairs[0]
    pairs.append((up + 0.3 * torch.randn_like(up), down))  # something that is shared
    got = Products.of(*zip(*pairs, strict=True)).overlap()
    dense = [(up.double() @ down.double()).numpy() for up, down in pairs]
    for one in range(len(dense)):
        for two in range(len(dense)):
            want = optimizer_ref.pair_metrics(dense[one], dense[two])["overlap"]
            assert float(got[one, two]) == pytest.approx(want, abs=1e-8)


def test_changes_in_spaces_that_have_nothing_in_common_overlap_by_nothing():
    one = (torch.eye(6)[:, :2], torch.eye(8)[:2])
    two = (torch.eye(6)[:, 2:4], torch.eye(8)[4:6])
    zero = (torch.zeros(6, 2), torch.ones(2, 8))
    got = Products.of(*zip(one, two, zero, strict=True)).overlap()
    assert torch.equal(got, torch.eye(3, dtype=torch.float64))


def test_entries_are_those_of_the_product():
    ((up, down),) = factors(2, 300, 500, 7)
    rows, columns = positions(stream_key(0, "a"), 300, 500)
    assert rows.shape == columns.shape == (GRIDS, SIDE)
    dense = up @ down
    want = torch.stack([dense[rows[k]][:, columns[k]] for k in range(GRIDS)]).flatten()
    assert torch.allclose(entries(up, down, rows, columns), want, atol=1e-5)


def test_positions_depend_on_the_name_and_reach_every_row_evenly():
    first, again, other = (positions(stream_key(0, name), 100_000, 7) for name in ("a", "a", "b"))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    rows, columns = first
    assert 0 <= int(rows.min()) < 1000 < 99_000 < int(rows.max()) < 100_000
    assert abs(float(rows.double().mean()) / 49_999.5 - 1) < 0.05  # 4 standard errors of 1264 draws
    assert columns.unique().tolist() == list(range(7))
    counts = columns.flatten().bincount().double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 22.5  # chi-squared of 6, p = 0.001


def test_signs_are_counted_where_both_are_there():
    a = torch.tensor([1.0, -2.0, 0.0, 3.0, 1e-30])
    b = torch.tensor([-1.0, -1.0, 5.0, 0.0, -1e-30])
    opposed, both = sign_counts([a, b])
    assert opposed.tolist() == [[0, 2], [2, 0]]
    assert both.tolist() == [[4, 3], [3, 4]]


def test_sampled_signs_agree_with_all_of_them_within_the_error_that_is_stated():
    """Random factors of rank 16, some related: four standard errors of 0.0016."""
    for seed in range(4):
        (one, other) = factors(seed, 400, 600, 16, 16)
        share = seed / 4
        two = (other[0] * (1 - share) + one[0] * share, other[1] * (1 - share) + one[1] * share)
        rows, columns = positions(stream_key(0, f"group {seed}"), 400, 600)
        opposed, both = sign_counts([entries(*pair, rows, columns) for pair in (one, two)])
        a, b = (up @ down for up, down in (one, two))
        want = float(((a > 0) != (b > 0)).double().mean())
        assert float(opposed[0, 1] / both[0, 1]) == pytest.approx(want, abs=4 * 0.0016)
