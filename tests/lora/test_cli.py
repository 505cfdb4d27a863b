"""The commands `lora merge`, `extract`, `resize`, `compare`; recipes of LoRAs run again and verified."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge import run, verify
from lib_merge.cli import main
from lib_merge.files.open import open_model
from lib_merge.lora import compare_loras, merge_loras
from lib_merge.verify import stored_recipe
from tests.lora.files import LINEAR, deltas, make, relative
from tests.lora.test_extract import SD15, K, tuned


def told(capsys, *words) -> dict:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def two(tmp_path):
    return make(tmp_path / "a.safetensors", 4, 2.0, 1), make(tmp_path / "b.safetensors", 8, None, 2)


def test_merge(two, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    found = told(capsys, "lora", "merge", f"{two[0]}@0.7", f"{two[1]}@-0.4@0.1", "-o", out)
    assert (found["merged"], found["ranks"], found["error"]) == (3, {"12": 3}, 0)
    assert len(found["sha256"]) == 64
    one, other, got = (deltas(path) for path in (*two, out))
    assert relative(got[LINEAR], 0.7 * one[LINEAR] - 0.4 * other[LINEAR]) <= 1e-6
    assert main(["lora", "merge", str(two[0]), str(two[1]), "-o", str(out)]) == 1
    assert "exists" in capsys.readouterr().err


def test_merge_to_a_rank_says_the_error_and_writes_a_report(two, tmp_path, capsys):
    out, table = tmp_path / "out.safetensors", tmp_path / "report.csv"
    assert main(["lora", "merge", *map(str, two), "-o", str(out), "--rank", "3", "--report", str(table)]) == 0
    text = capsys.readouterr().out
    assert "3 modules, rank 3" in text
    assert "relative error 0." in text
    lines = table.read_text().splitlines()
    assert len(lines) == 4
    assert {"key", "rank", "svd_error"} <= set(lines[0].split(","))
    assert "rounding" not in text  # float32 stays float32


def test_merge_to_fp8_says_what_rounding_adds(two, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["lora", "merge", *map(str, two), "-o", str(out), "--save-dtype", "fp8_e4m3fn"]) == 0
    assert "rounding to the stored dtype adds 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status"), [(["--rank", "x"], 2), (["--method", "concatt"], 1), (["--rank", "0"], 1)]
)
def test_wrong_words(two, tmp_path, capsys, words, status):
    assert main(["lora", "merge", *map(str, two), "-o", str(tmp_path / "out.safetensors"), *words]) == status
    assert capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


def test_dry_run_writes_nothing(two, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["lora", "merge", *map(str, two), "-o", str(out), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out
    assert not out.exists()


def test_extract_and_resize(tmp_path, capsys):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K})
    out, small = tmp_path / "lora.safetensors", tmp_path / "small.safetensors"
    found = told(capsys, "lora", "extract", after, before, "-o", out, "--rank", 8)
    assert (found["merged"], found["ranks"]) == (1, {"8": 1})
    found = told(capsys, "lora", "resize", out, "-o", small, "--rank", 2)
    assert found["ranks"] == {"2": 1}


def test_compare_tells_whether_loras_pull_together(tmp_path, capsys):
    a = make(tmp_path / "a.safetensors", 4, 2.0, 1)
    tensors = load_file(a)
    opposite = {key: -t if key.endswith("up.weight") else t for key, t in tensors.items() if key.startswith(LINEAR)}
    save_file(opposite, tmp_path / "b.safetensors")
    found = told(capsys, "lora", "compare", a, tmp_path / "b.safetensors", make(tmp_path / "c.safetensors", 4, 2.0, 9))
    changes = [deltas(tmp_path / f"{name}.safetensors") for name in "abc"]
    norms = [sum(float(d.norm()) ** 2 for d in change.values()) ** 0.5 for change in changes]
    assert [row["norm"] for row in found["loras"]] == pytest.approx(norms, rel=1e-6)
    pairs = {(pair["a"][0], pair["b"][0]): pair for pair in found["pairs"]}
    assert pairs["a", "b"]["cosine"] == pytest.approx(-1, abs=1e-6)
    assert (pairs["a", "b"]["shared"], pairs["a", "b"]["overlap"]) == (1, pytest.approx(1))
    one, three = (torch.cat([change[stem].flatten() for stem in sorted(change)]) for change in (changes[0], changes[2]))
    want = float(one @ three / one.norm() / three.norm())
    assert pairs["a", "c"]["cosine"] == pytest.approx(want, abs=1e-6)
    assert compare_loras(a).pairs == []


def test_a_recipe_runs_again_to_the_same_bytes_and_is_verified(two, tmp_path, capsys):
    out, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    merge_loras((two[0], 0.7), (two[1], -0.4, 0.2), out=out, rank=5)
    run(stored_recipe(open_model(out)), out=again, models=[tmp_path])
    assert out.read_bytes() == again.read_bytes()
    assert main(["run", str(out), "-o", str(again), "--overwrite"]) == 0
    assert out.read_bytes() == again.read_bytes()
    assert verify(out).ok
    tensors = {key: tensor.clone() for key, tensor in load_file(out).items()}  # they are the file's own memory
    with open_model(out).path.open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\0\0\0\0")
    changed = [key for key, tensor in load_file(out).items() if not torch.equal(tensor, tensors[key])]
    assert list(verify(out).differing) == changed != []


def test_an_extraction_is_verified(tmp_path):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    assert (
        main(["lora", "extract", str(after), str(before), "-o", str(tmp_path / "lora.safetensors"), "--rank", "3"]) == 0
    )
    assert verify(tmp_path / "lora.safetensors").ok


@pytest.mark.parametrize("suffix", [".csv", ".json", ".html"])
def test_reports_of_every_kind(tmp_path, capsys, suffix):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    table = tmp_path / f"report{suffix}"
    words = ["lora", "extract", str(after), str(before), "-o", str(tmp_path / "lora.safetensors"), "--rank", "2"]
    assert main([*words, "--report", str(table)]) == 0, capsys.readouterr().err
    text = table.read_text("utf-8")
    assert "attn2_to_k" in text
    assert "norm2.weight" in text  # what the LoRA cannot hold


def test_strict_stops_where_something_would_be_left_out(tmp_path, capsys):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors")
    words = ["lora", "extract", str(after), str(before), "-o", str(tmp_path / "lora.safetensors"), "--strict"]
    assert main(words) == 1
    assert "not in the LoRA" in capsys.readouterr().err
    assert not (tmp_path / "lora.safetensors").exists()
    assert main([*words, "--store-diffs"]) == 0


def test_tensors_that_are_not_used_are_named_by_every_command(two, tmp_path, capsys):
    """Of ten strange ones the first eight, and how many more there are; all of them with --json."""
    strange = {f"lora_unet_strange_{n}.alpha": torch.tensor(1.0) for n in range(10)}
    odd, out = tmp_path / "odd.safetensors", tmp_path / "out.safetensors"
    save_file(load_file(two[0]) | strange, odd)
    shown = "lora_unet_strange_0.alpha, lora_unet_strange_1.alpha"
    for words, more in (
        (["lora", "merge", odd, two[1]], "and 2 more"),
        (["lora", "resize", odd, "--rank", 2], "and 2 more"),
        (["lora", "convert", odd, "--names", "diffusers", "--family", "sd1"], "and 7 more"),
    ):
        line = [*map(str, words), "-o", str(out), "--overwrite"]
        assert main(line) == 0, words
        text = capsys.readouterr().out
        assert (shown if "convert" not in line else "lora_unet_strange_0.alpha (") in text, text
        assert more in text
    found = told(capsys, "lora", "merge", odd, two[1], "-o", out, "--overwrite")
    assert set(found["unused"]) == strange.keys()


def test_an_extraction_names_what_the_base_lacks(tmp_path, capsys):
    after, before = tuned(SD15, tmp_path / "tuned.safetensors", only={K})
    more = {f"model.diffusion_model.extra.{n}.weight": torch.ones(2) for n in range(2)}
    save_file(load_file(after) | more, tmp_path / "more.safetensors")
    words = ["lora", "extract", str(tmp_path / "more.safetensors"), str(before), "-o", str(tmp_path / "x.safetensors")]
    assert main(words) == 0
    assert f"2 tensors of the tuned model not in the base: {', '.join(more)}" in capsys.readouterr().out


def test_the_report_tells_how_ties_voted(tmp_path):
    """By number; by size where one LoRA is far stronger than the other."""
    two = [make(tmp_path / f"{name}.safetensors", 4, 2.0, number) for number, name in enumerate("ab")]
    for strength, told_as in ((1.0, "each LoRA counts once"), (9.0, "sizes count")):
        made = merge_loras(
            (two[0], strength), two[1], out=tmp_path / f"{strength}.safetensors", method="ties", report=True
        )
        (linear,) = [row["reason"] for row in made.rows if row["key"] == LINEAR]
        assert linear.endswith(told_as), linear
