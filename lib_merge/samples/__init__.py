"""Small sample models with the real tensor names of SD1.5, made on the spot for demos and tests.

Only this room makes models up; nothing else in the library depends on it but the demos.
"""

from __future__ import annotations

import hashlib
import json
import math
from importlib import resources
from pathlib import Path

from ..files.sink import FileSink, OutPart
from ..lazy import np

SHRINK = 16
_SPREAD, _DRIFT = 0.02, 0.002
_NUMPY = {"F16": np.float16, "F32": np.float32, "I64": np.int64}


def topology() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Key -> (dtype, shape) of a full SD1.5 checkpoint, in its own order."""
    text = resources.files(__package__).joinpath("sd15_ldm.json").read_text("utf-8")
    return {key: (dtype, tuple(shape)) for key, (dtype, shape) in json.loads(text).items()}


def make_sample(path: Path, variant: int, *, shrink: int = SHRINK) -> Path:
    """Write a small SD1.5-like checkpoint.

    Args:
        path: `.safetensors` file; replaced if it is there.
        variant: 0 is the base, N(0, 0.02); others are the base plus a drift N(0, 0.002) of their own.
        shrink: widths of 64 and more are divided by it; kernels, channels of images and names stay.
    """
    tensors = {
        key: (dtype, _shrunk(shape, shrink) if dtype != "I64" else shape) for key, (dtype, shape) in topology().items()
    }
    part = OutPart(path.name, "", tensors, {"format": "pt", "modelspec.title": path.stem})
    with FileSink(path, [part], folder=False, overwrite=True, fsync=False) as sink:
        for key, (dtype, shape) in tensors.items():
            sink.write(key, 0, memoryview(_values(key, dtype, shape, variant).tobytes()))
        sink.publish([part.metadata])
    return path


def _shrunk(shape: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(size // by if size >= 64 and size % by == 0 else size for size in shape)


def _values(
    key: str, dtype: str, shape: tuple[int, ...], variant: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if dtype == "I64":
        return np.arange(math.prod(shape), dtype=np.int64)
    values = _SPREAD * _normal(key, 0, shape)
    if variant:
        values = values + _DRIFT * _normal(key, variant, shape)
    return values.astype(_NUMPY[dtype])


def _normal(key: str, variant: int, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    seed = int.from_bytes(hashlib.sha256(f"{variant} {key}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
