"""The commands of README and of the pages on Auto and folding, run as printed; recipes.md has a test of its own."""

from __future__ import annotations

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lib_merge.cli import main
from tests.fold.making import Pair
from tests.support import read, write
from tests.test_bake import Q, V, lora
from tests.test_docs_recipes import CROSS, checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/optimizer.md", "docs/fold.md")
# Not run: they open a browser, hold text that is shortened, or show which options there are.
LEFT_OUT = re.compile(r"lib-merge app|lib-merge presets sent|.*\[--|.*# with the same options")
# What stands for a file of the reader's.
PLACEHOLDERS = {
    "A": "base.safetensors", "B": "tuned.safetensors", "OUT": "out.safetensors", "DIR": ".", "LORA": "ink.safetensors",
}  # fmt: skip
FOLDING = {"DENSE": "dense", "ADAPTER": "adapter", "SHIPPED": "shipped", "MODULE": "model.layers.0.self_attn.q_proj",
           "OUT": "folded", "llama_folder": "dense", "adapter_folder": "adapter"}  # fmt: skip
LORAS = ("style", "detail", "character", "light", "ink", "a", "b", "c", "big")
MODELS = ("base", "tuned", "other", "model", "tune1", "tune2", "tune3")
# Names that stand for a checkpoint in one command and for a LoRA in another.
AS_MODEL = {"style": "tuned", "big": "model"}


def commands(page):
    lines = re.findall(r"^lib-merge .*$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    return [line for line in lines if not LEFT_OUT.match(line)]


def words_of(line):
    """The words of a command, comments left out, with files that are there."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    folders = words[0] in ("fold", "fold-check", "quantizer-check") or "llama_folder" in words
    words = [(FOLDING if folders else PLACEHOLDERS).get(word, word) for word in words]
    mixes = words[0] in ("merge", "compare", "convert") or words[:2] == ["run", "style-30-percent"]
    if not mixes:
        return words
    for at, word in enumerate(words):
        if words[at - 1] not in ("-o", "--lora", "--report", "--vae"):
            stem, dot, end = word.partition(".safetensors")
            words[at] = AS_MODEL.get(stem, stem) + dot + end
    return words


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    for number, name in enumerate(MODELS):
        checkpoint(folder / f"{name}.safetensors", 100 * number)
    for number, name in enumerate(LORAS):
        lora(folder / f"{name}.safetensors", Q, V, CROSS, seed=50 * number, rank=4)
    torch.save(load_file(folder / "base.safetensors"), folder / "old.ckpt")
    vae = {key: tensor for key, tensor in read(folder / "other.safetensors").items() if key.startswith("first_stage")}
    write(folder / "kl-f8.safetensors", {key.removeprefix("first_stage_model."): value for key, value in vae.items()})
    Pair(folder).adapter()
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run_as_printed(samples, tmp_path, monkeypatch, capsys, page):
    folder = tmp_path / "work"
    shutil.copytree(samples, folder)
    monkeypatch.chdir(folder)
    lines = commands(page)
    assert len(lines) >= {"README.md": 40}.get(page, 2)
    for line in lines:
        words = words_of(line)
        for option, made in pairwise(words):
            if option in ("-o", "--report"):  # of an earlier command
                Path(made).unlink(missing_ok=True)
        if words[0] == "fold":
            shutil.rmtree("folded", ignore_errors=True)
        assert main(words) == 0, f"{line}\n{capsys.readouterr().err}"
