"""Model folders: Hugging Face shards with an index, diffusers pipelines, MLX folders, and plain single-file folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import FileError
from .header import TensorInfo, read_header
from .pickles import read_pickle_index
from .source import Part, Source

WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5", ".npz")
_READABLE = (".safetensors", ".bin")
_INDEX = ".index.json"
# `model.fp16.safetensors` and `model.fp16-00001-of-00002.safetensors` are other precisions of `model.safetensors`.
_VARIANT = re.compile(r"\.(fp16|fp32|bf16|non_ema|ema)(?=[.-])")
_NUMBERED = re.compile(r"\d+(-of-\d+)?\.(safetensors|bin)$")


def open_folder(path: Path) -> Source:
    """Open a model folder; see `open_model`. Keys of a diffusers pipeline get the component as prefix (`unet/…`)."""
    builder = _Builder(path)
    if (path / "model_index.json").is_file():
        for component in sorted(item for item in path.iterdir() if item.is_dir()):
            if _weights(component):
                builder.add_component(component, f"{component.name}/")
    else:
        builder.add_component(path, "")
    if not builder.tensors:
        raise FileError("the folder holds no weights", file=path, hint="name a folder with .safetensors files in it")
    return builder.source()


class _Builder:
    """Collects the parts of one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self.parts: list[Part] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []

    def add_component(self, folder: Path, prefix: str) -> None:
        index = self._index_of(folder)
        if index is not None:
            self._add_indexed(folder, prefix, index)
            return
        for file in self._loose_files(folder):
            tensors, metadata = self._read(file)
            self._add_part(file, prefix, list(tensors), tensors, metadata, "")

    def _index_of(self, folder: Path) -> Path | None:
        found = sorted(item for item in folder.iterdir() if item.name.endswith(_INDEX))
        plain = [item for item in found if not _VARIANT.search(item.name)] or found
        best = [item for item in plain if ".safetensors" in item.name] or plain
        for other in found:
            if other != best[0]:
                self.notes.append(f"{other.relative_to(self.root).as_posix()} was left alone, {best[0].name} was used")
        return best[0] if best else None

    def _add_indexed(self, folder: Path, prefix: str, index: Path) -> None:
        wanted = _weight_map(index)
        shards = sorted(set(wanted.values()))
        for name in shards:
            tensors, metadata = self._read(_inside(folder, name, index))
            keys = [key for key in tensors if wanted.get(key) == name]
            for key in (key for key, shard in wanted.items() if shard == name and key not in tensors):
                raise FileError(
                    f"the index promises this tensor in {name}, which has none of that name", file=index, tensor=key
                )
            self._note_strays(folder / name, len(tensors) - len(keys))
            self._add_part(folder / name, prefix, keys, tensors, metadata, index.name)
        for stray in sorted(set(_names(_weights(folder))) - set(shards)):
            self.notes.append(f"{prefix}{stray} is not in the index and was left alone")

    def _note_strays(self, shard: Path, count: int) -> None:
        if count:
            self.notes.append(f"{count} tensors of {shard.name} are not in the index and were left alone")

    def _loose_files(self, folder: Path) -> list[Path]:
        """Weights of a folder without an index: one file, or numbered shards."""
        found = [item for item in _weights(folder) if item.suffix == ".safetensors"] or _weights(folder)
        plain = [item for item in found if not _VARIANT.search(item.name)] or found
        for other in set(found) - set(plain):
            self.notes.append(f"{other.relative_to(self.root).as_posix()} is another variant and was left alone")
        if len(plain) > 1 and not all(_NUMBERED.search(item.name) for item in plain):
            raise FileError(
                f"several weights files and no index: {', '.join(_names(plain)[:5])}",
                file=folder,
                hint="name the one file that is meant",
            )
        return plain

    def _read(self, file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        at = self.files.index(file) if file in self.files else len(self.files)
        if not file.is_file():
            raise FileError("the index names a shard that is not there", file=file, hint="download the missing shard")
        if at == len(self.files):
            self.files.append(file)
        if file.suffix == ".safetensors":
            header = read_header(file, at)
            return header.tensors, header.metadata
        index = read_pickle_index(file, at)
        self.notes.extend(index.notes)
        return index.tensors, {}

    def _add_part(
        self,
        file: Path,
        prefix: str,
        keys: Iterable[str],
        tensors: dict[str, TensorInfo],
        metadata: dict[str, str],
        index: str,
    ) -> None:
        full = {prefix + key: tensors[key] for key in keys}
        for key in full.keys() & self.tensors.keys():
            raise FileError("two weights files of the folder hold this tensor", file=file, tensor=key)
        self.tensors.update(full)
        name = _output_name(file.relative_to(self.root).as_posix())
        self.parts.append(Part(name, prefix, tuple(full), metadata, _output_name(prefix + index) if index else ""))

    def source(self) -> Source:
        metadata: dict[str, str] = {}
        for part in self.parts:
            metadata = {**part.metadata, **metadata}
        return Source(
            self.root,
            "folder",
            tuple(self.files),
            self.tensors,
            metadata,
            tuple(self.parts),
            tuple(_side_files(self.root)),
            tuple(self.notes),
        )


def _weights(folder: Path) -> list[Path]:
    return sorted(item for item in folder.iterdir() if item.suffix in _READABLE and item.is_file())


def _names(files: Iterable[Path]) -> list[str]:
    return [item.name for item in files]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        document: Any = json.loads(index.read_text("utf-8"))
        wanted = document["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise FileError("the index is not a JSON table with a weight_map", file=index) from error
    if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted.values()):
        raise FileError("the index's weight_map is not a table of file names", file=index)
    return wanted


def _inside(folder: Path, name: str, index: Path) -> Path:
    """A shard's path, refused when it leaves the folder."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise FileError(f"the index names a shard outside its folder: {name!r}", file=index)
    return folder / name


def _output_name(name: str) -> str:
    """Name a part gets in the output: always safetensors, under the names that loaders look for."""
    if ".bin" not in name:
        return name
    return name.replace("pytorch_model", "model").replace(".bin", ".safetensors")


def _side_files(root: Path) -> Iterator[str]:
    """Everything that is not weights, an index or hidden."""
    for item in sorted(root.rglob("*")):
        inside = PurePosixPath(item.relative_to(root).as_posix())
        hidden = any(name.startswith(".") for name in inside.parts)
        if item.is_file() and not hidden and item.suffix not in WEIGHTS and not item.name.endswith(_INDEX):
            yield inside.as_posix()
