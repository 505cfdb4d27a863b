"""TIES and its kin: against the oracle, by hand, and what must hold for any deltas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import votes
from lib_merge.kernels.combinations import oriented
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS, SHAPES, STRENGTHS, arrays, close, low_rank, patient, stacks

every_vote = pytest.mark.parametrize("vote", ["frequency", "total"])
every_divisor = pytest.mark.parametrize("divisor", ["weight", "count"])
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
HAND = [torch.tensor(row) for row in ([1.0, -4, 2, 0], [2.0, 1, -3, 0], [-5.0, 2, 0, 0])]


# The threshold.


@pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 0.7, 0.999])
@dtypes
def test_the_threshold_is_the_order_statistic_of_a_sorted_list(density, dtype):
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((40, 25))).to(dtype)
    sizes = sorted(abs(float(value)) for value in x.reshape(-1))
    assert votes.kth_threshold(x, density) == sizes[1000 - (int(density * 999 + 1e-9) + 1)]


@pytest.mark.parametrize(
    ("density", "wanted"),
    [(0.5, [0, -3, 2, 0]), (0.9, [0, -3, 2, 0.5]), (0.1, [0, -3, 0, 0]), (1.0, [0.1, -3, 2, 0.5])],
)
def test_trimming_by_hand(density, wanted):
    assert votes.trim(torch.tensor([0.1, -3, 2, 0.5]), density).tolist() == pytest.approx(wanted)


def test_what_is_as_large_as_the_last_one_kept_stays():
    assert votes.trim(torch.tensor([1.0, -1, 1, 0.5]), 0.25).tolist() == [1, -1, 1, 0]


@pytest.mark.parametrize("density", [0, -1])
def test_density_0_keeps_nothing_and_density_1_all(density):
    x = torch.tensor([1.0, -2, 0])
    assert votes.trim(x, density).tolist() == [0, 0, 0]
    assert votes.ties([x, x], [1, 1], density).tolist() == [0, 0, 0]
    assert votes.trim(x, 1.0).tolist() == [1, -2, 0]
    assert votes.kth_threshold(torch.zeros(0), 0.5) == 0


def test_0_3_of_1001_elements_are_301():
    x = torch.arange(1, 1002, dtype=torch.float64)
    assert int((votes.trim(x, 0.3) != 0).sum()) == 301  # ⌊0.3·1000⌋ + 1, though 0.3·1000 is 299.99… in binary


def test_a_threshold_beyond_2_to_the_24_elements():
    count = (1 << 24) + 5
    x = torch.arange(count).mul_(7919).remainder_(count).double()  # a permutation: 7919 is prime, 0 … count − 1
    x[::2] *= -1
    assert votes.kth_threshold(x, 0.25) == count - (int(0.25 * (count - 1)) + 1)


# Against the oracle.


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_vote
@every_divisor
@dtypes
def test_ties_is_the_oracles(strengths, shape, vote, divisor, dtype):
    deltas = low_rank(len(strengths), shape, dtype)
    for density in (0.2, 0.5, 1.0):
        found = votes.ties(*oriented(deltas, strengths), density, vote, divisor)
        close(found, oracle.ties(arrays(deltas), strengths, density, vote, denom=divisor), deltas)


@pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("score", "named"), [("row_sum", "rowsum"), ("projection", "projection")])
@every_vote
@every_divisor
@dtypes
def test_the_vote_of_rows_is_the_oracles(strengths, shape, score, named, vote, divisor, dtype):
    deltas = low_rank(len(strengths), shape, dtype)
    gs, ws = oriented(deltas, strengths)
    ts = [votes.trim(g, 0.6) for g in gs]
    close(
        votes.columnwise(ts, ws, vote, divisor, score),
        oracle.columnwise_merge(arrays(ts), ws, vote, divisor, named),
        deltas,
    )


@patient
@given(stack=stacks())
@every_vote
def test_signs_and_conflicts_are_the_oracles_where_zeros_and_ties_are_many(stack, vote):
    deltas, strengths = stack
    gs, ws = oriented(deltas, strengths)
    assert np.array_equal(votes.elect(gs, ws, vote).numpy(), oracle.ties_elect(arrays(gs), ws, vote))
    assert np.array_equal(votes.conflict_mask(gs).numpy(), oracle.conflict_mask(arrays(deltas), strengths))


# By hand.


@pytest.mark.parametrize(
    ("ws", "vote", "divisor", "wanted"),
    [
        ([1, 1, 1], "frequency", "weight", [1.5, 1.5, -3, 0]),  # position 2 ties 1:1, the total decides
        ([1, 3, 1], "frequency", "weight", [7 / 4, 5 / 4, -3, 0]),
        ([1, 3, 1], "frequency", "count", [3.5, 2.5, -9, 0]),
        ([1, 1, 1], "total", "weight", [-5, -4, -3, 0]),
        ([4, 1, 1], "total", "weight", [6 / 5, -4, 2, 0]),  # weights count in the vote
    ],
)
def test_ties_worked_by_hand(ws, vote, divisor, wanted):
    assert votes.ties(HAND, ws, 1.0, vote, divisor).tolist() == pytest.approx(wanted)


def test_rows_worked_by_hand():
    rows = [torch.tensor([[4.0, -1], [1, 1]]), torch.tensor([[-1.0, -1], [2, -1]])]
    assert votes.columnwise(rows, [1, 1]).tolist() == [[4, -1], [1.5, 0]]  # row 0: the first alone, its −1 included
    assert votes.columnwise(rows, [1, 3]).tolist() == [[-1, -1], [1.75, -0.5]]  # 3 : −2·3, the weights decide the tie


def test_conflict_modes_worked_by_hand():
    low, high, whole = votes.conflict_mode_masks(HAND, [1, 1, 1], ["low_conflict", "high_conflict", "all"])
    assert whole is None
    assert (HAND[0] * low).tolist() == [1, 0, 0, 0]  # elected: +, +, −, none
    assert (HAND[1] * high).tolist() == [0, 0, 0, 0]
    assert votes.conflict_mode_masks(HAND, [1, 1, 1], ["all"] * 3) == [None] * 3


# For any deltas.


@patient
@given(stack=stacks(), density=st.sampled_from([0.2, 0.5, 0.8, 1.0]), data=st.data())
@every_vote
@every_divisor
def test_the_order_of_deltas_changes_nothing(stack, density, vote, divisor, data):
    gs, ws = oriented(*stack)
    order = data.draw(st.permutations(range(len(gs))))
    mixed = [gs[k] for k in order], [ws[k] for k in order]
    close(votes.ties(*mixed, density, vote, divisor), votes.ties(gs, ws, density, vote, divisor).numpy(), gs)
    close(votes.columnwise(*mixed, vote, divisor), votes.columnwise(gs, ws, vote, divisor).numpy(), gs)


@patient
@given(stack=stacks(), density=st.sampled_from([0.3, 1.0]), data=st.data())
@every_vote
def test_a_negative_strength_is_a_negated_delta(stack, density, vote, data):
    deltas, strengths = stack
    k = data.draw(st.integers(0, len(deltas) - 1))
    turned = [-d if i == k else d for i, d in enumerate(deltas)], [-s if i == k else s for i, s in enumerate(strengths)]
    for merge in (lambda gs, ws: votes.ties(gs, ws, density, vote), lambda gs, ws: votes.columnwise(gs, ws, vote)):
        assert torch.equal(merge(*oriented(*turned)), merge(*oriented(deltas, strengths)))


@patient
@given(stack=stacks())
@every_vote
@every_divisor
def test_all_deltas_turned_turn_the_result(stack, vote, divisor):
    deltas, strengths = stack
    found = votes.ties(*oriented(deltas, strengths), 0.6, vote, divisor)
    turned = votes.ties(*oriented([-d for d in deltas], strengths), 0.6, vote, divisor)
    assert torch.equal(turned + 0, -found + 0)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_vote
@every_divisor
@dtypes
def test_the_same_delta_many_times_is_that_delta(count, shape, vote, divisor, dtype):
    delta = low_rank(1, shape, dtype)[0]
    for merged in (
        votes.ties([delta] * count, [1.0] * count, 1.0, vote, divisor),
        votes.columnwise([delta] * count, [1.0] * count, vote, divisor, "projection"),
    ):
        torch.testing.assert_close(merged, delta)


@patient
@given(stack=stacks())
def test_the_two_conflict_modes_add_up_to_the_delta(stack):
    gs, ws = oriented(*stack)
    low = votes.conflict_mode_masks(gs, ws, ["low_conflict"] * len(gs))
    high = votes.conflict_mode_masks(gs, ws, ["high_conflict"] * len(gs))
    for g, agreeing, other in zip(gs, low, high, strict=True):
        assert torch.equal(g * agreeing + g * other, g)
        assert not (agreeing & other).any()


@patient
@given(stack=stacks(), factor=st.sampled_from([0.5, 4.0]))
def test_a_common_factor_of_the_strengths_cancels_with_the_divisor_weight_alone(stack, factor):
    gs, ws = oriented(*stack)
    scaled = [w * factor for w in ws]
    assert torch.equal(votes.ties(gs, scaled, 0.5), votes.ties(gs, ws, 0.5))
    assert torch.equal(votes.ties(gs, scaled, 0.5, divisor="count"), votes.ties(gs, ws, 0.5, divisor="count") * factor)


@pytest.mark.parametrize("density", [0.5, 1.0])
@every_vote
def test_no_sign_is_preferred(density, vote):
    rng = np.random.default_rng(3)
    gs = [torch.from_numpy(rng.standard_normal((300, 300))) for _ in range(2)]
    merged = votes.ties(gs, [1.0, 1.0], density, vote)
    assert abs(float(merged.mean())) < 5 * float(merged.std()) / 300  # ties that go to + would give 0.4


@pytest.mark.parametrize("zeros", [1, 2])
def test_zero_deltas_neither_vote_nor_count(zeros):
    deltas = low_rank(2, (6, 5)) + [torch.zeros(6, 5, dtype=torch.float64)] * zeros
    few, many = [1.0, 0.5], [1.0, 0.5] + [2.0] * zeros
    assert torch.equal(votes.ties(deltas, many, 0.5), votes.ties(deltas[:2], few, 0.5))
    nothing = torch.zeros(6, 5)
    assert torch.equal(votes.ties([nothing, nothing], [1, 1], 0.5), nothing)
    assert torch.equal(votes.columnwise([nothing, nothing], [1, 1]), nothing)


def test_inputs_stay_as_they_are_and_may_have_gaps():
    gs = [torch.randn(9, 12, generator=torch.Generator().manual_seed(k))[:, ::2].T for k in range(3)]
    before = [g.clone() for g in gs]
    found = votes.ties(gs, [1.0, 2.0, 0.5], 0.5)
    assert torch.equal(found, votes.ties(before, [1.0, 2.0, 0.5], 0.5))
    votes.columnwise(gs, [1.0, 2.0, 0.5])
    votes.conflict_mode_masks(gs, [1.0, 2.0, 0.5], ["low_conflict"] * 3)
    assert all(itertools.starmap(torch.equal, zip(gs, before, strict=True)))


@dtypes
def test_pieces_do_not_show(dtype):
    gs = low_rank(3, (300, 700), dtype)  # more than three pieces
    ws = [1.0, 0.5, 0.25]
    parts = [torch.cat([g[rows].reshape(-1) for rows in (slice(0, 100), slice(100, 300))]) for g in gs]
    assert torch.equal(votes.ties(gs, ws, 1.0).reshape(-1), votes.ties(parts, ws, 1.0))
    ts = [votes.trim(g, 0.4) for g in gs]
    assert torch.equal(votes.ties(gs, ws, 0.4), votes.disjoint(ts, ws, votes.elect(ts, ws)))
