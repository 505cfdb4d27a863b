"""The pictures of the methods show what the methods do now, and what their formulas promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib_merge.kernels.registry import all_methods
from tests.test_docs import writer

MODES = Path(__file__).resolve().parent.parent / "docs" / "modes"
_DOT = re.compile(r"M([\d.]+) ([\d.]+)h0")
MIDDLE, ALL = 110, 220


def dots(svg):
    """Coordinates of every dot, by path: two panels of three strengths."""
    return [[(float(x), float(y)) for x, y in _DOT.findall(line)] for line in svg.splitlines() if "h0" in line]


@pytest.fixture(scope="module")
def drawn():
    return writer("write_modes").pictures()


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_the_picture_is_current(drawn, name):
    there = (MODES / f"{name}.svg").read_text("utf-8")
    assert _DOT.sub("", there) == _DOT.sub("", drawn[f"{name}.svg"])
    for before, now in zip(dots(there), dots(drawn[f"{name}.svg"]), strict=True):
        assert len(before) == len(now) > 100
        for one, other in zip(before, now, strict=True):  # another CPU may round the last digit the other way
            assert one == pytest.approx(other, abs=0.11)


def test_a_weighted_sum_is_a_line_of_the_slope_alpha():
    for share, path in zip((0.25, 0.5, 1) * 2, dots((MODES / "weighted_sum.svg").read_text("utf-8")), strict=True):
        for x, y in path:
            assert MIDDLE - y == pytest.approx(share * (x - MIDDLE), abs=0.11)


def test_dare_leaves_a_weight_alone_or_scales_its_change_up():
    (first, *_) = dots((MODES / "power_up_dare.svg").read_text("utf-8"))
    slopes = [(MIDDLE - y) / (x - MIDDLE) for x, y in first if abs(x - MIDDLE) > 3]
    gain = 0.5 * 65536 / round(65536 * 0.15 - 0.5 + 0.5)  # multiplier 0.5, 15 % of the draws survive
    assert all(min(abs(slope), abs(slope - gain)) < 0.1 for slope in slopes)
    assert 0 < sum(slope > 1 for slope in slopes) < len(slopes) / 4
