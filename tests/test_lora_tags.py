"""LoRAs as prompts name them, and names without their ending, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib_merge import RecipeError
from lib_merge.cli import main
from lib_merge.cli.parse import lora_argument
from lib_merge.lora_tags import read_tags
from tests.test_bake import K, base, lora


@pytest.mark.parametrize(
    ("tag", "want"),
    [
        ("<lora:ink:0.8>", ("ink.safetensors", 0.8, None)),
        ("<lora:ink>", ("ink.safetensors", 1.0, None)),
        ("<lyco:ink:-0.5:1>", ("ink.safetensors", 1.0, -0.5)),
        ("<lora:old.ckpt:.5>", ("old.ckpt", 0.5, None)),  # a file of exactly that name
    ],
)
def test_the_command_line_reads_a_tag(tmp_path, monkeypatch, tag, want):
    monkeypatch.chdir(tmp_path)
    Path("old.ckpt").touch()
    assert lora_argument(tag) == (*want, "")


def test_several_tags_and_other_texts():
    assert read_tags("<lora:a:0.8>, <LORA: b :0.5:1>") == [("a", 0.8, None), ("b", 1.0, 0.5)]
    assert read_tags("a cat <lora:a:0.8>") == []
    assert read_tags("a.safetensors@0.8") == []


@pytest.mark.parametrize("text", ["<lora:ink:much>", "<lora:ink:1:2:3>", "<lora:ink:nan>", "<lora:a:1><lora:b:1>"])
def test_tags_that_say_no_one_lora(text):
    with pytest.raises(RecipeError) as caught:
        lora_argument(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    "words",
    [
        ("bake", "{base}", "{lora}@0.5"),
        ("lora", "merge", "{lora}"),
        ("merge", "{base}", "{base}", "--lora", "{lora}@1"),
    ],
)
def test_a_name_without_its_ending_is_answered_with_the_file(tmp_path, capsys, words):
    files = {"base": base(tmp_path / "base.safetensors"), "lora": lora(tmp_path / "ink.safetensors", K)}
    given = [word.format(base=files["base"], lora=files["lora"].with_suffix("")) for word in words]
    assert main([*given, "-o", str(tmp_path / "out.safetensors")]) == 1
    assert "did you mean ink.safetensors?" in capsys.readouterr().err


def test_a_tag_is_merged_as_the_file_at_that_strength(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lora(tmp_path / "ink.safetensors", K)
    assert main(["lora", "merge", "<lora:ink:0.8>", "-o", "tag.safetensors", "--no-recipe"]) == 0
    assert main(["lora", "merge", "ink.safetensors@0.8", "-o", "file.safetensors", "--no-recipe"]) == 0
    assert Path("tag.safetensors").read_bytes() == Path("file.safetensors").read_bytes()
