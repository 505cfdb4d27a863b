"""What one delta has to itself: against the oracle, by hand, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import selfish as kernel
from lib_merge.kernels.combinations import combined, oriented, weighted_average_scalars
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS, SHAPES, STRENGTHS, arrays, close, low_rank, patient, stacks

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dominance", [None, 1.0, 2.0])
@dtypes
def test_the_split_is_the_oracles(strengths, shape, dominance, dtype):
    deltas = low_rank(len(strengths), shape, dtype)
    gs, ws = oriented(deltas, strengths)
    found = kernel.tall_split(gs, ws, dominance)
    factor = (3 if len(strengths) == 2 else 1) if dominance is None else dominance
    rests, added, owner = oracle.tall_split(arrays(gs), ws, factor)
    close(found.selfish, added, deltas)
    for rest, wanted in zip(found.rests, rests, strict=True):
        close(rest, wanted, deltas)
    assert found.share == pytest.approx((owner >= 0).mean())


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize(("dominance", "least"), [(0.4, 2), (0.2, 2), (0.6, 1)])
def test_the_papers_mask_is_the_oracles(strengths, dominance, least):
    deltas = low_rank(len(strengths), (24, 20))
    gs, ws = oriented(deltas, strengths)
    wanted = oracle.tall_consensus_mask(arrays(deltas), strengths, dominance, least)
    assert np.array_equal(kernel.shared_mask(gs, ws, dominance, least).numpy(), wanted)


def test_by_hand():
    gs = [torch.tensor([4.0, 1, 2, 0, -3]), torch.tensor([1.0, -1, 1, 0, 1]), torch.tensor([-2.0, 3, 1, 0, -2])]
    found = kernel.tall_split(gs, [1, 1, 1])
    assert found.selfish.tolist() == [4, 3, 2, 0, -3]  # 4 ≥ 3; 3 ≥ 2; 2 ≥ 2; nothing; 3 ≥ 3
    assert [rest.tolist() for rest in found.rests] == [[0, 1, 0, 0, 0], [1, -1, 1, 0, 1], [-2, 0, 1, 0, -2]]
    assert found.share == 0.8
    assert kernel.tall_split(gs, [1, 1, 1], 2).selfish.tolist() == [0, 0, 0, 0, 0]  # none is twice the others
    assert kernel.tall_split(gs, [2, 1, 1]).selfish.tolist() == [8, 3, 4, 0, -6]  # 3 ≥ 2 + 1 still
    assert kernel.tall_split(gs, [3, 1, 1]).selfish.tolist() == [12, 0, 6, 0, -9]  # 3 < 3 + 1


def test_of_two_equal_shares_none_is_selfish():
    gs = [torch.tensor([2.0, 1]), torch.tensor([-2.0, 1])]
    assert kernel.tall_split(gs, [1, 1], 1.0).share == 0
    assert kernel.tall_split([torch.zeros(2), torch.zeros(2)], [1, 1]).share == 0


@pytest.mark.parametrize(("dominance", "share"), [(2, 0.59), (3, 0.41), (5, 0.25), (10, 0.127)])
def test_shares_of_two_unrelated_deltas_are_those_of_the_normal_distribution(dominance, share):
    rng = np.random.default_rng(2)
    gs = [torch.from_numpy(rng.standard_normal((400, 400))) for _ in range(2)]
    # P(|x| ≥ λ|y| or |y| ≥ λ|x|) = 4·arctan(1/λ)/π
    assert share == pytest.approx(4 * np.arctan(1 / dominance) / np.pi, abs=0.005)
    assert kernel.tall_split(gs, [1, 1], dominance).share == pytest.approx(
        4 * np.arctan(1 / dominance) / np.pi, abs=0.006
    )


@patient
@given(stack=stacks(), dominance=st.sampled_from([None, 0.5, 1.0, 2.0]))
def test_rests_and_selfish_add_up_to_the_input_and_never_overlap(stack, dominance):
    gs, ws = oriented(*stack)
    found = kernel.tall_split(gs, ws, dominance)
    assert torch.equal(combined(found.rests, ws) + found.selfish, combined(gs, ws))
    taken = [rest != g for rest, g in zip(found.rests, gs, strict=True)]
    assert (sum(mask.int() for mask in taken) <= 1).all()
    assert all(((rest == g) | (rest == 0)).all() for rest, g in zip(found.rests, gs, strict=True))


@patient
@given(stack=stacks(), data=st.data())
def test_the_order_of_deltas_changes_nothing(stack, data):
    gs, ws = oriented(*stack)
    order = data.draw(st.permutations(range(len(gs))))
    mixed = kernel.tall_split([gs[k] for k in order], [ws[k] for k in order])
    found = kernel.tall_split(gs, ws)
    assert torch.equal(mixed.selfish, found.selfish)
    assert all(torch.equal(rest, found.rests[k]) for rest, k in zip(mixed.rests, order, strict=True))


@pytest.mark.parametrize("count", [2, 3, 5])
@dtypes
def test_the_same_delta_many_times_is_that_delta(count, dtype):
    delta = low_rank(1, (12, 9), dtype)[0]
    found = kernel.tall_split([delta] * count, [1.0] * count)
    assert found.share == 0
    merged = combined(found.rests, weighted_average_scalars([1.0] * count)) + found.selfish
    torch.testing.assert_close(merged, delta)


def test_pieces_do_not_show_and_inputs_stay():
    gs = low_rank(3, (300, 700))
    before = [g.clone() for g in gs]
    whole = kernel.tall_split(gs, [1.0, 0.5, 0.7])
    parts = [kernel.tall_split([g[rows] for g in gs], [1.0, 0.5, 0.7]) for rows in (slice(0, 100), slice(100, 300))]
    assert torch.equal(whole.selfish, torch.cat([part.selfish for part in parts]))
    assert whole.share == pytest.approx((parts[0].share + 2 * parts[1].share) / 3)
    assert all(torch.equal(g, old) for g, old in zip(gs, before, strict=True))
