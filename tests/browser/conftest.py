"""Servers with each gradio, and pages of a real Chromium."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.browser.environments import PINS, python_of
from tests.browser.tab import Tab
from tests.support import write_sparse

ROOT = Path(__file__).resolve().parent.parent.parent
CHROMIUM = "chromium"
STARTING_S = 180
# 2 GB a model that take no room on the disk: a merge of some seconds at least
LONG = {f"model.diffusion_model.w{number}": ("F16", (1 << 26,)) for number in range(16)}


@dataclass(frozen=True)
class Server:
    """A standalone tab in a process of its own, on a folder of its own."""

    url: str
    models: Path
    loras: Path
    log: Path
    data: Path


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> Path:
    """Three small checkpoints, a pair to fold into, two LoRAs and an adapter, in the folders `models` and `loras`."""
    from lib_merge.samples import make_sample
    from tests.browser.loras import make_lora
    from tests.fold.making import Pair

    folder = tmp_path_factory.mktemp("samples")
    models, loras = folder / "models", folder / "loras"
    for each in (models, loras):
        each.mkdir()
    for number, name in enumerate(("base", "style", "portraits")):
        make_sample(models / f"{name}.safetensors", number)
    for number, name in enumerate(("ink", "mira")):
        make_lora(loras / f"{name}.safetensors", number)
    pair = Pair(models / "pair")
    pair.adapter()
    (models / "pair" / "adapter").rename(loras / "adapter")
    return folder


@pytest.fixture(scope="session", params=list(PINS))
def server(request, tmp_path_factory, samples) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"gradio-{request.param}")
    shutil.copytree(samples, folder, dirs_exist_ok=True)
    models, loras = folder / "models", folder / "loras"
    (models / "long").mkdir()
    for name in ("one", "two"):
        write_sparse(models / "long" / f"{name}.safetensors", LONG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "lib_merge.app", "--checkpoints", str(models), "--loras", str(loras), "--port", str(port)]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LIB_MERGE_CACHE": str(folder / "cache"),
        "LIB_MERGE_DATA": str(folder),
    }
    log = folder / "log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [str(python_of(request.param)), *words], cwd=folder, env=env, stdout=said, stderr=said
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        wait_for_page(process, url, log)
        yield Server(url, models, loras, log, folder)
    finally:
        process.kill()
        process.wait()


def wait_for_page(process: Any, url: str, log: Path) -> None:
    """Wait until a server answers; an early end of its process is an error that shows what it said."""
    deadline = time.monotonic() + STARTING_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no answer\n{log.read_text()}"
            time.sleep(0.2)
        else:
            return


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which(CHROMIUM)
    assert path, "no chromium on PATH: install Debian's package"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser, server) -> Iterator[Tab]:
    """A page of its own for each test, which may leave nothing in the console and nothing running."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = Tab(context.new_page(), server.url)
    yield opened
    opened.close()
    assert not opened.complaints, "\n".join([*opened.complaints, server.log.read_text()[-2000:]])
