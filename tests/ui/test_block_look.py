from __future__ import annotations

import re

import pytest

from lib_merge import blocks
from lib_merge.samples import make_sample
from lib_merge.ui.block_look import blocks_note, shape_text
from lib_merge.ui.facts import Facts, facts
from tests.ui.test_cards import text

# SD1: the text encoder, twelve blocks in, one in the middle, twelve out
SD1 = ("BASE", *(f"IN{n:02}" for n in range(12)), "M00", *(f"OUT{n:02}" for n in range(12)))
MODEL = Facts("a", "SD1", SD1, SD1[1:])


def dots(html):
    """(height, filled, what it says) of every dot, from left to right."""
    found = re.findall(r"cx='(\d+)' cy='([\d.]+)' r='3.5' fill='(\w+)'.*?<title>(.*?)</title>", html)
    assert [int(x) for x, *_ in found] == sorted(int(x) for x, *_ in found)
    return [(float(y), fill == "currentColor", said) for _, y, fill, said in found]


def test_one_dot_for_each_block():
    html = blocks_note("IN00-IN05=0.25, OUT=1", MODEL)
    assert text(html).startswith("18 of this model's 26 blocks have a weight of their own")
    shown = dots(html)
    assert len(shown) == 26
    assert [filled for _, filled, _ in shown] == [False] + [True] * 6 + [False] * 7 + [True] * 12
    assert shown[1][2] == "IN00: 0.25"
    assert shown[0][2] == "BASE: no weight of its own"
    low, quarter, whole = shown[0][0], shown[1][0], shown[-1][0]
    assert low - quarter == pytest.approx((low - whole) / 4)
    assert "role='img'" in html


def test_a_shape_rises_over_the_layers():
    heights = [height for height, filled, _ in dots(blocks_note("gradient_up", MODEL)) if filled]
    assert len(heights) == 25
    assert heights == sorted(heights, reverse=True)  # y grows downwards


def test_numbers_for_another_model_are_told():
    said = text(blocks_note(", ".join(["0.5"] * 20), Facts("a", "", ("BASE", "IN00", "M00", "OUT00"), ())))
    assert said.startswith("! 4 of this model's 4 blocks have a weight of their own; it has no block IN01")
    said = text(blocks_note("0.5, 0.5", MODEL))
    assert said.startswith("! This model has 26 blocks; 2 numbers are no known list of block weights")


def test_nothing_is_said_where_nothing_is_given_or_known():
    assert blocks_note("", MODEL) == ""
    assert blocks_note("IN00=1", Facts("a", "x")) == ""


def test_the_blocks_come_from_the_header(tmp_path):
    made = tmp_path / "a.safetensors"
    make_sample(made, 0)
    known = facts(made)
    assert set(SD1) <= set(known.blocks)
    assert "<script>" not in blocks_note("<script>=1", known)


def test_a_shape_is_written_for_the_layers_of_the_model_and_can_be_read_back():
    up = blocks.parse(shape_text("gradient_up", MODEL))
    assert list(up) == list(SD1[1:])
    numbers = [entry[""] for entry in up.values()]
    assert numbers == pytest.approx([place / 24 for place in range(25)], abs=5e-4)
    valley = [entry[""] for entry in blocks.parse(shape_text("V", MODEL)).values()]
    assert (valley[0], valley[12], valley[24]) == (1, 0, 1)
    assert {entry[""] for entry in blocks.parse(shape_text("flat", MODEL)).values()} == {0.5}
    assert len(blocks.parse(shape_text("flat", Facts("f", "Flux", ("D00", "S00", "VAE"), ("D00", "S00"))))) == 2
    assert shape_text("V", None) == shape_text("V", Facts("a", "x")) == "V"
