from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib_merge import RecipeError
from lib_merge.patterns import Patterns, compiled, split

pytestmark = pytest.mark.portable

KEY = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("attn2", True),
        ("^model", True),
        ("^attn2", False),
        ("to_k\\.weight$", True),
        ("to_k$", False),
        ("input_blocks\\.[45]\\.", True),
        ("input_blocks\\.(?!4)", False),
        ("ATTN2", False),
        ("(?i)ATTN2", True),
        (".", True),
        ("attn*2", True),  # a regular expression: n any number of times
    ],
)
def test_regular_expressions_are_searched_for(pattern, matches):
    assert compiled(pattern, glob=False)(KEY) is matches


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("attn2", True),  # anywhere in the name
        ("*attn2*", True),
        ("attn2*weight", True),
        ("attn2.to_?.", True),
        ("attn2.to_[kq]", True),
        ("attn2.to_[!kq]", False),
        ("attn[0-9]", True),
        ("attn[34]", False),
        ("ATTN2", False),  # the case counts on every system
        ("attn2to_k", False),
        ("model.diffusion", True),
        ("model?diffusion", True),
        ("modelxdiffusion", False),  # the dot is a dot
        ("^model", False),  # and ^ is a ^
        ("weight$", False),
        ("", True),
    ],
)
def test_globs_match_anywhere(pattern, matches):
    assert compiled(pattern, glob=True)(KEY) is matches
    # what fnmatch itself says, with a star on both sides
    assert fnmatch.fnmatchcase(KEY, f"*{pattern}*") is matches


@settings(max_examples=300, deadline=None)
@given(st.text("ab.[]!-*?^$\\(", max_size=8), st.text("ab.[]-^$\n", max_size=12))
def test_globs_are_those_of_fnmatch(pattern, key):
    assert compiled(pattern, glob=True)(key) is fnmatch.fnmatchcase(key, f"*{pattern}*")


@pytest.mark.parametrize("pattern", ["[", "(", "a{2,1}", "*attn", "(?P<n>a)(?P<n>b)", "a{99999999999}", "\\"])
def test_what_is_no_regular_expression_is_refused(pattern):
    with pytest.raises(RecipeError) as caught:
        compiled(pattern, glob=False)
    assert repr(pattern) in caught.value.what
    assert ("--glob" in (caught.value.hint or "")) is ("*" in pattern)
    compiled(pattern, glob=True)  # as a glob it means something


def test_white_space_separates_patterns_and_empty_ones_are_dropped():
    assert split(["a b", " c\nd\t", "", "  "]) == ["a", "b", "c", "d"]
    assert Patterns(["attn1 attn2"], glob=False).texts == ["attn1", "attn2"]


def test_no_pattern_matches_nothing():
    # the fault of other tools: an empty box as the regular expression "" that matches every key
    for patterns in ([], [""], ["  \n"]):
        assert not Patterns(patterns, glob=False).match(KEY)
        assert not Patterns(patterns, glob=True).match(KEY)


def test_several_patterns_match_when_one_does():
    patterns = Patterns(["nothing", "attn2"], glob=False)
    assert patterns.match(KEY)
    assert not patterns.match("model.out.weight")
    assert patterns.unmatched([KEY, "model.out.weight"]) == ["nothing"]


def test_the_case_counts_even_where_file_names_have_none(monkeypatch):
    monkeypatch.setattr("os.path.normcase", str.lower)  # as on Windows
    assert not compiled("ATTN2", glob=True)(KEY)


def test_python_itself_reads_the_expression():
    pattern = r"blocks\.(\d+)\.\d+\..*attn(1|2)\.to_[qk]"
    assert compiled(pattern, glob=False)(KEY) is bool(re.search(pattern, KEY))
