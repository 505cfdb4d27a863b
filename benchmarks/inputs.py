"""Pairs of checkpoints of real size: A ~ N(0, 0.02), B = A + N(0, 0.002), real key names, dtypes and shapes.

`python benchmarks/inputs.py [--models sd15,sdxl_unet] [--dir DIR]` makes what is missing, in tiles, always the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import platformdirs

TOPOLOGIES = Path(__file__).parent / "topologies"
MODELS = {"sd15": "sd15_ldm", "sdxl_unet": "sdxl_unet", "sdxl": "sdxl_base_sgm"}
# Checkpoint -> a LoRA for it.
LORAS = {"sdxl": "lora_kohya_sdxl_r16", "sd15": "lora_kohya_sd15_r16"}
SIGMA_FACTOR, LORA_ALPHA, LORA_RANK = 0.03, 8.0, 16
SIGMA, SIGMA_DIFFERENCE, SEED = 0.02, 0.002, 20
TILE = 1 << 20
SIZES = {"I64": 8, "F32": 4, "F16": 2, "BF16": 2}
Topology: TypeAlias = dict[str, tuple[str, list[int]]]
Floats: TypeAlias = npt.NDArray[np.float32]


def default_folder() -> Path:
    """`$LIB_MERGE_BENCH_DIR`, else the user's cache folder."""
    given = os.environ.get("LIB_MERGE_BENCH_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("lib_merge")) / "benchmarks"


def topology(name: str) -> Topology:
    """Key -> (dtype, shape), in the order that safetensors writes: widest dtype first, then by name."""
    raw = json.loads((TOPOLOGIES / f"{name}.json").read_text())
    return {
        key: (dtype, shape) for key, (dtype, shape) in sorted(raw.items(), key=lambda kv: (-SIZES[kv[1][0]], kv[0]))
    }


def header(tensors: Topology) -> tuple[bytes, int]:
    """The header's bytes, padded so that data starts at a multiple of 8, and the size of the whole file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, (dtype, shape) in tensors.items():
        start, end = end, end + SIZES[dtype] * math.prod(shape)
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest even; the values are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


CAST: dict[str, Callable[[Floats], npt.NDArray[Any]]] = {
    "F32": lambda values: values,
    "F16": lambda values: values.astype(np.float16),
    "BF16": bfloat16,
}


def tiles(tensors: Topology) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The data of A and of B, in file order. Integers (position_ids) count up and are the same in both."""
    random = np.random.Generator(np.random.SFC64(SEED))
    space = np.empty((2, TILE), np.float32)
    for dtype, shape in tensors.values():
        numel = math.prod(shape)
        if dtype == "I64":
            yield (ids := np.arange(numel, dtype=np.int64)), ids
            continue
        for start in range(0, numel, TILE):
            a, b = space[:, : min(TILE, numel - start)]
            random.standard_normal(out=a, dtype=np.float32)
            random.standard_normal(out=b, dtype=np.float32)
            a *= SIGMA
            b *= SIGMA_DIFFERENCE
            b += a
            yield CAST[dtype](a), CAST[dtype](b)


def ready(path: Path, head: bytes, size: int) -> bool:
    """Whether the file is there, whole (files appear by a rename) and not sparse."""
    if not path.is_file():
        return False
    found = path.stat()
    with path.open("rb") as file:
        return found.st_size == size and file.read(len(head)) == head and found.st_blocks * 512 >= size


def build_pair(model: str, folder: Path) -> tuple[Path, Path]:
    """Make the pair of one model unless it is there; gives the paths of A and B."""
    tensors = topology(MODELS[model])
    head, size = header(tensors)
    a, b = (folder / f"{model}_{which}.safetensors" for which in "ab")
    if ready(a, head, size) and ready(b, head, size):
        return a, b
    folder.mkdir(parents=True, exist_ok=True)
    parts = [path.with_suffix(".part") for path in (a, b)]
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("wb", buffering=0)) for part in parts]
        for file in files:
            file.write(head)
        for pair in tiles(tensors):
            for file, data in zip(files, pair, strict=True):
                file.write(data.data)
        for file in files:
            os.fsync(file.fileno())
    for part, path in zip(parts, (a, b), strict=True):
        part.replace(path)
        if not ready(path, head, size):
            raise RuntimeError(f"{path} is incomplete, or the file system stores it sparse")
    return a, b


def build_base(model: str, folder: Path) -> Path:
    """Make A of the pair alone, with the same bytes, unless it is there."""
    tensors = topology(MODELS[model])
    return _build(folder / f"{model}_a.safetensors", tensors, (a for a, _ in tiles(tensors)))


def build_loras(model: str, folder: Path, count: int, rank: int = LORA_RANK) -> list[Path]:
    """Make LoRAs for a model unless they are there: factors ~ N(0, 0.03), alpha 8, real names and shapes."""
    tensors = {
        key: (dtype, [rank if size == LORA_RANK else size for size in shape])
        for key, (dtype, shape) in topology(LORAS[model]).items()
    }
    name = f"{model}_lora" if rank == LORA_RANK else f"{model}_lora_r{rank}_"
    return [
        _build(folder / f"{name}{number}.safetensors", tensors, _factors(tensors, number)) for number in range(count)
    ]


def _factors(tensors: Topology, number: int) -> Iterator[npt.NDArray[Any]]:
    random = np.random.Generator(np.random.SFC64(SEED + number))
    for dtype, shape in tensors.values():
        values = SIGMA_FACTOR * random.standard_normal(shape, dtype=np.float32) if shape else np.float32(LORA_ALPHA)
        yield CAST[dtype](np.asarray(values, np.float32))


def _build(path: Path, tensors: Topology, data: Iterator[npt.NDArray[Any]]) -> Path:
    """Write one file and publish it by a rename, unless it is there."""
    head, size = header(tensors)
    if ready(path, head, size):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb", buffering=0) as file:
        file.write(head)
        for array in data:
            file.write(np.ascontiguousarray(array).tobytes())
        os.fsync(file.fileno())
    part.replace(path)
    return path


def write_tensors(path: Path, tensors: dict[str, npt.NDArray[np.float16]]) -> Path:
    """A file of half-precision tensors, made anew."""
    path.unlink(missing_ok=True)
    named: Topology = {key: ("F16", list(array.shape)) for key, array in tensors.items()}
    return _build(path, named, iter(tensors.values()))


def main() -> None:
    """Build the pairs that are asked for and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="sd15,sdxl_unet", help="comma-separated (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=default_folder(), help="default: %(default)s")
    args = parser.parse_args()
    for model in args.models.split(","):
        for path in build_pair(model, args.dir):
            print(f"{path}  {path.stat().st_size / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
