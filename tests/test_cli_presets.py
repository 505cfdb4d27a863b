"""Presets on the command line: listed, shown, shared, saved, and run by name with the models that they leave open."""

from __future__ import annotations

import json

import pytest

from lib_merge.cli import main
from lib_merge.presets import Presets, from_text
from lib_merge.recipe import from_json
from tests.support import values, write


@pytest.fixture
def models(tmp_path):
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), number)})
    return tmp_path


def said(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_a_preset_runs_by_name_and_gives_the_bytes_of_the_command(models, capsys):
    a, b = models / "a.safetensors", models / "b.safetensors"
    said(capsys, "run", "style-30-percent", a, b, "-o", models / "one.safetensors")
    said(capsys, "merge", a, b, "--alpha", "0.3", "-o", models / "two.safetensors")
    assert (models / "one.safetensors").read_bytes() == (models / "two.safetensors").read_bytes()
    assert "verified" in said(capsys, "verify", models / "one.safetensors")


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_preset_wants_as_many_models_as_it_leaves_open(models, capsys, given):
    files = [models / "a.safetensors"] * given
    words = ["run", "style-30-percent", *files, "-o", models / "out.safetensors"]
    assert main([str(word) for word in words]) == 1
    told = {0: "none is given", 1: "1 is given"}.get(given, f"{given} are given")
    assert f"takes 2 models, for A, B; {told}" in capsys.readouterr().err
    assert not (models / "out.safetensors").exists()


def test_a_merged_file_becomes_a_preset_of_ones_own(models, capsys):
    a, b, out = models / "a.safetensors", models / "b.safetensors", models / "mix.safetensors"
    said(capsys, "merge", a, b, "--alpha", "0.7", "-o", out)
    said(capsys, "presets", "mine", "--save", out, "--open")
    assert main(["presets", "mine", "--save", str(out)]) == 1
    assert "already" in capsys.readouterr().err
    shown = from_json(said(capsys, "presets", "mine"))
    assert (shown.params, shown.models) == ({"alpha": 0.7}, {"A": None, "B": None})
    word = said(capsys, "presets", "mine", "--share").strip()
    assert from_text(word) == shown
    said(capsys, "presets", "sent", "--save", f"look: {word}")
    listed = json.loads(said(capsys, "presets", "--json"))["presets"]
    assert [item["name"] for item in listed if item["own"]] == ["mine", "sent"]
    said(capsys, "run", "sent", b, a, "-o", models / "other.safetensors")
    said(capsys, "presets", "sent", "--delete")
    assert "sent" not in Presets().all()


def test_a_damaged_preset_is_listed_with_what_ails_it(capsys):
    folder = Presets().folder
    folder.mkdir(parents=True)
    (folder / "bad.json").write_text("{", "utf-8")
    assert "not JSON" in said(capsys, "presets").splitlines()[0]


def test_a_typing_error_is_told_with_the_name_that_was_meant(capsys):
    assert main(["recipe", "smaler-lora"]) == 1
    assert "did you mean smaller-lora?" in capsys.readouterr().err
    for words in (["presets", "--share"], ["presets", "x", "--share", "--delete"]):
        assert main(words) == 2


def test_loras_are_added_to_a_preset(tmp_path, capsys):
    from tests.test_bake import Q, V, base, lora

    for name in ("checkpoints", "loras"):
        (tmp_path / name).mkdir()
    checkpoint = tmp_path / "checkpoints" / "base.safetensors"
    base(checkpoint)
    lora(tmp_path / "loras" / "ink.safetensors", Q, V)
    ink = f"{tmp_path / 'loras' / 'ink.safetensors'}@0.5"
    said(capsys, "run", "bake-loras", checkpoint, "--lora", ink, "-o", tmp_path / "one.safetensors")
    said(capsys, "bake", checkpoint, ink, "-o", tmp_path / "two.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
