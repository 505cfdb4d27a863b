"""The web UIs' modules as each family has them: folders, hashes, lists, the model in use, progress, the GPU."""

from __future__ import annotations

import hashlib

import pytest

from tests.standing_in import FAMILIES, in_host, make_host
from tests.support import values, write

each_family = pytest.mark.parametrize("family", FAMILIES)
HOST = "from lib_merge import webui\nhost = webui.host()\n"


@pytest.fixture
def root(tmp_path):
    """A host with two checkpoints, one of them in a sub-folder, and a VAE beside them."""
    made = make_host(tmp_path / "host", "my own merger")
    models = made / "models" / "Stable-diffusion"
    (models / "sub").mkdir()
    for number, name in enumerate(("one", "sub/two", "one.vae")):
        write(models / f"{name}.safetensors", {"w": values((4, 4), number)})
    return made


@each_family
def test_folders_and_names(root, tmp_path, family):
    more = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(more):
        folder.mkdir()
        write(folder / "one.safetensors", {"w": values((4, 4), 7 + number)})
    given = {"ckpt_dirs": [*map(str, more)]} if family == "neo" else {"ckpt_dir": str(more[0])}
    found = in_host(
        root,
        family,
        HOST + "result = [host.models('checkpoint').names, host.models('vae').names,"
        " [str(p) for p in host.save_folders('checkpoint').values()]]",
        **given,
    )
    names, vaes, targets = found
    own = str(root / "models" / "Stable-diffusion")
    used = more if family == "neo" else more[:1]
    assert names == sorted([*(f"one.safetensors ({place})" for place in (own, *used)), "sub/two.safetensors"])
    assert vaes == ["one.vae.safetensors"]
    # the first is where the host's own merger saves
    assert targets == ([own, *map(str, more)] if family == "neo" else [str(more[0]), own])


@each_family
def test_presets_lie_with_what_belongs_to_the_host(root, family):
    assert in_host(root, family, HOST + "result = str(host.data())") == str(root / "merge_tab")


@each_family
def test_the_chosen_checkpoint_comes_first_whatever_its_title(root, family):
    code = HOST + (
        "info = sd_models.checkpoint_aliases['two']\n"
        "result = []\n"
        "for value in (None, info.title, info.name, info.title + ' [0123456789]', 'gone'):\n"
        "    shared.opts.sd_model_checkpoint = value\n"
        "    found = host.loaded()\n"
        "    result.append(found and os.path.relpath(found, sd_models.model_path))\n"
        "models = host.models('checkpoint')\n"
        "result += [models.resolve(v).name for v in sd_models.checkpoint_tiles() if 'two' in v]\n"
        "result.append(models.resolve('sub/two.safetensors [0123456789]').name)\n"
    )
    two = "sub/two.safetensors"
    assert in_host(root, family, code) == [None, two, two, two, None, "two.safetensors", "two.safetensors"]


@each_family
def test_hashes_are_shared(root, family):
    code = HOST + (
        "from pathlib import Path\n"
        "one, two = (Path(sd_models.checkpoint_aliases[n].filename) for n in ('one', 'two'))\n"
        "cache('hashes')['checkpoint/sub/two.safetensors'] = {'mtime': os.path.getmtime(two), 'sha256': 'ab' * 32}\n"
        "known = host.hashes()\n"
        "result = [known.get(one), known.get(two), known.compute(one), cache('hashes')['checkpoint/one.safetensors']]\n"
        "os.utime(two, (2e9, 2e9))\n"
        "result.append(known.get(two))\n"
    )
    one = root / "models" / "Stable-diffusion" / "one.safetensors"
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    cached = {"mtime": one.stat().st_mtime, "sha256": digest}
    assert in_host(root, family, code) == [None, "ab" * 32, digest, cached, None]


USING = {
    "a1111": ["list_models", "loaded sub/two.safetensors"],
    "reforge": ["list_models", "loaded sub/two.safetensors"],
    "forge": ["list_models", "checkpoint_change sub/two.safetensors"],
    "neo": ["list_models", "checkpoint_change sub/two.safetensors"],
}


@each_family
def test_use_this_model_now(root, family):
    code = HOST + (
        "from pathlib import Path\n"
        "path = Path(sd_models.model_path, 'sub/two.safetensors')\n"
        "host.use(path)\n"
        "result = [family.events, shared.opts.sd_model_checkpoint]\n"
    )
    assert in_host(root, family, code) == [USING[family], "sub/two.safetensors"]


def test_a_model_that_cannot_be_used_says_why(root):
    code = HOST + (
        "from pathlib import Path\n"
        "from lib_merge import MergeError\n"
        "result = []\n"
        "def attempt(path):\n"
        "    try: host.use(path)\n"
        "    except MergeError as error: result.append(error.what)\n"
        "attempt(Path('elsewhere.safetensors'))\n"
        "shared.opts.frozen = True\n"
        "attempt(Path(sd_models.model_path, 'one.safetensors'))\n"
    )
    said = in_host(root, "a1111", code)
    assert said[0] == "the host does not list this file"
    assert said[1].startswith("the host's settings are frozen")


@each_family
def test_lists_are_refreshed_by_kind(root, family):
    code = HOST + (
        "import types\n"
        "listed = lambda: family.events.append('loras')\n"
        "sys.modules['networks'] = types.SimpleNamespace(available_networks={}, list_available_networks=listed)\n"
        "for kind in ('checkpoint', 'lora', 'vae'): host.refresh(kind)\n"
        "result = family.events"
    )
    assert in_host(root, family, code) == ["list_models", "loras", "refresh_vae_list"]


FOLLOWING = HOST + (
    "from lib_merge import CancelToken, Progress\n"
    "state, cancel, seen, result = shared.state, CancelToken(), [], []\n"
    "with host.follow('a title', cancel, seen.append) as told:\n"
    "    result.append([state.job != '', state.textinfo, state.job_count])\n"
    "    told(Progress('merging', 1, 4))\n"
    "    result.append([state.sampling_step / state.sampling_steps, cancel.cancelled])\n"
    "    BETWEEN\n"
    "    told(Progress('merging', 2, 4))\n"
    "    result.append([cancel.cancelled, len(seen)])\n"
    "result.append(state.job)\n"
)


def test_the_hosts_progress_and_interrupt(root):
    said = in_host(root, "a1111", FOLLOWING.replace("BETWEEN", "state.interrupt()"))
    assert said == [[True, "a title", 1], [0.25, False], [True, 2], ""]


def test_a_generation_keeps_its_own_progress(root):
    # begun meanwhile: its progress is left alone, and its Interrupt is not ours
    said = in_host(
        root,
        "a1111",
        FOLLOWING.replace("BETWEEN", "state.begin('task(x)'); state.interrupt()")
        + "result.append(state.sampling_step)",
    )
    assert said == [[True, "a title", 1], [0.25, False], [False, 2], "task(x)", 0]
    # before: likewise
    before = FOLLOWING.replace("with host", "state.begin('task(y)')\nwith host").replace("BETWEEN", "state.interrupt()")
    before = before.replace("state.sampling_step / state.sampling_steps", "state.sampling_step")
    said = in_host(root, "a1111", before)
    assert said == [[True, None, -1], [0, False], [False, 2], "task(y)"]


UNLOADING = {
    "a1111": [["model to cpu", "torch_gc"], ["torch_gc", "model to device"]],
    "reforge": [["unload_all_models", "torch_gc"], ["torch_gc"]],
    "forge": [["unload_all_models", "torch_gc"], ["torch_gc"]],
    "neo": [["unload_all_models", "torch_gc"], ["torch_gc"]],
}


@each_family
def test_the_gpu_is_ours_for_a_while(root, family):
    code = HOST + (
        "sd_models.model_data.sd_model = 'model'\n"
        "with host.gpu():\n"
        "    result = [list(family.events), call_queue.queue_lock.owner == threading.get_ident()]\n"
        "    family.events.clear()\n"
        "result += [family.events, call_queue.queue_lock.owner, getattr(sd_models.model_data, 'forge_hash', '')]\n"
    )
    before, after = UNLOADING[family]
    assert in_host(root, family, code) == [before, True, after, None, ""]


@each_family
def test_a_merge_on_the_cpu_takes_no_lock(root, family):
    code = HOST + (
        "from lib_merge.ui import runs\n"
        "from lib_merge.ui.form import request\n"
        "from lib_merge.ui.tasks.registry import BY_ID\n"
        "task = BY_ID['merge']\n"
        "values = {**task.first_values(), 'A': 'one.safetensors', 'B': 'sub/two.safetensors', 'name': 'sub/new'}\n"
        "asked = request(task, values, host)\n"
        "with call_queue.queue_lock:\n"  # a generation that goes on
        "    run = runs.RUNS.start(asked, host)\n"
        "    assert run.job.wait(60), 'it waits for the lock'\n"
        "if run.job.error: raise run.job.error\n"
        "listed = 'sub/new.safetensors' in sd_models.checkpoint_aliases\n"
        "result = [family.events, listed, list(run.job.result.warnings)]\n"
    )
    events, listed, warnings = in_host(root, family, code)
    assert events == ["list_models"]
    assert listed
    assert warnings == []


def test_a_result_stays_whatever_the_hosts_list_does(root):
    code = HOST + (
        "def broken(): raise KeyError('odd')\n"
        "from dataclasses import replace\n"
        "from lib_merge.ui import runs\n"
        "from lib_merge.ui.form import request\n"
        "from lib_merge.ui.tasks.registry import BY_ID\n"
        "host = replace(host, refresh=lambda kind: {}['odd'])\n"
        "task = BY_ID['merge']\n"
        "values = {**task.first_values(), 'A': 'one.safetensors', 'B': 'sub/two.safetensors', 'name': 'new'}\n"
        "run = runs.RUNS.start(request(task, values, host), host)\n"
        "run.job.wait(60)\n"
        "result = [run.job.state, list(run.job.result.warnings)]\n"
    )
    state, warnings = in_host(root, "forge", code)
    assert state == "done"
    assert "were not refreshed" in warnings[0]
    assert (root / "models" / "Stable-diffusion" / "new.safetensors").exists()


@each_family
def test_reload_ui_twice(root, family):
    code = (
        "import lib_merge\n"
        "first = lib_merge\n"
        "counts = []\n"
        "for _ in range(2):\n"
        "    scripts.load_scripts()\n"
        "    counts.append(len(script_callbacks._ui_tabs))\n"
        # what is imported only now is found although the path may have been restored
        "import lib_merge.ui.tasks.registry\n"
        "import lib_merge.ui.form as form\n"
        "extension = os.path.dirname(os.path.dirname(lib_merge.__file__))\n"
        "result = [counts, sys.modules['lib_merge'] is first, [n for n in sys.modules if n.endswith('.py')], "
        "extension in sys.path]"
    )
    counts, same, own, on_path = in_host(root, family, code)
    assert (counts, same, own) == ([1, 1], True, [])
    assert on_path is (family != "a1111")


def test_the_entry_costs_a_host_little(root):
    # what every host has loaded by then is not ours to count
    code = (
        "import time, numpy, pandas, click, tqdm, sqlite3\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'lib_merge']: del sys.modules[name]\n"
        "start = time.process_time()\n"
        "scripts.load_scripts()\n"
        "result = [time.process_time() - start, 'torch' in sys.modules, 'gradio' in sys.modules]\n"
    )
    seconds, torch, gradio = min(in_host(root, "a1111", code) for _ in range(3))
    assert seconds < 0.3
    assert not torch
    assert not gradio


@pytest.mark.parametrize("package", ["msgspec", "platformdirs"])
def test_without_a_package_the_tab_says_what_to_install(root, package):
    code = (
        f"sys.modules[{package!r}] = None\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'lib_merge']: del sys.modules[name]\n"
        "import types\n"
        "said = []\n"
        "class Blocks:\n"
        "    def __init__(self, **options): pass\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *exc): pass\n"
        "sys.modules['gradio'] = types.SimpleNamespace(Blocks=Blocks, HTML=said.append)\n"
        "scripts.load_scripts()\n"
        "(tab,) = script_callbacks.ui_tabs_callback()\n"
        "result = [tab[1:], said]\n"
    )
    title, said = in_host(root, "forge", code)
    assert title == ["Merge", "merge_tab"]
    assert len(said) == 1
    assert package in said[0]


def test_no_plotly_changes_nothing(root):
    code = "sys.modules['plotly'] = None\nimport lib_merge.ui.form, lib_merge.ui.cards\n" + HOST + "result = host.name"
    assert in_host(root, "forge", code) == "Forge"


INSTALL = """
import sys, types, runpy
told = []
def run_pip(command, what):
    told.append(command)
    if 'plotly' in command: raise RuntimeError('no network')
installed = set(sys.argv[1].split(','))
sys.modules['launch'] = types.SimpleNamespace(is_installed=installed.__contains__, run_pip=run_pip)
runpy.run_path(sys.argv[2], run_name='__main__')
print(told)
"""


def test_install_adds_only_what_is_missing():
    import subprocess
    import sys

    from tests.standing_in import ROOT

    def told(*installed):
        words = [sys.executable, "-c", INSTALL, ",".join(installed), str(ROOT / "install.py")]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert told("click", "tqdm", "msgspec", "platformdirs", "plotly").strip() == "[]"
    assert told("click", "tqdm").splitlines()[-1] == "['install msgspec', 'install platformdirs', 'install plotly']"
    assert "no network" in told("click", "tqdm")


def test_preload_adds_options_of_its_own():
    import argparse
    import runpy

    from tests.standing_in import ROOT

    parser = argparse.ArgumentParser()
    runpy.run_path(str(ROOT / "preload.py"))["preload"](parser)
    assert parser.parse_args(["--merge-threads", "3"]).merge_threads == 3
    assert all(name.startswith("merge_") for name in vars(parser.parse_args([])))


@each_family
def test_the_routes_follow_the_hosts_own_api(root, family):
    code = (
        "from lib_merge import webui\n"
        "class App:\n"
        "    def __init__(self): self.paths = []\n"
        "    def add_api_route(self, path, endpoint, **more): self.paths.append([path, len(more['dependencies'])])\n"
        "import sys, types\n"
        "app = App()\n"
        "try:\n"
        "    script_callbacks.app_started_callback(None, app)\n"
        "except ModuleNotFoundError as error:\n"  # fastapi comes with gradio, which the default tier lacks
        "    app = str(error)\n"
        "result = [webui.api_users(), app if isinstance(app, str) else app.paths]\n"
    )
    users, paths = in_host(root, family, code)
    assert (users, paths) == (None, [])
    for given, expected in [(None, {}), ("ann:x:y,bob:z", {"ann": "x:y", "bob": "z"}), ("no colon", None)]:
        users, paths = in_host(root, family, code, api=True, api_auth=given)
        assert users == expected
        assert bool(paths) is (expected is not None)
