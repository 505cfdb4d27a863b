"""The HTML report: numbers of its groups, every name escaped, nothing from outside, and a table that sorts."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from lib_merge import report_charts, report_html
from lib_merge.report_charts import aggregate, grid, percent, sentence, worst
from lib_merge.report_html import html, meaning

EVIL = "</script><img src=x onerror=alert(1)>"
NAN = math.nan
PROMISED_COLUMNS = (
    *("key", "component", "block", "action", "method", "dtype_a", "dtype_b", "dtype_out", "shape", "numel", "norm_a"),
    *("norm_b", "norm_diff", "rel_diff", "cosine", "norm_out", "norm_change", "max_change", "sign_conflict", "reason"),
    *("note", "strategy", "n", "conflict_expected", "ratio", "selfish_share", "density", "rank", "svd_error", "step"),
    *("delta_step_ratio", "codes_changed", "correlation", "rms_ratio"),
)
VOID = {"meta", "input", "br", "img", "link", "hr"}


def merged(key: str, block: str, **values) -> dict:
    """A row of a merge as `Watcher` makes it."""
    what = {"key": key, "component": "unet", "block": block, "action": "merged", "method": "weighted_sum"}
    stored = {"dtype_a": "F16", "dtype_b": "F32", "dtype_out": "F32", "shape": [4, 5], "numel": 20}
    donor = {"norm_a": 2.0, "norm_b": 2.0, "norm_diff": 1.0, "rel_diff": 0.5, "cosine": 0.875}
    result = {"norm_out": 2.0, "norm_change": 0.4, "max_change": 0.1, "sign_conflict": NAN, "reason": "", "note": ""}
    return what | stored | donor | result | values


def copied(key: str, block: str) -> dict:
    empty = dict.fromkeys(("norm_a", "norm_b", "norm_diff", "rel_diff", "cosine", "norm_out", "norm_change"), NAN)
    nothing = {"action": "copied", "method": "", "max_change": NAN, "reason": "integers are copied", "shape": [77]}
    return merged(key, block, **empty, **nothing)


def unet(number: int, name: str = "attn1.to_q.weight") -> str:
    return f"model.diffusion_model.input_blocks.{number}.1.transformer_blocks.0.{name}"


@pytest.fixture
def rows() -> list[dict]:
    return [
        merged(unet(1), "IN01"),
        merged(unet(1, "attn1.to_q.bias"), "IN01", norm_a=1.0, norm_b=3.0, norm_diff=3.0, cosine=-0.5, norm_change=2.0),
        merged(unet(2), "IN02", norm_change=0.1),
        merged(unet(2, "attn2.to_k.weight"), "IN02", norm_change=0.0, max_change=0.0),
        copied("position_ids", "BASE"),
    ]


@pytest.fixture(autouse=True)
def no_plotly(monkeypatch):
    """Pages without the library, unless the test says otherwise: they are small."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)


class Page(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[tuple[dict, str]] = []
        self.table: list[list[str]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th") and self.table:
            self.table[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        here = self.open[-1] if self.open else ""
        if here == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif {"td", "th"} & set(self.open):
            self.table[-1][-1] += data
        else:
            self.texts.append((here, data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def data(self) -> dict:
        (text,) = (text for attributes, text in self.scripts if attributes.get("type") == "application/json")
        return json.loads(text)

    @property
    def rows(self) -> list[dict]:
        head = next(line for line in self.table if line[:2] == ["key", "block"])
        return [dict(zip(head, line, strict=True)) for line in self.table[self.table.index(head) + 1 :]]


def test_the_page_is_well_formed_and_says_what_happened(rows):
    page = Page(html(rows, "mix.safetensors", {"method": "weighted_sum", "device": "cpu"}))
    assert page.tags[0][0] == "html"
    assert [text for tag, text in page.texts if tag in ("title", "h1")] == ["mix.safetensors", "mix.safetensors"]
    assert any(text == sentence(rows) for tag, text in page.texts if tag == "p")
    assert page.table[:2] == [["method", "weighted_sum"], ["device", "cpu"]]


def test_all_rows_are_there_the_worst_first(rows):
    page = Page(html(rows, "t", {}))
    assert [row["key"] for row in page.rows] == [rows[n]["key"] for n in (1, 0, 2, 3, 4)]
    first, last = page.rows[0], page.rows[-1]
    assert (first["rel_change"], first["norm_diff"], first["shape"], first["numel"]) == ("2", "3", "4×5", "20")
    assert (last["norm_a"], last["reason"], last["shape"]) == ("", "integers are copied", "77")
    assert "sign_conflict" not in first  # empty in all rows
    assert "note" not in first


def test_the_table_can_be_sorted_and_read(rows):
    page = Page(html(rows, "t", {}))
    heads = [attributes for tag, attributes in page.tags if tag == "th" and attributes.get("scope") == "col"]
    names = list(page.rows[0])
    assert page.count("button") == len(heads) == len(names)
    assert all(attributes["title"] for attributes in heads)
    assert [name for name, each in zip(names, heads, strict=True) if "aria-sort" in each] == ["rel_change"]
    numeric = {name for name, each in zip(names, heads, strict=True) if each.get("class") == "n"}
    assert {"numel", "rel_diff", "norm_a", "rel_change"} <= numeric
    assert not {"key", "block", "shape", "reason"} & numeric
    assert sum(attributes.get("scope") == "row" for tag, attributes in page.tags if tag == "th") == len(rows)
    labelled = {attributes.get("for") for tag, attributes in page.tags if tag == "label"}
    assert {"filter", "quantity"} <= labelled


def test_hostile_names_stay_text(rows):
    for number, row in enumerate(rows):
        name = f"{EVIL} {number} & \"'\u2028<!--"
        row |= {"key": f"blocks.0.{name}.weight", "block": name, "method": name, "reason": name, "note": name}
    text = html(rows, f"</title>{EVIL}", {EVIL: EVIL})
    page = Page(text)
    assert page.count("img") == 0
    assert page.count("script") == 2
    assert EVIL not in text
    assert {row["key"] for row in page.rows} == {row["key"] for row in rows}
    assert set(page.data["blocks"]) == {row["block"] for row in rows[:4]}
    assert any(EVIL in kind for kind in page.data["kinds"])
    assert dict(page.texts)["h1"] == f"</title>{EVIL}"
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_names_reach_the_page_as_text_only():
    """The script never makes HTML out of a name."""
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", report_html._file("report_page.js")
    )


def test_nothing_comes_from_outside(rows):
    text = html(rows, "t", {})
    page = Page(text)
    assert not [1 for _, attributes in page.tags if {"src", "href", "action"} & attributes.keys()]
    assert re.findall(r"https?://[^\s\"')]+", text) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "@import" not in text
    assert "url(" not in text
    (policy,) = (attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_plotly_is_embedded_once_where_it_is_installed(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", SimpleNamespace(get_plotlyjs=lambda: "/* the library */"))
    page = Page(html(rows, "t", {}))
    assert [text for _, text in page.scripts].count("/* the library */") == 1
    assert "without plotly" not in "".join(text for _, text in page.texts)


def test_without_plotly_the_page_says_so(rows):
    page = Page(html(rows, "t", {}))
    assert len(page.scripts) == 2
    assert "without plotly" in "".join(text for _, text in page.texts)


@pytest.mark.parametrize("given", [[], [copied("position_ids", "BASE")]], ids=["no rows", "nothing measured"])
def test_a_page_without_numbers(given):
    page = Page(html(given, "t", {}))
    assert page.count("select") == 0
    assert page.data["quantities"] == []


def test_thousands_of_rows_stay_light():
    keys = [unet(n % 12).replace("blocks.0", f"blocks.{n}") for n in range(2600)]
    many = [merged(key, f"IN{n % 12:02d}", norm_change=n / 1e4) for n, key in enumerate(keys)]
    start = time.perf_counter()
    text = html(many, "t", {})
    assert time.perf_counter() - start < 5
    assert len(text) < 2_000_000
    assert 'class="first"' in text
    assert "nth-child(n + 101)" in text
    assert len(Page(text).rows) == 2600


def test_every_column_of_the_design_is_explained():
    assert [name for name in PROMISED_COLUMNS if not meaning(name)] == []
    assert meaning("norm_diff_c").startswith("‖C − A‖")
    assert meaning("norm_d").startswith("‖D‖")
    assert meaning("dtype_c") == meaning("dtype_b").replace("B", "C")
    assert meaning("unheard_of") == ""
    assert all(meaning(item.id) for item in report_charts.QUANTITIES)


def test_groups_add_norms_as_squares(rows):
    together = aggregate(rows[:2])
    assert together["norm_diff"] == pytest.approx(math.sqrt(1 + 9))
    assert together["rel_diff"] == pytest.approx(math.sqrt(10) / math.sqrt(5))
    assert together["rel_change"] == pytest.approx(math.sqrt(0.16 + 4) / math.sqrt(5))
    assert together["cosine"] == pytest.approx((0.875 * 4 - 0.5 * 3) / math.sqrt(5 * 13))
    assert together["max_change"] == 0.1
    assert math.isnan(together["sign_conflict"])
    assert all(math.isnan(value) for value in aggregate([rows[-1]]).values())


def test_conflicts_are_weighted_by_size(rows):
    rows[0] |= {"sign_conflict": 0.5, "numel": 10}
    rows[1] |= {"sign_conflict": 0.1, "numel": 30}
    assert aggregate(rows[:2])["sign_conflict"] == pytest.approx(0.2)
    assert aggregate(rows[:2])["cosine"] == pytest.approx((0.875 * 1 - 0.5 * 9) / 10)


def test_the_grid_has_a_cell_for_each_kind_and_block(rows):
    page = grid(rows)
    assert page["blocks"] == ["IN01", "IN02"]
    assert page["kinds"] == ["attn1.to_q", "attn2.to_k"]
    assert page["counts"] == [[2, 1], [0, 1]]
    shown = {item["id"]: item for item in page["quantities"]}
    assert list(shown) == ["rel_change", "rel_diff", "cosine", "norm_change", "norm_diff", "max_change"]
    assert shown["norm_change"]["cells"] == [[pytest.approx(math.hypot(0.4, 2), rel=1e-3), 0.1], [None, 0.0]]
    assert shown["norm_change"]["bars"][0] == shown["norm_change"]["cells"][0][0]
    assert (shown["rel_diff"]["low"], shown["rel_diff"]["high"]) == (0, pytest.approx(math.sqrt(2), rel=1e-3))
    assert shown["cosine"]["low"] == min(value for line in shown["cosine"]["cells"] for value in line if value)
    json.dumps(page, allow_nan=False)


def test_a_few_far_values_do_not_take_all_the_colours():
    many = [merged(unet(n, f"ff.net.{n}.weight"), f"IN{n:02d}", norm_change=0.1) for n in range(100)]
    many[7]["norm_change"] = 100.0
    change = next(item for item in grid(many)["quantities"] if item["id"] == "norm_change")
    assert change["high"] == 0.1


def test_a_model_of_many_kinds_is_pooled():
    many = [merged(f"blocks.{n % 3}.made_up_{n}.weight", f"B{n % 3:02d}") for n in range(1000)]
    page = grid(many)
    assert len(page["kinds"]) == report_charts.KINDS_AT_MOST + 1
    assert page["kinds"].count("other kinds") == 1
    assert sum(map(sum, page["counts"])) == 1000


def test_further_models_have_a_picture_of_their_own(rows):
    nothing = dict.fromkeys(("norm_change", "norm_out", "max_change"), NAN)
    compared = [{**row, "action": "compared", "norm_diff_c": 1.0, "rel_diff_c": 0.5, **nothing} for row in rows[:4]]
    assert [item["id"] for item in grid(compared)["quantities"]] == ["rel_diff", "cosine", "norm_diff", "rel_diff_c"]
    assert "C is" not in sentence(compared)
    assert re.search(r"B is [\d.]+ %, C [\d.]+ % away from A", sentence(compared))


def test_worst_rows_come_first_and_those_without_a_number_last(rows):
    rows[2]["norm_a"] = 0.0  # A is all zeros: no ratio, but a difference
    assert [row["key"] for row in worst(rows)] == [rows[n]["key"] for n in (1, 0, 3, 2, 4)]


def test_sentences(rows):
    said = sentence(rows)
    assert said.startswith("4 of 5 tensors were merged with weighted_sum, 1 copied.")
    assert "most in block IN01" in said
    assert f"the tensor that moved most is {rows[1]['key']} (200.0 %)" in said
    assert sentence([rows[-1]]) == "None of 1 tensors was merged."
    assert (percent(0.0312), percent(0.00004567)) == ("3.1 %", "0.0046 %")


@pytest.mark.browser
@pytest.mark.parametrize("library", ["svg", "plotly"])
def test_the_page_works_in_a_browser(rows, tmp_path, monkeypatch, library):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.fail("no Chromium on the path: install it, this tier needs one")
    if library == "plotly":
        monkeypatch.delitem(sys.modules, "plotly.offline")
        pytest.importorskip("plotly")
    many = [*rows, *(merged(unet(3, f"x{n}.weight"), "IN03", norm_change=n / 1000) for n in range(120))]
    text = html(many, "t", {})
    script = """
const heads = [...document.querySelectorAll("#rows thead th")], said = [];
const column = (name) => heads.findIndex((head) => head.textContent === name);
const first = (name) => document.querySelector("#rows tbody tr").cells[column(name)].textContent;
const visible = () => [...document.querySelectorAll("#rows tbody tr")].filter((row) => row.offsetHeight).length;
said.push(visible());
heads[column("norm_change")].querySelector("button").click(); said.push(first("norm_change"));
heads[column("norm_change")].querySelector("button").click(); said.push(first("norm_change"));
heads[column("block")].querySelector("button").click(); said.push(first("block"));
const box = document.getElementById("filter");
box.value = "IN02 TO_K"; box.dispatchEvent(new Event("input")); said.push(visible());
box.value = ""; box.dispatchEvent(new Event("input")); said.push(visible());
document.getElementById("all").click(); said.push(visible());
const select = document.getElementById("quantity");
select.selectedIndex = 2; select.dispatchEvent(new Event("change"));
said.push(document.getElementById("meaning").textContent.slice(0, 10));
setTimeout(() => {
  said.push(document.querySelectorAll("#chart svg").length > 0);
  document.body.replaceChildren();
  document.body.textContent = "RESULT" + JSON.stringify(said) + "END";
}, 500);
"""
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=60)
    said = json.loads(re.search(r"RESULT(.*)END", done.stdout)[1])
    assert said == [100, "2", "0", "BASE", 1, 100, 125, "of A and B", True]
