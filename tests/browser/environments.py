"""Environments with each gradio that a host or a user brings; they share the torch of the Python that runs the tests.

`python -m tests.browser.environments` builds them all and prints where they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# gradio -> what has to stand beside it: 3.41.2 as in A1111 and reForge, 4.40.0 as in Forge, the others as they come.
PINS: dict[str, tuple[str, ...]] = {
    "3.41.2": (
        "fastapi==0.94.0",
        "pydantic==1.10.20",
        "huggingface-hub==0.26.5",
        "httpx==0.24.1",
        "numpy==1.26.2",
        "pillow==9.5.0",
    ),
    "4.40.0": ("fastapi==0.104.1", "pydantic==2.8.2", "huggingface-hub==0.26.2", "httpx==0.24.1", "numpy==1.26.2"),
    "5.50.0": (),
    "6.31.0": (),
}
# What lib_merge itself needs beside gradio and torch.
OWN = ("click", "tqdm", "msgspec", "platformdirs", "safetensors", "pandas", "plotly")
# The packages of torch that are linked from the running Python instead of being installed once more.
_SHARED = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx")


def cache_folder() -> Path:
    """Where environments stay between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lib_merge-tests"


def python_of(gradio: str) -> Path:
    """Python of the environment with that gradio, built if it is not there yet.

    Raises:
        RuntimeError: it cannot be built; says what the installer said.
    """
    pins = (f"gradio=={gradio}", *PINS[gradio], *OWN)
    key = hashlib.sha256("\n".join([sys.version, *pins]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"gradio-{gradio}-{key}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _build(folder, python, pins)
            (folder / "complete").touch()
        _link_torch(python)
    return python


def _build(folder: Path, python: Path, pins: tuple[str, ...]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    uv = [sys.executable, "-m", "uv", "--quiet"]
    _run(*uv, "venv", "--python", sys.executable, folder)
    _run(*uv, "pip", "install", "--python", python, *pins)


def _link_torch(python: Path) -> None:
    """Point to the torch of the Python that runs the tests, which may have been another one before."""
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in (*_SHARED, f"torch-{metadata.version('torch')}.dist-info"):
        link, target = site / name, _torch_place() / name
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def _torch_place() -> Path:
    return Path(str(metadata.distribution("torch").locate_file("torch"))).resolve().parent


def _run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for version in PINS:
        print(version, python_of(version))
