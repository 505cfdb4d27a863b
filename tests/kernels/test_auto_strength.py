"""The strength that evens out a merge: the formula of the plain sum from its Gram matrix, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import votes
from lib_merge.kernels.auto_strength import auto_scale, suggested_max
from lib_merge.kernels.combinations import combined, gram, oriented, slerp_scalars, weighted_average_scalars
from lib_merge.kernels.consensus import consensus
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import arrays, low_rank, patient, stacks

MERGES = {
    "sum": combined,
    "average": lambda deltas, strengths: combined(deltas, weighted_average_scalars(strengths)),
    "slerp": lambda deltas, s: combined(deltas, slerp_scalars(gram(oriented(deltas, s)[0]), s)),
    "ties": lambda deltas, strengths: votes.ties(*oriented(deltas, strengths), 1.0),
    "ties by count": lambda deltas, strengths: votes.ties(*oriented(deltas, strengths), 1.0, divisor="count"),
    "columnwise": lambda deltas, strengths: votes.columnwise(*oriented(deltas, strengths)),
    "consensus": lambda deltas, strengths: consensus(*oriented(deltas, strengths)),
}


def scaled(deltas, strengths, merge):
    merged = merge(deltas, strengths)
    norms = [abs(s) * float(d.norm()) for d, s in zip(deltas, strengths, strict=True)]
    return merged * auto_scale(norms, float(merged.norm()))


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_the_same_lora_many_times_at_strength_1_is_that_lora(count, merge):
    delta = low_rank(1, (12, 9), rank=1)[0]
    torch.testing.assert_close(scaled([delta] * count, [1.0] * count, merge), delta)


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_a_lora_and_its_negative_at_opposite_strengths_are_one_lora_twice(merge):
    delta = low_rank(1, (12, 9), rank=1)[0]
    torch.testing.assert_close(scaled([delta, -delta], [1.0, -1.0], merge), delta)


@patient
@given(stack=stacks())
def test_for_the_sum_it_is_the_formula_of_energies(stack):
    deltas, strengths = stack
    norms = [abs(s) * float(d.norm()) for d, s in zip(deltas, strengths, strict=True)]
    inner = np.array([[oracle.dot(x, y) for y in arrays(deltas)] for x in arrays(deltas)])
    energy = math.sqrt(max(float(np.array(strengths) @ inner @ np.array(strengths)), 0))
    wanted = min(1.0, max(norms) / energy) if energy > 1e-6 * max(norms) else 1.0
    assert auto_scale(norms, float(combined(deltas, strengths).norm())) == pytest.approx(wanted)


@patient
@given(norms=st.lists(st.floats(0, 100), min_size=2, max_size=5), merged=st.floats(0, 100))
def test_a_merge_never_grows_nor_stays_larger_than_its_largest_input(norms, merged):
    scale = auto_scale(norms, merged)
    assert 0 <= scale <= 1
    assert scale * merged <= max(norms) * (1 + 1e-9) or merged == 0


@pytest.mark.parametrize(
    ("norms", "merged", "wanted"),
    [([2, 2], 4, 0.5), ([2, 2], math.sqrt(8), math.sqrt(0.5)), ([3, 1], 2, 1), ([2, 2], 0, 1), ([5], 9, 1), ([], 1, 1)],
)
def test_scales_by_hand(norms, merged, wanted):
    assert auto_scale(norms, merged) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("merged", "inputs", "cap", "wanted"),
    [
        ([1.0], [[2.0, 2.0]], 3, 2),
        ([1.0, 1.0], [[2.0, 4.0], [1.0]], 3, 2),  # (3 + 1) / 2
        ([1.0], [[9.0, 9.0]], 3, 3),
        ([1.0], [[9.0, 9.0]], 5, 5),
        ([3.0], [[2.0, 2.0]], 3, 1),  # never below 1
        ([0.0], [[2.0, 2.0]], 3, 1),  # all cancelled: no strength brings it back
        ([], [], 3, 1),
    ],
)
def test_suggestions_by_hand(merged, inputs, cap, wanted):
    assert suggested_max(merged, inputs, cap) == pytest.approx(wanted)
