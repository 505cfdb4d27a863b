"""The wheel: what it carries, and that it works from an empty folder with nothing of the tree beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("presets", "javascript", "style.css")
SOURCES = ("lib_merge", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


def run(*command: object, **options) -> str:
    """Standard output of a command that must end with status 0; on another one, all that it said."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(tree: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, tree)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.fixture
def alone(installed, tmp_path):
    """Runs a command in an empty folder where only the installed wheel offers lib_merge."""
    folder = tmp_path / "empty"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}

    def run_alone(*command: object) -> str:
        return run(*command, cwd=folder, env=env)

    return run_alone


def files_under(path: Path) -> set[str]:
    """Relative to the tree; a file is under itself."""
    files = [path, *path.rglob("*")]
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_file() and "__pycache__" not in file.parts}


def test_wheel_carries_the_package_and_its_data_and_nothing_else(wheel):
    data = {f"lib_merge/_data/{name}" for shipped in SHIPPED for name in files_under(ROOT / shipped)}
    packed = {name for name in names(wheel) if ".dist-info/" not in name}
    assert packed == files_under(ROOT / "lib_merge") | data
    assert "lib_merge/py.typed" in packed


def test_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert "\nLicense-Expression: MIT\n" in text
    required = re.findall(r"^Requires-Dist: (.+)$", text, re.M)
    assert "torch>=2.1" in required
    assert not [line for line in required if re.search(r"<|==|~=", line.split(";")[0])]


@pytest.fixture
def small_tree(tmp_path) -> Path:
    """The tree's build files and package, with none of what is shipped as data."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, tree / name)
    return tree


def test_data_is_taken_from_the_tree(small_tree, tmp_path):
    for name in ("presets/mine.json", "presets/more/other.json", "javascript/tab.js", "style.css"):
        small_tree.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        small_tree.joinpath(name).write_text("{}")
    packed = names(build(small_tree, tmp_path / "out"))
    assert {name.removeprefix("lib_merge/_data/") for name in packed if "/_data/" in name} == {
        "presets/mine.json",
        "presets/more/other.json",
        "javascript/tab.js",
        "style.css",
    }


def test_a_tree_without_data_builds(small_tree, tmp_path):
    packed = names(build(small_tree, tmp_path / "out"))
    assert "lib_merge/errors.py" in packed
    assert not [name for name in packed if "/_data/" in name]


def test_the_installed_copy_is_the_one_that_runs(alone, installed, wheel):
    code = "import lib_merge.version as v; print(v.__file__, v.__version__, sep='\\n')"
    where, version = alone(sys.executable, "-c", code).splitlines()
    assert installed in Path(where).parents
    assert wheel.name.startswith(f"lib_merge-{version}-")


def test_methods(alone, installed):
    said = alone(sys.executable, "-m", "lib_merge", "methods")
    assert "weighted_sum" in said
    script = next(path for path in installed.joinpath("bin").iterdir() if path.stem == "lib-merge")
    assert alone(script, "methods") == said


def has_recipe(file: Path) -> bool:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return "lib_merge.recipe" in header.get("__metadata__", {})


def test_demo_makes_a_merge_that_verifies(alone, tmp_path):
    folder = tmp_path / "demo"
    alone(sys.executable, "-m", "lib_merge", "demo", "-o", folder)
    merged = [file for file in sorted(folder.rglob("*.safetensors")) if has_recipe(file)]
    assert merged
    for file in merged:
        said = alone(sys.executable, "-m", "lib_merge", "verify", file, "--models", folder, "--json")
        result = json.loads(said)
        assert result["ok"] is True
        assert result["compared"] > 0
