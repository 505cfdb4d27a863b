from __future__ import annotations

import re

import pytest

from lib_merge.ui.matches import matches_note

pytestmark = pytest.mark.portable

KEYS = ["in.attn1.weight", "in.attn2.weight", "mid.attn2.weight", "out.attn2.weight", "out.attn2.bias", "ema.x"]


def lines(**entries):
    """The items of the list as plain text."""
    items = re.findall(r"<li.*?</li>", matches_note(entries, KEYS), re.DOTALL)
    return [re.sub(r"<[^>]+>", " ", item).strip() for item in items]


def test_each_line_tells_what_it_reaches():
    rule, kept, gone = lines(rule="attn2: alpha=0.3", exclude="bias$", discard="^ema")
    assert "attn2" in rule
    assert "4 tensors, alpha=0.3" in rule
    assert rule.endswith("in.attn2.weight, mid.attn2.weight, out.attn2.weight …")
    assert "1 tensor, kept as in A" in kept
    assert kept.endswith("out.attn2.bias")
    assert "1 tensor, left out" in gone


def test_wildcards_and_the_filter_turned_round():
    (said,) = lines(exclude="*.attn?.bias", glob=True, include_mode=True)
    assert "1 tensor, merged, alone" in said


def test_what_is_wrong_is_told_by_line_and_stops_no_other():
    first, second, third, fourth = lines(rule="attn1: alpha=1\n\nattn2 alpha=1\nnothing: alpha=1", exclude="(")
    assert "1 tensor, alpha=1" in first
    assert "line 3" in second
    assert "no rule" in second or "not a rule" in second
    assert "nothing → no tensor of model A" in third
    assert "not a regular expression" in fourth


def test_no_lines_no_list_and_no_markup_from_names():
    assert matches_note({"rule": " \n", "exclude": None}, KEYS) == ""
    assert "<b>x" not in matches_note({"exclude": "<b>x"}, ["<b>x.weight"])
    assert "&lt;b&gt;x.weight" in matches_note({"exclude": "<b>x"}, ["<b>x.weight"])
