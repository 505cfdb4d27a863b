"""The command that opens the tab: what it refuses, and the page it serves."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lib_merge.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no folder of checkpoints"),
        (["--checkpoints", "no such folder"], "no such folder"),
        (["--webui", "no such folder"], "no such folder"),
        (["--demo", "--listen"], "--auth USER:PASS"),
        (["--demo", "--auth", "nobody"], "--auth USER:PASS"),
        (["--demo", "--auth", ":x"], "--auth USER:PASS"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["app", *words]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_gradio_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    for name in [name for name in sys.modules if name.startswith("lib_merge.ui")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["app", "--checkpoints", str(tmp_path)]) == 1
    assert "pip install 'lib_merge[app]'" in capsys.readouterr().err


def test_the_folders_of_a_web_ui(tmp_path):
    from lib_merge.cli.serving import _folders

    for name in ("Stable-diffusion", "Lora"):  # it has no VAE yet
        (tmp_path / "models" / name).mkdir(parents=True)
    own = tmp_path / "models"
    found = _folders(["mine"], [], str(tmp_path))
    assert found == {"checkpoint": [Path("mine"), own / "Stable-diffusion"], "lora": [own / "Lora"], "vae": []}


@pytest.fixture
def served(tmp_path):
    """Starts the command; gives its address once it has printed it."""
    running = []

    def serve(*words):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "lib_merge.app", *words]
        process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)
        running.append(process)
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                return found[0]
        raise AssertionError(f"ended with {process.wait()}")

    yield serve
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.gradio
def test_the_demo_answers_on_this_machine_only(served, tmp_path):
    url = served("--demo")
    assert url.startswith("http://127.0.0.1:")
    start = time.monotonic()
    page = urllib.request.urlopen(url, timeout=30).read()
    print(f"\npage in {time.monotonic() - start:.3f} s")
    assert b"gradio" in page
    assert len(list((tmp_path / "lib_merge_demo").glob("*.safetensors"))) == 3


@pytest.mark.gradio
def test_others_may_come_in_with_a_password(served, tmp_path):
    url = served("--checkpoints", str(tmp_path), "--listen", "--auth", "me:secret").replace("0.0.0.0", "127.0.0.1")
    config = urllib.request.Request(f"{url}config")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(config, timeout=30)
    assert caught.value.code == 401
    wrong = base64.b64encode(b"me:secret").decode()
    config.add_header("Authorization", f"Basic {wrong}")  # it asks for a login in the page, not for this
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(config, timeout=30)
    form = urllib.request.Request(f"{url}login", data=b"username=me&password=secret", method="POST")
    answer = urllib.request.urlopen(form, timeout=30)
    cookie = answer.headers["set-cookie"].split(";")[0]
    known = urllib.request.Request(f"{url}config", headers={"Cookie": cookie})
    assert urllib.request.urlopen(known, timeout=30).status == 200
