"""The calls of other programs: the same runs as the form's, and no way out of the folders."""

from __future__ import annotations

import json
import os
import time

import pytest

import lib_merge
from lib_merge.errors import FileError, MergeError, OutputError, RecipeError
from lib_merge.host import standalone
from lib_merge.ui import api
from tests.support import values, write
from tests.test_bake import Q, V, base, lora

SLOTS = {"A": {"file": "a.safetensors"}, "B": {"file": "b.safetensors"}}
RECIPE = json.dumps(
    {"lib_merge": 1, "task": "merge", "method": "weighted_sum", "params": {"alpha": 0.25}, "models": SLOTS}
)


@pytest.fixture
def place(tmp_path):
    """Folders of a host, and a file beside them that nobody may reach."""
    for name in ("models/sub", "loras", "outside"):
        (tmp_path / name).mkdir(parents=True)
    for number, name in enumerate(("models/a", "models/b", "models/sub/b", "outside/secret")):
        write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), number)})
    return tmp_path


@pytest.fixture
def host(place):
    return standalone([place / "models"], [place / "loras"])


def over(host, id):
    deadline = time.monotonic() + 60
    while (told := api.job(host, id))["state"] in ("waiting", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return told


def files_of(place):
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


CHOSEN = json.dumps({"B": "b.safetensors"})


def test_a_call_makes_what_the_library_makes(host, place):
    begun = api.submit(host, "merge", RECIPE, "sub/new", CHOSEN, "", "number")
    assert begun["state"] in ("waiting", "running", "done")
    told = over(host, begun["job"])
    assert told["state"] == "done", told
    assert {**told["result"], "seconds": 0}.items() >= {"output": "sub/new.safetensors", "folder": "models"}.items()
    assert (told["share"], told["result"]["merged"]) == (1.0, 1)
    direct = lib_merge.run(
        lib_merge.recipe.from_json(RECIPE),
        out=place / "outside" / "direct.safetensors",
        files={slot: place / "models" / f"{slot.lower()}.safetensors" for slot in "AB"},
    )
    assert (place / "models/sub/new.safetensors").read_bytes() == direct.output.read_bytes()
    assert told["job"] in [job["job"] for job in api.jobs(host)["jobs"]]
    assert json.loads(json.dumps(told)) == told
    assert str(place) not in json.dumps(told)


def test_every_call_has_a_task_and_every_task_a_call(host):
    from lib_merge.ui.tasks.registry import TASKS

    assert set(api.CALLS.values()) == {task.id for task in TASKS}
    with pytest.raises(RecipeError, match="task merge") as caught:
        api.submit(host, "bake", RECIPE, "", CHOSEN)
    assert caught.value.hint == "call merge"


def test_a_model_that_is_there_twice_must_be_chosen(host):
    with pytest.raises(FileError, match=r"model B: b\.safetensors is there 2 times: b\.safetensors, sub/b"):
        api.plan(host, RECIPE)
    assert api.plan(host, RECIPE, "", CHOSEN)["output"] == "a+b weighted_sum 0.25.safetensors"
    chosen = json.dumps({"B": "sub/b.safetensors"})
    assert api.request_of(host, RECIPE, "", chosen).files["B"].parent.name == "sub"


def test_a_plan_counts_and_writes_nothing(host, place):
    before = files_of(place)
    told = api.plan(host, RECIPE, "new", CHOSEN)
    assert told["counts"]["merged"] == 1
    assert told["output_bytes"] > 9 * 9 * 4
    assert files_of(place) == before


def test_loras_are_baked_by_a_call(place):
    base(place / "models" / "base.safetensors")
    lora(place / "loras" / "ink.safetensors", Q, V)
    host = standalone([place / "models"], [place / "loras"])
    recipe = {"lib_merge": 1, "task": "bake", "models": {"A": {"file": "base.safetensors"}},
              "loras": [{"file": "ink.safetensors", "strength": 0.5}]}  # fmt: skip
    told = over(host, api.submit(host, "bake", json.dumps(recipe), "baked")["job"])
    assert told["result"]["merged"] == 2
    direct = lib_merge.bake(
        place / "models" / "base.safetensors",
        (place / "loras" / "ink.safetensors", 0.5),
        out=place / "outside" / "direct.safetensors",
    )
    assert (place / "models" / "baked.safetensors").read_bytes() == direct.output.read_bytes()


OUT = (
    "../escaped", "..\\escaped", "sub/../../escaped", "/tmp/escaped", "C:\\escaped", "C:escaped", "c:/escaped",
    "\\\\server\\share\\escaped", "//server/share/escaped", "sub/./escaped", "link/escaped", "x\0y", "~/../escaped",
)  # fmt: skip


@pytest.mark.parametrize("name", OUT)
def test_no_name_leads_out_of_the_folder(host, place, name):
    (place / "models" / "link").symlink_to(place / "outside", target_is_directory=True)
    before = files_of(place)
    with pytest.raises(OutputError):
        api.submit(host, "merge", RECIPE, name, CHOSEN)
    with pytest.raises(OutputError):
        api.plan(host, RECIPE, name, CHOSEN)
    assert files_of(place) == before


@pytest.mark.parametrize("name", ["%2e%2e%2fescaped", "..%2Fescaped", "%2Ftmp%2Fescaped"])
def test_a_name_is_decoded_by_nobody(host, place, name):
    told = over(host, api.submit(host, "merge", RECIPE, name, CHOSEN)["job"])
    assert told["result"]["output"] == f"{name}.safetensors"
    assert (place / "models" / f"{name}.safetensors").exists()


@pytest.mark.parametrize("folder", ["..", "/tmp", "outside", "models/../outside", "C:\\"])
def test_no_other_folder_is_written_to(host, place, folder):
    before = files_of(place)
    with pytest.raises(OutputError, match="no folder"):
        api.submit(host, "merge", RECIPE, "new", CHOSEN, folder)
    assert files_of(place) == before


@pytest.mark.parametrize(
    "path",
    ["../outside/secret.safetensors", "/etc/passwd", "sub/../../outside/secret.safetensors",
     "..\\outside\\secret.safetensors", "C:\\secret.safetensors", "%2e%2e/outside/secret.safetensors",
     "secret.safetensors", ""],
)  # fmt: skip
def test_no_file_is_read_that_the_lists_do_not_name(host, place, path):
    for wanted in (path, str(place / "outside" / "secret.safetensors")):
        with pytest.raises(MergeError):
            api.plan(host, RECIPE, "new", json.dumps({"A": wanted, "B": wanted or "x"}))
        inside = {**SLOTS, "A": {"file": wanted}}
        recipe = json.dumps({"lib_merge": 1, "task": "merge", "method": "weighted_sum", "models": inside})
        with pytest.raises(MergeError):
            api.plan(host, recipe, "new", CHOSEN)


def test_what_cannot_be_read_is_answered_with_what_to_do(host):
    for values_, said in [
        (("{",), "not JSON"),
        ((RECIPE, "", "[]"), "no JSON object"),
        ((RECIPE, "", "{"), "files is no JSON"),
        ((RECIPE, "", json.dumps({"D": "b.safetensors"})), "no model D"),
        ((RECIPE, "", CHOSEN, "", "replace"), "exists is 'replace'"),
        ((json.dumps({"lib_merge": 1, "task": "fly"}),), "fly"),
    ]:
        answer = api.answered(api.plan, host, *values_)
        assert said in answer["error"], answer
    assert "no run" in api.answered(api.job, host, "../../x")["error"]
    assert "no run" in api.answered(api.stop, host, "nobody")["error"]
    assert "no kind" in api.answered(api.models, host, "/etc")["error"]
    odd = RECIPE.replace("weighted_sum", "weihgted_sum")
    answer = api.answered(api.submit, host, "merge", odd, "", CHOSEN)
    assert "weighted_sum" in json.dumps(answer)
    assert os.sep not in answer.get("file", "")


def test_the_lists_name_what_calls_take(host):
    told = api.models(host, "checkpoint")
    assert told == {"models": ["a.safetensors", "b.safetensors", "sub/b.safetensors"], "folders": ["models"]}


def test_a_call_is_a_json_object_of_known_entries():
    recipe = json.loads(RECIPE)
    assert api.texts(json.dumps({"recipe": recipe, "files": {"B": "x"}})) == [
        json.dumps(recipe), "", json.dumps({"B": "x"}), "", "number"
    ]  # fmt: skip
    for wrong in ("[]", "{", json.dumps({"out": "x"}), "[" * 100_000):
        with pytest.raises(RecipeError):
            api.texts(wrong)
