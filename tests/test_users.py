"""Faults that users of comparable tools reported, by the number they have in our list: none of them here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import lib_merge
from lib_merge import NumberError, OutputError, PlanError, RecipeError
from lib_merge.cli import main
from lib_merge.files.source import Source
from lib_merge.kernels.registry import all_methods
from tests.support import bf16, header_size, raw, read, read_raw, values, write, write_raw, write_sparse

ROOT = Path(__file__).resolve().parent.parent
METHODS = list(all_methods())
POSITIONS = "cond_stage_model.transformer.text_model.embeddings.position_ids"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def models(tmp_path, method, tensors_of):
    """As many files as a method takes, made by `tensors_of(number)`."""
    slots = all_methods()[method].inputs
    return [write(tmp_path / f"{slot}.safetensors", tensors_of(number)) for number, slot in enumerate(slots)]


def tensors(number, shape=(12, 10)):
    return {name: values(shape, 10 * number + n, "<f4") for n, name in enumerate(("x", "y", "z"))}


# 01: bad numbers are found, named, and nothing is written


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("method", "slot"), [(name, slot) for name in METHODS for slot in all_methods()[name].inputs])
def test_01_a_bad_number_in_an_input_stops_the_run(tmp_path, method, slot, bad):
    slots = all_methods()[method].inputs
    paths = models(tmp_path, method, tensors)
    broken = tensors(slots.index(slot))
    broken["y"][5, 5] = bad
    write(tmp_path / f"{slot}.safetensors", broken)
    with pytest.raises(NumberError) as caught:
        lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method=method)
    assert caught.value.tensor == "y"
    assert caught.value.file == str(tmp_path / f"{slot}.safetensors")
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_01_what_is_copied_is_not_examined_but_can_be(tmp_path, capsys):
    broken = tensors(0)
    broken["y"][0, 0] = np.nan
    a, b = write(tmp_path / "a.safetensors", broken), write(tmp_path / "b.safetensors", tensors(1))
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", exclude=["y"])
    assert read(made.output)["y"].tobytes() == broken["y"].tobytes()
    assert main(["inspect", str(made.output), "--check"]) == 1
    assert "y: a value is not finite" in capsys.readouterr().out


def test_01_a_number_that_the_cast_makes_bad_stops_the_run(tmp_path):
    paths = [write(tmp_path / f"{name}.safetensors", {"w": np.array([1, 7e4], "<f4")}) for name in "ab"]
    with pytest.raises(NumberError, match="fp16") as caught:
        lib_merge.merge(*paths, out=tmp_path / "out.safetensors", save_dtype="fp16", override_dtype=True)
    assert caught.value.tensor == "w"
    with pytest.raises(NumberError):  # a tensor that is only copied too: the cast would change it
        lib_merge.convert(paths[0], out=tmp_path / "out.safetensors", save_dtype="fp16", override_dtype=True)
    assert sorted(tmp_path.iterdir()) == paths


# 05: position tables stay whole numbers


@pytest.mark.parametrize("method", METHODS)
def test_05_position_ids_come_through_several_generations(tmp_path, method):
    table = np.arange(77, dtype=np.int64)[None]
    paths = models(tmp_path, method, lambda number: {**tensors(number), POSITIONS: table})
    chosen = all_methods()[method]
    params = {"alpha": 0.1} if any(param.name == "alpha" for param in chosen.params) else {}
    made = paths[0]
    for generation in range(3):
        made = lib_merge.merge(
            made, *paths[1:], out=tmp_path / f"out{generation}.safetensors", method=method, params=params
        ).output
    assert read_raw(made)[1][POSITIONS] == ("I64", (1, 77), table.tobytes())


def test_05_a_broken_table_is_repaired(tmp_path):
    table = np.arange(77, dtype="<f4")[None] * np.float32(0.999)
    paths = [write(tmp_path / f"{name}.safetensors", {"w": np.ones(3, "<f4"), POSITIONS: table}) for name in "ab"]
    made = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", alpha=0.1)
    assert any(POSITIONS in problem.what for problem in made.plan.problems)
    assert read_raw(made.output)[1][POSITIONS] == ("I64", (1, 77), np.arange(77, dtype="<i8").tobytes())


# 07: fp8 Flux files are merged, and a merge of nothing is an error


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BF16"])
def test_07_flux_in_fp8_is_merged(tmp_path, dtype):
    key = "double_blocks.0.img_attn.qkv.weight"
    a = write_raw(tmp_path / "a.safetensors", {key: raw(dtype, [[1.0, -2.0], [0.5, 0.0]])})
    b = write_raw(tmp_path / "b.safetensors", {f"model.diffusion_model.{key}": raw(dtype, [[3.0, 2.0], [0.25, 0.0]])})
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", alpha=0.5)
    assert (made.merged, made.copied) == (1, 0)
    assert read_raw(made.output)[1][key] == raw(dtype, [[2.0, 0.0], [0.375, 0.0]])


def test_07_disjoint_keys_are_an_error(tmp_path):
    a = write(tmp_path / "a.safetensors", {"double_blocks.0.weight": np.ones(3, "<f4")})
    b = write(tmp_path / "b.safetensors", {"transformer_blocks.0.weight": np.ones(3, "<f4")})
    with pytest.raises(PlanError, match="nothing would be merged"):
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


# 10: nothing gets lost


def test_10_the_keys_are_those_of_the_base(tmp_path):
    keys = ["model.diffusion_model.out.2.weight", "first_stage_model.decoder.norm_out.weight", "model_ema.decay",
            "cond_stage_model.transformer.text_model.final_layer_norm.weight", "alphas_cumprod"]  # fmt: skip
    a = write(tmp_path / "a.safetensors", {key: values((7,), n, "<f2") for n, key in enumerate(keys)})
    b = write(tmp_path / "b.safetensors", {keys[0]: values((7,), 99, "<f2")})
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    before, after = read_raw(a)[1], read_raw(made.output)[1]
    assert list(after) == list(before)
    assert [key for key in keys if after[key] != before[key]] == [keys[0]]
    assert (made.merged, made.copied) == (1, 4)


# 11 and 12: what one model lacks or has in another shape


@pytest.mark.parametrize("method", METHODS)
def test_11_three_policies_for_a_missing_key(tmp_path, method, monkeypatch):
    def uneven(number):
        both = {"both": values((4, 4), number)}
        return {**both, "only_a": values((4, 4), 7)} if number == 0 else {**both, f"only_{number}": values((4,), 8)}

    paths = models(tmp_path, method, uneven)
    skipped = lib_merge.merge(*paths, out=tmp_path / "skip.safetensors", method=method)
    before, after = read_raw(paths[0])[1], read_raw(skipped.output)[1]
    assert list(after) == list(before)
    assert after["only_a"] == before["only_a"]
    assert "only_1" in skipped.unused
    zeros = lib_merge.merge(*paths, out=tmp_path / "zeros.safetensors", method=method, mismatch="zeros")
    lone = {
        slot: values((4, 4), 7) if slot == "A" else np.zeros((4, 4), "<f4") for slot in all_methods()[method].inputs
    }
    whole = [write(tmp_path / f"whole{slot}.safetensors", {"only_a": array}) for slot, array in lone.items()]
    by_hand = lib_merge.merge(*whole, out=tmp_path / "hand.safetensors", method=method)
    assert read_raw(zeros.output)[1]["only_a"] == read_raw(by_hand.output)[1]["only_a"]
    monkeypatch.setattr(Source, "read_into", None)
    with pytest.raises(PlanError, match="missing in B: only_a"):
        lib_merge.merge(*paths, out=tmp_path / "error.safetensors", method=method, mismatch="error")
    assert not (tmp_path / "error.safetensors").exists()


def test_12_vocabularies_of_different_size(tmp_path):
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    one, other = values((10, 4), 1, "<f4"), values((12, 4), 2, "<f4")
    a = write(tmp_path / "a.safetensors", {embedding: one, norm: np.ones(4, "<f4")})
    b = write(tmp_path / "b.safetensors", {embedding: other, norm: np.zeros(4, "<f4")})
    skipped = lib_merge.merge(a, b, out=tmp_path / "skip.safetensors", alpha=0.25)
    assert read(skipped.output)[embedding].tobytes() == one.tobytes()
    assert any("[10, 4] in A, [12, 4] in B" in warning for warning in skipped.warnings)
    zeros = lib_merge.merge(a, b, out=tmp_path / "zeros.safetensors", alpha=0.25, mismatch="zeros")
    assert np.array_equal(read(zeros.output)[embedding], one - np.float32(0.25) * one)
    with pytest.raises(PlanError, match="another shape in B"):
        lib_merge.merge(a, b, out=tmp_path / "error.safetensors", mismatch="error")


def test_12_tied_heads_stay_tied(tmp_path):
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        tied = {"model.embed_tokens.weight": values((10, 4), number), "model.norm.weight": values((4,), 5 + number)}
        write(tmp_path / name / "model.safetensors", tied)
        (tmp_path / name / "config.json").write_text('{"tie_word_embeddings": true}')
    out = lib_merge.merge(tmp_path / "one", tmp_path / "two", out=tmp_path / "out").output
    assert set(read(out / "model.safetensors")) == {"model.embed_tokens.weight", "model.norm.weight"}
    assert (out / "config.json").read_text() == '{"tie_word_embeddings": true}'


# 35: metadata of any shape


def test_35_metadata_of_any_shape_is_saved_as_text(tmp_path, capsys):
    story = {"plain": "x", "json": json.dumps({"a": {"b": [1, None, True]}}), "number": "3", "null": "null"}
    a = write(tmp_path / "a.safetensors", tensors(0), story)
    b = write(tmp_path / "b.safetensors", tensors(1))
    given = {"nested": {"a": [1, {"b": None}]}, "count": 3, "ratio": 0.5, "none": None, "yes": True, "text": "t"}
    out = tmp_path / "out.safetensors"
    assert main(["merge", str(a), str(b), "-o", str(out), "--metadata", json.dumps(given)]) == 0
    capsys.readouterr()
    from safetensors import safe_open

    with safe_open(out, "np") as opened:  # the package accepts text only
        found = opened.metadata()
    assert {name: found[name] for name in story} == story
    assert found["text"] == "t"
    assert {name: json.loads(found[name]) for name in given if name != "text"} == {
        name: value for name, value in given.items() if name != "text"
    }


# 36: the recipe in the file runs again


@pytest.mark.parametrize("method", METHODS)
def test_36_a_recipe_read_from_the_file_gives_the_same_file(tmp_path, method):
    paths = models(tmp_path, method, tensors)
    first = lib_merge.merge(
        *paths, out=tmp_path / "first.safetensors", method=method, seed=12, exclude=["z"], metadata={"by": "me"}
    ).output
    made = lib_merge.recipe.from_json(read_raw(first)[0]["lib_merge.recipe"])
    again = lib_merge.run(made, out=tmp_path / "again.safetensors", models=[tmp_path]).output
    assert again.read_bytes() == first.read_bytes()


def test_36_chains_and_parents_run_again(tmp_path):
    paths = models(tmp_path, "add_difference", tensors)
    child = lib_merge.merge(*paths[:2], out=tmp_path / "child.safetensors", alpha=0.3).output
    first = lib_merge.merge(child, paths[2], out=tmp_path / "first.safetensors").output
    made = lib_merge.recipe.from_json(read_raw(first)[0]["lib_merge.recipe"])
    assert made.models["A"].made_by.params == {"alpha": 0.3}
    again = lib_merge.run(made, out=tmp_path / "again.safetensors", models=[tmp_path]).output
    assert again.read_bytes() == first.read_bytes()


def test_36_only_named_inputs_are_read(tmp_path):
    # a result in the same folder, even with A's own name below it, is never taken for an input
    paths = models(tmp_path, "weighted_sum", tensors)
    first = lib_merge.merge(*paths, out=tmp_path / "first.safetensors", alpha=0.5).output
    (tmp_path / "sub").mkdir()
    lib_merge.merge(first, paths[1], out=tmp_path / "sub" / "A.safetensors", alpha=0.9)
    assert main(["run", str(first), "-o", str(tmp_path / "again.safetensors"), "--models", str(tmp_path)]) == 0
    assert (tmp_path / "again.safetensors").read_bytes() == first.read_bytes()


def test_36_the_recipe_can_be_left_out(tmp_path):
    a = write(tmp_path / "secret one.safetensors", tensors(0))
    b = write(tmp_path / "secret two.safetensors", tensors(1))
    out = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", keep_recipe=False).output
    assert b"secret" not in out.read_bytes()[: header_size(out)]
    assert hashlib.sha256(a.read_bytes()).hexdigest().encode() not in out.read_bytes()
    kept = lib_merge.merge(a, b, out=tmp_path / "kept.safetensors").output
    assert load_file(kept)["x"].tobytes() == load_file(out)["x"].tobytes()


# 39: success is announced when there is a file


@pytest.mark.parametrize("target", ["no such folder/out.safetensors", "", ".", "a.safetensors/out.safetensors"])
def test_39_an_output_that_cannot_be_is_an_error(tmp_path, monkeypatch, capsys, target):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", tensors(number))
    assert main(["merge", "a.safetensors", "b.safetensors", "-o", target]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_39_a_read_only_folder_is_an_error(tmp_path, monkeypatch):
    paths = models(tmp_path, "weighted_sum", tensors)
    (tmp_path / "fixed").mkdir(mode=0o500)
    real = os.access  # nothing is read-only for root, who may run this
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "fixed" and real(path, mode))
    with pytest.raises(PlanError, match="cannot be written to"):
        lib_merge.merge(*paths, out=tmp_path / "fixed" / "out.safetensors")
    assert not list((tmp_path / "fixed").iterdir())


def test_39_a_file_that_does_not_read_back_is_an_error(tmp_path, monkeypatch):
    from lib_merge.files import sink

    paths = models(tmp_path, "weighted_sum", tensors)
    real = sink.read_header
    monkeypatch.setattr(sink, "read_header", lambda path, *more: real(paths[0], *more))
    with pytest.raises(OutputError, match="does not read back"):
        lib_merge.merge(*paths, out=tmp_path / "out.safetensors", exclude=["x"], discard=["z"])
    assert sorted(tmp_path.iterdir()) == sorted(paths)


# 40: views, shared and transposed tensors


def test_40_views_are_saved_with_the_right_bytes(tmp_path):
    import torch

    big = torch.arange(1000, dtype=torch.float32).reshape(100, 10)
    shared = torch.arange(21.0).reshape(7, 3)
    state = {"t": torch.arange(12.0).reshape(3, 4).t(), "row": big[:1], "column": big[:, 3], "strided": big[::7, ::2],
             "one": shared, "two": shared, "half": torch.ones(5, dtype=torch.float16)[1:3]}  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    out = lib_merge.convert(tmp_path / "a.pt", out=tmp_path / "out.safetensors").output
    expected = {key: tensor.contiguous().numpy() for key, tensor in state.items()}
    found = load_file(out)
    assert {key: (array.shape, array.tobytes()) for key, array in found.items()} == {
        key: (array.shape, array.tobytes()) for key, array in expected.items()
    }
    assert out.stat().st_size == header_size(out) + sum(array.nbytes for array in expected.values())
    doubled = write(tmp_path / "b.safetensors", {key: 3 * array for key, array in expected.items()})
    merged = lib_merge.merge(tmp_path / "a.pt", doubled, out=tmp_path / "merged.safetensors", alpha=0.5).output
    assert all(np.array_equal(array, 2 * expected[key]) for key, array in load_file(merged).items())


# 44 and 45: memory

PEAKS = """
import os, sys, json
import lib_merge
from lib_merge import fused
from lib_merge.kernels.registry import all_methods
import torch
folder, cases = sys.argv[1], json.loads(sys.argv[2])
peaks = []
for name, size, fused.WORTH_BYTES in cases:
    # one process for each: what it starts from is what it inherits, torch and no more
    read_end, write_end = os.pipe()
    if not os.fork():
        paths = [f"{folder}/{size}/{slot}.safetensors" for slot in all_methods()[name].inputs]
        made = lib_merge.merge(*paths, out=f"{folder}/out.safetensors", method=name, overwrite=True, fsync=False,
                               keep_recipe=False, threads=2)
        text = open("/proc/self/status").read()
        peak = int(text.split("VmHWM:")[1].split()[0]) * 1024
        steps = made.plan.steps
        more = any(step.whole or step.measured and not fused.WORTH_BYTES for step in steps)
        os.write(write_end, json.dumps([peak, made.plan.peak_bytes, more]).encode())
        os._exit(0)
    os.close(write_end)
    peaks.append(json.loads(os.read(read_end, 1000) or b"null"))
    os.wait()
print(json.dumps(peaks))
"""


def child(code, *words):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
def test_44_memory_stays_where_the_plan_says_for_every_method(tmp_path):
    for count in (4, 64):  # tensors of 8 MB
        (tmp_path / str(count)).mkdir()
        for slot in "ABC":
            tensors = {f"w{n:02d}": ("F16", (1024, 4096)) for n in range(count)}
            write_sparse(tmp_path / str(count) / f"{slot}.safetensors", tensors)
    compiled, never = 0, 1 << 60  # from how many bytes on loops are compiled, where numba is there
    cases = [(name, 4, never) for name in METHODS]
    cases += [(name, 4, compiled) for name in ("weighted_sum", "enhanced_man_interp", "power_up_dare_ties_enhanced")]
    large = [("weighted_sum", compiled), ("weighted_sum", never), ("slerp", never)]
    cases += [(name, 64, worth) for name, worth in large]
    peaks = dict(zip(cases, child(PEAKS, tmp_path, json.dumps(cases)), strict=True))
    for case, (peak, planned, more) in peaks.items():
        assert peak <= planned, (case, peak, planned)
        assert more or peak <= 400e6, (case, peak)
    for name, worth in large:  # sixteen times the model, the same memory
        assert abs(peaks[name, 64, worth][0] - peaks[name, 4, worth][0]) < 20e6, peaks


LOOP = """
import gc, json, os, sys
import lib_merge
folder = sys.argv[1]
a, b, c = (f"{folder}/{name}.safetensors" for name in "abc")
cases = [dict(method="weighted_sum"), dict(method="slerp", report=True), dict(method="power_up_dare", seed=1),
         dict(method="weighted_sum", save_dtype="fp32", rules=[("w0", {"alpha": 0.1})])]
sizes, files = [], []
for n in range(20):
    case = cases[n % 4]
    lib_merge.merge(a, b, out=f"{folder}/out.safetensors", overwrite=True, fsync=False, **case)
    if n % 5 == 4:
        lib_merge.verify(f"{folder}/out.safetensors")
        try:
            lib_merge.merge(a, c, out=f"{folder}/bad.safetensors")
        except lib_merge.NumberError:
            pass
    with open("/proc/self/status") as stream:
        sizes.append(int(stream.read().split("VmRSS:")[1].split()[0]) * 1024)
    files.append(len(os.listdir("/proc/self/fd")))
print(json.dumps([sizes, files]))
"""


@linux
def test_45_twenty_merges_leave_nothing_behind(tmp_path):
    shapes = {f"w{n}": (512, 1024) for n in range(8)}
    for number, name in enumerate("ab"):
        arrays = {key: values(shape, 10 * number + n, "<f2") for n, (key, shape) in enumerate(shapes.items())}
        write(tmp_path / f"{name}.safetensors", arrays)
    arrays["w7"][0, 0] = np.nan
    write(tmp_path / "c.safetensors", arrays)
    sizes, files = child(LOOP, tmp_path)
    assert sizes[-1] - sizes[2] < 20e6, sizes
    assert files[-1] == files[0], files


# 46: chance repeats itself

RANDOM = [name for name, method in all_methods().items() if method.random]
# Methods that leave nothing to chance at their defaults
SMOOTH = {
    "comparative_interpolation": {"gamma": 0.0},
    "enhanced_man_interp": {"delta": 0.0},
    "enhanced_auto_interp": {"gamma": 0.0},
    "power_up_dare_enhanced": {"gamma": 0.0},
}


@pytest.mark.parametrize("method", RANDOM)
def test_46_the_same_seed_gives_the_same_bytes(tmp_path, method):
    def big(number):
        small = {f"y{n}": values((5,), 100 * number + n) for n in range(20)}
        return {"x": values((600, 500), number), "z": values((70, 3, 3, 3), number), **small}

    def merged(name, seed=3, **how):
        params = SMOOTH.get(method, {})
        target = tmp_path / f"{name}.safetensors"
        return lib_merge.merge(*paths, out=target, method=method, params=params, seed=seed, **how).output

    paths = models(tmp_path, method, big)
    ways = [{"threads": 1}, {"threads": 8}, {"threads": 3, "tile": 1 << 16}]
    seen = [merged(number, **how) for number, how in enumerate(ways)]
    assert len({path.read_bytes() for path in seen}) == 1
    assert read_raw(merged("other", seed=4))[1] != read_raw(seen[0])[1]
    for path in paths:  # the same tensors in another order in the file
        write_raw(path, dict(reversed(read_raw(path)[1].items())))
    turned = merged("turned")
    assert list(read_raw(turned)[1]) != list(read_raw(seen[0])[1])
    assert read_raw(turned)[1] == read_raw(seen[0])[1]


def test_46_there_is_a_seed_even_where_none_is_given(tmp_path):
    paths = models(tmp_path, "power_up_dare", tensors)
    seen = [lib_merge.merge(*paths, out=tmp_path / f"{n}.safetensors", method="power_up_dare").output for n in range(2)]
    assert seen[0].read_bytes() == seen[1].read_bytes()
    assert json.loads(read_raw(seen[0])[0]["lib_merge.recipe"])["seed"] == 0


# 50: a typing error shows at once


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"method": "power-up-dare"}, "power_up_dare"),
        ({"method": "Weighted_Sum"}, "weighted_sum"),
        ({"method": "slrep"}, "slerp"),
        ({"alpha": None, "params": {"alhpa": 1}}, "alpha"),
        ({"blocks": "0.1,0.2,0.3"}, "26"),
    ],
)
def test_50_typing_errors_show_before_anything_is_read(tmp_path, monkeypatch, options, hint):
    paths = models(tmp_path, "weighted_sum", tensors)
    monkeypatch.setattr(Source, "read_into", None)
    monkeypatch.setattr(Source, "descriptor", None)
    with pytest.raises(RecipeError) as caught:
        lib_merge.merge(*paths, out=tmp_path / "out.safetensors", **options)
    assert hint in caught.value.hint
    assert not (tmp_path / "out.safetensors").exists()


def test_50_a_missing_file_is_named_with_the_one_that_may_be_meant(tmp_path):
    (a, _) = models(tmp_path, "weighted_sum", tensors)
    with pytest.raises(PlanError) as caught:
        lib_merge.merge(a, tmp_path / "B.safetensor", out=tmp_path / "out.safetensors")
    assert caught.value.problems[0].file == str(tmp_path / "B.safetensor")
    assert caught.value.problems[0].hint == "did you mean B.safetensors?"


# 02, as far as checkpoints go: one rounding at the end


def test_02_sums_are_rounded_once(tmp_path):
    # 1 + 8 · 0.001 in bf16: eight roundings would leave 1.0
    step = np.frombuffer(bf16([1.001]), "<u2")
    assert step[0] == 0x3F80
    one = write_raw(tmp_path / "one.safetensors", {"w": raw("BF16", np.ones(4))})
    more = write(tmp_path / "more.safetensors", {"w": np.full(4, 1.001, "<f4")})
    none = write_raw(tmp_path / "none.safetensors", {"w": raw("BF16", np.ones(4))})
    slot, recipe = lib_merge.recipe.Slot, lib_merge.Recipe(method="add_difference", models={"A": None, "B": None})
    made, files = slot(file="one.safetensors"), {}
    for _ in range(8):
        inner = {"A": made, "B": slot(file="more.safetensors"), "C": slot(file="none.safetensors")}
        recipe = lib_merge.Recipe(
            method="add_difference", models=inner, output=lib_merge.recipe.Output(save_dtype="keep")
        )
        made = slot(recipe=recipe)
    for path, model in lib_merge.recipe.files(recipe):
        files[path] = {"one.safetensors": one, "more.safetensors": more, "none.safetensors": none}[model.file]
    out = lib_merge.run(recipe, out=tmp_path / "out.safetensors", files=files).output
    assert read(out)["w"].tolist() == [1.0078125] * 4
