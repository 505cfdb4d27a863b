"""What the report's page shows: the worst first, numbers as numbers, everything in the files, names as text."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from lib_merge.ui import report_view
from lib_merge.ui.report_view import ALL, SHOWN, View
from tests.browser.reports import NASTY, large_rows


@pytest.fixture(scope="module")
def view():
    return View(f"{NASTY}.safetensors", {"result": NASTY}, large_rows())


def test_the_worst_hundred_of_thousands_stand_in_the_table(view):
    table = view.table("rel_change")
    assert len(view.rows) > 2000
    assert len(table) == SHOWN
    shares = sorted((row["norm_change"] / row["norm_a"] for row in view.rows), reverse=True)[:SHOWN]
    assert list(table["rel_change"]) == pytest.approx(shares, rel=1e-3)
    assert table["rel_change"].dtype.kind == table["norm_diff"].dtype.kind == "f"
    assert table["key"][0] == view.rows[0]["key"]
    assert "note" in table


def test_a_cosine_is_worst_where_it_is_smallest_and_blocks_narrow(view):
    table = view.table("cosine", "IN04")
    assert set(table["block"]) == {"IN04"}
    of_block = [row["cosine"] for row in view.rows if row["block"] == "IN04"]
    assert table["cosine"][0] == pytest.approx(min(of_block), rel=1e-3)
    assert view.blocks[0] == ALL
    assert set(view.blocks[1:]) == {row["block"] for row in view.rows}


def test_only_quantities_that_are_there_are_offered_the_main_one_first(view):
    assert next(iter(view.quantities.values())) == "rel_change"
    assert "sign_conflict" not in view.quantities.values()
    lora = [
        {"key": f"down_blocks_{n}", "block": "IN01", "shape": [4, 4], "numel": 16, "dtype_a": "", "action": "merged",
         "method": "auto", "strategy": "ties", "reason": "conflict 40 % > 25 %", "svd_error": n / 10, "rank": 8.0,
         "norm_diff": math.nan, "note": ""}
        for n in range(3)
    ]  # fmt: skip
    other = View("lora", {}, lora)
    assert list(other.quantities.values()) == ["svd_error", "rank"]
    table = other.table("svd_error")
    assert list(table["svd_error"]) == [0.2, 0.1, 0.0]
    assert {"strategy", "reason"} <= set(table)
    assert "What the rank cannot hold is 10.0 % on average, most in block IN01" in other.sentence


def test_the_files_hold_every_row(view):
    table = pd.read_csv(view.csv())
    assert len(table) == len(view.rows)
    assert table["norm_change"][7] == view.rows[7]["norm_change"]  # full precision
    page = view.page()
    assert page.name == "_img src_x onerror_window.xss_1_.safetensors.html"
    assert "<img" not in page.read_text("utf-8").replace("&lt;img", "")


def test_a_histogram_counts_each_value_once():
    edges, counts = report_view._histogram([0.0, 0.1, 0.1, 1.0])
    assert (edges[0], edges[-1], sum(counts)) == (0.0, pytest.approx(1.0), 4)
    assert (counts[0], counts[-1], counts[6]) == (1, 1, 2)
    assert sum(report_view._histogram([2.0, 2.0])[1]) == 2


def test_an_empty_report_shows_nothing_and_breaks_nothing():
    view = View("empty", {}, [])
    assert (view.quantities, view.blocks) == ({}, [ALL])
    assert len(view.table("rel_change")) == 0
    assert report_view.heatmap(view, "rel_change") is None
    assert report_view.distribution(view, "rel_change", "x") is None


def test_pictures_hold_the_numbers_and_escape_names(view):
    pytest.importorskip("plotly")
    figure = report_view.heatmap(view, "rel_change")
    (trace,) = figure.data
    assert len(trace.x) * len(trace.y) >= 1000
    assert sum(count for line in trace.customdata for count in line) == len(view.rows)
    cell = trace.z[trace.y.index("conv_in")][trace.x.index("IN00")]
    rows = [row for row in view.rows if row["key"].startswith("model.diffusion_model.input_blocks.0.0.")]
    change, length = (math.fsum(row[name] ** 2 for row in rows) for name in ("norm_change", "norm_a"))
    assert cell == pytest.approx(math.sqrt(change / length), rel=1e-3)
    named = View("x", {}, [{**view.rows[0], "key": NASTY, "block": NASTY}])
    for made in (report_view.heatmap(named, "rel_change"), report_view.distribution(named, "rel_change", NASTY)):
        assert "<img" not in made.to_json().replace("\\u003c", "<")


def test_without_plotly_a_line_says_so(view, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install plotly" in report_view.drawing_problem()
    assert report_view.heatmap(view, "rel_change") is None
    assert len(view.table("rel_change")) == SHOWN


def test_the_strategies_of_each_block_are_counted():
    chosen = [("IN01", "slerp"), ("IN01", "ties"), ("IN01", "ties"), ("", "ties"), ("M00", ""), ("OUT03", "consensus")]
    view = View("lora", {}, [{"key": str(n), "block": b, "strategy": s} for n, (b, s) in enumerate(chosen)])
    assert view.chosen == {"IN01": "2 ties, 1 slerp", "(none)": "1 ties", "OUT03": "1 consensus"}
    assert View("merge", {}, [{"key": "a", "block": "IN01", "action": "merged"}]).chosen == {}
