"""The registry: found without torch, complete for display, strict about names and values, helpful about misspelling."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from lib_merge.errors import RecipeError
from lib_merge.kernels.registry import Method, Param, all_methods, merge_method, method
from lib_merge.wording import suggestion

pytestmark = pytest.mark.portable

METHODS = list(all_methods().values())
every_method = pytest.mark.parametrize("chosen", METHODS, ids=lambda chosen: chosen.id)


def test_listing_the_methods_imports_no_torch():
    code = """
import sys
from lib_merge.kernels.registry import all_methods
for chosen in all_methods().values():
    print(chosen.id, chosen.summary, chosen.formula, chosen.check({}))
assert not [name for name in sys.modules if name.split(".")[0] == "torch"], "torch was imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "weighted_sum" in done.stdout


def test_methods_are_sorted_and_found_by_their_id():
    assert list(all_methods()) == sorted(all_methods())
    assert {"weighted_sum", "add_difference", "slerp", "power_up_dare"} <= set(all_methods())
    assert all(method(chosen.id) is chosen for chosen in METHODS)


@every_method
def test_every_method_says_what_a_user_needs(chosen):
    assert chosen.label
    assert chosen.summary.endswith(".")
    assert chosen.formula
    assert chosen.exact_a
    assert chosen.kind in ("elementwise", "whole")
    assert chosen.inputs[0] == "A"
    assert len(set(chosen.inputs)) == len(chosen.inputs) > 1


@every_method
def test_every_parameter_has_a_meaning_and_a_default_that_is_allowed(chosen):
    names = [param.name for param in chosen.params]
    assert len(set(names)) == len(names)
    for param in chosen.params:
        assert param.meaning and "\n" not in param.meaning
        assert param.range
        assert param.check(param.default) == param.default
        assert param.low < param.high
        if not isinstance(param.default, bool):
            low, high = param.slider
            assert low < high
            assert low <= param.default <= high
            assert low == param.low or math.isinf(param.low)
            assert high == param.high or math.isinf(param.high)


@every_method
def test_the_strength_is_a_number_among_the_parameters_and_may_be_zero(chosen):
    strength = chosen.param(chosen.strength)
    assert not isinstance(strength.default, bool)
    assert strength.check(0) == 0


@every_method
def test_a_formula_names_every_parameter(chosen):
    assert all(param.name in chosen.formula for param in chosen.params)


@every_method
def test_what_is_not_given_takes_its_default(chosen):
    values = chosen.check({})
    assert values == {param.name: param.default for param in chosen.params}
    assert chosen.check({chosen.strength: 0})[chosen.strength] == 0


@every_method
def test_a_value_that_is_no_finite_number_is_refused(chosen):
    values = (math.nan, math.inf, -math.inf, True, "0.5", None, [0.5], 1j, 10**400)
    for param, value in itertools.product(chosen.params, values):
        if isinstance(param.default, bool) and isinstance(value, bool):
            continue
        with pytest.raises(RecipeError, match=f"^{param.name} must be"):
            chosen.check({param.name: value})


@every_method
def test_a_value_outside_the_range_is_refused_unless_the_parameter_clamps(chosen):
    for param in chosen.params:
        for limit, beyond in ((param.low, param.low - 1e-9), (param.high, param.high + 1e-9)):
            if math.isinf(limit):
                continue
            if param.clamp:
                assert param.check(beyond) == limit
            else:
                with pytest.raises(RecipeError, match=param.range) as caught:
                    param.check(beyond)
                assert repr(beyond) in caught.value.what


def test_only_weighted_sum_clamps():
    clamping = {(chosen.id, param.name) for chosen in METHODS for param in chosen.params if param.clamp}
    assert clamping == {("weighted_sum", "alpha")}


def test_a_whole_number_counts_as_a_number_and_a_bool_parameter_takes_bools_only():
    share, flag = Param("share", 0.5, "a share", 0.0, 1.0), Param("flag", False, "a flag")
    assert share.check(1) == 1.0
    assert isinstance(share.check(1), float)
    assert flag.check(True) is True
    for wrong in (0, 1, 1.0, "true", None):
        with pytest.raises(RecipeError, match="true or false"):
            flag.check(wrong)


def test_ranges_are_worded():
    assert Param("x", 0.5, "", 0.0, 1.0).range == "0 … 1"
    assert Param("x", 0.5, "").range == "any number"
    assert Param("x", 0.5, "", 0.0).range == "0 or more"
    assert Param("x", True, "").range == "true or false"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("weigthed-sum", "weighted_sum"),
        ("weight_sum", "weighted_sum"),
        ("Weighted-Sum", "weighted_sum"),
        ("sum", "weighted_sum"),
        ("add-diff", "add_difference"),
        ("difference", "add_difference"),
        ("SLERP", "slerp"),
        ("slerpp", "slerp"),
        ("power_up", "power_up_dare"),
        ("dare", "power_up_dare"),
        ("dare-linear", "power_up_dare"),
    ],
)
def test_a_mistyped_method_brings_a_suggestion(typed, meant):
    known = ["add_difference", "power_up_dare", "slerp", "weighted_sum"]
    assert suggestion(typed, known) == f"did you mean {meant}?"


def test_an_unknown_method_is_refused_with_the_nearest_one():
    for typed, words in (("weigthed-sum", {"weighted_sum"}), ("dare-ties", {"dare"})):
        with pytest.raises(RecipeError, match=f"there is no method '{typed}'") as caught:
            method(typed)
        named = caught.value.hint.removeprefix("did you mean ").removesuffix("?")
        assert named in all_methods()
        assert words & {named, *named.split("_")}


def test_a_name_like_nothing_known_lists_them_all():
    with pytest.raises(RecipeError) as caught:
        method("xyzzy")
    assert all(id in caught.value.hint for id in all_methods())


@every_method
def test_an_unknown_parameter_is_refused_with_the_nearest_one(chosen):
    with pytest.raises(RecipeError, match=f"{chosen.id} has no parameter") as caught:
        chosen.check({chosen.strength + "h": 0.5})
    assert caught.value.hint == f"did you mean {chosen.strength}?"
    with pytest.raises(RecipeError, match=f"{chosen.id} has no parameter 'xyzzy'") as caught:
        chosen.check({"xyzzy": 0.5})
    assert all(param.name in caught.value.hint for param in chosen.params)


def nothing(a, b, *, alpha):
    """Do nothing."""
    return a


def register(id, function=nothing, **changes):
    about = {"label": "Test", "inputs": "AB", "strength": "alpha", "formula": "A", "exact_a": "always"}
    return merge_method(id, params=(Param("alpha", 0.5, "share"),), **about | changes)(function)


def test_an_id_is_given_once():
    with pytest.raises(ValueError, match="two methods are called weighted_sum"):
        register("weighted_sum")


def test_a_method_must_have_the_parameters_it_refers_to():
    with pytest.raises(ValueError, match="no_such has no parameter beta"):
        register("no_such", strength="beta")
    with pytest.raises(ValueError, match="no_such has no parameter smooth"):
        register("no_such", whole_when="smooth")
    assert "no_such" not in all_methods()


@every_method
def test_only_what_needs_whole_tensors_says_so(chosen):
    needs = chosen.needs_whole(chosen.check({}))
    assert needs == (chosen.kind == "whole")
    if chosen.whole_when:
        assert isinstance(chosen.param(chosen.whole_when).default, bool)
        assert chosen.needs_whole(chosen.check({chosen.whole_when: True}))


def test_methods_cannot_be_changed_by_accident():
    chosen = method("weighted_sum")
    assert isinstance(chosen, Method)
    with pytest.raises(AttributeError):
        chosen.label = "Other"
