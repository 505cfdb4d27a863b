"""Comparing models: numbers against float64 numpy, what belongs together, and what must not be taken for numbers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lib_merge import contrast
from lib_merge.analyze import compare
from lib_merge.errors import CancelledError, FileError, RecipeError
from lib_merge.events import CancelToken
from lib_merge.files.hashes import HashCache
from lib_merge.files.source import Source

KEY = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
EXACT = {"rel": 1e-12, "abs": 1e-300}


@pytest.fixture
def save(tmp_path):
    """Writes a model and returns its path."""

    def write(name: str, tensors: dict[str, torch.Tensor]):
        path = tmp_path / f"{name}.safetensors"
        save_file({key: value.clone() for key, value in tensors.items()}, path)
        return path

    return write


def wave(shape: tuple[int, ...], seed: float, dtype=torch.float32) -> torch.Tensor:
    """Values that are the same everywhere and not alike."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(at * (0.7 + seed)) + 0.1 * seed).reshape(shape).to(dtype)


def flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy().ravel()


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def conflict(x: np.ndarray, y: np.ndarray) -> tuple[int, int]:
    return int(np.sum(x * y < 0)), int(np.sum((x != 0) & (y != 0)))


def row_of(found, key: str) -> dict:
    (row,) = (row for row in found.rows if row["key"] == key)
    return row


def nans(row: dict) -> set[str]:
    return {name for name, value in row.items() if isinstance(value, float) and math.isnan(value)}


def test_two_models(save):
    a, b = wave((40, 30), 1), wave((40, 30), 2)
    found = compare(save("a", {KEY: a}), save("b", {KEY: b}))
    row, x, y = row_of(found, KEY), flat(a), flat(b)
    assert (row["component"], row["block"], row["action"]) == ("unet", "IN01", "compared")
    assert (row["dtype_a"], row["dtype_b"], row["shape"], row["numel"]) == ("F32", "F32", [40, 30], 1200)
    assert row["norm_a"] == pytest.approx(np.linalg.norm(x), **EXACT)
    assert row["norm_b"] == pytest.approx(np.linalg.norm(y), **EXACT)
    assert row["norm_diff"] == pytest.approx(np.linalg.norm(y - x), **EXACT)
    assert row["rel_diff"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), **EXACT)
    assert row["cosine"] == pytest.approx(cosine(x, y), **EXACT)
    assert row["max_diff"] == np.abs(y - x).max()
    assert nans(row) == {"sign_conflict"}
    assert (row["reason"], row["note"]) == ("", "")


def test_three_models_compare_the_differences(save):
    a, b, c = (wave((50, 20), seed) for seed in (1, 2, 3))
    c[:10] = a[:10]  # where C is A there is no conflict
    row = compare(save("a", {KEY: a}), save("b", {KEY: b}), save("c", {KEY: c})).rows[0]
    d, e = flat(b) - flat(a), flat(c) - flat(a)
    against, both = conflict(d, e)
    assert row["cosine"] == pytest.approx(cosine(d, e), **EXACT)
    assert row["sign_conflict"] == pytest.approx(against / both, **EXACT)
    assert row["norm_c"] == pytest.approx(np.linalg.norm(flat(c)), **EXACT)
    assert row["norm_diff_c"] == pytest.approx(np.linalg.norm(e), **EXACT)
    assert row["rel_diff_c"] == pytest.approx(np.linalg.norm(e) / np.linalg.norm(flat(a)), **EXACT)
    assert row["max_diff_c"] == np.abs(e).max()
    assert row["dtype_c"] == "F32"
    assert not nans(row)


def test_four_models_are_the_mean_of_their_pairs(save):
    tensors = [{KEY: wave((30, 7), seed), "model.diffusion_model.out.2.bias": wave((9,), seed)} for seed in range(4)]
    found = compare(*(save(str(number), each) for number, each in enumerate(tensors)))
    row, base = row_of(found, KEY), flat(tensors[0][KEY])
    deltas = [flat(each[KEY]) - base for each in tensors[1:]]
    pairs = list(combinations(deltas, 2))
    counts = [conflict(*two) for two in pairs]
    assert row["cosine"] == pytest.approx(np.mean([cosine(*two) for two in pairs]), **EXACT)
    expected = sum(against for against, _ in counts) / sum(both for _, both in counts)
    assert row["sign_conflict"] == pytest.approx(expected, **EXACT)
    whole = [np.concatenate([flat(each[key]) - flat(tensors[0][key]) for key in tensors[0]]) for each in tensors[1:]]
    assert list(found.summary["pairs"]) == ["B, C", "B, D", "C, D"]
    for pair, two in zip(found.summary["pairs"].values(), combinations(whole, 2), strict=True):
        against, both = conflict(*two)
        assert pair["cosine"] == pytest.approx(cosine(*two), **EXACT)
        assert pair["sign_conflict"] == pytest.approx(against / both, **EXACT)
    assert found.summary["cosine"] == pytest.approx(np.mean([cosine(*t) for t in combinations(whole, 2)]), **EXACT)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_mixed_dtypes_are_measured_exactly(save, mine, theirs):
    a, b = wave((33, 3), 1, mine), wave((33, 3), 2, theirs)
    row = compare(save("a", {KEY: a}), save("b", {KEY: b})).rows[0]
    x, y = flat(a), flat(b)
    assert row["norm_diff"] == pytest.approx(np.linalg.norm(y - x), **EXACT)
    assert row["cosine"] == pytest.approx(cosine(x, y), **EXACT)
    assert row["max_diff"] == np.abs(y - x).max()


def test_same_values_in_another_dtype_are_not_identical(save):
    a = wave((12, 4), 1, torch.float16)
    found = compare(save("a", {KEY: a}), save("b", {KEY: a.float()}))
    row = found.rows[0]
    assert (row["norm_diff"], row["max_diff"], row["cosine"], row["note"]) == (0, 0, 1, "same values")
    assert found.summary["identical"] == 0
    assert not found.summary["all_identical"]


def test_identical_models(save):
    tensors = {KEY: wave((300, 300), 1, torch.float16), "position_ids": torch.arange(77), "v_pred": torch.zeros(0)}
    found = compare(save("a", tensors), save("b", tensors))
    assert {row["note"] for row in found.rows} == {"same"}
    assert row_of(found, KEY)["cosine"] == 1
    assert row_of(found, KEY)["norm_a"] == pytest.approx(np.linalg.norm(flat(tensors[KEY])), **EXACT)
    assert found.summary["all_identical"]
    assert (found.summary["identical"], found.summary["differing"], found.summary["rel_diff"]) == (3, 0, 0)
    assert found.summary["most_different"] == []


def test_keys_are_matched_across_denoiser_prefixes(save):
    a, b = wave((8, 8), 1), wave((8, 8), 2)
    left = {KEY: a, "cond_stage_model.transformer.text_model.final_layer_norm.bias": wave((5,), 1)}
    found = compare(save("a", left), save("b", {KEY.removeprefix("model.diffusion_model."): b}))
    assert row_of(found, KEY)["norm_diff"] == pytest.approx(np.linalg.norm(flat(b) - flat(a)), **EXACT)
    assert (found.summary["compared"], found.summary["missing"], found.summary["extra"]) == (1, 1, 0)


def test_what_cannot_be_compared_is_listed(save):
    a = {"x.weight": wave((4, 4), 1), "lost.weight": wave((3,), 1), "wide.weight": wave((4, 4), 1)}
    b = {"x.weight": wave((4, 4), 2), "more.weight": wave((6,), 2), "wide.weight": wave((4, 9), 2)}
    found = compare(save("a", a), save("b", b))
    assert found.rows[-1]["key"] == "more.weight"
    lost, more, wide = (row_of(found, key) for key in ("lost.weight", "more.weight", "wide.weight"))
    assert (lost["action"], lost["reason"], lost["dtype_b"]) == ("missing", "missing in B", "")
    assert (more["action"], more["reason"], more["dtype_a"], more["shape"]) == ("extra", "only in B", "", [6])
    assert (wide["action"], wide["reason"]) == ("shape differs", "[4, 4] in A, [4, 9] in B")
    numbers = {"norm_a", "norm_b", "norm_diff", "rel_diff", "max_diff", "cosine", "sign_conflict"}
    assert all(nans(row) == numbers for row in (lost, more, wide))
    counts = {name: found.summary[name] for name in ("tensors", "compared", "missing", "extra", "shape_differs")}
    assert counts == {"tensors": 4, "compared": 1, "missing": 1, "extra": 1, "shape_differs": 1}
    said = "\n".join(found.summary["warnings"])
    for key in ("lost.weight", "more.weight", "wide.weight"):
        assert key in said
        assert key in found.describe()
    assert not found.summary["all_identical"]


def test_a_tensor_that_only_one_of_the_others_has(save):
    a, b, c = wave((6, 6), 1), wave((6, 6), 2), wave((6, 6), 3)
    found = compare(
        save("a", {"x.weight": a, "y.weight": a}),
        save("b", {"x.weight": b, "new.weight": b}),
        save("c", {"x.weight": c, "y.weight": c, "new.weight": c}),
    )
    row = row_of(found, "y.weight")
    assert (row["action"], row["reason"]) == ("compared", "missing in B")
    assert row["norm_diff_c"] == pytest.approx(np.linalg.norm(flat(c) - flat(a)), **EXACT)
    assert row["norm_a"] == pytest.approx(np.linalg.norm(flat(a)), **EXACT)
    assert {"norm_b", "norm_diff", "rel_diff", "cosine", "sign_conflict"} <= nans(row)
    assert row_of(found, "new.weight")["reason"] == "only in B, C"
    rel_b = np.linalg.norm(flat(b) - flat(a)) / np.linalg.norm(flat(a))
    assert found.summary["rel_diff"] == pytest.approx(rel_b, **EXACT)


def test_integers_are_compared_bit_for_bit(save):
    a = {"position_ids": torch.arange(77), "mask": torch.tensor([True, False]), "w.weight": wave((3,), 1)}
    b = {**a, "mask": torch.tensor([True, True])}
    found = compare(save("a", a), save("b", b), save("c", a))
    ids, mask = row_of(found, "position_ids"), row_of(found, "mask")
    assert (ids["note"], ids["action"]) == ("same", "compared")
    assert mask["note"] == "same in C; differs in B"
    assert "bit for bit" in mask["reason"]
    assert math.isnan(mask["norm_a"])
    assert row_of(compare(save("a", a), save("b", b)), "mask")["note"] == "differs"


def test_integers_are_not_measured_against_floats(save):
    found = compare(save("a", {"position_ids": torch.arange(4)}), save("b", {"position_ids": torch.arange(4.0)}))
    row = found.rows[0]
    assert (row["note"], row["reason"]) == ("differs", "I64 in A, number in B")
    assert math.isnan(row["norm_diff"])
    assert found.summary["identical"] == 0


def test_codes_of_no_known_scale_are_not_numbers(save):
    codes = wave((8, 8), 1).to(torch.float8_e4m3fn)
    a = {"x.weight": codes, "x.scale_weight": torch.full((8, 8), 0.5), "y.bias": wave((3,), 1)}
    b = {**a, "x.scale_weight": torch.full((8, 8), 0.25)}
    found = compare(save("a", a), save("b", b))
    row = row_of(found, "x.weight")
    assert row["note"] == "same"
    assert "codes" in row["reason"]
    assert math.isnan(row["norm_a"])
    assert row_of(found, "x.scale_weight")["note"] == "differs"
    plain = row_of(compare(save("a", a), save("b", {"x.weight": codes, "y.bias": a["y.bias"]})), "x.weight")
    assert plain["note"] == "differs"
    assert "codes" in plain["reason"]
    assert "number in B" in plain["reason"]


def test_equal_codes_with_another_scale_differ(save):
    codes = wave((8, 8), 1).to(torch.float8_e4m3fn)
    a = {"x.weight": codes, "x.scale_weight": torch.tensor(0.5), "y.bias": wave((3,), 1)}
    found = compare(save("a", a), save("b", {**a, "x.scale_weight": torch.tensor(0.25)}))
    row = row_of(found, "x.weight")
    assert (row["note"], row["rel_diff"], row["cosine"]) == ("", 0.5, pytest.approx(1))
    assert row["norm_a"] == pytest.approx(0.5 * float(codes.double().norm()))
    plain = row_of(
        compare(save("a", a), save("b", {"x.weight": codes.float() * 0.5, "y.bias": a["y.bias"]})), "x.weight"
    )
    assert (plain["note"], plain["norm_diff"]) == ("same values", 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", "AB")
def test_values_that_are_not_finite_are_named(save, value, where):
    a, b = wave((300, 300), 1), wave((300, 300), 2)
    (a if where == "A" else b)[299, 299] = value
    tensors = {"y.weight": wave((4,), 1)}
    found = compare(save("a", {"x.weight": a, **tensors}), save("b", {"x.weight": b, **tensors}))
    row = row_of(found, "x.weight")
    assert row["note"] == f"values that are not finite in {where}"
    assert {"norm_a", "norm_b", "norm_diff", "rel_diff", "cosine", "max_diff"} <= nans(row)
    assert found.summary["not_finite"] == 1
    assert "x.weight" in found.summary["warnings"][0]
    assert found.summary["norm_diff"] == 0
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_damaged_model_leaves_the_numbers_of_the_others(save):
    a, b, c = wave((9, 9), 1), wave((9, 9), 2), wave((9, 9), 3)
    c[0, 0] = math.nan
    row = compare(save("a", {KEY: a}), save("b", {KEY: b}), save("c", {KEY: c})).rows[0]
    assert row["norm_diff"] == pytest.approx(np.linalg.norm(flat(b) - flat(a)), **EXACT)
    assert {"norm_c", "norm_diff_c", "rel_diff_c", "max_diff_c", "cosine", "sign_conflict"} == nans(row)
    assert row["note"] == "values that are not finite in C"


def test_float64_whose_squares_overflow_has_no_numbers(save):
    a = torch.full((70000,), 1e200, dtype=torch.float64)
    row = compare(save("a", {"x.weight": a}), save("b", {"x.weight": -a})).rows[0]
    assert math.isnan(row["norm_a"])
    assert row["note"] == "values too large to be measured"


def test_empty_tensors_and_scalars(save):
    a = {"scaled": torch.zeros(0), "scale": torch.tensor(2.0), "zero.weight": torch.zeros(5)}
    b = {"scaled": torch.zeros(0), "scale": torch.tensor(3.0), "zero.weight": torch.ones(5)}
    found = compare(save("a", a), save("b", b))
    assert row_of(found, "scaled")["note"] == "same"
    assert (row_of(found, "scale")["rel_diff"], row_of(found, "scale")["shape"]) == (0.5, [])
    zero = row_of(found, "zero.weight")
    assert (zero["norm_a"], zero["norm_diff"]) == (0, pytest.approx(math.sqrt(5)))
    assert math.isnan(zero["rel_diff"])
    assert math.isnan(zero["cosine"])


@pytest.mark.parametrize(("threads", "tile"), [(1, 1 << 18), (3, 1 << 16), (8, 1), (2, 100_000)])
def test_numbers_depend_on_neither_threads_nor_tile(save, threads, tile):
    models = [
        save(str(seed), {f"{n}.weight": wave((size,), seed) for n, size in enumerate((300_001, 65_536, 65_537, 3))})
        for seed in range(3)
    ]
    whole = compare(*models, threads=1, tile=1 << 20)
    before = torch.get_num_threads()
    found = compare(*models, threads=threads, tile=tile)
    assert torch.get_num_threads() == before
    assert found.to_dict()["rows"] == whole.to_dict()["rows"]
    summaries = [each.to_dict()["summary"] for each in (found, whole)]
    for summary in summaries:
        del summary["seconds"], summary["peak_rss_mb"]
    assert summaries[0] == summaries[1]


def test_groups_are_as_if_their_tensors_were_one(save):
    vae = "first_stage_model.decoder.conv_out.weight"
    names = [KEY, KEY.replace("to_q", "to_k"), KEY.replace("blocks.1", "blocks.2"), vae]
    a = {name: wave((10, 3), n) for n, name in enumerate(names)}
    b = {name: wave((10, 3), n + 0.3) for n, name in enumerate(names)}
    summary = compare(save("a", a), save("b", b)).summary
    for group, chosen in (("IN01", names[:2]), ("IN02", names[2:3]), ("VAE", names[3:])):
        x, y = (np.concatenate([flat(model[name]) for name in chosen]) for model in (a, b))
        block = summary["blocks"][group]
        assert block["tensors"] == len(chosen)
        assert block["rel_diff"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
        assert block["cosine"] == pytest.approx(cosine(x, y), rel=1e-12)
        assert block["max_diff"] == np.abs(y - x).max()
    x, y = (np.concatenate([flat(model[name]) for name in names]) for model in (a, b))
    assert summary["rel_diff"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert set(summary["components"]) == {"unet", "vae"}
    ranked = [item["rel_diff"] for item in summary["most_different"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(ranked) == 4


def test_patterns(save):
    a = {"enc.x.weight": wave((3,), 1), "dec.x.weight": wave((3,), 1)}
    b = {"enc.x.weight": wave((3,), 2), "dec.x.weight": wave((3,), 2), "dec.new.weight": wave((3,), 2)}
    paths = save("a", a), save("b", b)
    left = compare(*paths, exclude=["^dec"])
    assert (row_of(left, "dec.x.weight")["action"], row_of(left, "dec.x.weight")["reason"]) == ("excluded", "excluded")
    assert (left.summary["compared"], left.summary["excluded"], left.summary["extra"]) == (1, 1, 0)
    only = compare(*paths, exclude=["dec.*"], include_mode=True, glob=True)
    assert row_of(only, "enc.x.weight")["reason"] == "not included"
    assert (only.summary["compared"], only.summary["extra"]) == (1, 1)
    assert any("nothing_here" in text for text in compare(*paths, exclude=["nothing_here"]).summary["warnings"])


def test_summary_says_what_was_compared(save):
    path = save("a", {KEY: wave((3,), 1)})
    models = compare(path, save("b", {KEY: wave((3,), 2)})).summary["models"]
    assert models["A"]["file"] == str(path)
    assert set(models) == {"A", "B"}
    assert models["A"]["sha256"] is None


def test_header_names_models_and_versions(save):
    paths = save("a", {KEY: wave((3,), 1)}), save("b", {KEY: wave((3,), 2)})
    digest = HashCache().compute(paths[1])
    header = compare(*paths).header()
    assert list(header) == ["model A", "model B", "versions"]
    assert header["model A"] == f"{paths[0]}, unknown"
    assert header["model B"] == f"{paths[1]}, unknown, sha256 {digest[:10]}…"
    assert "torch" in header["versions"]


def test_strangers_are_refused(save):
    paths = save("a", {"x.weight": wave((3,), 1)}), save("b", {"y.weight": wave((3,), 1)})
    with pytest.raises(RecipeError, match=r"nothing to compare.*A has x\.weight, B has y\.weight") as caught:
        compare(*paths)
    assert caught.value.hint
    with pytest.raises(RecipeError, match="nothing to compare"):
        compare(paths[0], paths[0], exclude=["."])
    with pytest.raises(RecipeError, match="27 models"):
        compare(*paths[:1] * 27)
    with pytest.raises(RecipeError, match="not a regular expression"):
        compare(*paths, exclude=["("])
    with pytest.raises(FileError):
        compare(paths[0], paths[0].with_name("none.safetensors"))


def test_other_shapes_alone_are_listed_and_not_refused(save):
    found = compare(save("a", {"x.weight": wave((3,), 1)}), save("b", {"x.weight": wave((4,), 1)}))
    assert (found.summary["compared"], found.summary["shape_differs"]) == (0, 1)


def test_progress_ends_at_all_bytes(save):
    seen = []
    tensors = {f"{n}.weight": wave((1000,), n) for n in range(20)} | {"ids": torch.arange(10)}
    compare(save("a", tensors), save("b", tensors), on_progress=seen.append)
    assert {event.stage for event in seen} == {"comparing"}
    assert [event.done_bytes for event in seen] == sorted(event.done_bytes for event in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == 2 * (20 * 4000 + 80)


def test_it_can_be_stopped(save):
    token = CancelToken()
    token.cancel()
    before = torch.get_num_threads()
    tensors = {f"{n}.weight": wave((1000,), n) for n in range(50)}
    with pytest.raises(CancelledError):
        compare(save("a", tensors), save("b", tensors), cancel=token)
    assert torch.get_num_threads() == before


def test_an_error_of_a_worker_reaches_the_caller(save, monkeypatch):
    def broken(self, key, start, view):
        raise FileError("cannot read: on purpose", file=self.path, tensor=key)

    paths = save("a", {KEY: wave((3,), 1)}), save("b", {KEY: wave((3,), 1)})
    monkeypatch.setattr(Source, "read_into", broken)
    with pytest.raises(FileError, match="on purpose"):
        compare(*paths)


def test_a_file_that_is_written_to_meanwhile_is_refused(save):
    paths = save("a", {KEY: wave((3,), 1)}), save("b", {KEY: wave((3,), 1)})
    with pytest.raises(FileError, match="written to while"):
        compare(*paths, on_progress=lambda progress: os.utime(paths[1], ns=(1, 1)))


def test_many_models_are_held_in_small_tiles():
    reader = contrast._Reader(dict.fromkeys("ABCDEFGHIJKLMNOP"), 1 << 18, CancelToken())
    assert reader._tile == 1 << 16


def test_to_dict_is_strict_json_and_describe_is_text(save):
    found = compare(save("a", {KEY: wave((3,), 1)}), save("b", {KEY: wave((3,), 2)}))
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(read) == {"rows", "summary"}
    assert read["rows"][0]["sign_conflict"] is None
    assert KEY in found.describe()


def run_python(code: str, *words: object) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_loaded_only_to_measure(save):
    code = """
import sys
from lib_merge.analyze import compare
from lib_merge.errors import RecipeError
try:
    compare(*sys.argv[1:])
except RecipeError:
    print("torch" in sys.modules)
"""
    paths = save("a", {"x.weight": wave((3,), 1)}), save("b", {"y.weight": wave((3,), 1)})
    assert run_python(code, *paths).strip() == "False"


def test_memory_stays_bounded(tmp_path):
    """Two files of zeros, which take no room on the disk; held in memory they would be 150 MB."""
    size, paths = 1_600_000, (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    for path, dtype, width in zip(paths, ("F16", "F32"), (2, 4), strict=True):
        offsets = [[n * width * size, (n + 1) * width * size] for n in range(16)]
        header = {f"{n}.weight": {"dtype": dtype, "shape": [size], "data_offsets": at} for n, at in enumerate(offsets)}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + offsets[-1][1])
    code = """
import sys
from lib_merge.analyze import compare
found = compare(*sys.argv[1:], threads=8)
assert found.rows[0]["note"] == "same values"
print(found.summary["peak_rss_mb"])
"""
    assert float(run_python(code, *paths)) < 400
