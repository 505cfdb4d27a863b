"""Checkpoints in scaled fp8: decoded by their scale wherever they count as numbers, left alone elsewhere."""

from __future__ import annotations

import json

import numpy as np
import pytest

import lib_merge
from lib_merge import NumberError, RecipeError
from lib_merge.cli import main
from lib_merge.kernels.registry import all_methods
from lib_merge.recipe import Recipe, Slot
from tests.support import bf16, decode, raw, read, read_raw, values, write, write_raw

STEMS = [f"model.diffusion_model.blocks.{n}." for n in range(3)]
NORM = "model.diffusion_model.norm.weight"
SHAPE = (6, 10)


def coded(path, seed, dtype="F8_E4M3", name="scale_weight", layout=(), marker="scaled_fp8", bad=None):
    """A model of codes, and its weights by hand."""
    rng = np.random.default_rng(seed)
    tensors, numbers = {}, {}
    for stem in STEMS:
        codes = rng.integers(0, 0x70, SHAPE, dtype=np.uint8) | rng.integers(0, 2, SHAPE, dtype=np.uint8) << 7
        scale = rng.uniform(0.01, 0.1, layout).astype("<f4")
        if bad is not None:
            scale[...] = bad
        tensors[f"{stem}weight"] = (dtype, SHAPE, codes.tobytes())
        tensors[f"{stem}{name}"] = raw("F32", scale)
        plain = decode(dtype, codes.tobytes()).reshape(SHAPE)
        numbers[f"{stem}weight"] = plain * (
            scale.reshape(()) if scale.size == 1 else scale.reshape(6, -1).repeat(10 // (scale.size // 6), 1)
        )
    tensors[NORM] = raw("F16", values((10,), seed))
    numbers[NORM] = values((10,), seed, "<f2")
    if marker:
        tensors[marker] = (dtype, (0,), b"")
    return write_raw(path, tensors), numbers


def plain(path, seed, dtype="F16"):
    return write_raw(path, {f"{stem}weight": raw(dtype, values(SHAPE, seed + n)) for n, stem in enumerate(STEMS)} | {
        NORM: raw(dtype, values((10,), seed + 9))})  # fmt: skip


def lerp(x, y, share):
    x, y = x.astype("<f4"), y.astype("<f4")
    return x - (x - y) * np.float32(share)


SPELLINGS = [
    {"name": "scale_weight"},
    {"name": "scale_weight", "layout": (1,), "dtype": "F8_E5M2"},
    {"name": "weight_scale", "layout": (6, 1), "marker": ""},
    {"name": "weight_scale", "layout": (6, 5, 1), "marker": ""},
    {"name": "weight_scale_inv", "layout": (1, 1), "marker": ""},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_codes_are_merged_as_numbers_and_stored_as_bf16(tmp_path, spelling):
    a, x = coded(tmp_path / "a.safetensors", 1, **spelling)
    b, y = coded(tmp_path / "b.safetensors", 2, **spelling)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", alpha=0.3, exclude=["blocks.2"], report=True)
    stored = read_raw(made.output)[1]
    assert list(stored) == [f"{stem}weight" for stem in STEMS] + [NORM]
    for stem in STEMS[:2]:
        key = f"{stem}weight"
        assert stored[key] == ("BF16", SHAPE, bf16(lerp(x[key], y[key], 0.3)))
    key = f"{STEMS[2]}weight"  # excluded: A's values, in a model that has no codes any more
    assert stored[key] == ("BF16", SHAPE, bf16(x[key]))
    sides = set(read_raw(a)[1]) - set(stored)
    assert set(made.plan.discarded) == sides
    (note,) = [problem.what for problem in made.plan.problems if "scaled fp8 decoded" in problem.what]
    assert all(side in note for side in sides)
    assert made.unused == ()
    assert made.warnings == ()
    assert lib_merge.verify(made.output).ok
    rows = {row["key"]: row for row in made.rows}
    assert (rows[f"{STEMS[0]}weight"]["dtype_a"], rows[f"{STEMS[0]}weight"]["dtype_out"]) == (
        spelling.get("dtype", "F8_E4M3"),
        "BF16",
    )


@pytest.mark.parametrize(
    ("how", "dtypes"),
    [
        ({}, ("BF16", "F16")),
        ({"save_dtype": "keep"}, ("F8_E4M3", "F16")),
        ({"save_dtype": "fp16"}, ("F16", "F16")),
        ({"save_dtype": "fp32"}, ("F32", "F32")),
        ({"save_dtype": "fp8_e4m3fn", "override_dtype": True}, ("F8_E4M3", "F8_E4M3")),
    ],
)
def test_the_dtype_rule_knows_them(tmp_path, how, dtypes):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    b, _ = coded(tmp_path / "b.safetensors", 2)
    stored = read_raw(lib_merge.merge(a, b, out=tmp_path / "out.safetensors", **how).output)[1]
    assert (stored[f"{STEMS[0]}weight"][0], stored[NORM][0]) == dtypes


def test_codes_beside_plain_weights(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b = plain(tmp_path / "b.safetensors", 20)
    y = read(b)
    key = f"{STEMS[1]}weight"
    there = read_raw(lib_merge.merge(a, b, out=tmp_path / "ab.safetensors", alpha=0.25).output)[1]
    assert there[key] == ("BF16", SHAPE, bf16(lerp(x[key], y[key], 0.25)))
    back = lib_merge.merge(b, a, out=tmp_path / "ba.safetensors", alpha=0.25)
    assert read_raw(back.output)[1][key] == raw("F16", lerp(y[key], x[key], 0.25))
    assert (back.plan.discarded, back.unused, back.warnings) == ((), (), ())
    assert lib_merge.verify(back.output).ok


@pytest.mark.parametrize("method", list(all_methods()))
def test_every_method_and_any_tile(tmp_path, method):
    count = len(all_methods()[method].inputs)
    made = [coded(tmp_path / f"{n}.safetensors", n, layout=(6, 1), name="weight_scale") for n in range(count)]
    by_hand = [
        write(tmp_path / f"hand{n}.safetensors", {key: value.astype("<f4") for key, value in numbers.items()})
        for n, (_, numbers) in enumerate(made)
    ]
    how = {"method": method, "save_dtype": "fp32", "seed": 3}
    out = [
        lib_merge.merge(*paths, out=tmp_path / f"out{n}.safetensors", **how, **way).output
        for n, (paths, way) in enumerate(
            (([path for path, _ in made], {}), (by_hand, {}), ([path for path, _ in made], {"tile": 7, "threads": 3}))
        )
    ]
    one, hand, cut = (read_raw(path)[1] for path in out)
    assert one == hand == cut


def test_convert_decodes_where_a_dtype_is_named(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    same = lib_merge.convert(a, out=tmp_path / "same.safetensors")
    assert read_raw(same.output)[1] == read_raw(a)[1]
    made = lib_merge.convert(a, out=tmp_path / "out.safetensors", save_dtype="bf16")
    stored = read_raw(made.output)[1]
    assert list(stored) == [f"{stem}weight" for stem in STEMS] + [NORM]
    assert all(stored[f"{stem}weight"] == ("BF16", SHAPE, bf16(x[f"{stem}weight"])) for stem in STEMS)
    assert lib_merge.verify(made.output).ok


def test_codes_that_no_merge_touches_stay_codes(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    b, _ = coded(tmp_path / "b.safetensors", 2)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", exclude=["blocks"])
    before, after = read_raw(a)[1], read_raw(made.output)[1]
    assert set(after) == set(before)
    assert [key for key in after if after[key] != before[key]] == [NORM]
    assert made.plan.discarded == ()
    told = lib_merge.merge(a, b, out=tmp_path / "told.safetensors", exclude=["blocks"], save_dtype="fp32")
    assert any("coded weights kept as stored" in problem.what for problem in told.plan.problems)


def test_a_recipe_inside_decodes_for_the_outer_one(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b, y = coded(tmp_path / "b.safetensors", 2)
    slots = {"A": Slot(file="a.safetensors"), "B": Slot(file="b.safetensors")}
    for exclude in ((), ("blocks",)):
        inner = Recipe(method="weighted_sum", params={"alpha": 0.5}, models=slots, exclude=exclude)
        outer = Recipe(
            method="weighted_sum",
            params={"alpha": 0.5},
            models={"A": Slot(recipe=inner), "B": Slot(file="b.safetensors")},
        )
        out = lib_merge.run(
            outer, out=tmp_path / f"{len(exclude)}.safetensors", files={"A.A": a, "A.B": b, "B": b}
        ).output
        key = f"{STEMS[0]}weight"
        first = x[key] if exclude else lerp(x[key], y[key], 0.5)
        assert read_raw(out)[1][key] == ("BF16", SHAPE, bf16(lerp(first, y[key], 0.5)))
        assert set(read_raw(out)[1]) == {*(f"{stem}weight" for stem in STEMS), NORM}


def test_a_scale_that_is_no_number_is_named(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1, bad=np.inf)
    b, _ = coded(tmp_path / "b.safetensors", 2)
    with pytest.raises(NumberError) as caught:
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert (caught.value.tensor in read_raw(a)[1], "scale_weight" in caught.value.tensor) == (True, True)
    assert not (tmp_path / "out.safetensors").exists()


def test_codes_without_a_known_scale_are_still_refused(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1, name="weight_scale", layout=(6, 10), marker="")
    b, _ = coded(tmp_path / "b.safetensors", 2)
    with pytest.raises(RecipeError, match="model A holds coded weights"):
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors")


def test_compare_measures_the_numbers(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b = plain(tmp_path / "b.safetensors", 20, "F32")
    y = read(b)
    rows = {row["key"]: row for row in lib_merge.compare(a, b).rows}
    for stem in STEMS:
        key = f"{stem}weight"
        expected = np.linalg.norm(y[key].astype("<f8") - x[key].astype("<f8"))
        assert rows[key]["norm_diff"] == pytest.approx(expected, rel=1e-6)
        side = rows[f"{stem}scale_weight"]
        assert (side["action"], "fp8" in side["reason"]) == ("excluded", True)
    both = lib_merge.compare(a, a)
    assert both.summary["all_identical"]
    assert lib_merge.compare(a, b, tile=1 << 16).to_dict()["rows"] == lib_merge.compare(a, b).to_dict()["rows"]


def test_inspect_says_that_they_can_be_merged(tmp_path, capsys):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    assert main(["inspect", str(a), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["coded"] == ["scaled fp8"]
    assert any("3 weights" in note and "decode" in note for note in found["notes"])
