"""The HTTP routes on a FastAPI app as hosts have one."""

from __future__ import annotations

import json
import time

import pytest

from lib_merge.host import standalone
from tests.support import values, write
from tests.ui.test_api import RECIPE

pytestmark = pytest.mark.gradio

USERS = {"ann": "one:two", "bob": "three"}


@pytest.fixture
def call(tmp_path):
    """Calls an app with the routes: (users, method, path, body, name and password) -> (status, answer)."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from lib_merge.ui.routes import add_routes

    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), number)})

    def make(users, method, path, body=None, auth=None, headers=None):
        app = FastAPI()
        add_routes(app, standalone([tmp_path]), users)
        client = TestClient(app)
        given = {"content": body, "headers": headers} if headers else {"json": body} if body is not None else {}
        answer = client.request(method, f"/lib-merge/v1/{path}", auth=auth, **given)
        return answer.status_code, answer.json()

    return make


def test_a_run_from_call_to_result(call, tmp_path):
    status, begun = call({}, "POST", "merge", {"recipe": json.loads(RECIPE), "name": "by call"})
    assert status == 200, begun
    for _ in range(3000):
        status, told = call({}, "GET", f"jobs/{begun['job']}")
        if told["state"] not in ("waiting", "running"):
            break
        time.sleep(0.02)
    assert (status, told["state"]) == (200, "done")
    assert (tmp_path / "by call.safetensors").exists()
    assert begun["job"] in [job["job"] for job in call({}, "GET", "jobs")[1]["jobs"]]
    assert call({}, "POST", f"jobs/{begun['job']}/stop")[1]["state"] == "done"
    assert call({}, "GET", "models/checkpoint")[1]["models"][0] == "a.safetensors"
    assert call({}, "POST", "plan", {"recipe": RECIPE})[1]["counts"]["merged"] == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "merge"), ("POST", "plan"), ("GET", "jobs"), ("GET", "jobs/x"), ("POST", "jobs/x/stop"),
     ("GET", "models/lora")],
)  # fmt: skip
def test_the_hosts_passwords_are_asked_for_everywhere(call, method, path):
    body = {"recipe": RECIPE} if method == "POST" else None
    for auth in (None, ("ann", "one"), ("ann", ""), ("carl", ""), ("bob", "one:two")):
        assert call(USERS, method, path, body, auth)[0] == 401
    for auth in USERS.items():
        assert call(USERS, method, path, body, auth)[0] != 401


def test_what_a_page_of_another_site_could_send_is_refused(call):
    assert call({}, "POST", "merge", json.dumps({"recipe": RECIPE}), headers={"content-type": "text/plain"})[0] == 415


def test_wrong_calls_say_why(call):
    assert call({}, "POST", "merge", {"recipe": RECIPE, "name": "../x"})[0] == 400
    assert call({}, "POST", "bake", {"recipe": RECIPE})[0] == 400
    assert call({}, "POST", "merge", {"recipe": RECIPE, "out": "/tmp/x"})[1]["error"] == "a call has no entry out"
    for path in ("jobs/nobody", "jobs/..%2F..%2Fetc", "models/%2Fetc"):
        status, told = call({}, "GET", path)
        assert status == 404
        assert "error" in told or told["detail"] == "Not Found"
