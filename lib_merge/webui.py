"""The web UIs around the tab: A1111, Forge, reForge, Forge Classic and Neo; the only file that imports their `modules`.

What differs from host to host is looked for, never told by a host's name or version.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modules import sd_models, shared

from .errors import MergeError
from .events import CancelToken, OnProgress, Progress
from .files.hashes import HashCache
from .host import Host, Kind

_STEPS = 100


def host() -> Host:
    """This web UI as the tab sees it."""
    return Host(
        name=_name(),
        folders=_folders,
        single_files=_single_files,
        hashes=_SharedHashes,
        loaded=_loaded,
        refresh=_refresh,
        use=_use,
        follow=_follow,
        gpu=_gpu,
        generators=_generators(),
        data=_data,
        threads=getattr(shared.cmd_opts, "merge_threads", None),
    )


def _optional(name: str) -> Any:
    """A module that only some hosts have, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _name() -> str:
    if _optional("backend.memory_management"):
        return "Forge"
    return "reForge" if _optional("ldm_patched.modules.model_management") else "the web UI"


def _generators() -> bool:
    """False where gradio 3 runs without its queue: there an event answers once."""
    version = getattr(_optional("gradio"), "__version__", "3")
    return not getattr(shared.cmd_opts, "no_gradio_queue", False) or int(version.split(".")[0]) >= 4


def api_users() -> dict[str, str] | None:
    """Name -> password of those who may call the host's API: empty for everybody, None for nobody."""
    if not (getattr(shared.cmd_opts, "api", False) or getattr(shared.cmd_opts, "nowebui", False)):
        return None
    given = getattr(shared.cmd_opts, "api_auth", None) or ""
    users = {user: password for user, colon, password in (entry.partition(":") for entry in given.split(",")) if colon}
    return None if given and not users else users  # what cannot be read opens nothing


# Folders


def _given(*options: str) -> list[Path]:
    """Folders of the command line that exist; an option may hold one, several or none, or be unknown to this host."""
    found: list[Path] = []
    for option in options:
        value = getattr(shared.cmd_opts, option, None)
        found += [Path(value)] if isinstance(value, (str, os.PathLike)) and str(value) else map(Path, value or ())
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _models_path(name: str) -> Path:
    from modules import paths

    return Path(paths.models_path) / name


def _folders(kind: Kind) -> Sequence[Path]:
    """Folders of a kind; first the one that the host's own merger saves to."""
    if kind == "checkpoint":
        own = Path(getattr(sd_models, "model_path", None) or _models_path("Stable-diffusion"))
        first, more = _given("ckpt_dir"), _given("ckpt_dirs")
        folders = [*first, own, *more]
    elif kind == "lora":
        folders = [*_given("lora_dir"), _models_path("Lora"), *_given("lora_dirs", "lyco_dir_backcompat")]
    else:
        folders = [_models_path("VAE"), *_given("vae_dir", "vae_dirs")]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _single_files(kind: Kind) -> Sequence[Path]:
    if kind == "checkpoint":
        given = getattr(shared.cmd_opts, "ckpt", None)
        return [Path(given)] if given else []
    if kind == "vae":
        return [path for folder in _folders("checkpoint") for path in folder.rglob("*.vae.*")]
    return []


def _data() -> Path:
    """Where presets and the history are kept: with what else belongs to this web UI."""
    from modules import paths

    return Path(paths.data_path) / "merge_tab"


# The host's lists


def _entry(path: Path) -> Any:
    """The host's own entry of a checkpoint, or None when it has not listed it."""
    real = os.path.realpath(path)
    return next((e for e in sd_models.checkpoints_list.values() if os.path.realpath(e.filename) == real), None)


def _loaded() -> Path | None:
    """The checkpoint that is chosen in the host; the model itself is not touched: some hosts would load it."""
    chosen = getattr(shared.opts, "sd_model_checkpoint", None)
    if not chosen:
        return None
    entry = getattr(sd_models, "checkpoint_aliases", {}).get(chosen)
    entry = entry or sd_models.get_closet_checkpoint_match(chosen)
    return Path(entry.filename) if entry else None


def _refresh(kind: Kind) -> None:
    if kind == "checkpoint":
        sd_models.list_models()
    elif kind == "lora" and (networks := sys.modules.get("networks")):
        networks.list_available_networks()
    elif kind == "vae" and (vaes := _optional("modules.sd_vae")):
        vaes.refresh_vae_list()


def _use(path: Path) -> None:
    """Make the host take a checkpoint from now on.

    Raises:
        MergeError: the host does not list it, or its settings are frozen.
    """
    sd_models.list_models()
    entry = _entry(path)
    if entry is None:
        raise MergeError("the host does not list this file", file=path, hint="refresh its list of checkpoints")
    change = getattr(_optional("modules_forge.main_entry"), "checkpoint_change", None)
    if change is not None:
        change(entry.name)
        return
    try:
        # Its own reaction to the change loads the model and takes the queue's lock, which must not be ours by then.
        shared.opts.set("sd_model_checkpoint", entry.title)
    except AssertionError as error:
        raise MergeError(f"the host's settings are frozen: {error}") from error
    shared.opts.save(shared.config_filename)


class _SharedHashes(HashCache):
    """Our remembered hashes and the host's: each learns from the other."""

    def get(self, path: Path) -> str | None:
        """The hash of a file that either of the two knows."""
        return super().get(path) or self._of_host(path)

    def compute(self, path: Path, stop: Callable[[], bool] = lambda: False) -> str:
        """The hash of a file, remembered in both."""
        digest = super().compute(path, stop)
        if digest and not self._of_host(path):
            self._tell_host(path, digest)
        return digest

    def _of_host(self, path: Path) -> str | None:
        title, hashes = self._title(path), _optional("modules.hashes")
        if not title or hashes is None:
            return None
        with suppress(Exception):  # the host's cache: whatever ails it, the hash can be computed
            return hashes.sha256_from_cache(str(path), title) or None
        return None

    def _tell_host(self, path: Path, digest: str) -> None:
        title, cache = self._title(path), _optional("modules.cache")
        if title and cache is not None:
            with suppress(Exception):  # as above
                cache.cache("hashes")[title] = {"mtime": path.stat().st_mtime, "sha256": digest}

    @staticmethod
    def _title(path: Path) -> str:
        """What the host remembers a file's hash by; empty when it has not listed the file."""
        entry = _entry(path)
        if entry is not None:
            return f"checkpoint/{entry.name}"
        networks = getattr(sys.modules.get("networks"), "available_networks", {})
        real = os.path.realpath(path)
        return next((f"lora/{n.name}" for n in networks.values() if os.path.realpath(n.filename) == real), "")


# Runs


@contextmanager
def _follow(title: str, cancel: CancelToken, on_progress: OnProgress) -> Iterator[OnProgress]:
    """Show a run in the host's progress and hear its Interrupt, as long as no generation needs them for itself."""
    state, mine = shared.state, f"merge({id(cancel):x})"
    if state.job:
        yield on_progress
        return
    state.begin(job=mine)
    state.textinfo, state.job_count, state.sampling_steps = title, 1, _STEPS

    def told(progress: Progress) -> None:
        if state.job == mine:
            if state.interrupted:
                cancel.cancel()
            state.sampling_step = _STEPS * progress.done_bytes // max(1, progress.total_bytes)
        on_progress(progress)

    try:
        yield told
    finally:
        if state.job == mine:
            state.end()


@contextmanager
def _gpu() -> Iterator[None]:
    """The GPU for us alone: the host's queue waits, and what its models take there is given back first."""
    from modules import call_queue, devices

    with call_queue.queue_lock:
        again = _unload()
        devices.torch_gc()
        try:
            yield
        finally:
            devices.torch_gc()
            again()


def _unload() -> Callable[[], None]:
    """Take the host's models off the GPU; returns what brings back those that do not come by themselves."""
    manager = _optional("backend.memory_management") or _optional("ldm_patched.modules.model_management")
    if manager is not None:
        manager.unload_all_models()
        data: Any = getattr(sd_models, "model_data", None)
        if hasattr(data, "forge_hash"):  # or the host believes that its model is still there
            data.forge_hash = ""
        return lambda: None
    model = getattr(getattr(sd_models, "model_data", None), "sd_model", None)
    if model is None:
        return lambda: None
    sd_models.send_model_to_cpu(model)
    return lambda: sd_models.send_model_to_device(model)
