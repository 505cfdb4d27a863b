"""Checkpoints in scaled fp8 that stay so: what changes gets fresh codes and a fresh scale, by the definition."""

from __future__ import annotations

import numpy as np
import pytest

import lib_merge
from lib_merge import NumberError, RecipeError
from lib_merge.cli import main
from lib_merge.kernels.registry import all_methods
from lib_merge.recipe import Recipe, Slot
from tests.support import bf16, decode, raw, read_raw, values, write, write_raw
from tests.test_decoding import NORM, SHAPE, SPELLINGS, STEMS, coded, lerp, plain

FIRST, SECOND, THIRD = (f"{stem}weight" for stem in STEMS)
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}
OPTION = {"F8_E4M3": "fp8_e4m3fn", "F8_E5M2": "fp8_e5m2"}
# Distance of neighbouring numbers: relative, and among those next to 0.
STEP = {"F8_E4M3": (2.0**-3, 2.0**-9), "F8_E5M2": (2.0**-2, 2.0**-16)}


def by_scale(numbers, layout):
    """Each weight's group: those under one scale."""
    if int(np.prod(layout)) == 1:
        return np.zeros(numbers.shape, int)
    rows, columns = numbers.shape
    if len(layout) == 2 and layout[1] != 1:
        row, column = np.indices(numbers.shape) // 128
        return row * layout[1] + column
    each = int(np.prod(layout)) // rows
    return np.arange(rows)[:, None] * each + np.arange(columns) * each // columns


def fresh(numbers, dtype, layout):
    """Scale and codes by definition: the nearest of all codes, of two the one that is even."""
    groups = by_scale(numbers, layout)
    scale = np.array([np.abs(numbers[groups == g]).max() for g in range(groups.max() + 1)], "<f4") / np.float32(
        LARGEST[dtype]
    )
    table = decode(dtype, bytes(range(256))).astype("<f8")
    table[~np.isfinite(table)] = np.inf
    wanted = numbers.astype("<f4") / scale[groups]
    away = np.abs(wanted[..., None].astype("<f8") - table)
    odd = np.arange(256) % 2
    negative = np.arange(256) >= 128
    order = np.lexsort((negative != np.signbit(wanted)[..., None], np.broadcast_to(odd, away.shape), away), axis=-1)
    return scale.reshape(layout), order[..., 0].astype("u1")


def assert_coded(stored, key, name, numbers, dtype, layout):
    scale, codes = fresh(numbers, dtype, layout)
    assert stored[key.removesuffix("weight") + name] == ("F32", tuple(layout), scale.tobytes())
    assert stored[key] == (dtype, numbers.shape, codes.tobytes())


def numbers_of(stored, key, name):
    """What a program makes of codes and scale."""
    dtype, shape, data = stored[key]
    scale = np.frombuffer(stored[key.removesuffix("weight") + name][2], "<f4")
    layout = stored[key.removesuffix("weight") + name][1]
    return decode(dtype, data).reshape(shape).astype("<f8") * scale[by_scale(np.empty(shape), layout)]


def lora(path, *keys, shape=SHAPE, rank=2, factor=1.0):
    """A LoRA with alpha = rank, and what it adds, in float64."""
    tensors, deltas = {}, {}
    for number, key in enumerate(keys):
        up, down = factor * values((shape[0], rank), 70 + number), values((rank, shape[1]), 80 + number)
        stem = key.removeprefix("model.").removesuffix(".weight")
        tensors |= {f"{stem}.lora_up.weight": up.astype("<f4"), f"{stem}.lora_down.weight": down}
        tensors[f"{stem}.alpha"] = np.float32(rank)
        deltas[key] = up.astype("<f4").astype("<f8") @ down.astype("<f8")
    return write(path, tensors), deltas


def test_a_calculation_by_hand(tmp_path):
    """Scale 0.5 and a change of 672 at one place."""
    codes = np.array([[1.0, -2.0], [448.0, 0.0]], "<f4")
    a = write_raw(
        tmp_path / "a.safetensors",
        {
            FIRST: raw("F8_E4M3", codes),
            f"{STEMS[0]}scale_weight": raw("F32", np.array(0.5, "<f4")),
            "scaled_fp8": ("F8_E4M3", (0,), b""),
        },
    )
    # up·down = [[0, 0], [672, 0]]: 448·0.5 + 672 = 896 = 448·2, so the scale is 2.
    stem = STEMS[0].removeprefix("model.").rstrip(".")
    one = write(
        tmp_path / "one.safetensors",
        {
            f"{stem}.lora_up.weight": np.array([[0.0], [672.0]], "<f4"),
            f"{stem}.lora_down.weight": np.array([[1.0, 0.0]], "<f4"),
            f"{stem}.alpha": np.float32(1),
        },
    )
    stored = read_raw(lib_merge.bake(a, one, out=tmp_path / "out.safetensors", save_dtype="keep").output)[1]
    assert stored[f"{STEMS[0]}scale_weight"] == raw("F32", np.array(2.0, "<f4"))
    # 0.5 and -1 in units of 2 are 0.25 and -0.5: codes 0x28 and 0xB0; 448 is 0x7E.
    assert stored[FIRST] == ("F8_E4M3", (2, 2), bytes([0x28, 0xB0, 0x7E, 0x00]))
    assert stored["scaled_fp8"] == ("F8_E4M3", (0,), b"")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("named", [False, True])
def test_baking_keeps_the_layout_and_what_is_not_touched(tmp_path, spelling, named):
    dtype, name, layout = (spelling.get(what, plain) for what, plain in
                           (("dtype", "F8_E4M3"), ("name", ""), ("layout", ())))  # fmt: skip
    a, x = coded(tmp_path / "a.safetensors", 1, **spelling)
    one, deltas = lora(tmp_path / "one.safetensors", FIRST, SECOND)
    how = {"save_dtype": OPTION[dtype] if named else "keep"}
    made = lib_merge.bake(a, one, out=tmp_path / "out.safetensors", report=True, **how)
    before, stored = read_raw(a)[1], read_raw(made.output)[1]
    assert set(stored) == set(before)
    changed = {FIRST, SECOND, f"{STEMS[0]}{name}", f"{STEMS[1]}{name}"}
    assert {key for key in stored if stored[key] != before[key]} == changed
    assert {key: stored[key][:2] for key in stored} == {key: before[key][:2] for key in stored}
    for key in (FIRST, SECOND):
        exact = x[key].astype("<f8") + deltas[key]
        got = numbers_of(stored, key, name)
        scale = np.frombuffer(stored[key.removesuffix("weight") + name][2], "<f4")[by_scale(exact, layout)]
        wide, small = STEP[dtype]
        assert (np.abs(got - exact) <= 0.501 * np.maximum(np.abs(exact) * wide, scale * small)).all()
        reach = [np.abs(exact[by_scale(exact, layout) == g]).max() for g in range(max(1, int(np.prod(layout))))]
        np.testing.assert_allclose(np.unique(scale), np.unique(np.array(reach) / LARGEST[dtype]), rtol=1e-5)
    assert any("fresh scale" in problem.what for problem in made.plan.problems)
    assert made.warnings == ()
    assert lib_merge.verify(made.output).ok
    rows = {row["key"]: row for row in made.rows}
    np.testing.assert_allclose(rows[FIRST]["norm_change"], np.linalg.norm(deltas[FIRST]), rtol=1e-5)
    assert (rows[f"{STEMS[0]}{name}"]["action"], rows[f"{STEMS[0]}{name}"]["dtype_out"]) == ("merged", "F32")
    assert rows[THIRD]["action"] == "copied"


@pytest.mark.parametrize("layout", [(), (900, 1), (900, 5, 1), (8, 5)])
def test_tensors_of_several_blocks(tmp_path, layout):
    """900 × 640 numbers are computed in several blocks of rows; the scale is that of all of them."""
    rng = np.random.default_rng(5)
    shape = (900, 640)
    codes = rng.integers(0, 0x70, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    scale = rng.uniform(0.01, 0.1, layout).astype("<f4")
    a = write_raw(
        tmp_path / "a.safetensors",
        {FIRST: ("F8_E4M3", shape, codes.tobytes()), f"{STEMS[0]}weight_scale": raw("F32", scale)},
    )
    one, deltas = lora(tmp_path / "one.safetensors", FIRST, shape=shape, factor=20.0)
    made = [
        lib_merge.bake(a, one, out=tmp_path / f"{n}.safetensors", save_dtype="keep", fsync=False, **how)
        for n, how in enumerate(({}, {"threads": 3, "tile": 640 * 7}))
    ]
    first, other = (read_raw(one.output)[1] for one in made)
    assert first == other
    exact = decode("F8_E4M3", codes.tobytes()).reshape(shape).astype("<f8")
    exact = exact * scale.reshape(-1)[by_scale(exact, layout)] + deltas[FIRST]
    got = numbers_of(first, FIRST, "weight_scale")
    new = np.frombuffer(first[f"{STEMS[0]}weight_scale"][2], "<f4")
    groups = by_scale(exact, layout)
    reach = np.zeros(max(1, int(np.prod(layout))))
    np.maximum.at(reach, groups.reshape(-1), np.abs(exact).reshape(-1))
    np.testing.assert_allclose(new, reach / 448, rtol=1e-5)
    assert (np.abs(got - exact) <= 0.501 * np.maximum(np.abs(exact) / 8, new[groups] * 2.0**-9)).all()
    assert lib_merge.verify(made[0].output, threads=2).ok


@pytest.mark.parametrize("method", list(all_methods()))
def test_every_method_is_coded_from_its_numbers(tmp_path, method):
    count = len(all_methods()[method].inputs)
    made = [coded(tmp_path / f"{n}.safetensors", n, layout=(6, 1), name="weight_scale") for n in range(count)]
    paths, how = [path for path, _ in made], {"method": method, "seed": 3}
    wide = read_raw(lib_merge.merge(*paths, out=tmp_path / "wide.safetensors", save_dtype="fp32", **how).output)[1]
    out = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", save_dtype="keep", report=True, **how)
    cut = lib_merge.merge(*paths, out=tmp_path / "cut.safetensors", save_dtype="keep", tile=7, threads=3, **how)
    stored = read_raw(out.output)[1]
    for key in (FIRST, SECOND, THIRD):
        assert_coded(stored, key, "weight_scale", decode(*wide[key][::2]).reshape(SHAPE), "F8_E4M3", (6, 1))
    assert read_raw(cut.output)[1] == stored
    assert lib_merge.verify(out.output).ok


def test_merge_with_a_lora(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b, y = coded(tmp_path / "b.safetensors", 2)
    one, deltas = lora(tmp_path / "one.safetensors", FIRST)
    out = tmp_path / "out.safetensors"
    told = ["merge", str(a), str(b), "-o", str(out), "--lora", str(one), "--exclude", "blocks.2"]
    assert main([*told, "--save-dtype", "fp8_e4m3fn"]) == 0
    before, stored = read_raw(a)[1], read_raw(out)[1]
    exact = 0.5 * x[FIRST].astype("<f8") + 0.5 * y[FIRST] + deltas[FIRST]
    scale = np.frombuffer(stored[f"{STEMS[0]}scale_weight"][2], "<f4")[0]
    np.testing.assert_allclose(scale, np.abs(exact).max() / 448, rtol=1e-5)
    bound = 0.501 * np.maximum(np.abs(exact) / 8, scale * 2.0**-9)
    assert (np.abs(numbers_of(stored, FIRST, "scale_weight") - exact) <= bound).all()
    assert_coded(stored, SECOND, "scale_weight", lerp(x[SECOND], y[SECOND], 0.5), "F8_E4M3", ())
    for key in (THIRD, f"{STEMS[2]}scale_weight", "scaled_fp8"):
        assert stored[key] == before[key]


def test_the_other_kind_of_fp8_codes_everything_anew(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    one, _ = lora(tmp_path / "one.safetensors", FIRST)
    made = lib_merge.bake(a, one, out=tmp_path / "out.safetensors", save_dtype="fp8_e5m2")
    stored = read_raw(made.output)[1]
    assert stored["scaled_fp8"] == ("F8_E5M2", (0,), b"")
    assert stored[FIRST][0] == "F8_E5M2"
    assert_coded(stored, THIRD, "scale_weight", x[THIRD], "F8_E5M2", ())
    assert lib_merge.verify(made.output).ok
    told = lib_merge.convert(a, out=tmp_path / "told.safetensors", save_dtype="fp8_e5m2")
    assert_coded(read_raw(told.output)[1], FIRST, "scale_weight", x[FIRST], "F8_E5M2", ())


def test_a_model_that_says_its_kind_keeps_it(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1, marker="")
    tensors = read_raw(a)[1] | {
        f"{STEMS[0]}comfy_quant": raw("U8", np.frombuffer(b'{"format": "float8_e4m3fn"}', "u1"))
    }
    a = write_raw(a, tensors)
    one, _ = lora(tmp_path / "one.safetensors", FIRST)
    with pytest.raises(RecipeError, match="which kind of fp8"):
        lib_merge.bake(a, one, out=tmp_path / "out.safetensors", save_dtype="fp8_e5m2")
    stored = read_raw(lib_merge.bake(a, one, out=tmp_path / "out.safetensors", save_dtype="fp8_e4m3fn").output)[1]
    assert stored[f"{STEMS[0]}comfy_quant"] == tensors[f"{STEMS[0]}comfy_quant"]


def test_a_convert_to_what_it_is_copies_it(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    made = lib_merge.convert(a, out=tmp_path / "out.safetensors", save_dtype="fp8_e4m3fn")
    assert read_raw(made.output)[1] == read_raw(a)[1]


def test_scales_are_never_cast(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    one, _ = lora(tmp_path / "one.safetensors", FIRST)
    how = {"save_dtype": "fp8_e4m3fn", "override_dtype": True}
    stored = read_raw(lib_merge.bake(a, one, out=tmp_path / "out.safetensors", **how).output)[1]
    assert [stored[f"{stem}scale_weight"][0] for stem in STEMS] == ["F32"] * 3
    assert stored[NORM][0] == "F8_E4M3"
    b, _ = coded(tmp_path / "b.safetensors", 2)
    how = {"save_dtype": "fp16", "override_dtype": True, "exclude": ["blocks"]}
    stored = read_raw(lib_merge.merge(a, b, out=tmp_path / "kept.safetensors", **how).output)[1]
    assert stored[f"{STEMS[0]}scale_weight"] == read_raw(a)[1][f"{STEMS[0]}scale_weight"]


def test_wider_donors_make_numbers_of_all(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b = plain(tmp_path / "b.safetensors", 20)
    stored = read_raw(lib_merge.merge(a, b, out=tmp_path / "out.safetensors", save_dtype="fp8_e4m3fn").output)[1]
    assert (stored[FIRST][0], f"{STEMS[0]}scale_weight" in stored) == ("F16", False)
    kept = read_raw(lib_merge.merge(a, b, out=tmp_path / "kept.safetensors", save_dtype="keep", alpha=0.0).output)[1]
    assert_coded(kept, FIRST, "scale_weight", x[FIRST], "F8_E4M3", ())


def test_an_inner_recipe_gives_numbers(tmp_path):
    a, x = coded(tmp_path / "a.safetensors", 1)
    b, y = coded(tmp_path / "b.safetensors", 2)
    slots = {"A": Slot(file="a.safetensors"), "B": Slot(file="b.safetensors")}
    output = lib_merge.recipe.Output(save_dtype="keep")
    inner = Recipe(method="weighted_sum", params={"alpha": 0.5}, models=slots, output=output)
    outer = Recipe(method="weighted_sum", params={"alpha": 0.5}, models={**slots, "A": Slot(recipe=inner)})
    out = lib_merge.run(outer, out=tmp_path / "out.safetensors", files={"A.A": a, "A.B": b, "B": b}).output
    assert read_raw(out)[1][FIRST] == ("BF16", SHAPE, bf16(lerp(lerp(x[FIRST], y[FIRST], 0.5), y[FIRST], 0.5)))
    donor = Recipe(
        method="weighted_sum", params={"alpha": 0.5}, models={**slots, "B": Slot(recipe=inner)}, output=output
    )
    out = lib_merge.run(donor, out=tmp_path / "donor.safetensors", files={"A": a, "B.A": a, "B.B": b}).output
    wanted = lerp(x[FIRST], lerp(x[FIRST], y[FIRST], 0.5), 0.5)
    assert_coded(read_raw(out)[1], FIRST, "scale_weight", wanted, "F8_E4M3", ())


def test_what_stands_against_it_is_told(tmp_path):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    one, _ = lora(tmp_path / "one.safetensors", FIRST)
    b, _ = coded(tmp_path / "b.safetensors", 2)
    with pytest.raises(RecipeError, match="discarded") as caught:
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors", save_dtype="keep", discard=["blocks.0.scale_weight"])
    assert caught.value.tensor == f"{STEMS[0]}scale_weight"
    bad, _ = coded(tmp_path / "bad.safetensors", 1, bad=np.inf)
    with pytest.raises(NumberError):
        lib_merge.bake(bad, one, out=tmp_path / "out.safetensors", save_dtype="keep")
    huge, _ = lora(tmp_path / "huge.safetensors", FIRST, factor=1e36)
    with pytest.raises(NumberError, match="result holds a value that is not finite") as caught:
        lib_merge.bake(a, (huge, 1e6), out=tmp_path / "out.safetensors", save_dtype="keep")
    assert caught.value.tensor == FIRST
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("damage", ["value", "dtype", "lost"])
def test_verify_looks_at_the_scales(tmp_path, damage):
    a, _ = coded(tmp_path / "a.safetensors", 1)
    one, _ = lora(tmp_path / "one.safetensors", FIRST)
    made = lib_merge.bake(a, one, out=tmp_path / "out.safetensors", save_dtype="keep")
    metadata, stored = read_raw(made.output)
    key = f"{STEMS[0]}scale_weight"
    other = {"value": raw("F32", np.array(1.0, "<f4")), "dtype": raw("F16", np.array(1.0, "<f4"))}
    stored = {name: other.get(damage) if name == key else value for name, value in stored.items()}
    write_raw(made.output, {name: value for name, value in stored.items() if value}, metadata)
    assert lib_merge.verify(made.output).differing == (key,)
