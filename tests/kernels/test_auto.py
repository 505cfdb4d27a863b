"""The method that chooses: each choice against the oracle's own decision and merge, strengths, and what it tells."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lib_merge.kernels.auto import decide
from lib_merge.kernels.registry import method
from tests.data.oracles import optimizer_ref as oracle

AUTO = method("auto")
SHAPE = (30, 40)
PROFILES = {"v1.2": {}, "no_slerp": {"slerp": False}, "classic": {"classic": True}}
# Wanted strategy of the profile v1.2 -> cosine of two changes.
COSINES = {"ties": 0.5, "slerp": 0.0, "consensus": 0.95}


def changes(cosine: float, count: int = 2, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> list[np.ndarray]:
    """Normally distributed changes, each two of about this cosine."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(shape)
    own = [rng.standard_normal(shape) for _ in range(count)]
    sign = np.sign(cosine) or 1.0
    share = math.sqrt(abs(cosine))
    return [(sign if k else 1) * share * common + math.sqrt(1 - abs(cosine)) * x for k, x in enumerate(own)]


def merged(found: list[np.ndarray], strengths, dtype=torch.float64, **params) -> np.ndarray:
    """What the method adds to a base of zeros, where a donor is its own change."""
    donors = [torch.tensor(change).to(dtype) for change in found]
    base = torch.zeros_like(donors[0])
    return AUTO.function(base, *donors, strengths=strengths, **AUTO.check(params)).double().numpy()


def wanted(found: list[np.ndarray], strengths, profile="v1.2", density=0.5) -> np.ndarray:
    """The oracle's decision, carried out by the oracle."""
    numbers = oracle.group_metrics(found, strengths)
    strategy = oracle.choose(numbers, profile)
    vote = "total" if numbers["ratio"] > 2 else "frequency"
    ways = {
        "weighted_sum": lambda: oracle.weighted_sum(found, strengths),
        "weighted_average": lambda: oracle.weighted_average(found, strengths),
        "slerp": lambda: oracle.slerp(found, strengths),
        "consensus": lambda: oracle.consensus(found, strengths, cleanup=False),
        "ties": lambda: oracle.ties(found, strengths, density, method=vote),
    }
    return ways[strategy]()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("cosine", [-0.6, 0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("strengths", [(1.0, 1.0), (0.8, 0.5), (1.0, -1.0), (3.0, 0.5)])
def test_each_choice_is_the_oracle_s_and_so_is_its_merge(profile, cosine, strengths):
    found = changes(cosine)
    want = wanted(found, strengths, profile)
    assert np.allclose(merged(found, strengths, **PROFILES[profile]), want, rtol=0, atol=1e-9)
    narrow = merged(found, strengths, torch.float32, **PROFILES[profile])
    assert np.linalg.norm(narrow - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(("strategy", "cosine"), COSINES.items())
def test_every_strategy_is_reached(strategy, cosine):
    base, *donors = (torch.tensor(x) for x in [np.zeros(SHAPE), *changes(cosine)])
    assert decide(base, donors, (1.0, 1.0), "v1.2").choice.strategy == strategy


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95])
def test_any_number_of_models(count, cosine):
    found = changes(cosine, count)
    strengths = tuple(1 + 0.1 * k for k in range(count))
    assert np.allclose(merged(found, strengths), wanted(found, strengths), rtol=0, atol=1e-9)


def test_numbers_do_not_depend_on_the_base():
    """B − A is what counts: from another base the same changes give the same result, up to rounding."""
    found = changes(0.5)
    base = np.random.default_rng(9).standard_normal(SHAPE)
    tensors = [torch.tensor(x) for x in [base, *(base + change for change in found)]]
    result = AUTO.function(*tensors, strengths=(1.0, 1.0), **AUTO.check({})).numpy()
    assert np.allclose(result - base, wanted(found, (1.0, 1.0)), rtol=0, atol=1e-9)


def test_a_change_that_is_alone_comes_at_full_strength():
    one, other = changes(0.0)
    nothing = np.zeros(SHAPE)
    assert np.allclose(merged([one, nothing, nothing], (0.7, 1.0, 1.0)), 0.7 * one)
    assert np.allclose(merged([one, other], (0.7, 0.0)), 0.7 * one)
    assert np.array_equal(merged([nothing, nothing], (1.0, 1.0)), nothing)


def test_conflicts_are_counted_in_every_block_of_a_large_tensor():
    """More than two blocks of 2**16, with signs that disagree in the last elements alone."""
    one = np.ones(150_000)
    other = np.where(np.arange(150_000) < 147_000, 1.0, -1.0)
    base = torch.zeros(150_000, dtype=torch.float64)
    found = decide(base, [torch.tensor(one), torch.tensor(other)], (1.0, 1.0), "v1.2")
    assert found.numbers.conflict == 3_000 / 150_000
    assert found.numbers.cos == pytest.approx(144_000 / 150_000, rel=1e-12)
    assert found.choice.strategy == "consensus"


@hypothesis_settings(deadline=None, max_examples=30)
@given(
    cosine=st.floats(-0.95, 0.95),
    strengths=st.tuples(*[st.floats(0.1, 3)] * 2),
    factor=st.floats(0.25, 4),
    alpha=st.floats(-2, 2),
)
def test_a_common_factor_of_strengths_does_nothing_and_alpha_multiplies(cosine, strengths, factor, alpha):
    found = changes(cosine)
    want = merged(found, strengths)
    scaled = tuple(s * factor for s in strengths)
    assert np.allclose(merged(found, scaled), want, rtol=0, atol=1e-9)
    assert np.allclose(merged(found, strengths, alpha=alpha), alpha * want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95])
def test_a_negative_strength_turns_the_change_round(cosine):
    one, other = changes(cosine)
    assert np.allclose(merged([one, other], (1.0, -0.6)), merged([one, -other], (1.0, 0.6)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [2, 4])
def test_models_that_changed_the_same_give_that_change(count):
    (one,) = changes(0.0, 1)
    assert np.allclose(merged([one] * count, (1.0,) * count), one, rtol=0, atol=1e-12)


def test_it_tells_the_choice_and_the_numbers_behind_it():
    found = changes(0.5)
    tensors = [torch.tensor(x) for x in [np.zeros(SHAPE), *found]]
    before = [tensor.clone() for tensor in tensors]
    assert AUTO.explain is not None
    told = AUTO.explain(*tensors, strengths=(1.0, 1.0), **AUTO.check({}))
    assert all(map(torch.equal, tensors, before))
    numbers = oracle.group_metrics(found, (1.0, 1.0))
    assert told["strategy"] == "ties"
    assert "conflict" in str(told["reason"])
    assert told["cosine"] == pytest.approx(numbers["cos"], rel=1e-12)
    assert told["sign_conflict"] == pytest.approx(numbers["conflict"], rel=1e-12)
    assert told["conflict_expected"] == pytest.approx(math.acos(numbers["cos"]) / math.pi, rel=1e-12)
    sizes = sorted(map(np.linalg.norm, found))
    assert told["ratio"] == pytest.approx(sizes[1] / sizes[0], rel=1e-12)
    assert told["density"] == 0.5
    assert told["n"] == 2
