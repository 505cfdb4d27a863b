"""Odd command lines: what a hurried or unlucky user types, and what is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lib_merge.cli import main
from lib_merge.errors import RecipeError
from lib_merge.merge import merge
from tests.lora.files import make
from tests.support import values, write

ROOT = Path(__file__).resolve().parent.parent
KEY = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", {KEY: values((4, 4), number)})
        make(tmp_path / f"l{number}.safetensors", 4, 2.0, number)
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Command line -> what its error says.
REFUSED = {
    "lora extract l0.safetensors l1.safetensors -o o.safetensors": "model A is a LoRA, not a checkpoint",
    "lora extract a.safetensors l1.safetensors -o o.safetensors": "model B is a LoRA, not a checkpoint",
    "lora merge l0.safetensors l1.safetensors -o o.ckpt": "the output's name must end in .safetensors",
    "lora merge l0.safetensors l1.safetensors -o o": "the output is a folder, but these names are not PEFT's",
    "lora resize l0.safetensors --rank 2 -o o --dry-run": "the output is a folder, but these names are not PEFT's",
    "lora merge l0.safetensors l1.safetensors -o .": "the output has no name",
    "inspect A.safetensors": "did you mean a.safetensors?",
    "inspect b": "did you mean b.safetensors?",
    "demo -o notes.txt": "cannot write: File exists (file notes.txt)",
    "merge a.safetensors b.safetensors -o o.safetensors --lora-alpha 8": "lora_alpha takes effect only with a LoRA",
    "merge a.safetensors b.safetensors -o o.safetensors --include-mode": "nothing",
    "run bake-loras -o x.safetensors": "takes 1 model, for A; none is given",
}
NOTED = {
    "merge a.safetensors b.safetensors -o o.safetensors --seed 5": "seed changes nothing: weighted_sum is not random",
    "merge a.safetensors b.safetensors -o o.safetensors --glob": "glob changes nothing: there are no patterns",
}


def test_what_is_refused(folder, capsys):
    before = sorted(folder.iterdir())
    for line, told in REFUSED.items():
        assert main(line.split()) == 1, line
        assert told in capsys.readouterr().err, line
        assert sorted(folder.iterdir()) == before, line


def test_what_is_noted(folder, capsys):
    for line, told in NOTED.items():
        assert main([*line.split(), "--dry-run"]) == 0, line
        assert f"note: {told}" in capsys.readouterr().out, line


def test_python_refuses_an_alpha_without_a_lora(folder):
    with pytest.raises(RecipeError, match="lora_alpha takes effect only with a LoRA"):
        merge("a.safetensors", "b.safetensors", out="o.safetensors", lora_alpha=8.0)


@pytest.mark.parametrize(
    "name", ["ä 日本.safetensors", "new\nline.safetensors", "x@0.5.safetensors", "-dash.safetensors"]
)
def test_names_of_every_kind(folder, name, capsys):
    Path("l0.safetensors").rename(name)
    for given in (name, f"./{name}@0.5"):
        assert main(["lora", "merge", "-o", f"o {name}", "--overwrite", "--", given, "l1.safetensors"]) == 0
        assert Path(f"o {name}").exists()
    assert main(["inspect", "--json", "--", f"o {name}"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_a_pipe_that_is_closed_early_shows_no_traceback(folder):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    line = f"{sys.executable} -m lib_merge methods | head -1; {sys.executable} -m lib_merge blocks --json | head -c 10"
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout


def test_a_copy_of_a_quantized_model_is_told_to_be_one(folder, capsys):
    key = "model.diffusion_model.double_blocks.0.img_attn.qkv.weight"
    parts = {"absmax": np.ones(2, "f4"), "quant_map": np.ones(16, "f4")}
    parts["quant_state.bitsandbytes__nf4"] = np.zeros(4, np.uint8)
    tensors = {key: np.zeros((8, 1), np.uint8), **{f"{key}.{name}": array for name, array in parts.items()}}
    write(folder / "nf4.safetensors", tensors)
    assert main(["convert", "nf4.safetensors", "-o", "copy.safetensors"]) == 0
    told = capsys.readouterr().out
    assert "note: 4 tensors of coded weights (NF4" in told
    assert "copied as they are, quantized" in told
    assert main(["convert", "a.safetensors", "-o", "plain.safetensors"]) == 0
    assert "coded" not in capsys.readouterr().out
