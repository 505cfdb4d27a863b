"""Model folders: Hugging Face shards with an index, diffusers pipelines, MLX folders, and plain single-file folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import FileError
from .companion import ADAPTER_CONFIG
from .header import TensorInfo, load_json
from .source import Part, Source
from .weights import Weights, read_weights

WEIGHTS = (
    ".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".npz"
)  # fmt: skip
_READABLE = (".safetensors", ".bin")
# `model.safetensors.index.json`; of another precision: `model.safetensors.index.fp16.json`.
_INDEX = re.compile(r"\.index(\.\w+)?\.json$")
# `model.fp16.safetensors` and `model.fp16-00001-of-00002.safetensors` are other precisions of `model.safetensors`.
_VARIANT = re.compile(r"\.(fp16|fp32|bf16|non_ema|ema)(?=[.-])")
# What the loaders of transformers, diffusers, PEFT and MLX take when other weights lie beside it.
_USUAL = re.compile(r"(model|pytorch_model|diffusion_pytorch_model|adapter_model)\.(safetensors|bin)")
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?:-of-(?P<count>\d+))?\.(?:safetensors|bin)")


def open_folder(path: Path) -> Source:
    """Open a model folder; see `open_model`. Keys of a diffusers pipeline get the component as prefix (`unet/…`)."""
    try:
        builder = _Builder(path)
        if (path / "model_index.json").is_file():
            for component in sorted(path.iterdir()):
                if component.is_dir() and not component.name.startswith("."):
                    builder.add_component(component, f"{component.name}/")
        else:
            builder.add_component(path, "")
        if not builder.tensors:
            raise FileError(
                "the folder holds no weights", file=path, hint="name a folder with .safetensors files in it"
            )
        return builder.source()
    except OSError as error:
        raise FileError(f"cannot read: {error.strerror or error}", file=error.filename or path) from error


class _Builder:
    """Collects the parts of one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self.parts: list[Part] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.notes: list[str] = []
        self._noted: set[str] = set()

    def add_component(self, folder: Path, prefix: str) -> None:
        index = self._index_of(folder)
        if index is not None:
            self._add_indexed(folder, prefix, index)
            return
        files = self._loose_files(folder)
        for file in files:
            found = self._read(file)
            self._add_part(file, prefix, list(found.tensors), found, "")
        if prefix and not files and (folder / "config.json").is_file():
            self.notes.append(f"{prefix} has a config.json but no weights")

    def _index_of(self, folder: Path) -> Path | None:
        found = sorted(item for item in folder.iterdir() if _INDEX.search(item.name))
        plain = [item for item in found if not _VARIANT.search(item.name)] or found
        best = [item for item in plain if ".safetensors" in item.name] or plain
        for other in found:
            if other != best[0]:
                self._note(other, f"was left alone, {best[0].name} was used")
        return best[0] if best else None

    def _add_indexed(self, folder: Path, prefix: str, index: Path) -> None:
        wanted = _weight_map(index)
        shards = sorted(set(wanted.values()))
        for name in shards:
            shard = _inside(folder, name, index)
            if not shard.is_file():
                raise FileError(
                    "the index names a shard that is not there", file=shard, hint="download the missing shard"
                )
            found = self._read(shard)
            keys = [key for key in found.tensors if wanted.get(key) == name]
            for key in (key for key, home in wanted.items() if home == name and key not in found.tensors):
                raise FileError(
                    f"the index promises this tensor in {name}, which has none of that name", file=index, tensor=key
                )
            if strays := len(found.tensors) - len(keys):
                self.notes.append(f"{strays} tensors of {self._name(shard)} are not in the index and were left alone")
            self._add_part(shard, prefix, keys, found, index.name)
        for stray in _weights(folder):
            if stray.name not in shards:
                self._note(stray, "is not in the index and was left alone")

    def _loose_files(self, folder: Path) -> Sequence[Path]:
        """Weights of a folder without an index: one file, or numbered shards."""
        found = [item for item in _weights(folder) if item.suffix == ".safetensors"] or _weights(folder)
        plain = [item for item in found if not _VARIANT.search(item.name)] or found
        for other in found:
            if other not in plain:
                self._note(other, "is another variant and was left alone")
        usual = [item for item in plain if _USUAL.fullmatch(item.name)]
        chosen = usual if len(usual) == 1 else plain
        _check_numbers(folder, chosen)
        return chosen

    def _read(self, file: Path) -> Weights:
        found = read_weights(file, len(self.files))
        self.files.append(file)
        self.notes.extend(found.notes)
        return found

    def _add_part(self, file: Path, prefix: str, keys: Iterable[str], found: Weights, index: str) -> None:
        full = {prefix + key: found.tensors[key] for key in keys}
        for key in full.keys() & self.tensors.keys():
            raise FileError("two weights files of the folder hold this tensor", file=file, tensor=key)
        self.tensors.update(full)
        name = _output_name(self._name(file))
        listed_in = _output_name(prefix + index) if index else ""
        self.parts.append(Part(name, prefix, tuple(full), found.metadata, listed_in))

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _note(self, file: Path, what: str) -> None:
        self._noted.add(self._name(file))
        self.notes.append(f"{self._name(file)} {what}")

    def source(self) -> Source:
        metadata: dict[str, str] = {}
        for part in self.parts:
            metadata = {**part.metadata, **metadata}
        side_files = []
        for name in sorted(_walk(self.root)):
            file = self.root / name
            if not file.is_file():
                self._note(file, "is a broken link or no plain file and was left alone")
            elif file.suffix not in WEIGHTS and not _INDEX.search(name):
                side_files.append(name)
            elif not (file in self.files or name in self._noted or _INDEX.search(name)):
                self._note(file, "is not part of the model and was left alone")
        return Source(
            self.root,
            "folder",
            tuple(self.files) + tuple(file for file in (self.root / ADAPTER_CONFIG,) if file.is_file()),
            self.tensors,
            metadata,
            tuple(self.parts),
            tuple(side_files),
            tuple(self.notes),
        )


def _weights(folder: Path) -> list[Path]:
    """Weights files of a folder that can be read; hidden ones are no part of it (unfinished outputs, for example)."""
    items = (item for item in folder.iterdir() if item.suffix in _READABLE and not item.name.startswith("."))
    return sorted(item for item in items if item.is_file())


def _check_numbers(folder: Path, files: Sequence[Path]) -> None:
    """Several weights files without an index must be the numbered shards of one model, and all of them."""
    found = [_NUMBERED.fullmatch(item.name) for item in files]
    stems = {(match["stem"], match["count"]) if match else None for match in found}
    if len(files) > 1 and (None in stems or len(stems) > 1):
        raise FileError(
            f"several weights files and no index: {', '.join(item.name for item in files[:5])}",
            file=folder,
            hint="name the one file that is meant",
        )
    numbers = sorted(int(match["number"]) for match in found if match)
    total = next((int(match["count"]) for match in found if match and match["count"]), len(numbers))
    first = numbers[0] if numbers else 0
    whole = len(numbers) == total and numbers == list(range(first, first + len(numbers))) and first in (0, 1)
    if (len(files) > 1 or total > 1) and not whole:
        have = ", ".join(item.name for item in files[:5])
        raise FileError(f"shards are missing: there are {len(files)} ({have})", file=folder, hint="download the others")


def _weight_map(index: Path) -> dict[str, str]:
    wanted = load_json(index.read_bytes(), index, "index").get("weight_map")
    if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted.values()):
        raise FileError("the index has no weight_map, a table of file names", file=index)
    if not wanted:
        raise FileError("the index names no tensors", file=index)
    return wanted


def _inside(folder: Path, name: str, index: Path) -> Path:
    """A shard's path, refused when it leaves the folder."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise FileError(f"the index names a shard outside its folder: {name!r}", file=index)
    return folder / name


def _output_name(name: str) -> str:
    """Name a part or an index gets in the output: always safetensors, under the names that loaders look for."""
    folder, slash, file = name.rpartition("/")
    renamed = re.sub(r"\.(bin|ckpt|pt|pth)(?=\.index|$)", ".safetensors", file)
    if renamed != file:
        renamed = re.sub(r"^pytorch_model(?=[.-])", "model", renamed)
    return folder + slash + renamed


def _walk(root: Path, inside: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Relative paths of all files below a folder that are not hidden; links to folders are followed."""
    folder = root / inside
    real = os.path.realpath(folder)
    if real in above:  # links may run in circles
        return
    for name in os.listdir(folder):
        path = f"{inside}/{name}" if inside else name
        if name.startswith("."):
            continue
        if os.path.isdir(root / path):
            yield from _walk(root, path, (*above, real))
        else:
            yield path
