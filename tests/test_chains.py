"""Recipes inside recipes, and what stands in for missing tensors: whole runs against numpy's float32."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest

import lib_merge
from lib_merge import Recipe
from lib_merge.recipe import Output, Rule, Slot
from tests.support import read, read_raw, values, write

f32 = np.float32
METHODS = {
    "weighted_sum": {"alpha": 0.25},
    "add_difference": {"alpha": 0.5},
    "power_up_dare": {"alpha": 0.5, "beta": 1.0},
    "slerp": {"alpha": 0.25},
}


def step_towards(a, b, share):
    return a - f32(share) * (a - b)


def dare(a, b, seed, name, *more, alpha=0.5, beta=1.0):
    """Draws and DARE from the definition, written out again."""
    text = "\0".join(["lib_merge/1", str(seed), name, *more])
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw((a.size + 3) // 4)
    raw16 = words.astype("<u8").view("<u2")[: a.size].reshape(a.shape)
    limit = math.ceil(65536 * (1 - alpha) - 0.5)
    return np.where(raw16 < limit, step_towards(a, b, beta * 65536 / limit), a)


def model(path, seed, keys=("w", "v"), dtype="<f2", shape=(33, 17), metadata=None):
    tensors = {key: values(shape, 100 * seed + number, dtype) for number, key in enumerate(keys)}
    return write(path, tensors, metadata)


def wide(path, key="w"):
    return read(path)[key].astype(f32)


def recipe(method="weighted_sum", slots="AB", **fields):
    models = {slot: Slot(file="any.safetensors") for slot in slots}
    return Recipe(method=method, models={**models, **fields.pop("models", {})}, **fields)


def run(made, tmp_path, **files):
    return lib_merge.run(
        made,
        out=tmp_path / "out.safetensors",
        files={slot.replace("_", "."): path for slot, path in files.items()},
        overwrite=True,
    )


# Missing tensors and other shapes


@pytest.fixture
def uneven(tmp_path):
    """A's `lone` is missing in B (and C), its `odd` has another shape there; all values are small whole numbers."""
    whole = {"both": np.arange(8, dtype=f32).reshape(2, 4) - 3, "lone": np.arange(6, dtype=f32).reshape(2, 3) - 2,
             "odd": np.arange(12, dtype=f32).reshape(3, 4) - 5}  # fmt: skip
    a = write(tmp_path / "a.safetensors", whole)
    b = write(tmp_path / "b.safetensors", {"both": 2 * whole["both"] + 1, "odd": np.ones((4, 3), f32)})
    c = write(tmp_path / "c.safetensors", {"both": whole["both"], "odd": np.ones((3, 4, 1), f32)})
    return whole, {"A": a, "B": b, "C": c}


@pytest.mark.parametrize("method", METHODS)
def test_skip_gives_a_to_the_bit(uneven, method, tmp_path):
    whole, files = uneven
    paths = list(files.values())[: 3 if method == "add_difference" else 2]
    made = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method=method, params=METHODS[method])
    found = read(made.output)
    for key in ("lone", "odd"):  # not (1 − alpha)·A, as in other tools
        assert found[key].tobytes() == whole[key].tobytes()
    assert found["both"].tobytes() != whole["both"].tobytes()


@pytest.mark.parametrize("key", ["lone", "odd"])
@pytest.mark.parametrize("method", METHODS)
def test_zeros_stand_in(uneven, method, key, tmp_path):
    whole, files = uneven
    paths = list(files.values())[: 3 if method == "add_difference" else 2]
    made = lib_merge.merge(
        *paths, out=tmp_path / "out.safetensors", method=method, params=METHODS[method], mismatch="zeros", seed=5
    )
    a = whole[key]
    expected = {
        "weighted_sum": 0.75 * a,
        "add_difference": a,  # A + ½·(0 − 0)
        "power_up_dare": dare(a, np.zeros_like(a), 5, key),
        "slerp": 0.75 * a,  # a tensor of length 0 has no angle: the straight line
    }[method]
    assert np.array_equal(read(made.output)[key], expected)


@pytest.mark.parametrize(("lacking", "expected"), [("B", lambda a, b, c: a - c / 2), ("C", lambda a, b, c: a + b / 2)])
def test_add_difference_with_one_of_its_donors(tmp_path, lacking, expected):
    arrays = {slot: np.full((2, 3), value, f32) for slot, value in (("A", 3), ("B", 8), ("C", 6))}
    paths = []
    for slot, array in arrays.items():
        tensors = {"both": array} if slot == lacking else {"both": array, "w": array}
        paths.append(write(tmp_path / f"{slot}.safetensors", tensors))
    made = lib_merge.merge(
        *paths, out=tmp_path / "out.safetensors", method="add_difference", alpha=0.5, mismatch="zeros"
    )
    assert np.array_equal(read(made.output)["w"], expected(*arrays.values()))


# Chains


def test_an_inner_result_is_not_rounded(tmp_path):
    a, x, y = (model(tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate("axy"))
    made = recipe(params={"alpha": 0.7}, models={"B": Slot(recipe=recipe(params={"alpha": 0.3}))})
    result = run(made, tmp_path, A=a, B_A=x, B_B=y)
    (plain, left, right) = (wide(path) for path in (a, x, y))
    inner = step_towards(left, right, 0.3)
    assert read(result.output)["w"].tobytes() == step_towards(plain, inner, 0.7).astype("<f2").tobytes()
    # with a file in between some values come out otherwise: the test would notice
    rounded = step_towards(plain, inner.astype("<f2").astype(f32), 0.7).astype("<f2")
    assert read(result.output)["w"].tobytes() != rounded.tobytes()
    assert (result.merged, result.copied) == (2, 0)


@pytest.mark.parametrize("tile", [64, 1 << 16])
@pytest.mark.parametrize("threads", [1, 3])
def test_two_levels_with_a_random_method_in_each_slot(tmp_path, tile, threads):
    names = "abcdef"
    paths = {name: model(tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate(names)}
    deep = recipe("power_up_dare", params={"alpha": 0.5, "beta": 1.0}, seed=9)
    middle = recipe(params={"alpha": 0.4}, models={"A": Slot(recipe=deep)})
    left = recipe("power_up_dare", params={"alpha": 0.25, "beta": 0.5}, seed=9)
    made = recipe("power_up_dare", seed=9, models={"A": Slot(recipe=left), "B": Slot(recipe=middle)})
    files = {"A.A": "a", "A.B": "b", "B.A.A": "c", "B.A.B": "d", "B.B": "e"}
    result = lib_merge.run(
        made,
        out=tmp_path / "out.safetensors",
        files={slot: paths[name] for slot, name in files.items()},
        tile=tile,
        threads=threads,
    )
    for key in ("w", "v"):
        a, b, c, d, e = (wide(paths[name], key) for name in "abcde")
        inner_a = dare(a, b, 9, key, "A", alpha=0.25, beta=0.5)
        inner_b = step_towards(dare(c, d, 9, key, "B.A"), e, 0.4)
        expected = dare(inner_a, inner_b, 9, key, alpha=0.85, beta=1.0)
        assert read(result.output)[key].tobytes() == expected.astype("<f2").tobytes()


def slerp(a, b, alpha):
    """The formula in float64."""
    a, b = a.astype(float), b.astype(float)
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    return (a * np.sin((1 - alpha) * angle) + b * np.sin(alpha * angle)) / np.sin(angle)


def test_a_method_of_whole_tensors_inside_and_outside(tmp_path):
    a, x, y = (model(tmp_path / f"{name}.safetensors", seed, dtype="<f4") for seed, name in enumerate("axy"))
    plain, left, right = (wide(path) for path in (a, x, y))
    inside = recipe(params={"alpha": 0.3}, models={"B": Slot(recipe=recipe("slerp", params={"alpha": 0.6}))})
    found = read(run(inside, tmp_path, A=a, B_A=x, B_B=y).output)["w"]
    expected = plain + 0.3 * (slerp(left, right, 0.6) - plain)
    assert np.abs(found - expected).max() < 1e-6
    outside = recipe("slerp", params={"alpha": 0.6}, models={"B": Slot(recipe=recipe(params={"alpha": 0.3}))})
    found = read(run(outside, tmp_path, A=a, B_A=x, B_B=y).output)["w"]
    assert np.abs(found - slerp(plain, left + 0.3 * (right - left), 0.6)).max() < 1e-6


def test_inner_recipes_keep_their_own_settings(tmp_path):
    keys = ("in.w", "out.w", "gone.w")
    a, x, y = (model(tmp_path / f"{name}.safetensors", seed, keys) for seed, name in enumerate("axy"))
    inner = recipe(
        params={"alpha": 0.5},
        rules=(Rule(match="^in", params={"alpha": 0.25}),),
        exclude=("^out",),
        discard=("^gone",),
    )
    result = run(recipe(params={"alpha": 0.5}, models={"B": Slot(recipe=inner)}), tmp_path, A=a, B_A=x, B_B=y)
    found = read(result.output)
    plain, left, right = ({key: wide(path, key) for key in keys} for path in (a, x, y))
    expected = {
        "in.w": step_towards(plain["in.w"], step_towards(left["in.w"], right["in.w"], 0.25), 0.5),
        "out.w": step_towards(plain["out.w"], left["out.w"], 0.5),
        "gone.w": plain["gone.w"],  # B has none: A's
    }
    assert {key: array.tobytes() for key, array in found.items()} == {
        key: array.astype("<f2").tobytes() for key, array in expected.items()
    }
    assert any("missing in B: gone.w" in text for text in result.warnings)


def test_convert_of_an_inner_recipe_stores_its_result(tmp_path):
    x, y = (model(tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate("xy"))
    made = Recipe(
        task="convert",
        models={"A": Slot(recipe=recipe(params={"alpha": 0.3}))},
        output=Output(save_dtype="fp32", override_dtype=True),
    )
    result = run(made, tmp_path, A_A=x, A_B=y)
    expected = step_towards(wide(x), wide(y), 0.3)
    assert read_raw(result.output)[1]["w"] == ("F32", (33, 17), expected.tobytes())
    assert result.merged == 2


def test_a_bad_number_of_an_inner_result_stops_the_run(tmp_path):
    big = write(tmp_path / "x.safetensors", {"w": np.full((4,), 3e38, f32), "v": np.ones(4, f32)})
    low = write(tmp_path / "y.safetensors", {"w": np.full((4,), -3e38, f32), "v": np.ones(4, f32)})
    ok = write(tmp_path / "b.safetensors", {"w": np.ones(4, f32), "v": np.ones(4, f32)})
    inner = recipe("power_up_dare", params={"alpha": 0, "beta": 2})
    # not even where the outer recipe leaves the tensor alone
    made = recipe(models={"A": Slot(recipe=inner)}, exclude=("w",))
    with pytest.raises(lib_merge.NumberError) as caught:
        run(made, tmp_path, A_A=big, A_B=low, B=ok)
    assert caught.value.tensor == "w"
    assert not (tmp_path / "out.safetensors").exists()


def shards(folder, seed, metadata):
    """A model folder in two shards, with an index and a config."""
    folder.mkdir()
    names = {"model.layers.0.w": "model-00001-of-00002.safetensors", "lm_head.w": "model-00002-of-00002.safetensors"}
    for number, (key, name) in enumerate(names.items()):
        write(folder / name, {key: values((8, 8), seed + number, "<f4")}, metadata)
    index = {"metadata": {"total_size": 512}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": f"made with {seed}"}))
    return folder


def test_layout_and_metadata_follow_the_first_file_of_the_chain(tmp_path):
    first = shards(tmp_path / "first", 1, {"format": "pt", "who": "first"})
    second = shards(tmp_path / "second", 10, {"format": "pt", "who": "second"})
    third = model(tmp_path / "third.safetensors", 3, ("model.layers.0.w", "lm_head.w"), "<f4", (8, 8), {"who": "third"})
    made = recipe(params={"alpha": 0.5}, models={"A": Slot(recipe=recipe(params={"alpha": 0.5}))})
    out = lib_merge.run(made, out=tmp_path / "out", files={"A.A": first, "A.B": second, "B": third}).output
    assert sorted(item.name for item in out.iterdir()) == sorted(item.name for item in first.iterdir())
    assert (out / "config.json").read_bytes() == (first / "config.json").read_bytes()
    told, tensors = read_raw(out / "model-00001-of-00002.safetensors")
    assert told["who"] == "first"
    one, two = (read(folder / "model-00001-of-00002.safetensors")["model.layers.0.w"] for folder in (first, second))
    expected = step_towards(step_towards(one, two, 0.5), read(third)["model.layers.0.w"], 0.5)
    assert tensors["model.layers.0.w"][2] == expected.tobytes()
