"""`--json`: whatever a command meets, stdout is one JSON object; of an error always of the same fields."""

from __future__ import annotations

import json

import click
import pytest

from lib_merge.cli import cli, main
from tests.support import values, write

pytestmark = pytest.mark.portable

GROUPS = {name: command for name, command in cli.commands.items() if isinstance(command, click.Group)}
COMMANDS = [(name,) for name in cli.commands if name not in GROUPS]
COMMANDS += [(group, name) for group, command in GROUPS.items() for name in command.commands]
# Those that read no model have nothing of the kind that is not there.
WITHOUT_FILES = {("methods",), ("presets",), ("demo",), ("app",)}


def command_of(path):
    command = cli
    for name in path:
        command = command.commands[name]
    return command


def refused(capsys, *words):
    status = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert status in (1, 2)
    assert set(told["error"]) == {"what", "file", "tensor", "hint"}
    assert told["problems"][0]["level"] == "error"
    assert err.startswith(f"error: {told['problems'][0]['what']}")
    return told["error"]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_line_that_cannot_be_parsed(capsys, path):
    told = refused(capsys, *path, "--no-such-option")
    assert "--no-such-option" in told["what"]
    assert told["hint"] == f"lib-merge {' '.join(path)} --help"


@pytest.mark.parametrize("path", [path for path in COMMANDS if path not in WITHOUT_FILES], ids=" ".join)
def test_a_file_that_is_not_there(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    words = [f"no{number}.safetensors" for number, param in enumerate(command_of(path).params)
             if isinstance(param, click.Argument)]  # fmt: skip
    words += ["no9.safetensors"] if path in {("merge",), ("compare",)} else []
    needed = {"-o": "out.safetensors", "--quantize": "shipped.safetensors", "--names": "kohya"}
    for param in command_of(path).params:
        if isinstance(param, click.Option) and param.required:
            option = next(name for name in param.opts if name in needed)
            words += [option, needed[option]]
    told = refused(capsys, *path, *words)
    assert ".safetensors" in f"{told['file']} {told['what']}"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_that_finds_errors_has_the_plan_and_the_error(tmp_path, capsys):
    a = write(tmp_path / "a.safetensors", {"x.weight": values((4, 4), 1)})
    told = refused_plan(capsys, "merge", a, a, "-o", a, "--dry-run")
    assert "replace input" in told["error"]["what"]
    assert {"steps", "counts", "problems", "output_bytes"} <= set(told)
    assert main(["merge", str(a), str(a), "-o", str(tmp_path / "b.safetensors"), "--dry-run", "--json"]) == 0
    assert "error" not in json.loads(capsys.readouterr().out)


def refused_plan(capsys, *words):
    assert main([*map(str, words), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told["error"]) == {"what", "file", "tensor", "hint"}
    return told
