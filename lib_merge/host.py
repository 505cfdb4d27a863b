"""What the tab asks of the program around it, as plain callables, and the answers where there is none: standalone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from .catalog import Catalog
from .errors import FileError, OutputError
from .events import CancelToken, OnProgress
from .files.hashes import HashCache
from .files.userdata import data_folder
from .wording import suggestion

Kind = Literal["checkpoint", "lora", "vae"]
# Checkpoints and VAEs often share a folder; this part of the name tells them apart.
_VAE_NAME = re.compile(r"\.vae\.[a-z]+$", re.IGNORECASE)
# What hosts add to a model's name in their lists: `name [3f9c1e07ab]`.
_TITLE_HASH = re.compile(r" \[[0-9a-f]{8,64}\]$")

LISTED_S = 3.0

Following = Callable[[str, CancelToken, OnProgress], AbstractContextManager[OnProgress]]


@dataclass(frozen=True)
class Host:
    """A program that shows the tab.

    Attributes:
        name: for people.
        folders: kind of model -> folders to look through with all below them, the one to save to first.
        single_files: kind of model -> files that count whatever folder they lie in.
        hashes: remembered hashes, shared with the host where it has its own.
        loaded: the checkpoint that the host has chosen, to start with; None where there is none.
        refresh: the host's own lists should look at the folders again; given the kind that was written.
        use: makes the host take a checkpoint from now on; None where it cannot.
        follow: (title, cancel, own callback) -> a context that shows a run in the host's own progress and hears its
            interrupt; gives the callback to call.
        gpu: a context in which the GPU is ours: the host's queue waits and its models are unloaded.
        data: the folder where presets and the history of runs are kept; need not be there yet.
        threads: workers of a run; None for the cores.
        generators: an event may answer several times (false where the host was started without a queue).
    """

    name: str
    folders: Callable[[Kind], Sequence[Path]]
    single_files: Callable[[Kind], Sequence[Path]] = lambda kind: ()
    hashes: Callable[[], HashCache] = HashCache
    loaded: Callable[[], Path | None] = lambda: None
    refresh: Callable[[Kind], None] = lambda kind: None
    use: Callable[[Path], None] | None = None
    follow: Following = lambda title, cancel, on_progress: nullcontext(on_progress)
    gpu: Callable[[], AbstractContextManager[None]] = nullcontext
    generators: bool = True
    data: Callable[[], Path] = data_folder
    threads: int | None = None
    _listed: dict[Kind, tuple[float, Models]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def models(self, kind: Kind) -> Models:
        """The models of a kind, as the folders were at most `LISTED_S` ago: large ones on a slow disk take a while."""
        listed = self._listed.get(kind)
        if listed is None or time.monotonic() - listed[0] > LISTED_S:
            models = Models(self.folders(kind), self.single_files(kind), kind)
            listed = self._listed[kind] = time.monotonic(), models
        return listed[1]

    def look_again(self) -> None:
        """The next question for models looks at the folders anew."""
        self._listed.clear()

    def save_folders(self, kind: Kind) -> dict[str, Path]:
        """Folders a result may be saved to, by the name they are shown under, the usual one first."""
        folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in self.folders(kind)))
        names = [folder.name for folder in folders]
        return {folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in folders}

    def place_of(self, kind: Kind, path: Path) -> tuple[str, str]:
        """The name of a result's folder and its path in there, with `/`; ("", file name) for what lies elsewhere."""
        real = Path(os.path.realpath(path))
        for name, folder in self.save_folders(kind).items():
            root = Path(os.path.realpath(folder))
            if real.is_relative_to(root):
                return name, real.relative_to(root).as_posix()
        return "", path.name

    def target(self, kind: Kind, folder: str, name: str) -> Path:
        """Where a result goes: never outside the folders of its kind.

        Args:
            kind: of the result.
            folder: a name of `save_folders`; empty for the first.
            name: file or folder name as typed, with sub-folders; `.safetensors` may be left out by the caller.

        Raises:
            OutputError: the name is empty or leads out of the folder.
        """
        offered = self.save_folders(kind)
        if not offered:
            raise OutputError("there is no folder to save to", hint="make one of those that the host looks through")
        if folder and folder not in offered:
            raise OutputError(f"{folder!r} is no folder to save to", hint=suggestion(folder, list(offered)))
        root = offered[folder] if folder else next(iter(offered.values()))
        parts = re.split(r"[\\/]", name.strip())
        if parts == [""]:
            raise OutputError("the result has no name", hint="type one, or leave the field empty for a proposed one")
        wrong = [part for part in parts if part.strip(" .") == "" or ":" in part or "\0" in part]
        if wrong or Path(name.strip()).is_absolute():
            raise OutputError(
                f"{name!r} leads out of {root}", hint="type a name, with sub-folders if you like: mixes/new"
            )
        target = root.joinpath(*parts)
        if not Path(os.path.realpath(target)).is_relative_to(os.path.realpath(root)):
            raise OutputError(f"{name!r} leads out of {root}", hint="choose a folder that lies in it")
        return target


class Models:
    """The models of some folders under the names that a list shows: relative to their folder, each name once.

    Args:
        folders: looked through with all that is below them.
        single_files: further files.
        kind: `vae` takes what the others leave out: names that end in `.vae.safetensors` and the like.
    """

    def __init__(self, folders: Sequence[Path], single_files: Sequence[Path], kind: Kind) -> None:
        found: dict[str, list[tuple[Path, Path]]] = {}
        for root, path in _located(folders, single_files):
            if kind == "vae" or not _VAE_NAME.search(path.name):
                found.setdefault(_shown(root, path), []).append((root, path))
        self._paths: dict[str, Path] = {}
        for name, places in found.items():
            for root, path in places:
                self._paths[name if len(places) == 1 else f"{name} ({root})"] = path

    @property
    def names(self) -> list[str]:
        """As the list shows them, sorted without regard to case and endings."""
        return sorted(self._paths, key=lambda name: (PurePosixPath(name).with_suffix("").as_posix().casefold(), name))

    def name_of(self, path: Path) -> str | None:
        """The name a path is shown under; None when it is not among them."""
        real = os.path.realpath(path)
        return next((name for name, other in self._paths.items() if os.path.realpath(other) == real), None)

    def resolve(self, value: str) -> Path:
        """The model that a value of the list means.

        Args:
            value: a name as shown; also `name [hash]` as hosts write it, or a file name alone where it is the only one.

        Raises:
            FileError: there is none, or not any more, or several.
        """
        name = _TITLE_HASH.sub("", value.strip())
        path = self._paths.get(value) or self._paths.get(name)
        if path is None:
            same = [other for other in self._paths.values() if other.name == name]
            if len(same) > 1:
                raise FileError(f"{name} is there several times", hint="choose one from the list")
            path = same[0] if same else None
        if path is None:
            hint = suggestion(name, list(self._paths)) if self._paths else "there are no models in the folders"
            raise FileError(f"{name} is not among the models", hint=f"refresh the lists; {hint}"[:300])
        if not path.exists():
            raise FileError(f"{name} is not there any more", file=path, hint="refresh the lists and choose again")
        return path


def _located(folders: Sequence[Path], single_files: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """(folder it was found in, model); a folder inside another one is looked through once."""
    seen: set[str] = set()
    for root in folders:
        for path in Catalog([root], HashCache()).files():
            if (real := os.path.realpath(path)) not in seen and path != root:
                seen.add(real)
                yield root, path
    for path in single_files:
        if (real := os.path.realpath(path)) not in seen and path.is_file():
            seen.add(real)
            yield path.parent, path


def _shown(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def standalone(
    checkpoints: Sequence[Path], loras: Sequence[Path] = (), vaes: Sequence[Path] = (), output: Path | None = None
) -> Host:
    """The host of `python -m lib_merge.app`: folders as given, nothing else.

    Args:
        checkpoints: folders of checkpoints.
        loras: folders of LoRAs.
        vaes: folders of VAEs; those of the checkpoints count too.
        output: folder to save to; None for the first of the kind.
    """
    given: Mapping[Kind, Sequence[Path]] = {
        "checkpoint": checkpoints,
        "lora": loras or checkpoints,
        "vae": (*vaes, *checkpoints),
    }

    def folders(kind: Kind) -> list[Path]:
        return [*([output] if output else []), *given[kind]]

    return Host("lib_merge", folders)
