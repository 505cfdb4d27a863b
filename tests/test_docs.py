"""What the documents say is what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import click
import pytest

import lib_merge
from lib_merge.cli import cli
from lib_merge.kernels.registry import all_methods
from lib_merge.recipe import files, from_json

pytestmark = pytest.mark.portable

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def writer(name="write_methods"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_method_tables_are_current():
    assert writer().readme(README) == README
    assert (ROOT / "docs" / "methods.md").read_text("utf-8") == writer().methods_page()


def test_the_table_of_options_that_need_others_is_current():
    page = (ROOT / "docs" / "optimizer.md").read_text("utf-8")
    assert writer().optimizer(page) == page
    options = set(re.findall(r"^\| \w+ \| `--([a-z-]+)(?: auto)?` \| with", page, re.MULTILINE))
    known = {option.lstrip("-") for command in cli.commands["lora"].commands.values() for param in command.params
             for option in (*param.opts, *param.secondary_opts)}  # fmt: skip
    assert options <= known
    assert len(options) > 10


def test_every_method_has_a_current_page_and_a_picture():
    pages, folder = writer("write_modes").pages(), ROOT / "docs" / "modes"
    assert {name: (folder / name).read_text("utf-8") for name in pages} == pages
    pictures = {f"{name}.svg" for name in all_methods()}
    assert {path.name for path in folder.iterdir()} == {*pages, *pictures, "texts.json"}
    assert sum((folder / name).stat().st_size for name in pictures) < 1_000_000


def test_the_study_s_tables_follow_from_its_figures():
    study = (ROOT / "docs" / "optimizer-study.md").read_text("utf-8")
    write = writer("write_study")
    assert write.page(study) == study
    assert len(write.figures()) == 5 * (2 + 2 * 15)
    assert {len(values) for values in write.figures().values()} == {5}


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_every_method_is_documented(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_and_stands_in_the_readme(name):
    assert cli.commands[name].help
    assert f"lib-merge {name}" in README


def test_the_readme_names_only_options_that_exist():
    groups = [command for command in cli.commands.values() if isinstance(command, click.Group)]
    commands = [*cli.commands.values(), *(command for group in groups for command in group.commands.values())]
    known = {option for command in commands for param in command.params
             if isinstance(param, click.Option) for option in param.opts}  # fmt: skip
    lines = [line for line in README.splitlines() if line.startswith(("lib-merge ", "    lib-merge "))]
    used = {word for line in lines for word in re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)}
    assert used <= known | {"-o", "-p"}
    assert len(used) > 10


def test_the_recipe_in_the_readme_is_one():
    (text,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    recipe = from_json(text)
    assert [slot for slot, _ in files(recipe)] == ["A", "B.A", "B.B", "B.C"]


def test_links_lead_to_files():
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_all_is_what_the_package_offers():
    offered = {name for name, value in vars(lib_merge).items() if not name.startswith("_") and not _is_module(value)}
    assert set(lib_merge.__all__) - {"__version__"} == offered


def _is_module(value):
    return type(value).__name__ == "module"
