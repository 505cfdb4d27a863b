from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.errors import RecipeError
from lib_merge.recipe import Rule
from lib_merge.rule_text import parse, read, write

pytestmark = pytest.mark.portable

NAMES = st.sampled_from(["alpha", "beta", "smooth"])
VALUES = st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
# what a pattern can hold in a line: anything visible, colons and equals signs too
PATTERNS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@given(st.lists(st.builds(Rule, match=PATTERNS, params=st.dictionaries(NAMES, VALUES, min_size=1)), max_size=4))
def test_what_is_written_is_read_again_to_the_last_bit(rules):
    assert read(write(rules)) == tuple(rules)


def test_lines_as_people_write_them():
    assert read("  attn2 : alpha=.5, beta=1e-3\n\n^a:b: smooth=TRUE \n") == (
        Rule(match="attn2", params={"alpha": 0.5, "beta": 0.001}),
        Rule(match="^a:b", params={"smooth": True}),
    )
    assert read("") == ()


def test_a_wrong_line_is_named():
    with pytest.raises(RecipeError, match=r"line 3: alpha=x: neither a number"):
        read("a: alpha=1\n\nb: alpha=x")


@pytest.mark.parametrize("text", ["", "attn2", ": alpha=1", "attn2:", "attn2: alpha"])
def test_what_is_no_rule(text):
    with pytest.raises(RecipeError):
        parse(text)


@pytest.mark.parametrize("rule", [Rule(match="a\nb", params={"alpha": 1.0}), Rule(match="a", params={})])
def test_a_rule_that_no_line_can_hold_is_refused(rule):
    with pytest.raises(RecipeError, match="cannot be written"):
        write([rule])
