"""The commands that the documents print, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lib_merge.cli import main
from tests.fold.making import Pair, Q

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"DENSE": "dense", "ADAPTER": "adapter", "OUT": "folded", "SHIPPED": "shipped", "MODULE": Q, "...": "lm_head"}


def printed(page, heading=None):
    """Lines of commands in a document, without what is said beside them."""
    text = (ROOT / page).read_text("utf-8")
    text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else text
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("lib-merge ")]
    return [re.split(r" {2,}", line)[0].removeprefix("lib-merge ") for line in lines]


def concrete(command):
    """The command with names of files, and the options in brackets in each of their values."""
    options = re.findall(r"\[(--[^\]]+)\]", command)
    words = [NAMES.get(word, word) for word in shlex.split(re.sub(r"\[[^\]]*\]", "", command))]
    yield words
    for option in options:
        name, _, values = option.partition(" ")
        for value in values.split("|") if values else [""]:
            yield [*words, name, *([] if not value else ["3"] if value.isupper() else [value])]


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/fold.md", None), ("README.md", "Fold a LoRA into a quantized language model")]
)
def test_commands_run_as_printed(tmp_path, monkeypatch, page, heading, capsys):
    Pair(tmp_path).adapter()
    monkeypatch.chdir(tmp_path)
    commands = printed(page, heading)
    assert {command.split()[0] for command in commands} == {"fold", "fold-check", "quantizer-check"}
    run = 0
    for command in commands:
        for words in concrete(command):
            more = ["--overwrite"] if words[0] == "fold" else []
            assert main([*words, *more]) == 0, (words, capsys.readouterr().err)
            run += 1
        if command.startswith("fold "):  # what is checked next was made without options
            assert main([*next(concrete(command)), "--overwrite"]) == 0
    assert run == (12 if page == "docs/fold.md" else 3)
