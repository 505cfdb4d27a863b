from __future__ import annotations

import csv
import io
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest

import lib_merge
from lib_merge import OutputError, Recipe, report
from lib_merge.recipe import Slot
from tests.support import raw, read, values, write, write_raw

portable = pytest.mark.portable

# The columns that the report promises, in order
COLUMNS = [
    *("key", "component", "block", "action", "method", "dtype_a", "dtype_b", "dtype_out", "shape", "numel"),
    *("norm_a", "norm_b", "norm_diff", "rel_diff", "cosine", "norm_out", "norm_change", "max_change"),
    *("sign_conflict", "reason", "note"),
]
NUMBERS = COLUMNS[10:19]


def rows(*paths, tmp_path, **options):
    made = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", overwrite=True, report=True, **options)
    return {row["key"]: row for row in made.rows}, read(made.output)


def norm(x):
    return math.sqrt(math.fsum((x.astype(float) ** 2).ravel()))


def cosine(x, y):
    return math.fsum((x.astype(float) * y.astype(float)).ravel()) / norm(x) / norm(y)


def close(found, expected):
    return math.isclose(found, expected, rel_tol=1e-12)


# Numbers


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
def test_numbers_of_two_models(tmp_path, dtype):
    a, b = ({"w": values((70, 50), seed, dtype), "v": values((9,), 9 + seed, dtype)} for seed in (1, 2))
    paths = [write(tmp_path / f"{name}.safetensors", tensors) for name, tensors in (("a", a), ("b", b))]
    found, out = rows(*paths, tmp_path=tmp_path, method="weighted_sum", alpha=0.3, save_dtype="fp64")
    for key in ("w", "v"):
        row, x, y, z = found[key], a[key].astype(float), b[key].astype(float), out[key].astype(float)
        assert close(row["norm_a"], norm(x))
        assert close(row["norm_b"], norm(y))
        assert close(row["cosine"], cosine(x, y))
        # the difference of two float32 is taken in float64
        assert close(row["norm_diff"], norm(y - x))
        assert close(row["rel_diff"], norm(y - x) / norm(x))
        assert close(row["norm_out"], norm(z))
        assert close(row["norm_change"], norm(z - x))
        assert close(row["max_change"], np.abs(z - x).max())
        assert math.isnan(row["sign_conflict"])


def test_numbers_of_three_models(tmp_path):
    a, b, c = (values((40, 30), seed, "<f4") for seed in (1, 2, 3))
    b[:, ::3] = a[:, ::3]  # where B is A there is no sign to disagree with
    paths = [write(tmp_path / f"{n}.safetensors", {"w": x}) for n, x in (("a", a), ("b", b), ("c", c))]
    found, _ = rows(*paths, tmp_path=tmp_path, method="add_difference", alpha=0.5)
    x, y = b.astype(float) - a, c.astype(float) - a
    signs = np.sign(x) * np.sign(y)
    assert close(found["w"]["sign_conflict"], (signs < 0).sum() / (signs != 0).sum())
    assert 0.3 < found["w"]["sign_conflict"] < 0.7
    assert close(found["w"]["cosine"], cosine(x, y))
    assert close(found["w"]["norm_diff"], norm(x))


def test_hand_worked_numbers(tmp_path):
    a = write(tmp_path / "a.safetensors", {"w": np.array([3, 4], "<f4")})
    b = write(tmp_path / "b.safetensors", {"w": np.array([3, 0], "<f4")})
    found, _ = rows(a, b, tmp_path=tmp_path, alpha=0.5)
    row = found["w"]
    assert [row[name] for name in NUMBERS[:-1]] == [5, 3, 4, 0.8, 0.6, math.sqrt(13), 2, 2]


def test_what_does_not_apply_is_nan(tmp_path):
    tensors = {"w": np.ones((2, 2), "<f4"), "zero": np.zeros(3, "<f4"), "n": np.arange(4), "kept": np.ones(2, "<f4")}
    a = write(tmp_path / "a.safetensors", tensors)
    b = write(tmp_path / "b.safetensors", {**tensors, "w": 2 * tensors["w"], "zero": np.ones(3, "<f4")})
    found, _ = rows(a, b, tmp_path=tmp_path, exclude=["kept"])
    for key in ("n", "kept"):
        assert all(math.isnan(found[key][name]) for name in NUMBERS)
    assert (found["zero"]["norm_a"], found["zero"]["norm_diff"]) == (0, math.sqrt(3))
    assert math.isnan(found["zero"]["rel_diff"])
    assert math.isnan(found["zero"]["cosine"])
    assert not math.isnan(found["w"]["cosine"])


def test_numbers_do_not_depend_on_threads_or_tiles(tmp_path):
    # several tiles of both sizes, with a rest
    paths = [
        write(tmp_path / f"{name}.safetensors", {"w": values((700_001,), seed), "v": values((3, 333, 333), seed + 9)})
        for seed, name in enumerate("abc")
    ]
    for method in ("weighted_sum", "add_difference", "slerp", "power_up_dare"):
        count = 3 if method == "add_difference" else 2
        seen = [
            rows(*paths[:count], tmp_path=tmp_path, method=method, threads=threads, tile=tile)[0]
            for threads, tile in ((1, 1 << 18), (4, 1 << 18), (1, 1 << 16), (4, 1 << 16))
        ]
        assert repr(seen[0]) == repr(seen[1]) == repr(seen[2]) == repr(seen[3])


# Words


def test_each_tensor_has_a_row_in_the_order_of_the_output(tmp_path):
    names = {
        "model.diffusion_model.input_blocks.1.0.in_layers.2.weight": ("unet", "IN01"),
        "model.diffusion_model.middle_block.0.in_layers.2.weight": ("unet", "M00"),
        "model.diffusion_model.output_blocks.3.0.in_layers.2.weight": ("unet", "OUT03"),
        "cond_stage_model.transformer.text_model.final_layer_norm.weight": ("te1", "BASE"),
    }
    a = write_raw(tmp_path / "a.safetensors", {key: raw("F16", values((4, 2), 1)) for key in names})
    b = write_raw(tmp_path / "b.safetensors", {key: raw("F32", values((4, 2), 2)) for key in reversed(names)})
    made = lib_merge.merge(
        a, b, out=tmp_path / "out.safetensors", report=True, exclude=["^cond"], rules=[("middle", {"alpha": 0})]
    )
    assert [row["key"] for row in made.rows] == list(names)
    assert {row["key"]: (row["component"], row["block"]) for row in made.rows} == names
    assert all(list(row) == COLUMNS for row in made.rows)
    plain, ruled, _, kept = made.rows
    assert (plain["action"], plain["method"], plain["reason"]) == ("merged", "weighted_sum", "")
    assert (plain["dtype_a"], plain["dtype_b"], plain["dtype_out"]) == ("F16", "F32", "F32")
    assert (ruled["dtype_out"], ruled["reason"]) == ("F16", "rule middle")
    assert (kept["action"], kept["method"], kept["reason"]) == ("copied", "", "excluded")
    assert (kept["dtype_a"], kept["dtype_b"], kept["dtype_out"]) == ("F16", "", "F16")
    assert (plain["shape"], plain["numel"]) == ([4, 2], 8)


def test_a_new_vae_is_told_with_the_dtype_that_a_had(tmp_path):
    key = "first_stage_model.decoder.conv_in.weight"
    a = write_raw(tmp_path / "a.safetensors", {key: raw("F16", values((4, 2), 1))})
    v = write_raw(tmp_path / "v.safetensors", {"decoder.conv_in.weight": raw("F32", values((4, 2), 2))})
    made = lib_merge.convert(a, vae=v, out=tmp_path / "out.safetensors", report=True)
    (row,) = made.rows
    assert (row["dtype_a"], row["dtype_out"], row["reason"]) == ("F16", "F32", "taken from the VAE file")


def test_rows_of_a_chain_tell_of_its_last_method(tmp_path):
    paths = [write(tmp_path / f"{name}.safetensors", {"w": values((5, 5), n)}) for n, name in enumerate("abc")]
    inner = Recipe(method="slerp", models={"A": Slot(file="b"), "B": Slot(file="c")})
    made = Recipe(method="weighted_sum", models={"A": Slot(file="a"), "B": Slot(recipe=inner)})
    files = dict(zip(("A", "B.A", "B.B"), paths, strict=True))
    result = lib_merge.run(made, out=tmp_path / "out.safetensors", files=files, report=True)
    assert (result.rows[0]["method"], result.rows[0]["dtype_b"]) == ("weighted_sum", "F32")
    assert close(result.rows[0]["norm_a"], norm(read(paths[0])["w"]))


# Files


PLAIN = {"component": "unet", "block": "IN00", "action": "merged", "method": "slerp", "dtype_a": "F16",
         "dtype_b": "F16", "dtype_out": "F16", "shape": [4, 4], "numel": 16, "reason": "", "note": ""}  # fmt: skip


def row(key="w", **fields):
    given = {**dict.fromkeys(NUMBERS, math.nan), **PLAIN, "key": key, **fields}
    return {name: given[name] for name in COLUMNS}


ODD = 'a, "b"\n'
ROWS = [row(ODD, norm_a=1 / 3, norm_b=5e-324, norm_out=1.7976931348623157e308), row("b", shape=[], numel=1)]


@portable
def test_csv_keeps_full_precision(tmp_path):
    report.save(ROWS, tmp_path / "r.csv", "title")
    raw_bytes = (tmp_path / "r.csv").read_bytes()
    assert b"\r" not in raw_bytes
    lines = list(csv.DictReader(io.StringIO(raw_bytes.decode("utf-8"), newline="")))
    assert [line["key"] for line in lines] == [ODD, "b"]
    assert float(lines[0]["norm_a"]) == 1 / 3
    assert float(lines[0]["norm_b"]) == 5e-324
    assert float(lines[0]["norm_out"]) == 1.7976931348623157e308
    assert [lines[0][name] for name in ("norm_diff", "shape", "numel")] == ["", "4×4", "16"]
    assert lines[1]["shape"] == "scalar"


@portable
def test_tables_have_numbers_where_numbers_stand():
    table = report.table(ROWS)
    assert {str(table[name].dtype) for name in NUMBERS} == {"float64"}
    assert str(table["numel"].dtype) == "int64"
    assert table["norm_a"].tolist()[0] == 1 / 3
    assert math.isnan(table["norm_a"].tolist()[1])


@portable
def test_json_is_strict(tmp_path):
    report.save(ROWS, tmp_path / "r.json", "title")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads((tmp_path / "r.json").read_text("utf-8"), parse_constant=refuse)
    assert found["title"] == "title"
    assert found["rows"][0]["norm_a"] == 1 / 3
    assert found["rows"][0]["norm_diff"] is None
    assert found["rows"][1]["shape"] == []
    assert set(found["rows"][0]) == set(COLUMNS)


class Page(HTMLParser):
    """Tags in order, and the text that a reader sees."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.seen, self._hidden = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.seen += data


def page(tmp_path, rows, title="title"):
    report.save(rows, tmp_path / "r.html", title)
    return Page((tmp_path / "r.html").read_text("utf-8"))


@portable
def test_html_shows_hostile_names_as_text(tmp_path):
    hostile = "<script>alert('x')</script>&amp;\"<img src=x onerror=alert(1)>--></style></td>"
    found = page(tmp_path, [row(hostile, reason=hostile, note=hostile)], hostile)
    harmless = page(tmp_path, [row("w", reason="r", note="n")])
    assert found.tags == harmless.tags  # none of it became a part of the page
    assert found.attributes == harmless.attributes
    assert found.seen.count(hostile) >= 4  # title, key, reason and note


@portable
def test_html_shows_long_names_and_many_rows_in_full(tmp_path):
    long = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_out.0.weight." + "x" * 200
    found = page(tmp_path, [row(f"{long}{n:03d}") for n in range(200)])
    assert all(f"{long}{n:03d}" in found.seen for n in range(200))
    assert "nan" not in found.seen.lower()


# Names


@portable
@pytest.mark.parametrize("name", ["r.txt", "r", "r.CSV.gz", ".csv", "nowhere/r.csv"])
def test_names_that_cannot_be_written_are_refused(tmp_path, name):
    with pytest.raises(OutputError):
        report.check_report_path(tmp_path / name)


@portable
def test_reports_are_not_overwritten_unless_told(tmp_path):
    (tmp_path / "r.csv").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        report.check_report_path(tmp_path / "r.csv")
    report.check_report_path(tmp_path / "r.csv", overwrite=True)
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(OutputError):
        report.check_report_path(tmp_path / "d.csv", overwrite=True)
    assert report.numbered(tmp_path / "r.csv") == tmp_path / "r_1.csv"
    assert report.numbered(tmp_path / "new.html") == tmp_path / "new.html"


@portable
def test_a_report_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "gone").mkdir()
    path = tmp_path / "gone" / "r.csv"
    report.check_report_path(path)
    (tmp_path / "gone").rmdir()
    with pytest.raises(OutputError) as caught:
        report.save(ROWS, path, "title")
    assert str(path) in str(caught.value)


@portable
def test_no_rows_make_an_empty_report(tmp_path):
    for suffix in report.SUFFIXES:
        report.save([], tmp_path / f"r{suffix}", "title")
        assert (tmp_path / f"r{suffix}").exists()
