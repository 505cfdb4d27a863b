"""Promise 2: what headers and the recipe can tell is told before the work, without torch and without tensor data.

All command lines run in one child process that has no torch loaded and records every read (see `watched_cli.py`).
The inputs' headers are longer than any read buffer, so not even a buffer filled ahead may reach the data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import header_size, values, write, write_raw

pytestmark = [
    pytest.mark.portable,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the records need /proc and preadv"),
]

HERE = Path(__file__).resolve().parent
LONG = {"note": "x" * 400_000}
WEIGHT = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"

# What is wrong -> (status, command line, what stderr holds)
CASES: dict[str, tuple[int, str, list[str]]] = {
    "unknown method": (1, "merge A B -o out --method wieghted_sum", ["no method 'wieghted_sum'", "weighted_sum?"]),
    "dash in a method": (1, "merge A B -o out --method power-up-dare", ["did you mean power_up_dare"]),
    "unknown parameter": (1, "merge A B -o out -p alhpa=1", ["no parameter 'alhpa'", "hint: did you mean alpha?"]),
    "parameter of another method": (1, "merge A B -o out --gamma 1", ["no parameter 'gamma'"]),
    "parameter twice": (1, "merge A B -o out --alpha 1 -p alpha=0.5", ["alpha is given twice"]),
    "out of range": (1, "merge A B -o out --method slerp --alpha 1.5", ["alpha must be 0 … 1, not 1.5"]),
    "not a number": (1, "merge A B -o out --alpha nan", ["alpha must be a finite number"]),
    "infinite": (1, "merge A B -o out -p alpha=inf", ["alpha must be a finite number"]),
    "seed below 0": (1, "merge A B -o out --seed -1", ["seed must be"]),
    "missing file": (1, "merge A nothing.safetensors -o out", ["model B: no such file", "nothing.safetensors"]),
    "two missing files": (1, "merge no1.safetensors no2.safetensors -o out", ["no1.safetensors", "no2.safetensors"]),
    "nearly the name": (1, "merge A.safetensors DIR/bb.safetensor -o out", ["did you mean bb.safetensors?"]),
    "garbage": (1, "merge A garbage -o out", ["not a safetensors file", "garbage.safetensors"]),
    "cut off": (1, "merge A short -o out", ["cut off", "short.safetensors", "hint: download"]),
    "empty file": (1, "merge A empty -o out", ["the file is empty"]),
    "web page": (1, "merge A page -o out", ["a web page"]),
    "gguf": (1, "merge A gguf -o out", ["GGUF"]),
    "nothing in common": (1, "merge A other -o out", ["nothing would be merged", WEIGHT, "encoder.weight"]),
    "nothing included": (1, "merge A B -o out --include-mode", ["include mode without a pattern"]),
    "bad pattern": (1, "merge A B -o out --exclude attn(", ["'attn(' is not a regular", "hint: write \\ before"]),
    "glob taken for one": (1, "merge A B -o out --discard *attn", ["not a regular expression", "--glob"]),
    "rule without tensor": (1, "merge A B -o out --rule typo:alpha=1", ["'typo' matches no tensor"]),
    "rule with a wrong name": (1, "merge A B -o out --rule weight:beta=1", ["no parameter 'beta'"]),
    "wrong number of blocks": (1, "merge A B -o out --blocks 1,2,3", ["3 numbers", "26"]),
    "block twice": (1, "merge A B -o out --blocks IN01=1,IN00-IN02=0", ["named twice"]),
    "mismatch": (1, "merge A odd -o out --mismatch error", ["of another shape in B", "[4, 4] in A, [4, 9] in B"]),
    "strict": (1, "merge A odd -o out --strict", ["1 tensor of another shape in B"]),
    "mismatch typo": (1, "merge A B -o out --mismatch pad", ["mismatch cannot be 'pad'", "choose one of: skip, zeros"]),
    "coded weights": (1, "merge A coded -o out", ["model B holds coded weights (scaled fp8)", "16-bit"]),
    "existing output": (1, "merge A B -o bb.safetensors", ["the output exists", "--overwrite"]),
    "output is an input": (1, "merge A B -o A.safetensors --overwrite", ["would replace input A"]),
    "output is an input by a link": (1, "merge A B -o link.safetensors --overwrite", ["would replace input A"]),
    "missing folder": (1, "merge A B -o no/such/out.safetensors", ["folder does not exist", "hint: make it first"]),
    "no name": (1, "merge A B -o ''", ["no name"]),
    "wrong suffix": (1, "merge A B -o out.ckpt", ["must end in .safetensors", "hint: write out.safetensors"]),
    "report suffix": (1, "merge A B -o out --report r.xlsx", ["a report ends in .csv, .json, .html"]),
    "report folder": (1, "merge A B -o out --report no/r.csv", ["report's folder does not exist"]),
    "report exists": (1, "merge A B -o out --report old.csv", ["the report exists"]),
    "dtype typo": (1, "merge A B -o out --save-dtype fp12", ["save dtype cannot be 'fp12'", "choose one of: auto"]),
    "nothing to override": (1, "merge A B -o out --override-dtype", ["override_dtype has nothing to force"]),
    "metadata is no JSON": (1, "merge A B -o out --metadata {", ["--metadata is not JSON"]),
    "metadata is a list": (1, "merge A B -o out --metadata []", ["not a JSON object"]),
    "reserved metadata": (1, 'merge A B -o out --metadata {"lib_merge.recipe":1}', ["lib_merge's own"]),
    "one model": (1, "merge A -o out", ["weighted_sum needs at least two models"]),
    "too many models": (1, "merge A B A -o out", ["does not use model C"]),
    "too few models": (1, "merge A B -o out --method add_difference", ["needs model C"]),
    "weight for a model": (1, "merge A@0.5 B -o out", ["takes no weight for each model", "--alpha"]),
    "convert what is missing": (1, "convert nothing.safetensors -o out", ["no such file"]),
    "convert to nothing": (1, "convert A -o out --only te", ["nothing is left"]),
    "component typo": (1, "convert A -o out --only unett", ["only cannot be 'unett'", "choose one of: unet, te, vae"]),
    "no such VAE": (1, "convert A -o out --vae nothing.safetensors", ["model vae: no such file"]),
    "VAE of another kind": (1, "convert A -o out --vae B", ["model A has no VAE"]),
    "cast of codes": (1, "convert coded -o out --save-dtype fp32", ["coded weights (scaled fp8)"]),
    "no recipe in it": (1, "run A -o out", ["holds no recipe"]),
    "recipe is no JSON": (1, "run bad.json -o out", ["the recipe is not JSON", "bad.json"]),
    "recipe with a typo": (1, "run typo.json -o out", ["unknown field `alhpa`"]),
    "newer recipe": (1, "run newer.json -o out", ["version 99", "hint: update lib_merge"]),
    "recipe without inputs": (1, "run lonely.json -o out", ["gone.safetensors is in none", "lost", "--models"]),
    "verify without a recipe": (1, "verify A", ["holds no recipe"]),
    "inspect what is missing": (1, "inspect nothing.safetensors", ["no such file"]),
    "unknown method to show": (1, "methods slrep", ["no method 'slrep'", "slerp"]),
    "dry run of what cannot be": (1, "merge A B -o bb.safetensors --dry-run", ["the output exists"]),
    "unknown option": (2, "merge A B -o out --aplha 1", ["No such option", "--aplha"]),
    "unknown command": (2, "marge A B -o out", ["No such command", "marge"]),
    "word for a number": (2, "merge A B -o out --alpha much", ["much"]),
    "parameter without value": (2, "merge A B -o out -p alpha", ["NAME=VALUE"]),
    "parameter with a word": (2, "merge A B -o out -p alpha=much", ["neither a number nor true or false"]),
    "rule without colon": (2, "merge A B -o out --rule attn", ["PATTERN: alpha=0.3"]),
    "no output": (2, "merge A B", ["-o"]),
    "no threads": (2, "merge A B -o out --threads 0", ["--threads"]),
    "no model": (2, "convert -o out", ["Missing argument"]),
}  # fmt: skip


# What needs headers only, and is done
ANSWERS = {
    "inspect": "inspect A",
    "inspect as json": "inspect A --json",
    "dry run": "merge A B -o out --dry-run",
    "dry run of a conversion": "convert A -o out --dry-run --save-dtype bf16",
    "methods": "methods",
    "one method": "methods slerp --json",
    "recipe": "recipe lonely.json",
    "help": "merge --help",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("refusals")
    tensors = {WEIGHT: values((4, 4), 1), "v": values((64, 64), 2)}
    for number, name in enumerate(("A", "B", "bb")):
        write(root / f"{name}.safetensors", {**tensors, "v": values((64, 64), number)}, LONG)
    write(root / "odd.safetensors", {**tensors, WEIGHT: values((4, 9), 3)}, LONG)
    write(root / "other.safetensors", {"encoder.weight": values((64, 64), 4)}, LONG)
    coded = {key: ("F8_E4M3", array.shape, bytes(array.size)) for key, array in tensors.items()}
    coded["scaled_fp8"] = ("F8_E4M3", (0,), b"")
    write_raw(root / "coded.safetensors", coded, LONG)
    (root / "garbage.safetensors").write_bytes(np.random.default_rng(0).bytes(2000))
    (root / "short.safetensors").write_bytes((root / "A.safetensors").read_bytes()[:-100])
    (root / "empty.safetensors").write_bytes(b"")
    (root / "page.safetensors").write_bytes(b"<!doctype html><html>" + b" " * 1000)
    (root / "gguf.safetensors").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(1000))
    (root / "link.safetensors").symlink_to(root / "A.safetensors")
    (root / "old.csv").write_text("mine")
    (root / "bad.json").write_text("{")
    (root / "typo.json").write_text('{"lib_merge": 1, "alhpa": 0.5}')
    (root / "newer.json").write_text('{"lib_merge": 99}')
    models = {"A": {"file": "gone.safetensors"}, "B": {"file": "lost.safetensors"}}
    (root / "lonely.json").write_text(json.dumps({"lib_merge": 1, "method": "slerp", "models": models}))
    return root


def command(line: str, folder: Path) -> list[str]:
    """The words of a case, with files of the folder in full."""
    words = []
    for word in line.split():
        word = word.replace("DIR", str(folder)).replace("''", "")
        name, at, weight = word.partition("@")
        if word == "out":
            word = str(folder / "out.safetensors")
        elif (folder / f"{name}.safetensors").exists():
            word = str(folder / f"{name}.safetensors") + at + weight
        elif re.fullmatch(r"[\w/]+\.[a-z]+", word):
            word = str(folder / word)
        words.append(word)
    return words


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    lines = {name: command(line, folder) for name, (_, line, _) in CASES.items()}
    lines |= {f"answer: {name}": command(line, folder) for name, line in ANSWERS.items()}
    lines["json"] = [*lines["two missing files"], "--json"]
    lines["dry json"] = [*lines["dry run of what cannot be"], "--json"]
    lines["a real read"] = ["inspect", str(folder / "A.safetensors"), "--check"]
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    cases.write_text(json.dumps(list(lines.values())), "utf-8")
    done = subprocess.run(
        [sys.executable, str(HERE / "watched_cli.py"), str(folder), str(cases)],
        capture_output=True,
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "PYTHONIOENCODING": "utf-8"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def test_the_records_would_show_a_read_of_tensor_data(results, folder):
    path = folder / "A.safetensors"
    assert results["a real read"]["status"] == 0
    assert results["a real read"]["furthest"][str(path)] == path.stat().st_size


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_so_many_words(results, name):
    status, _, said = CASES[name]
    result = results[name]
    assert result["status"] == status, result
    for text in said:
        assert text in result["err"]
    assert "Traceback" not in result["err"] + result["out"]
    lines = result["err"].splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith(("error: ", "hint: ")) for line in lines), lines
    if name != "dry run of what cannot be":  # prints its plan
        assert result["out"] == ""


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_without_torch_tensor_data_or_a_trace_on_disk(results, folder, name):
    result = results[name]
    assert not result["torch"]
    assert not result["changed"]
    for path, furthest in result["furthest"].items():
        if Path(path).stem in ("A", "B", "bb", "odd", "other", "coded"):
            assert furthest <= header_size(Path(path)), path


@pytest.mark.parametrize("name", ANSWERS)
def test_what_headers_tell_is_told_from_headers(results, folder, name):
    result = results[f"answer: {name}"]
    assert (result["status"], result["err"], result["torch"], result["changed"]) == (0, "", False, False)
    assert result["out"]
    for path, furthest in result["furthest"].items():
        if Path(path).suffix == ".safetensors":
            assert furthest <= header_size(Path(path)), path


def test_each_missing_file_has_a_line_of_its_own(results):
    lines = results["two missing files"]["err"].splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 2


def test_json_tells_the_same_as_one_object(results, folder):
    found = json.loads(results["json"]["out"])
    assert set(found) == {"error", "problems"}
    assert set(found["error"]) == {"what", "file", "tensor", "hint"}
    assert [problem["file"] for problem in found["problems"]] == [str(folder / f"no{n}.safetensors") for n in (1, 2)]
    assert results["json"]["err"] == results["two missing files"]["err"]


def test_a_dry_run_prints_its_plan_as_one_object(results):
    found = json.loads(results["dry json"]["out"])
    assert set(found) == {"error", "steps", "counts", "problems", "output_bytes", "peak_memory_mb"}
    assert [problem["what"] for problem in found["problems"]] == ["the output exists"]
    assert (results["dry json"]["status"], results["dry json"]["err"].splitlines()[0][:24]) == (
        *(1, "error: the output exists"),
    )
