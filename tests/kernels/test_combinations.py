"""Sums with scalars from strengths and inner products: against the oracle on dense deltas, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import combinations as kernel
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS, SHAPES, STRENGTHS, arrays, close, low_rank, patient, stacks

stacked = pytest.mark.parametrize("strengths", STRENGTHS, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LINEAR = {
    "weighted_sum": lambda deltas, strengths: kernel.weighted_sum_scalars(strengths),
    "weighted_average": lambda deltas, strengths: kernel.weighted_average_scalars(strengths),
    "slerp": lambda deltas, strengths: kernel.slerp_scalars(oriented_gram(deltas, strengths), strengths),
}
each_merge = pytest.mark.parametrize("name", LINEAR)


def oriented_gram(deltas, strengths):
    return kernel.gram(kernel.oriented(deltas, strengths)[0])


def merged(name, deltas, strengths):
    return kernel.combined(deltas, LINEAR[name](deltas, strengths))


def turned(angle: float, size: float = 1.0) -> torch.Tensor:
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64) * size


# Against the oracle.


@stacked
@shapes
@dtypes
@each_merge
def test_the_oracles(name, strengths, shape, dtype):
    deltas = low_rank(len(strengths), shape, dtype)
    close(merged(name, deltas, strengths), getattr(oracle, name)(arrays(deltas), strengths), deltas)


@stacked
@shapes
@dtypes
@pytest.mark.parametrize("cap", [1.0, 2.0, 1e9])
def test_orthogonal_deltas_are_the_oracles(strengths, shape, dtype, cap):
    deltas = low_rank(len(strengths), shape, dtype)
    deltas[1] = deltas[0] + 0.3 * deltas[1]  # near enough that a cap of 2 matters
    rows = kernel.orthogonalize_scalars(kernel.gram(deltas), strengths, cap)
    scaled = [delta * strength for delta, strength in zip(arrays(deltas), strengths, strict=True)]
    for row, wanted, strength in zip(rows, oracle.do_orthogonalize(scaled, max_gain=cap), strengths, strict=True):
        close(kernel.combined(deltas, row), wanted / strength, deltas)


def test_gram_and_mean_norm():
    deltas = low_rank(3, (8, 5))
    wanted = [[float((x * y).sum()) for y in deltas] for x in deltas]
    np.testing.assert_allclose(kernel.gram(deltas), wanted, rtol=1e-12)
    assert kernel.mean_norm([3.0, 1.0], [1.0, 2.0]) == pytest.approx(5 / 3)


# By hand.


def test_linear_merges_by_hand():
    assert kernel.weighted_sum_scalars([2, -1]) == [2, -1]
    assert kernel.weighted_average_scalars([2, -1]) == pytest.approx([2 / 3, -1 / 3])


@pytest.mark.parametrize(
    ("strengths", "wanted"),
    [
        ([1, 1], turned(math.pi / 4)),
        ([2, 1], turned(math.pi / 6)),  # a third of the way from the stronger one
        ([1, 2], turned(math.pi / 3)),
        ([1, -1], turned(-math.pi / 4)),
    ],
)
def test_slerp_of_a_right_angle(strengths, wanted):
    found = merged("slerp", [turned(0), turned(math.pi / 2)], strengths)
    torch.testing.assert_close(found, wanted)


def test_slerp_corrects_the_norm_of_two_as_well():
    found = merged("slerp", [turned(0, 1), turned(1.0, 3)], [1.0, 1.0])
    assert float(found.norm()) == pytest.approx(2)


@pytest.mark.parametrize(
    ("size", "strengths", "wanted"),
    [
        (1.0, [1, 1], [0, 0]),  # they cancel
        (0.5, [1, 1], [0.5, 0]),  # 1/4 of the first is left; its norm should be 3/4, and is doubled
        (0.9, [3, 1], [0.975, 0]),  # 0.525 is left, to be 0.975
        (1.0, [1, -1], [1, 0]),  # the opposite with the opposite sign is the same
    ],
)
def test_slerp_of_opposites_by_hand(size, strengths, wanted):
    first = turned(0)
    found = merged("slerp", [first, -size * first], strengths)
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("away", [0, 1e-17, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("start", [0.0, math.pi])
def test_slerp_is_finite_and_no_longer_than_its_inputs_near_parallel_and_opposite(away, start):
    for strengths in ([1, 1], [1, 0.5], [1, 1, 1]):
        deltas = [turned(0), turned(start + away), turned(start - away)][: len(strengths)]
        found = merged("slerp", deltas, strengths)
        assert 0 <= float(found.norm()) <= 1 + 1e-3  # NaN fails; an angle of 1e-6 is known to some 1e-4


def test_slerp_of_zeros():
    nothing, delta = torch.zeros(3, 2, dtype=torch.float64), low_rank(1, (3, 2))[0]
    assert torch.equal(merged("slerp", [nothing, nothing], [1, 1]), nothing)
    torch.testing.assert_close(merged("slerp", [nothing, delta], [1, 1]), delta / 2)  # to the mean of the norms


def test_orthogonalizing_worked_by_hand():
    gram = kernel.gram([turned(0, 2), turned(math.pi / 3)])
    rows = kernel.orthogonalize_scalars(gram, [1, 1])
    new = kernel.combined([turned(0, 2), turned(math.pi / 3)], rows[1])
    assert rows[0] == [1, 0]  # the larger one stays
    torch.testing.assert_close(new, turned(math.pi / 2))  # of norm 1 as before
    assert kernel.orthogonalize_scalars(gram, [1, 3])[1] == pytest.approx([0, 1])  # now the second is the larger one


@pytest.mark.parametrize("away", [1e-12, 1e-7, 1e-5, 1e-3, 0.1, 0.4])
def test_of_a_near_duplicate_no_more_than_twice_what_is_its_own_is_left(away):
    deltas = [turned(0), turned(away)]
    rows = kernel.orthogonalize_scalars(kernel.gram(deltas), [1, 1])
    left = float(kernel.combined(deltas, rows[1]).norm())
    assert kernel.kept_shares(kernel.gram(deltas), rows) == pytest.approx([1, left], abs=1e-9)
    assert left <= 2 * math.sin(away) * (1 + 1e-6)
    assert left >= 2 * math.sin(away) - 3e-6


def test_duplicates_zeros_and_what_others_make_up_come_to_nothing():
    a, b = low_rank(2, (6, 5))
    deltas = [a, b, a, a * 0, 0.3 * a - 0.2 * b]
    rows = kernel.orthogonalize_scalars(kernel.gram(deltas), [1.0] * 5)
    norms = [float(kernel.combined(deltas, row).norm()) for row in rows]
    assert sum(norm > 0 for norm in norms) == 2
    assert norms[3] == norms[4] == 0
    shares = kernel.kept_shares(kernel.gram(deltas), rows)
    assert shares == pytest.approx(
        [norm / float(d.norm()) if norm else 0 for norm, d in zip(norms, deltas, strict=True)]
    )


# For any deltas.


@patient
@given(stack=stacks())
@each_merge
def test_a_negative_strength_is_a_negated_delta(name, stack):
    deltas, strengths = stack
    turned_all = [-d if s < 0 else d for d, s in zip(deltas, strengths, strict=True)]
    found = merged(name, turned_all, [abs(s) for s in strengths])
    torch.testing.assert_close(found, merged(name, deltas, strengths), rtol=0, atol=1e-12)


@patient
@given(stack=stacks(), data=st.data())
@pytest.mark.parametrize("name", ["weighted_sum", "weighted_average"])
def test_the_order_of_deltas_changes_nothing(name, stack, data):
    deltas, strengths = stack
    order = data.draw(st.permutations(range(len(deltas))))
    mixed = merged(name, [deltas[k] for k in order], [strengths[k] for k in order])
    torch.testing.assert_close(mixed, merged(name, deltas, strengths), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_the_order_of_deltas_of_different_strength_changes_neither_slerp_nor_orthogonal_deltas(order):
    deltas, strengths = low_rank(3, (12, 9)), [0.3, -1.0, 0.6]
    mixed = [deltas[k] for k in order], [strengths[k] for k in order]
    torch.testing.assert_close(merged("slerp", *mixed), merged("slerp", deltas, strengths))
    rows = kernel.orthogonalize_scalars(kernel.gram(deltas), strengths)
    for k, row in zip(order, kernel.orthogonalize_scalars(kernel.gram(mixed[0]), mixed[1]), strict=True):
        torch.testing.assert_close(kernel.combined(mixed[0], row), kernel.combined(deltas, rows[k]))


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("name", ["weighted_average", "slerp"])
@dtypes
def test_the_same_delta_many_times_is_that_delta(name, count, dtype):
    delta = low_rank(1, (12, 9), dtype)[0]
    torch.testing.assert_close(merged(name, [delta] * count, [1.0] * count), delta)


@patient
@given(stack=stacks(), cap=st.sampled_from([1.0, 2.0]))
def test_orthogonal_deltas_are_orthogonal_and_never_longer(stack, cap):
    deltas, strengths = stack
    rows = kernel.orthogonalize_scalars(kernel.gram(deltas), strengths, cap)
    new = [kernel.combined(deltas, row) for row in rows]
    for i, one in enumerate(new):
        assert float(one.norm()) <= float(deltas[i].norm()) * (1 + 1e-9)
        for two in new[:i]:
            lengths = float(one.norm() * two.norm())
            assert abs(float((one * two).sum())) <= 1e-9 * lengths
