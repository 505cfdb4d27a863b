"""Block-weight text: what is read, what is refused, and that writing gives it back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib_merge import blocks
from lib_merge.blocks import LISTS, SHAPES, expand, parse, unknown
from lib_merge.errors import RecipeError

pytestmark = pytest.mark.portable

SDXL = ["BASE", *(f"IN{n:02d}" for n in range(9)), "M00", *(f"OUT{n:02d}" for n in range(9))]
FLUX = ["CLIP", "T5", "IN", *(f"D{n:02d}" for n in range(19)), *(f"S{n:02d}" for n in range(38)), "OUT"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \n ;, # nothing\n", {}),
        ("BASE=0,IN00-IN05=0.2,M00=0.5,OUT=0.7",
         {"BASE": {"": 0}, "IN00-IN05": {"": 0.2}, "M00": {"": 0.5}, "OUT": {"": 0.7}}),
        ("base = 0; in0 - in5 = .2\nM0=5e-1 out=+1.", {"BASE": {"": 0}, "IN00-IN05": {"": 0.2}, "M00": {"": 0.5},
                                                       "OUT": {"": 1}}),
        ("IN00=alpha:0.3 beta:0.1, IN01=beta: 2", {"IN00": {"alpha": 0.3, "beta": 0.1}, "IN01": {"beta": 2}}),
        ("IN00=0.3 beta:0.1", {"IN00": {"": 0.3, "beta": 0.1}}),
        ("IN00=0.3, # the first\n# IN01=1\nIN02=-0.5", {"IN00": {"": 0.3}, "IN02": {"": -0.5}}),
        ("IN0-5=1", {"IN00-IN05": {"": 1}}),
        ("IN0–IN5=1", {"IN00-IN05": {"": 1}}),
        ("T5=0.5, t05=1", {"T5": {"": 0.5}, "T05": {"": 1}}),
        ("L100=1", {"L100": {"": 1}}),
        ("a.stack.3=1, a.stack.04-a.stack.06=2", {"a.stack.03": {"": 1}, "a.stack.04-a.stack.06": {"": 2}}),
        ("VAE=0 TIME=1 BASE=0.5", {"VAE": {"": 0}, "TIME": {"": 1}, "BASE": {"": 0.5}}),
    ],
)  # fmt: skip
def test_reading(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("IN00=0.5, IN00=1", "named twice"),
        ("IN0=0.5, in00=1", "named twice"),
        ("IN00-IN03=1, IN02=2", "named twice"),
        ("IN00-IN03=1, IN03-IN05=2", "named twice"),
        ("OUT=1, OUT03=2", "named twice"),
        ("OUT03=1, OUT=2", "named twice"),
        ("IN05-IN00=1", "backwards"),
        ("IN00-OUT03=1", "no range"),
        ("IN-OUT=1", "no range"),
        ("IN00-IN5000=1", "beyond"),
        ("=3", "no block name"),
        ("5=3", "no block name"),
        ("a b!=3", "cannot read"),
        ("b!=3", "no block name"),
        (f"IN{'9' * 5000}=1", "no block name"),
        ("IN00=", "cannot read the number"),
        ("IN00=x", "cannot read the number"),
        ("IN00=1_0", "cannot read the number"),
        ("IN00==1", "cannot read the number"),
        ("IN00=1:2", "cannot read the parameter"),
        ("IN00=0.5 0.6", "given twice"),
        ("IN00=0,5", "given twice"),
        ("IN00=alpha:1 alpha:2", "given twice"),
        ("alpha:1", "cannot read"),
        ("IN00", "cannot read"),
        ("IN00=nan", "no finite number"),
        ("IN00=-inf", "no finite number"),
        ("IN00=alpha:1e999", "no finite number"),
        (" ".join(["nan"] * 26), "no finite number"),
    ],
)
def test_refusals(text, said):
    with pytest.raises(RecipeError, match=said):
        parse(text)


@pytest.mark.parametrize("length", [1, 2, 11, 19, 21, 25, 27, 60, 62])
def test_a_wrong_length_names_the_accepted_ones(length):
    with pytest.raises(RecipeError, match=str(length)) as caught:
        parse(",".join(["0.5"] * length))
    assert all(str(accepted) in caught.value.hint for accepted in (12, 17, 20, 26, 61))


@pytest.mark.parametrize("separator", [",", " ", ", ", "\n", ";"])
@pytest.mark.parametrize("length", [12, 17, 20, 26, 61])
def test_lists_of_numbers(length, separator):
    values = parse(separator.join(str(number / 4) for number in range(length)))
    assert list(values) == list(LISTS[length])
    assert [entry[""] for entry in values.values()] == [number / 4 for number in range(length)]


def test_the_names_of_the_lists():
    assert {length: len(names) for length, names in LISTS.items()} == {12: 12, 17: 17, 20: 20, 26: 26, 61: 61}
    assert LISTS[12] == ("BASE", "IN04", "IN05", "IN07", "IN08", "M00",
                         "OUT00", "OUT01", "OUT02", "OUT03", "OUT04", "OUT05")  # fmt: skip
    assert LISTS[17] == ("BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "M00", "OUT03", "OUT04", "OUT05",
                         "OUT06", "OUT07", "OUT08", "OUT09", "OUT10", "OUT11")  # fmt: skip
    assert list(LISTS[20]) == SDXL
    assert LISTS[26][:2] == ("BASE", "IN00")
    assert LISTS[26][12:15] == ("IN11", "M00", "OUT00")
    assert list(LISTS[61]) == FLUX


def test_expanding():
    spec = parse("BASE=0, IN00-IN02=0.2, M=0.5, OUT=alpha:0.7")
    full = expand(spec, SDXL)
    assert list(full) == [name for name in SDXL if not name.startswith("IN") or name <= "IN02"]
    assert full["IN02"] == {"": 0.2}
    assert full["M00"] == {"": 0.5}
    assert full["OUT08"] == {"alpha": 0.7}
    assert unknown(spec, SDXL) == []


def test_a_name_that_is_a_block_and_no_group():
    full = expand(parse("IN=1, OUT=2, D=3, T5=4"), FLUX)
    assert (full["IN"], full["OUT"], full["T5"]) == ({"": 1}, {"": 2}, {"": 4})
    assert all(full[f"D{n:02d}"] == {"": 3} for n in range(19))
    assert "S00" not in full


def test_what_the_model_lacks_is_named():
    spec = parse("IN07-IN11=1, D00-D05=1, TIME=0, M00=0.5")
    assert unknown(spec, SDXL) == ["IN09", "IN10", "IN11", "D00-D05", "TIME"]
    assert list(expand(spec, SDXL)) == ["IN07", "IN08", "M00"]
    assert unknown(parse(" ".join(["1"] * 26)), SDXL) == ["IN09", "IN10", "IN11", "OUT09", "OUT10", "OUT11"]
    assert unknown(parse(" ".join(["1"] * 12)), SDXL) == []


def test_names_taken_from_tensors():
    names = ["IN", "some.stack.00", "some.stack.01", "other_stack.00"]
    assert list(expand(parse("some.stack=1"), names)) == ["some.stack.00", "some.stack.01"]
    assert list(expand(parse("some.stack.1=1, other_stack.0=2"), names)) == ["some.stack.01", "other_stack.00"]
    with pytest.raises(RecipeError, match="named twice"):
        parse("some.stack=1, some.stack.1=2")


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None, 10**400])
def test_values_of_a_recipe_are_checked(value):
    with pytest.raises(RecipeError, match="finite number"):
        expand({"IN00": {"": value}}, SDXL)


def test_names_of_a_recipe_are_checked():
    with pytest.raises(RecipeError, match="named twice"):
        expand({"IN00": {"": 1}, "in0-in3": {"": 2}}, SDXL)
    with pytest.raises(RecipeError, match="no block name"):
        expand({"IN 00": {"": 1}}, SDXL)


def test_nothing_given_is_changed():
    spec = {"in0": {"": 1.0}}
    full = expand(spec, SDXL)
    full["IN00"][""] = 2.0
    assert spec == {"in0": {"": 1.0}}


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PARAMETERS = st.sampled_from(["", "alpha", "beta", "gamma", "delta", "low_2"])
NAMES = st.sampled_from([*FLUX, "BASE", "VAE", "TIME", "CLIPL", "IN00-IN03", "OUT", "some.stack.03", "L100"])


@st.composite
def specs(draw):
    spec = draw(st.dictionaries(NAMES, st.dictionaries(PARAMETERS, NUMBERS, min_size=1), max_size=8))
    return spec if not {"IN", "IN00-IN03"} <= set(spec) else {}


@given(specs())
def test_what_is_written_is_read_back(spec):
    assert parse(blocks.format(spec)) == spec


@given(st.sampled_from(sorted(LISTS)), st.data())
def test_lists_are_written_as_names(length, data):
    numbers = data.draw(st.lists(NUMBERS, min_size=length, max_size=length))
    values = parse(" ".join(map(repr, numbers)))
    assert [entry[""] for entry in values.values()] == numbers
    assert parse(blocks.format(values)) == values


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        values = parse(text)
    except RecipeError:
        return
    assert parse(blocks.format(values)) == values
    expand(values, SDXL)


@given(st.text(alphabet="IN0123456789-=.,: Maeb#\n"))
def test_likely_text_is_read_or_refused(text):
    test_any_text_is_read_or_refused.hypothesis.inner_test(text)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 19, 20, 26, 61])
def test_shapes(name, count):
    values = SHAPES[name](count)
    assert len(values) == count
    assert all(0 <= value <= 1 for value in values)
    text = ", ".join(f"L{place:02d}={value!r}" for place, value in enumerate(values))
    assert [entry[""] for entry in parse(text).values()] == values


def test_the_forms_of_the_shapes():
    assert SHAPES["flat"](3) == [0.5, 0.5, 0.5]
    assert SHAPES["gradient_up"](5) == [0, 0.25, 0.5, 0.75, 1]
    assert SHAPES["gradient_down"](5) == [1, 0.75, 0.5, 0.25, 0]
    assert SHAPES["V"](5) == [1, 0.5, 0, 0.5, 1]
    assert SHAPES["inverted_V"](5) == [0, 0.5, 1, 0.5, 0]


# Shapes by name


BLOCKS = ["BASE", "IN00", "IN01", "M00", "OUT00", "OUT01", "VAE", "TIME"]
LAYERS = BLOCKS[1:6]


@pytest.mark.parametrize("text", ["gradient_up", "gradient up", "Gradient-Up", " GRADIENT_UP = 1 "])
def test_a_shape_runs_over_the_layers(text):
    found = expand(parse(text), BLOCKS, LAYERS)
    assert found == {name: {"": value} for name, value in zip(LAYERS, [0, 0.25, 0.5, 0.75, 1], strict=True)}


def test_a_shape_may_be_scaled_and_set_another_parameter():
    found = expand(parse("V=alpha:0.5, inverted_V=beta:2"), BLOCKS, LAYERS)
    assert [found[name]["alpha"] for name in LAYERS] == [0.5, 0.25, 0, 0.25, 0.5]
    assert [found[name]["beta"] for name in LAYERS] == [0, 1, 2, 1, 0]


def test_what_is_named_besides_has_its_own_value():
    found = expand(parse("v, BASE=0, OUT=0.3, VAE=0"), BLOCKS, LAYERS)
    assert found == {
        "BASE": {"": 0}, "IN00": {"": 1}, "IN01": {"": 0.5}, "M00": {"": 0},
        "OUT00": {"": 0.3}, "OUT01": {"": 0.3}, "VAE": {"": 0},
    }  # fmt: skip


def test_shapes_are_written_as_they_are_read():
    assert parse(blocks.format(parse("gradient down=0.8, BASE=0"))) == parse("gradient_down=0.8, BASE=0")
    assert unknown(parse("V, IN07=1"), BLOCKS) == ["IN07"]


def test_two_shapes_for_one_parameter_are_refused():
    with pytest.raises(RecipeError, match="two shapes"):
        expand(parse("V, flat"), BLOCKS, LAYERS)


def test_a_block_whose_name_holds_a_shape_s_is_a_block():
    assert parse("encoder.v.03=0.5") == {"encoder.v.03": {"": 0.5}}
