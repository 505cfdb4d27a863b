"""The tab inside stand-ins for the web UIs, with the gradio that each of them pins."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.browser.conftest import ROOT, wait_for_page
from tests.browser.environments import python_of
from tests.browser.tab import Tab, until
from tests.standing_in import environment, make_host

pytestmark = pytest.mark.browser

# Host, its gradio, and how it was started.
HOSTS = {
    "a1111 without a queue": ("a1111", "3.41.2", {"no_gradio_queue": True}),
    "neo": ("neo", "4.40.0", {}),
}


@dataclass(frozen=True)
class Serving:
    family: str
    url: str
    root: Path
    log: Path


@pytest.fixture(scope="module", params=list(HOSTS))
def host(request, tmp_path_factory, samples):
    family, gradio, options = HOSTS[request.param]
    root = make_host(tmp_path_factory.mktemp(family), "another name")
    models = root / "models" / "Stable-diffusion"
    (models / "sub").mkdir()
    (models / "one.safetensors").write_bytes((samples / "models" / "base.safetensors").read_bytes())
    (models / "sub" / "two.safetensors").write_bytes((samples / "models" / "style.safetensors").read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = root / "log"
    env = environment(root, family, options) | {"GRADIO_ANALYTICS_ENABLED": "False"}
    words = [str(python_of(gradio)), str(ROOT / "tests" / "browser" / "host_page.py"), str(port)]
    with log.open("w") as said:
        process = subprocess.Popen(words, cwd=root, env=env, stdout=said, stderr=said)
    try:
        wait_for_page(process, f"http://127.0.0.1:{port}/", log)
        yield Serving(family, f"http://127.0.0.1:{port}/", root, log)
    finally:
        process.kill()
        process.wait()


def test_a_merge_in_a_host(browser, host):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = Tab(context.new_page(), host.url)
    tab.open()
    assert tab.page.locator("#tab_merge_tab #merge_root").count() >= 1
    tab.choose("A", "one.safetensors")
    tab.choose("B", "sub/two.safetensors")
    tab.wait_plan("1,130 merged")
    assert "\u8a33" in tab.page.inner_text("#merge_root")  # the page was translated under us
    tab.merge()
    assert "Merged" in tab.made("one+two")
    made = next(path for path in (host.root / "models" / "Stable-diffusion").iterdir() if "+" in path.name)
    assert made.name in tab.status()
    tab.page.click("#merge_use")
    until(lambda: "uses" in tab.page.inner_text("#merge_note_use"), tab.page)
    assert not tab.complaints, "\n".join([*tab.complaints, host.log.read_text()])
    # nothing of ours is kept in the host's own file of defaults
    assert json.loads((host.root / "ui-config.json").read_text()) == []
    tab.close()
