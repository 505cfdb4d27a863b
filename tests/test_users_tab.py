"""Faults that users of comparable tools met in their tabs, tried on ours; numbered as in tests/test_users.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lib_merge
from lib_merge.cli import main
from lib_merge.host import standalone
from lib_merge.ui import form
from lib_merge.ui.form import FormError, request
from lib_merge.ui.runs import Runs
from lib_merge.ui.tasks.registry import BY_ID
from tests.support import values, write, write_sparse

ROOT = Path(__file__).resolve().parent.parent
MERGE = BY_ID["merge"]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "models"
    made.mkdir()
    for number, name in enumerate("abc"):
        write(made / f"{name}.safetensors", {"w": values((9, 9), number)})
    return made


def filled(**changed):
    return {**MERGE.first_values(), "A": "a.safetensors", "B": "b.safetensors", **changed}


# 42: nothing is overwritten without a question


@pytest.mark.parametrize("exists", ["number", "stop", "overwrite"])
def test_42_the_form_says_what_happens_to_a_file_that_exists(folder, exists):
    there = folder / "mine.safetensors"
    there.write_bytes(b"precious")
    asked = request(MERGE, filled(name="mine", exists=exists), standalone([folder]))
    if exists == "stop":
        with pytest.raises(lib_merge.PlanError, match="the output exists"):
            asked.run(standalone([folder]))
    else:
        made = asked.run(standalone([folder])).output
        assert made.name == ("mine_1.safetensors" if exists == "number" else "mine.safetensors")
    assert (there.read_bytes() == b"precious") is (exists != "overwrite")
    assert MERGE.first_values()["exists"] == "number"


# 43: the config that a model needs goes with it


def test_43_the_config_beside_a_goes_with_the_result(folder):
    host = standalone([folder])
    (folder / "b.yaml").write_text("of b")
    request(MERGE, filled(name="plain"), host).run(host)
    assert not (folder / "plain.yaml").exists()
    (folder / "a.yaml").write_text("model: v")
    request(MERGE, filled(name="vpred"), host).run(host)
    assert (folder / "vpred.yaml").read_text() == "model: v"


# 48: a run outlives the page


def test_48_a_run_goes_on_without_a_page_and_stops_without_a_trace(folder):
    # 4 GB of output: some seconds of work; the inputs take no room
    tensors = {f"w{number}": ("F16", (1 << 26,)) for number in range(32)}
    for name in ("long1", "long2"):
        write_sparse(folder / f"{name}.safetensors", tensors)
    host, runs = standalone([folder]), Runs()
    assert runs.latest is None
    runs.stop()
    long = request(MERGE, filled(A="long1.safetensors", B="long2.safetensors", name="long"), host)
    run = runs.start(long, host)
    assert runs.latest is run
    assert not run.over
    runs.stop()
    assert run.job.wait(30)
    assert (run.job.state, run.over) == ("stopped", True)
    assert not list(folder.glob("*long.*"))
    assert run.job.log
    again = runs.start(request(MERGE, filled(name="other"), host), host)
    assert again.job.wait(60)
    assert (again.job.state, runs.latest) == ("done", again)


# 49: a value that is not in the list any more


def test_49_a_model_that_went_is_named_and_the_form_stays(folder):
    host = standalone([folder])
    entered = filled(alpha=0.125, name="new")
    assert "b.safetensors" in host.models("checkpoint").names
    before = dict(entered)
    (folder / "b.safetensors").rename(folder / "moved.away")
    with pytest.raises(FormError) as caught:
        request(MERGE, entered, host)
    assert list(caught.value.fields) == ["B"]
    assert "b.safetensors is not there any more" in caught.value.what
    host.look_again()
    with pytest.raises(FormError, match=r"b\.safetensors is not among the models"):
        request(MERGE, entered, host)
    assert entered == before
    (folder / "moved.away").rename(folder / "b.safetensors")
    host.look_again()
    assert request(MERGE, entered, host).run(host).output.exists()


@pytest.mark.parametrize("name", sorted({*MERGE.first_values(), "A", "B"} - {"method", "device"}))
@pytest.mark.parametrize("empty", [None, "", []], ids=["None", "text", "list"])
def test_49_no_empty_entry_is_more_than_a_message(folder, name, empty):
    host = standalone([folder])
    try:
        request(MERGE, filled(**{name: empty}), host).run(host, dry_run=True).plan.close()
    except lib_merge.MergeError as error:
        assert error.what
    request(MERGE, filled(), host)


def test_49_a_name_with_a_hash_means_the_same_model(folder):
    asked = request(MERGE, filled(B="b.safetensors [3f9c1e07ab]"), standalone([folder]))
    assert asked.files["B"] == folder / "b.safetensors"


# 51: the library knows no host, and what the tab says the command line can do

ALONE = r"""
import importlib, importlib.util, pkgutil, sys
for name in ("modules", "gradio", "plotly"):
    sys.modules[name] = None
import lib_merge
needs = {"lib_merge.webui", "lib_merge.__main__"}
names = [item.name for item in pkgutil.walk_packages(lib_merge.__path__, "lib_merge.")]
for name in names:
    text = open(importlib.util.find_spec(name).origin, encoding="utf-8").read()
    if name.startswith("lib_merge.compiled."):  # only where numba is, and there with torch
        continue
    if name not in needs and "\nimport gradio" not in text and "\nfrom fastapi" not in text:
        importlib.import_module(name)
assert "torch" not in sys.modules
print(len(names))
"""


def test_51_the_library_loads_without_a_web_ui():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_51_a_recipe_of_the_tab_gives_the_same_bytes_on_the_command_line(folder, tmp_path):
    host = standalone([folder])
    asked = request(MERGE, filled(method="tensor_select", alpha=0.5, seed=11, exclude="x", name="tab"), host)
    (tmp_path / "recipe.json").write_text(form.recipe_text(asked))
    words = ["run", str(tmp_path / "recipe.json"), "-o", str(tmp_path / "cli.safetensors"), "--models", str(folder)]
    assert main(words) == 0
    assert (tmp_path / "cli.safetensors").read_bytes() == asked.run(host).output.read_bytes()
