from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import lib_merge
from lib_merge import CancelledError, CancelToken, PlanError, Recipe, RecipeError, engine, verify
from lib_merge.files.hashes import HashCache
from lib_merge.kernels.registry import all_methods
from lib_merge.recipe import Slot
from lib_merge.verify import ulp_distance
from tests.support import header_size, read_raw, values, write

KEYS = ("model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight",
        "cond_stage_model.transformer.text_model.final_layer_norm.weight")  # fmt: skip
POSITIONS = "cond_stage_model.transformer.text_model.embeddings.position_ids"


def model(path, seed, dtype="<f2", shape=(24, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: values(shape, 10 * seed + number, dtype) for number, key in enumerate(KEYS)}
    return write(path, {**tensors, POSITIONS: np.arange(77)[None]})


@pytest.fixture
def files(tmp_path):
    return [model(tmp_path / "in" / f"{name}.safetensors", seed) for seed, name in enumerate("abc")]


def checked(out, tmp_path, **options):
    return verify(out, models=[tmp_path / "in"], **options)


def flip(path, key, byte, bit=0):
    """Change one bit of a tensor."""
    offset = json.loads(path.read_bytes()[8 : header_size(path)])[key]["data_offsets"][0]
    content = bytearray(path.read_bytes())
    content[header_size(path) + offset + byte] ^= 1 << bit
    path.write_bytes(content)


def change(path, key, values):
    """Give a tensor other values of its dtype."""
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    save_file({**tensors, key: values}, path, metadata)


# What a fresh result says


@pytest.mark.parametrize("method", list(all_methods()))
def test_every_method_verifies(files, tmp_path, method):
    count = len(all_methods()[method].inputs)
    out = lib_merge.merge(*files[:count], out=tmp_path / "out.safetensors", method=method).output
    before = sorted(tmp_path.rglob("*"))
    found = checked(out, tmp_path)
    assert (found.ok, found.compared, found.differing, found.within_2_ulp) == (True, 4, (), ())
    assert sorted(tmp_path.rglob("*")) == before


def vae(path):
    return write(path, {"decoder.conv_in.weight": values((24, 20), 77, "<f4")})


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.3, "discard": ["first_stage"]},
        {"exclude": ["cond_stage"], "save_dtype": "fp32"},
        {"exclude": ["cond_stage"], "include_mode": True},
        {"save_dtype": "bf16", "override_dtype": True},
        {"save_dtype": "fp8_e4m3fn", "override_dtype": True},
        {"rules": [("first_stage", {"alpha": 0})], "blocks": "IN00=1"},
        {"vae": vae, "save_dtype": "fp32"},
        {"method": "power_up_dare", "seed": 7},
        {"metadata": {"a": {"b": 1}}},
    ],
)
def test_every_option_verifies(files, tmp_path, options):
    options = {name: value(tmp_path / "in" / "v.safetensors") if callable(value) else value
               for name, value in options.items()}  # fmt: skip
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", **options).output
    assert checked(out, tmp_path).ok


@pytest.mark.parametrize(
    "options",
    [{"save_dtype": "fp32"}, {"only": "unet"}, {"discard": ["diffusion_model.*"], "glob": True}, {"vae": vae}, {}],
)
def test_conversions_verify(files, tmp_path, options):
    options = {name: value(tmp_path / "in" / "v.safetensors") if callable(value) else value
               for name, value in options.items()}  # fmt: skip
    out = lib_merge.convert(files[0], out=tmp_path / "out.safetensors", **options).output
    found = checked(out, tmp_path)
    assert (found.ok, found.compared) == (True, len(read_raw(out)[1]))


def test_chains_verify(files, tmp_path):
    inner = Recipe(method="power_up_dare", models={"A": Slot(file="b.safetensors"), "B": Slot(file="c.safetensors")})
    made = Recipe(method="weighted_sum", models={"A": Slot(file="a.safetensors"), "B": Slot(recipe=inner)})
    out = lib_merge.run(made, out=tmp_path / "out.safetensors", models=[tmp_path / "in"]).output
    assert checked(out, tmp_path).ok
    flip(out, KEYS[0], 5)
    assert checked(out, tmp_path).differing == (KEYS[0],)


def test_a_merge_of_merges_verifies_without_its_grandparents(files, tmp_path):
    child = lib_merge.merge(*files[:2], out=tmp_path / "in" / "child.safetensors").output
    out = lib_merge.merge(child, files[2], out=tmp_path / "out.safetensors").output
    files[0].unlink()
    assert checked(out, tmp_path).ok


def test_a_pickle_as_input_verifies(files, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {key: torch.from_numpy(array) for key, array in load_file(files[0]).items()}
    torch.save({"state_dict": tensors}, tmp_path / "in" / "a.ckpt")
    out = lib_merge.merge(tmp_path / "in" / "a.ckpt", files[1], out=tmp_path / "out.safetensors").output
    assert checked(out, tmp_path).ok


def folder(path, seed):
    path.mkdir(parents=True)
    names = {"model.layers.0.w": "model-00001-of-00002.safetensors", "lm_head.w": "model-00002-of-00002.safetensors"}
    for number, (key, name) in enumerate(names.items()):
        write(path / name, {key: values((8, 8), 10 * seed + number, "<f4")})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def test_folders_verify(tmp_path):
    one, two = (folder(tmp_path / "in" / name, seed) for seed, name in enumerate(("one", "two")))
    out = lib_merge.merge(one, two, out=tmp_path / "out").output
    found = checked(out, tmp_path)
    assert (found.ok, found.compared) == (True, 2)
    flip(out / "model-00002-of-00002.safetensors", "lm_head.w", 0)
    assert checked(out, tmp_path).differing == ("lm_head.w",)


def test_a_folder_of_the_same_name_is_not_taken(tmp_path):
    one, two = (folder(tmp_path / "in" / name, seed) for seed, name in enumerate(("one", "two")))
    out = lib_merge.merge(one, two, out=tmp_path / "out").output
    flip(two / "model-00001-of-00002.safetensors", "model.layers.0.w", 0)
    assert checked(out, tmp_path).missing_inputs == ("two",)


# Damage


@pytest.mark.parametrize("byte", [0, 1, 500, 24 * 20 * 2 - 1])
@pytest.mark.parametrize("key", [*KEYS, POSITIONS])
def test_a_flipped_bit_is_found_and_named(files, tmp_path, key, byte):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", exclude=["cond_stage"]).output
    flip(out, key, min(byte, 77 * 8 - 1) if key == POSITIONS else byte)
    found = checked(out, tmp_path)
    assert (found.ok, found.differing) == (False, (key,))


@pytest.mark.parametrize("piece", [64, 100, 1000, 1 << 20])
def test_long_copied_runs_are_compared_tensor_by_tensor(tmp_path, piece, monkeypatch):
    # pieces end inside tensors, at their ends, and hold several of them
    monkeypatch.setattr(engine, "_COPY_BYTES", piece)
    tensors = {f"k{n:02d}": values((n % 7 * 16,), n, "<f4") for n in range(40)}
    (tmp_path / "in").mkdir()
    for name in "ab":
        write(tmp_path / "in" / f"{name}.safetensors", {**tensors, "z": values((4,), ord(name))})
    paths = [tmp_path / "in" / f"{name}.safetensors" for name in "ab"]
    out = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", exclude=["^k"]).output
    assert checked(out, tmp_path).ok
    damaged = ["k01", "k02", "k20", "k39"]
    for key in damaged:
        flip(out, key, tensors[key].nbytes - 1)
    assert checked(out, tmp_path).differing == tuple(damaged)


def test_tensors_that_lack_or_are_too_many_are_named(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    with safe_open(out, "np") as opened:
        metadata = opened.metadata()
    tensors = load_file(out)
    tensors["extra"] = np.ones(3, "<f4")
    del tensors[KEYS[1]]
    tensors[KEYS[0]] = tensors[KEYS[0]].astype("<f4")
    tensors[KEYS[2]] = tensors[KEYS[2]].reshape(20, 24)
    save_file(tensors, out, metadata)
    found = checked(out, tmp_path)
    assert (found.ok, set(found.differing), found.compared) == (False, {"extra", *KEYS}, 1)


def test_a_file_that_another_tool_laid_out_anew_verifies(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", exclude=["cond", "first"]).output
    with safe_open(out, "np") as opened:
        metadata = opened.metadata()
    save_file(dict(reversed(list(load_file(out).items()))), out, metadata)
    assert checked(out, tmp_path).ok


# Inputs


def test_inputs_beside_the_output_are_found(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "in" / "out.safetensors").output
    assert verify(out).ok


def test_missing_inputs_are_listed(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    found = verify(out)
    assert (found.ok, found.compared, found.missing_inputs) == (False, 0, ("a.safetensors", "b.safetensors"))
    files[1].unlink()
    assert checked(out, tmp_path).missing_inputs == ("b.safetensors",)


def test_other_contents_under_the_right_name_are_not_taken(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    flip(files[1], KEYS[0], 3)
    assert checked(out, tmp_path).missing_inputs == ("b.safetensors",)
    with pytest.raises(PlanError, match="model B has another sha256"):
        verify(out, files={"A": files[0], "B": files[1]})


def test_a_renamed_input_is_found_by_its_remembered_hash(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    HashCache().compute(files[1].rename(tmp_path / "in" / "renamed.safetensors"))
    assert checked(out, tmp_path).ok


def test_inputs_may_be_given(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    assert verify(out, files={"A": files[0], "B": str(files[1])}).ok


def test_a_file_without_a_recipe_is_an_error(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", keep_recipe=False).output
    for path in (out, files[0]):
        with pytest.raises(RecipeError, match="holds no recipe"):
            verify(path)


# Rounding of another CPU


def shifted(values, steps):
    """The first value moved by some steps of its format, away from 0."""
    moved = values.copy()
    bits = moved.reshape(-1).view(f"<i{moved.itemsize}")
    bits[0] += steps
    return moved


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@pytest.mark.parametrize(
    ("method", "steps", "outcome"),
    [
        ("slerp", 1, "near"),
        ("slerp", -2, "near"),
        ("slerp", 3, "differing"),
        ("slerp", -3, "differing"),
        ("weighted_sum", 1, "differing"),
        ("power_up_dare", 1, "differing"),
    ],
)
def test_inexact_methods_may_differ_by_two_ulp(tmp_path, dtype, method, steps, outcome):
    paths = [model(tmp_path / "in" / f"{name}.safetensors", seed, dtype) for seed, name in enumerate("ab")]
    out = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method=method).output
    change(out, KEYS[0], shifted(load_file(out)[KEYS[0]], steps))
    found = checked(out, tmp_path)
    assert found.within_2_ulp == ((KEYS[0],) if outcome == "near" else ())
    assert found.differing == ((KEYS[0],) if outcome == "differing" else ())
    assert found.ok is (outcome == "near")


def test_a_tensor_that_is_near_in_one_place_and_far_in_another_differs(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", method="slerp").output
    moved = shifted(load_file(out)[KEYS[0]], 1)
    moved[-1, -1] += 1
    change(out, KEYS[0], moved)
    found = checked(out, tmp_path)
    assert (found.differing, found.within_2_ulp) == ((KEYS[0],), ())


def test_copied_tensors_of_an_inexact_merge_are_exact(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors", method="slerp", exclude=["cond"]).output
    change(out, KEYS[2], shifted(load_file(out)[KEYS[2]], 1))
    assert checked(out, tmp_path).differing == (KEYS[2],)


def test_infinity_is_never_near(tmp_path):
    largest = np.full((2, 2), 65504, "<f2")
    (tmp_path / "in").mkdir()
    for name in "ab":
        write(tmp_path / "in" / f"{name}.safetensors", {"w": largest})
    paths = [tmp_path / "in" / f"{name}.safetensors" for name in "ab"]
    out = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method="slerp").output
    change(out, "w", np.where([[True, False], [False, False]], np.float16("inf"), largest).astype("<f2"))
    assert checked(out, tmp_path).differing == ("w",)


@pytest.mark.parametrize(
    ("dtype", "numpy", "left", "right", "expected"),
    [
        ("F32", "<f4", 1.0, np.nextafter(np.float32(1), np.float32(2)), 1),
        ("F32", "<f4", 0.0, -0.0, 0),
        ("F32", "<f4", 1e-45, -1e-45, 2),  # the smallest numbers on both sides of 0
        ("F16", "<f2", 1.0, 1 + 2**-9, 2),
        ("F16", "<f2", 65504.0, -65504.0, 2 * 0x7BFF),
        ("F64", "<f8", 1.0, 1 + 2**-52, 1),
        ("F64", "<f8", -5e-324, 5e-324, 2),
    ],
)
def test_distance_in_steps_of_the_format(dtype, numpy, left, right, expected):
    one, other = (np.array([7, value, 7]).astype(numpy).view(np.uint8) for value in (left, right))
    assert ulp_distance(one, other, dtype) == expected
    assert ulp_distance(other, one, dtype) == expected


def test_the_widest_distance_does_not_run_over():
    one, other = (np.array([value]).view(np.uint8) for value in (1.7e308, -1.7e308))
    assert ulp_distance(one, other, "F64") > 2**62


def test_small_floats_count_their_codes():
    codes = np.arange(256, dtype=np.uint8)
    assert ulp_distance(codes[8:9], codes[10:11], "F8_E4M3") == 2
    assert ulp_distance(codes[0x80:0x81], codes[0:1], "F8_E5M2") == 0
    assert ulp_distance(codes[0x81:0x82], codes[1:2], "F8_E5M2") == 2


# What it tells


def test_the_fields_of_its_json(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    assert checked(out, tmp_path).to_dict() == {
        "ok": True,
        "compared": 4,
        "differing": [],
        "within_2_ulp": [],
        "missing_inputs": [],
    }


def test_it_tells_how_far_it_is_and_can_be_stopped(files, tmp_path):
    out = lib_merge.merge(*files[:2], out=tmp_path / "out.safetensors").output
    seen = []
    checked(out, tmp_path, on_progress=seen.append)
    assert {progress.stage for progress in seen} == {"verifying"}
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        checked(out, tmp_path, cancel=token)
