"""What is done with a group, from its numbers alone: against the oracle, and the boundaries one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.choose import WORDS, Numbers, choose, smooth, vote_of, word
from lib_merge.errors import RecipeError
from tests.data.oracles import optimizer_ref

pytestmark = pytest.mark.portable

PROFILES = WORDS["profile"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("rules", WORDS["rules"])
def test_every_decision_is_the_oracle_s(profile, rules):
    for n in (1, 2, 5):
        for cos in np.linspace(-1, 1, 81):
            for conflict in np.linspace(0, 1, 41):
                numbers = Numbers(n, float(cos), float(conflict))
                want = optimizer_ref.choose({"n": n, "cos": cos, "conflict": conflict}, profile, rules)
                assert choose(numbers, rules, profile).strategy == want


@pytest.mark.parametrize(
    ("cos", "strategy"),
    [
        (-0.6, "ties"),
        (-0.2, "slerp"),
        (0.0, "slerp"),
        (0.2, "slerp"),
        (0.5, "ties"),
        (0.8, "slerp"),
        (0.95, "consensus"),
    ],
)
def test_normally_distributed_changes_fall_into_the_regimes_that_are_told(cos, strategy):
    assert choose(Numbers(2, cos, math.acos(cos) / math.pi)).strategy == strategy


def test_the_document_s_thresholds_know_no_unrelated_loras():
    """Unrelated LoRAs disagree at half of all positions by chance: taken literally, they are in conflict."""
    unrelated = Numbers(2, 0.001, 0.5)
    assert choose(unrelated, "document").strategy == "ties"
    assert choose(unrelated, "ordered").strategy == "slerp"
    assert choose(unrelated, "ordered", "no_slerp").strategy == "weighted_average"
    assert choose(unrelated, "ordered", "classic").strategy == "ties"


def test_one_lora_alone_is_never_changed():
    for profile in PROFILES:
        for rules in WORDS["rules"]:
            assert choose(Numbers(1), rules, profile).strategy == "weighted_sum"


def test_the_reason_names_the_number_that_decided():
    assert "50%" in choose(Numbers(2, 0.5, 0.5)).reason
    assert "+0.10" in choose(Numbers(2, 0.1, 0.5)).reason
    assert "0.97" in choose(Numbers(2, 0.97, 0.05)).reason


def test_votes_count_sizes_from_a_ratio_of_2_on():
    assert vote_of(Numbers(2, ratio=2.0)) == "frequency"
    assert vote_of(Numbers(2, ratio=2.01)) == "total"
    assert choose(Numbers(2, 0.5, 0.5, ratio=3.0)).vote == "total"


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_smoothing_is_the_oracle_s(groups, share):
    numbers = [Numbers(2, cos, conflict) for cos, conflict, _ in groups]
    energies = [energy for *_, energy in groups]
    found = smooth(numbers, ["IN00"] * len(groups), energies, share)
    for name in ("cos", "conflict"):
        want = optimizer_ref.smooth([getattr(one, name) for one in numbers], energies, share)
        assert np.allclose([getattr(one, name) for one in found], want, atol=1e-12)


def test_groups_of_one_lora_have_no_say_and_blocks_do_not_mix():
    numbers = [Numbers(2, 0.0, 0.4), Numbers(1), Numbers(2, 0.8, 0.1), Numbers(2, -0.4, 0.2)]
    found = smooth(numbers, ["IN00", "IN00", "IN00", "OUT01"], [1.0, 100.0, 3.0, 5.0], 0.25)
    assert found[0].cos == pytest.approx(0.75 * 0.0 + 0.25 * 0.6)  # (0·1 + 0.8·3)/4 = 0.6
    assert found[0].conflict == pytest.approx(0.75 * 0.4 + 0.25 * 0.175)
    assert found[1] == numbers[1]
    assert repr(found[3]) == repr(numbers[3])  # a NaN is never equal
    assert smooth(numbers, ["IN00"] * 4, [1.0] * 4, 0.0) == numbers


@pytest.mark.parametrize(
    ("name", "said", "here"),
    [
        ("profile", "full", "v1.2"),
        ("profile", "basic", "classic"),
        ("refinement", "none", "standard"),
        ("refinement", "refine", "enhanced"),
        ("refinement", "full", "maximum"),
        ("scope", "weighted_sum_only", "additive"),
        *((name, value, value) for name, values in WORDS.items() for value in values),
    ],
)
def test_newer_spellings_are_understood(name, said, here):
    assert word(name, said) == here


def test_an_unknown_word_is_refused_with_the_one_that_was_meant():
    with pytest.raises(RecipeError, match="no profile 'clasic'") as caught:
        word("profile", "clasic")
    assert caught.value.hint == "did you mean classic?"
