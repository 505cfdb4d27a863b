from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest

import lib_merge
from lib_merge.cli import cli, main, reading
from lib_merge.cli.parse import assignments, model_argument, rule
from lib_merge.errors import RecipeError
from lib_merge.kernels.registry import all_methods
from tests.support import read, read_raw, values, write, write_sparse

portable = pytest.mark.portable

ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    "model.diffusion_model.input_blocks.1.0.in_layers.2.weight": "IN01",
    "model.diffusion_model.middle_block.0.in_layers.2.weight": "M00",
    "first_stage_model.decoder.up.0.block.0.conv1.weight": "VAE",
}
IN, MIDDLE, VAE = KEYS
RESULT = {"output", "sha256", "merged", "copied", "discarded", "unused", "warnings", "seconds", "peak_rss_mb"}
COMMANDS = ("merge", "convert", "run", "verify", "inspect", "recipe", "methods", "demo")
WRITING = ("merge", "convert", "run")


@pytest.fixture
def files(tmp_path):
    paths = []
    for number, name in enumerate("abc"):
        tensors = {key: values((6, 5), 10 * number + n, "<f2") for n, key in enumerate(KEYS)}
        paths.append(write(tmp_path / f"{name}.safetensors", {**tensors, "position_ids": np.arange(77)}))
    return paths


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (status, stdout, stderr)."""

    def call(*words):
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def done(run):
    """Run one that must succeed quietly, and return what it printed."""

    def call(*words):
        status, out, err = run(*words)
        assert (status, err) == (0, ""), (status, out, err)
        return json.loads(out) if "--json" in words else out

    return call


def alphas(found) -> dict[str, float]:
    return {KEYS[step["key"]]: step["params"].get("alpha") for step in found["steps"] if step["key"] in KEYS}


# merge


def test_merge_prints_what_it_did_as_one_object(files, tmp_path, done):
    found = done("merge", *files[:2], "-o", tmp_path / "out.safetensors", "--json")
    assert set(found) - {"saturated"} == RESULT
    assert found["output"] == str(tmp_path / "out.safetensors")
    assert found["sha256"] == hashlib.sha256((tmp_path / "out.safetensors").read_bytes()).hexdigest()
    assert (found["merged"], found["copied"], found["discarded"], found["unused"]) == (3, 1, 0, [])
    assert found["warnings"] == []
    assert found["seconds"] > 0
    assert found["peak_rss_mb"] > 20


def test_merge_prints_what_it_did_for_people(files, tmp_path, done):
    out = done("merge", *files[:2], "-o", tmp_path / "out.safetensors")
    assert out.startswith(f"wrote {tmp_path / 'out.safetensors'}: 3 tensors merged, 1 copied")
    assert "sha256" not in out
    hashed = done("merge", *files[:2], "-o", tmp_path / "two.safetensors", "--hash")
    assert hashlib.sha256((tmp_path / "two.safetensors").read_bytes()).hexdigest() in hashed


def test_a_merge_that_can_change_nothing_is_told(files, tmp_path, done):
    same = done("merge", files[0], files[0], "-o", tmp_path / "same.safetensors")
    assert "note: model A and model B are the same file" in same
    still = done("merge", *files[:2], "--alpha", 0, "-o", tmp_path / "still.safetensors")
    assert "note: alpha is 0 everywhere: the merge leaves model A as it is" in still
    some = done("merge", *files[:2], "--alpha", 0, "--rule", "weight: alpha=0.5", "-o", tmp_path / "some.safetensors")
    assert "note: " not in some


def test_what_did_not_happen_is_not_counted(files, tmp_path, done):
    out = tmp_path / "copy.safetensors"
    assert done("convert", files[0], "-o", out).startswith(f"wrote {out}: 4 tensors copied\n")


def test_warnings_and_unused_keys_are_told(files, tmp_path, done):
    other = write(tmp_path / "d.safetensors", {IN: np.ones((6, 5), "<f2"), "extra": np.ones(2, "<f2")})
    found = done("merge", files[0], other, "-o", tmp_path / "out.safetensors", "--json")
    assert found["unused"] == ["extra"]
    assert len(found["warnings"]) == 1
    assert "2 tensors missing in B" in found["warnings"][0]
    text = done("merge", files[0], other, "-o", tmp_path / "two.safetensors", "--save-dtype", "fp32")
    assert "\nwarning: 2 tensors missing in B" in text
    assert "\nnote: 1 tensor of the other models without a counterpart in A, not used: extra\n" in text
    assert "\nnote: 3 tensors stored wider than in A" in text
    assert "(--save-dtype keep stores them as A does)" in text


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--alpha", "0.3"], {"alpha": 0.3}),
        (["-p", "alpha=0.3"], {"params": {"alpha": 0.3}}),
        (["--method", "power_up_dare", "--alpha", ".5", "--beta", "2", "--seed", "7"],
         {"method": "power_up_dare", "alpha": 0.5, "beta": 2, "seed": 7}),
        (["--method", "slerp"], {"method": "slerp"}),
        (["--rule", "middle: alpha=0.9", "--rule", "block: alpha=0.1"],
         {"rules": [("middle", {"alpha": 0.9}), ("block", {"alpha": 0.1})]}),
        (["--blocks", "M00=0.2, IN=1"], {"blocks": "M00=0.2, IN=1"}),
        (["--exclude", "middle", "--exclude", "first"], {"exclude": ["middle", "first"]}),
        (["--exclude", "middle", "--include-mode"], {"exclude": ["middle"], "include_mode": True}),
        (["--discard", "*middle*", "--glob"], {"discard": ["*middle*"], "glob": True}),
        (["--save-dtype", "fp32"], {"save_dtype": "fp32"}),
        (["--save-dtype", "bf16", "--override-dtype"], {"save_dtype": "bf16", "override_dtype": True}),
        (["--metadata", '{"a": {"b": null}}'], {"metadata": {"a": {"b": None}}}),
        (["--no-recipe"], {"keep_recipe": False}),
        (["--no-fsync", "--threads", "3"], {}),
        (["--mismatch", "zeros"], {"mismatch": "zeros"}),
    ],
)  # fmt: skip
def test_the_command_line_and_python_give_the_same_bytes(files, tmp_path, done, words, options):
    done("merge", *files[:2], "-o", tmp_path / "cli.safetensors", *words)
    lib_merge.merge(*files[:2], out=tmp_path / "python.safetensors", **options)
    assert (tmp_path / "cli.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()


def test_three_models_and_a_bool(files, tmp_path, done):
    words = ("--method", "add_difference", "-p", "alpha=0.5", "-p", "smooth=true")
    done("merge", *files, "-o", tmp_path / "cli.safetensors", *words)
    lib_merge.merge(
        *files, out=tmp_path / "python.safetensors", method="add_difference", params={"alpha": 0.5, "smooth": True}
    )
    assert (tmp_path / "cli.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()


def test_another_vae(files, tmp_path, done):
    vae = write(tmp_path / "vae.safetensors", {"decoder.up.0.block.0.conv1.weight": values((6, 5), 99, "<f2")})
    done("merge", *files[:2], "-o", tmp_path / "out.safetensors", "--vae", vae)
    assert read(tmp_path / "out.safetensors")[VAE].tobytes() == read(vae)["decoder.up.0.block.0.conv1.weight"].tobytes()


# Names


@pytest.mark.parametrize("name", ["mix@2.safetensors", "mix@0.5", "a b (v2).safetensors", "ä×.safetensors", "@1"])
def test_file_names_may_hold_anything(files, tmp_path, done, name):
    files[0].rename(tmp_path / name)
    done("merge", tmp_path / name, files[1], "-o", tmp_path / f"out {name}.safetensors")
    recipe = json.loads(read_raw(tmp_path / f"out {name}.safetensors")[0]["lib_merge.recipe"])
    assert recipe["models"]["A"]["file"] == name


@portable
@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a.ckpt@0.5", "a.ckpt"),
        ("a.ckpt@-1", "a.ckpt"),
        ("a.ckpt@0.5@.3", "a.ckpt"),
        ("a@b@1e-3", "a@b"),
        ("@1@2", "@1"),
    ],
)
def test_a_weight_for_a_model_is_refused_where_the_method_takes_none(text, rest):
    with pytest.raises(RecipeError) as caught:
        model_argument(text, "power_up_dare")
    assert text in caught.value.what
    assert caught.value.hint == f"write {rest} and set --beta"


@portable
def test_what_is_no_number_is_part_of_the_name(tmp_path):
    for text in ("a@b.safetensors", "a@0.5x", "@", "C:\\a@b"):
        assert model_argument(text, "slerp") == text
    for text in ("a@", "a@nan", "a@0.5@inf"):
        with pytest.raises(RecipeError, match=r"of a is (missing|no finite number)"):
            model_argument(text, "slerp")
    (tmp_path / "x@0.5").write_bytes(b"")
    assert model_argument(str(tmp_path / "x@0.5"), "slerp") == str(tmp_path / "x@0.5")


# Parameters and rules


@portable
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attn2: alpha=0.3", ("attn2", {"alpha": 0.3})),
        ("attn2:alpha=0.3 beta=0.1", ("attn2", {"alpha": 0.3, "beta": 0.1})),
        ("attn2: alpha = 0.3, beta=-1e-3", ("attn2", {"alpha": 0.3, "beta": -0.001})),
        ("(?:attn1|attn2): smooth=true", ("(?:attn1|attn2)", {"smooth": True})),
        ("a:b:c: alpha=1", ("a:b:c", {"alpha": 1})),
        ("blocks\\.[0-9]: smooth=FALSE", ("blocks\\.[0-9]", {"smooth": False})),
    ],
)
def test_rules_are_read(text, expected):
    assert rule(text) == expected


@portable
@pytest.mark.parametrize("text", ["attn2", "attn2: 0.3", ": alpha=1", "attn2: alpha", "attn2:", "a: alpha=1 beta"])
def test_rules_that_are_none_cannot_be_parsed(text, run):
    assert run("merge", "a", "b", "-o", "out", "--rule", text)[0] == 2


@portable
def test_a_parameter_is_given_once(run):
    for words in (["-p", "alpha=1", "-p", "alpha=1"], ["-p", "alpha=1", "--alpha", "1"], ["--rule", "x: a=1 a=2"]):
        status, _, err = run("merge", "a", "b", "-o", "out", *words)
        assert (status, "given twice" in err) == (1, True)
    assert assignments("a=1, b=2") == {"a": 1, "b": 2}


@portable
def test_settings_reach_the_plan(files, tmp_path, done):
    words = ("--dry-run", "--json", "-o", tmp_path / "out.safetensors")
    found = done(
        "merge", *files[:2], *words, "--alpha", "0.4", "--blocks", "IN01=0.2", "--rule", "m.*e_block:alpha=0.9"
    )
    assert alphas(found) == {"IN01": 0.2, "M00": 0.9, "VAE": 0.4}
    listed = ",".join(str(n / 100) for n in range(26))  # BASE IN00 … IN11 M00 OUT00 …
    found = done("merge", *files[:2], *words, "--blocks", listed)
    assert alphas(found) == {"IN01": 0.02, "M00": 0.13, "VAE": 0.5}


# The output's name


def test_existing_files_are_not_overwritten_unless_told(files, tmp_path, run):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    assert run("merge", *files[:2], "-o", out)[0] == 1
    assert out.read_bytes() == b"precious"
    for n in (1, 2):
        assert run("merge", *files[:2], "-o", out, "--number")[0] == 0
        assert (tmp_path / f"out_{n}.safetensors").exists()
    assert out.read_bytes() == b"precious"
    assert run("merge", *files[:2], "-o", out, "--overwrite")[0] == 0
    assert out.read_bytes() == (tmp_path / "out_1.safetensors").read_bytes()


def test_a_dry_run_writes_nothing(files, tmp_path, done):
    before = sorted(tmp_path.iterdir())
    words = ("merge", *files[:2], "-o", tmp_path / "out.safetensors", "--dry-run", "--report", tmp_path / "r.csv")
    text = done(*words)
    assert "plan: 3 merged, 1 copied" in text
    found = done(*words, "--json")
    assert set(found) == {"steps", "counts", "problems", "output_bytes", "peak_memory_mb"}
    assert found["counts"] == {"merged": 3, "copied": 1, "discarded": 0, "unused": 0}
    assert sorted(tmp_path.iterdir()) == before
    done("merge", *files[:2], "-o", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").stat().st_size == found["output_bytes"]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".html"])
def test_reports_are_written_and_numbered_like_the_output(files, tmp_path, run, suffix):
    words = ("merge", *files[:2], "-o", tmp_path / "out.safetensors", "--report", tmp_path / f"r{suffix}")
    assert run(*words)[0] == 0
    text = (tmp_path / f"r{suffix}").read_text("utf-8")
    assert all(key in text for key in KEYS)
    assert run(*words)[0] == 1
    assert run(*words, "--number")[0] == 0
    assert (tmp_path / f"r_1{suffix}").exists()
    (tmp_path / f"r{suffix}").write_text("old")
    assert run(*words, "--overwrite")[0] == 0
    assert (tmp_path / f"r{suffix}").read_text("utf-8") == text


# The other commands


def test_convert(files, tmp_path, done):
    found = done("convert", files[0], "-o", tmp_path / "out.safetensors", "--save-dtype", "fp32", "--json")
    assert set(found) - {"saturated"} == RESULT
    assert (found["merged"], found["copied"]) == (0, 4)
    lib_merge.convert(files[0], out=tmp_path / "python.safetensors", save_dtype="fp32")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    done("convert", files[0], "-o", tmp_path / "vae.safetensors", "--only", "vae", "--discard", "nothing")
    assert list(read(tmp_path / "vae.safetensors")) == [VAE]


def test_verify(files, tmp_path, run, done):
    out = tmp_path / "sub" / "out.safetensors"
    out.parent.mkdir()
    done("merge", *files[:2], "-o", out)
    assert "verified: 4 tensors" in done("verify", out, "--models", tmp_path)
    found = done("verify", out, "--models", tmp_path, "--json")
    assert (found["ok"], found["compared"], found["differing"], found["missing_inputs"]) == (True, 4, [], [])
    status, text, err = run("verify", out)
    assert (status, err) == (1, "")
    assert "a.safetensors, b.safetensors not found" in text
    assert run("verify", out, "--json")[0] == 1
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    status, text, err = run("verify", out, "--models", tmp_path)
    assert (status, err) == (1, "")
    assert text.startswith("different: 1 of 4 tensors differ\n")
    assert any(key in text for key in KEYS)


def test_inspect(files, tmp_path, run, done):
    done("merge", *files[:2], "-o", tmp_path / "out.safetensors")
    found = done("inspect", tmp_path / "out.safetensors", "--json")
    assert set(found) >= {
        *("kind", "family", "format", "dtype", "tensors", "components", "blocks", "metadata", "recipe", "ranks"),
        *("trigger_words", "hashes"),
    }
    assert (found["tensors"], found["format"], found["dtype"]) == (4, "safetensors", {"F16": 3, "I64": 1})
    assert found["recipe"]["method"] == "weighted_sum"
    assert "recipe: yes" in done("inspect", tmp_path / "out.safetensors")
    bad = write(tmp_path / "bad.safetensors", {"w": np.array([1, np.nan, np.inf], "<f4"), "v": np.ones(2, "<f4")})
    done("inspect", bad)
    status, text, _ = run("inspect", bad, "--check", "--json")
    assert (status, list(json.loads(text)["damaged"])) == (1, ["w"])
    status, text, _ = run("inspect", bad, "--check")
    assert (status, "damaged: w: " in text) == (1, True)
    assert "all numbers are finite" in done("inspect", files[0], "--check")


def test_recipe_and_run(files, tmp_path, done):
    out = tmp_path / "out.safetensors"
    done("merge", *files[:2], "-o", out, "--alpha", "0.3", "--seed", "5", "--rule", "middle: alpha=1")
    told = done("recipe", out)
    assert json.loads(told) == json.loads(read_raw(out)[0]["lib_merge.recipe"])
    assert done("recipe", out, "--json") == json.loads(told)
    (tmp_path / "recipe.json").write_text(told, "utf-8")
    again = tmp_path / "again.safetensors"
    done("run", out, "-o", again)
    assert again.read_bytes() == out.read_bytes()
    elsewhere = tmp_path / "sub"
    elsewhere.mkdir()
    done("run", tmp_path / "recipe.json", "-o", elsewhere / "again.safetensors", "--models", tmp_path)
    assert (elsewhere / "again.safetensors").read_bytes() == out.read_bytes()
    assert done("recipe", tmp_path / "recipe.json") == told


@portable
def test_methods(done):
    listed = done("methods")
    assert all(re.search(rf"^{name} \(", listed, re.MULTILINE) for name in all_methods())
    found = {entry["id"]: entry for entry in done("methods", "--json")["methods"]}
    assert set(found) == set(all_methods())
    assert found["weighted_sum"]["params"] == [
        {"name": "alpha", "default": 0.5, "range": "0 … 1", "meaning": "share of B: 0 is A, 1 is B"}
    ]
    assert found["add_difference"]["inputs"] == ["A", "B", "C"]
    assert done("methods", "--all")
    for name in all_methods():
        text = done("methods", name)
        assert f"({name})" in text
        assert all(param.name in text for param in all_methods()[name].params)


def test_demo(tmp_path, done, run):
    text = done("demo", "-o", tmp_path / "demo")
    assert sorted(item.name for item in (tmp_path / "demo").iterdir()) == [
        *("merged.safetensors", "report.html", "sample_a.safetensors", "sample_b.safetensors"),
    ]
    assert "verified: " in text
    assert run("verify", tmp_path / "demo" / "merged.safetensors")[0] == 0
    status, _, err = run("demo", "-o", tmp_path / "demo")
    assert (status, "would replace" in err) == (1, True)
    done("demo", "-o", tmp_path / "demo", "--overwrite")


# Help


@portable
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, done):
    text = done(command, "--help")
    assert text.startswith(f"Usage: lib-merge {command}")
    assert done(command, "-h") == text
    options = {"--report", "--overwrite", "--number", "--no-recipe", "--hash", "--no-fsync", "--threads", "--dry-run",
               "--strict", "--json", "--debug"}  # fmt: skip
    if command in WRITING:
        assert all(option in text for option in options)


@portable
def test_the_program_explains_itself(done, run):
    text = done("--help")
    assert all(re.search(rf"^  {command} ", text, re.MULTILINE) for command in COMMANDS)
    assert set(cli.commands) >= set(COMMANDS)
    assert done("--version").strip().endswith(lib_merge.__version__)
    status, _, err = run()
    assert (status, "Usage: lib-merge" in err) == (2, True)


# As a program


def program(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "lib_merge", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number):
    tensors = {f"w{n}": ("F16", (1 << 26,)) for n in range(16)}  # 2 GB: some seconds of work
    paths = [write_sparse(tmp_path / f"{name}.safetensors", tensors) for name in "ab"]
    running = program("merge", *paths, "-o", tmp_path / "out.safetensors", "--threads", 1)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.safetensors.lib_merge-*")):
        assert running.poll() is None, running.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert (out, err.decode().strip()) == (b"", "error: interrupted; what was not finished is removed")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@portable
def test_a_console_without_these_letters_shows_something(tmp_path):
    env = {"PYTHONIOENCODING": "ascii"}
    running = program("methods", env=env)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, b"")
    assert b"\\u2026" in out or b"\\xb7" in out
    running = program("methods", "--json", env=env)
    out, _ = running.communicate(timeout=60)
    assert any("·" in entry["formula"] for entry in json.loads(out)["methods"])


@portable
@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise there")
def test_a_reader_that_goes_away_is_no_fault():
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "lib_merge", "methods"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@portable
def test_a_fault_of_our_own_is_one_line_unless_debugged(monkeypatch, run):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr(reading, "inspect", broken)
    status, out, err = run("inspect", "x")
    assert (status, out) == (1, "")
    assert err.splitlines()[0] == "error: ZeroDivisionError: oh no"
    assert "--debug" in err
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "x", "--debug"])


@portable
def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(lib_merge.MergeError):
        main(["inspect", "nothing.safetensors", "--debug"])


def test_blocks_lists_shapes_and_lists(tmp_path, capsys):
    assert main(["blocks"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("gradient_up", "inverted_V", "26", "OUT11"))
    unet = {f"model.diffusion_model.{part}.0.weight": values((2, 2), 1) for part in ("input_blocks.0", "middle_block")}
    unet["model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"] = values((4, 768), 1)
    path = write(tmp_path / "a.safetensors", unet)
    assert main(["blocks", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [*(f"IN{n:02d}" for n in range(12)), "M00", *(f"OUT{n:02d}" for n in range(12))]
    assert found["shapes"]["gradient_down"]["IN00"] == 1
    assert found["shapes"]["V"]["M00"] == 0
    out = tmp_path / "out.safetensors"
    assert (
        main(["merge", str(path), str(path), "-o", str(out), "--blocks", "V", "--alpha", "0.2", "--dry-run", "--json"])
        == 0
    )
    steps = {step["key"]: step["params"]["alpha"] for step in json.loads(capsys.readouterr().out)["steps"]}
    assert steps["model.diffusion_model.middle_block.0.weight"] == 0
    assert steps["model.diffusion_model.input_blocks.0.0.weight"] == 1


def test_commands_of_a_group_do_not_stand_in_for_others():
    group = cli.commands["lora"]
    assert isinstance(group, click.Group)
    assert not set(group.commands.values()) & set(cli.commands.values())
    assert [option.name for option in cli.commands["merge"].params if option.name == "blocks"] == ["blocks"]
