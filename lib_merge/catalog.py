"""Folders to model files: found by name and by hash; the same name in two folders stays two files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .errors import FileError
from .files.hashes import HashCache
from .recipe import Recipe, Slot, files

PathLike = Path | str

MODEL_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


class Catalog:
    """The model files below some folders.

    Args:
        folders: looked through with all that is below them; links are followed.
        cache: remembered hashes.
    """

    def __init__(self, folders: Sequence[Path], cache: HashCache) -> None:
        self.folders = tuple(folders)
        self._cache = cache

    def files(self) -> Iterator[Path]:
        """Every model file and model folder, sorted by path; hidden names are left out."""
        seen = set()
        for root in self.folders:
            for folder, subfolders, names in os.walk(root, followlinks=True):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                real = os.path.realpath(folder)
                if real in seen:  # links may run in circles
                    subfolders.clear()
                    continue
                seen.add(real)
                if any(name.endswith(".index.json") or name == "model_index.json" for name in names):
                    yield Path(folder)
                yield from (
                    Path(folder, name)
                    for name in sorted(names)
                    if name.endswith(MODEL_SUFFIXES) and not name.startswith(".")
                )

    def find(self, slot: Slot) -> Path:
        """The file that a recipe means.

        Args:
            slot: name, and sha256 where it is known. With a hash, a file of the right contents is found under any name
                whose hash is remembered; files of the same name are hashed.

        Raises:
            FileError: there is none, or several that could be meant.
        """
        named = [path for path in self.files() if path.name == slot.file]
        if slot.sha256:
            right = [path for path in named if self._hash(path) in (slot.sha256, "")]
            right = right or [path for path in self.files() if path.is_file() and self._cache.get(path) == slot.sha256]
            if right:
                return right[0]
        if not named:
            raise FileError(
                f"{slot.file} is in none of the folders",
                file=", ".join(map(str, self.folders)),
                hint="name the folder it lies in with --models",
            )
        if slot.sha256:
            raise FileError(
                f"{slot.file} is another file than the recipe was made with",
                file=named[0],
                hint="name the folder of the right one with --models",
            )
        if len(named) > 1:
            raise FileError(
                f"{slot.file} is there several times: {', '.join(map(str, named))}",
                hint="name one folder only, or give the file itself",
            )
        return named[0]

    def _hash(self, path: Path) -> str:
        """sha256 of a file, computed if need be; empty for folders, which are judged when they are opened."""
        if path.is_dir():
            return ""
        return self._cache.get(path) or self._cache.compute(path)


def locate(
    recipe: Recipe, given: Mapping[str, PathLike], folders: Sequence[PathLike], cache: HashCache
) -> dict[str, Path]:
    """Slot path -> file, from what is given and from folders; slots that are nowhere are left out."""
    located = {slot: Path(path) for slot, path in given.items()}
    catalog = Catalog([Path(folder) for folder in folders], cache)
    for slot, model in files(recipe):
        if slot not in located and folders:
            with contextlib.suppress(FileError):
                located[slot] = catalog.find(model)
    return located


def known_hashes(located: Mapping[str, Path], cache: HashCache) -> dict[str, str]:
    """Slot path -> sha256, of the files whose hash is remembered."""
    found = {slot: cache.get(path) for slot, path in located.items() if path.is_file()}
    return {slot: digest for slot, digest in found.items() if digest}
