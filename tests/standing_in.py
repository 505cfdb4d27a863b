"""Runs code inside a stand-in for a web UI: a process that finds `modules` as hosts lay it out, and our extension."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOSTS = ROOT / "tests" / "hosts"
FAMILIES = ("a1111", "reforge", "forge", "neo")
# What stands beside `modules` in each family.
_MORE = {"a1111": [], "reforge": ["reforge"], "forge": ["forge"], "neo": ["forge"]}
_PRELUDE = """
import json, os, sys, threading
from modules import call_queue, family, script_callbacks, scripts, sd_models, shared
from modules.cache import cache
sd_models.list_models()
scripts.load_scripts()
family.events.clear()
result = None
"""


def make_host(root: Path, extension: str = "lib_merge") -> Path:
    """The folders of a host, with our extension under any name."""
    for name in ("models/Stable-diffusion", "models/Lora", "models/VAE"):
        (root / name).mkdir(parents=True)
    place = root / "extensions" / extension
    place.mkdir(parents=True)
    for name in ("scripts", "lib_merge", "javascript", "style.css", "install.py", "preload.py", "metadata.ini"):
        (place / name).symlink_to(ROOT / name)
    return root


def environment(root: Path, family: str, options: dict[str, Any]) -> dict[str, str]:
    """The environment of a host's process."""
    path = [str(HOSTS), *(str(HOSTS / name) for name in _MORE[family])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "STAND_IN_HOST": family,
        "STAND_IN_ROOT": str(root),
        "STAND_IN_OPTIONS": json.dumps(options),
    }


def in_host(root: Path, family: str, code: str, **options: Any) -> Any:
    """What `code` leaves in `result`, run in the host with these command line options."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_PRELUDE}\n{code}\nprint(); print(json.dumps(result))"],
        capture_output=True,
        text=True,
        env=environment(root, family, options),
        cwd=root,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
