"""Folders to model files: found by name and by hash; the same name in two folders stays two files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from .errors import FileError, PlanError, Problem
from .files.companion import ADAPTER_CONFIG
from .files.hashes import HashCache
from .files.open import open_model
from .recipe import Recipe, Slot, called, files

PathLike = Path | str

MODEL_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


class Catalog:
    """The model files of some folders.

    Args:
        folders: looked through with all that is below them; links are followed.
        cache: remembered hashes.
        near: folders of which only the files and model folders directly in them count.
    """

    def __init__(self, folders: Sequence[Path], cache: HashCache, near: Sequence[Path] = ()) -> None:
        self.folders, self.near = tuple(folders), tuple(near)
        self._cache = cache

    def files(self) -> Iterator[Path]:
        """Every model file and model folder, folder by folder, sorted; hidden names are left out."""
        seen: set[str] = set()
        for root in self.folders:
            yield from _below(root, seen)
        for root in self.near:
            if os.path.realpath(root) not in seen:
                yield from _inside(root)
                yield from (folder for folder in _subfolders(root) if _is_model(folder))

    @cached_property
    def _found(self) -> tuple[Path, ...]:
        return tuple(self.files())

    def find(self, slot: Slot) -> Path:
        """The file that a recipe means.

        Args:
            slot: name, and sha256 where it is known. With a hash, a file of the right contents is found under any name
                whose hash is remembered; files of the same name are hashed.

        Raises:
            FileError: there is none, or several that could be meant.
        """
        named = [path for path in self._found if path.name == slot.file]
        if slot.sha256:
            right = [path for path in named if model_hash(path, self._cache) == slot.sha256]
            right = right or [
                path for path in self._found if model_hash(path, self._cache, compute=False) == slot.sha256
            ]
            if right:
                return right[0]
        if not named:
            raise FileError(
                f"{slot.file} is in none of the folders",
                file=", ".join(map(str, (*self.folders, *self.near))),
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


def _below(root: Path, seen: set[str]) -> Iterator[Path]:
    for folder, subfolders, _ in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        real = os.path.realpath(folder)
        if real in seen:  # links may run in circles, and one folder may lie in another
            subfolders.clear()
            continue
        seen.add(real)
        if _is_model(Path(folder)):
            yield Path(folder)
        yield from _inside(Path(folder))


def _inside(folder: Path) -> Iterator[Path]:
    """Model files directly in a folder."""
    return (
        item
        for item in _listed(folder)
        if item.name.endswith(MODEL_SUFFIXES) and not item.name.startswith(".") and item.is_file()
    )


def _subfolders(folder: Path) -> Iterator[Path]:
    return (item for item in _listed(folder) if not item.name.startswith(".") and item.is_dir())


def _is_model(folder: Path) -> bool:
    names = [item.name for item in _listed(folder)]
    if any(name.endswith(".index.json") or name == "model_index.json" for name in names):
        return True
    configured = "config.json" in names or ADAPTER_CONFIG in names
    return configured and any(name.endswith(MODEL_SUFFIXES) for name in names)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # a folder that may not be read holds nothing for us
        return []


def model_hash(path: Path, cache: HashCache, *, compute: bool = True) -> str | None:
    """sha256 of a model file or folder; None when it is not remembered and must not be computed, or unreadable."""
    if path.is_file():
        return cache.compute(path) if compute else cache.get(path)
    try:
        source = open_model(path)
    except FileError:
        return None
    return cache.compute_source(source) if compute else cache.get_source(source)


def search(
    recipe: Recipe, given: Mapping[str, PathLike], catalog: Catalog
) -> tuple[dict[str, Path], dict[str, FileError]]:
    """Look for the inputs of a recipe.

    Args:
        recipe: what to look for.
        given: slot path -> file, where it is known.
        catalog: where to look for the others.

    Returns:
        slot path -> file, and slot path -> why none was taken.
    """
    located = {slot: Path(path) for slot, path in given.items()}
    missing: dict[str, FileError] = {}
    for slot, model in files(recipe):
        if slot not in located:
            try:
                located[slot] = catalog.find(model)
            except FileError as error:
                missing[slot] = error
    return located, missing


def locate(
    recipe: Recipe, given: Mapping[str, PathLike], folders: Sequence[PathLike], cache: HashCache
) -> dict[str, Path]:
    """Slot path -> file, from what is given and from folders; without folders, slots may be left out.

    Raises:
        PlanError: an input is in none of the folders, or cannot be told from others.
    """
    if not folders:
        return {slot: Path(path) for slot, path in given.items()}
    located, missing = search(recipe, given, Catalog([Path(folder) for folder in folders], cache))
    refuse_missing(missing)
    return located


def refuse_missing(missing: Mapping[str, FileError]) -> None:
    """Stop when inputs were not found.

    Raises:
        PlanError: with a problem for each of them.
    """
    if missing:
        raise PlanError(
            [
                Problem("error", f"{called(slot)}: {error.what}", error.file, error.tensor, error.hint)
                for slot, error in missing.items()
            ]
        )


def known_hashes(located: Mapping[str, Path], cache: HashCache) -> dict[str, str]:
    """Slot path -> sha256, of the models whose hash is remembered."""
    found = {slot: model_hash(path, cache, compute=False) for slot, path in located.items() if os.path.exists(path)}
    return {slot: digest for slot, digest in found.items() if digest}
