"""The named endpoints, called with the gradio_client that comes with each gradio."""

from __future__ import annotations

import json
import subprocess

import pytest

import lib_merge
from tests.browser.environments import python_of

pytestmark = pytest.mark.browser

# As docs/api.md has it; says what the job and a refused call answered.
CODE = """
import json, sys, time
from gradio_client import Client

url, recipe = sys.argv[1:]
client = Client(url)
names = json.loads(client.predict("checkpoint", api_name="/models"))["models"]
plan = json.loads(client.predict(recipe, "called", "", "", "stop", api_name="/plan"))
job = json.loads(client.predict(recipe, "called", "", "", "stop", api_name="/merge"))
while job.get("state") in ("waiting", "running"):
    time.sleep(0.2)
    job = json.loads(client.predict(job["job"], api_name="/job"))
refused = json.loads(client.predict(recipe, "../out", "", "", "number", api_name="/merge"))
stopped = json.loads(client.predict(job["job"], api_name="/stop"))
print(json.dumps([names, plan, job, refused, stopped["state"]]))
"""


def test_a_script_merges_through_the_tab(server, request, tmp_path):
    recipe = {
        "lib_merge": 1,
        "task": "merge",
        "method": "weighted_sum",
        "params": {"alpha": 0.375},
        "models": {"A": {"file": "base.safetensors"}, "B": {"file": "style.safetensors"}},
    }
    version = request.node.callspec.params["server"]
    done = subprocess.run(
        [str(python_of(version)), "-W", "ignore", "-c", CODE, server.url, json.dumps(recipe)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, plan, job, refused, stopped = json.loads(done.stdout.splitlines()[-1])
    assert {"base.safetensors", "style.safetensors"} <= set(names)
    assert plan["counts"]["merged"] == 1130
    assert (job["state"], job["result"]["output"], stopped) == ("done", "called.safetensors", "done")
    assert "leads out" in refused["error"]
    direct = lib_merge.run(
        lib_merge.recipe.from_json(json.dumps(recipe)), out=tmp_path / "out.safetensors", models=[server.models]
    )
    assert direct.output.read_bytes() == (server.models / "called.safetensors").read_bytes()
    (server.models / "called.safetensors").unlink()
