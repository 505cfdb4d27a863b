"""Model files written, read and damaged without lib_merge: by the safetensors package, or byte by byte."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# dtype of the format -> numpy's, where numpy has it
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "i1",
    "U8": "u1",
    "U32": "<u4",
    "BOOL": "?",
    "C64": "<c8",
}
Raw = tuple[str, tuple[int, ...], bytes]


# Coded storage -> the tensors that its tool writes for one linear layer `l`, and a word of the name we give it.
STORAGES = {
    "bitsandbytes nf4": (
        {"l.weight": "U8", "l.weight.absmax": "U8", "l.weight.quant_map": "F32", "l.weight.nested_absmax": "F32",
         "l.weight.nested_quant_map": "F32", "l.weight.quant_state.bitsandbytes__nf4": "U8"},
        "NF4",
    ),
    "bitsandbytes fp4": (
        {"l.weight": "U8", "l.weight.absmax": "F32", "l.weight.quant_map": "F32",
         "l.weight.quant_state.bitsandbytes__fp4": "U8"},
        "NF4",
    ),
    "bitsandbytes int8": ({"l.weight": "I8", "l.SCB": "F32"}, "int8"),
    "gptq": ({"l.qweight": "I32", "l.qzeros": "I32", "l.scales": "F16", "l.g_idx": "I32"}, "GPTQ"),
    "awq": ({"l.qweight": "I32", "l.qzeros": "I32", "l.scales": "F16"}, "GPTQ/AWQ"),
    "mlx": ({"l.weight": "U32", "l.scales": "BF16", "l.biases": "BF16"}, "MLX"),
    "comfy scaled fp8": ({"l.weight": "F8_E4M3", "l.scale_weight": "F32"}, "fp8"),
    "comfy quant": ({"l.weight": "F8_E4M3", "l.weight_scale": "F32", "l.comfy_quant": "U8"}, "fp8"),
    "deepseek blocks": ({"l.weight": "F8_E4M3", "l.weight_scale_inv": "F32"}, "fp8"),
    "static fp8": ({"l.weight": "F8_E4M3", "l.weight_scale": "BF16", "l.input_scale": "BF16"}, "fp8"),
    "scaled int8": ({"l.weight": "I8", "l.weight_scale": "BF16"}, "int8"),
    "nvfp4": ({"l.weight": "U8", "l.weight_scale": "F8_E4M3", "l.weight_scale_2": "F32"}, "NVFP4"),
    "packed int4": (
        {"l.weight_packed": "I32", "l.weight_scale": "BF16", "l.weight_shape": "I64"},
        "compressed-tensors",
    ),
    "mxfp4": ({"l.gate_blocks": "U8", "l.gate_scales": "U8"}, "MXFP4"),
    "4-bit floats": ({"l.weight": "F4"}, "4-bit"),
    "6-bit floats": ({"l.weight": "F6_E2M3"}, "6-bit"),
    "block scales": ({"l.scale": "F8_E8M0"}, "scale"),
}  # fmt: skip


def write(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> Path:
    """A model made of numpy arrays, by the safetensors package."""
    arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    save_file(arrays, path, metadata=None if metadata is None else dict(metadata))
    return path


def write_raw(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, Any] | None = None) -> Path:
    """A model of any dtype, byte by byte, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def write_sparse(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Any = None) -> Path:
    """A model of zeros that takes no room on the disk."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for key, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at)
    return path


def header_size(path: Path) -> int:
    """Where the data of a safetensors file starts."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def read_raw(path: Path) -> tuple[dict[str, str], dict[str, Raw]]:
    """Metadata, and key -> (dtype, shape, bytes) in the order of the header."""
    content = path.read_bytes()
    start = header_size(path)
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for key, entry in header.items():
        low, high = entry["data_offsets"]
        tensors[key] = (entry["dtype"], tuple(entry["shape"]), content[start + low : start + high])
    return metadata, tensors


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of a model; bf16 and fp8 come as the float32 they stand for."""
    _, tensors = read_raw(path)
    return {key: decode(dtype, data).reshape(shape) for key, (dtype, shape, data) in tensors.items()}


def decode(dtype: str, data: bytes) -> np.ndarray[Any, Any]:
    """Bytes of a dtype as numbers."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return np.array([_small_float(code, dtype) for code in data], "<f4")
    return np.frombuffer(data, NUMPY[dtype])


def bf16(values: Any) -> bytes:
    """Finite float32 values rounded to the nearest bf16, ties to even."""
    bits = np.asarray(values, "<f4").reshape(-1).view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def raw(dtype: str, values: Any) -> Raw:
    """Values as an entry for `write_raw`."""
    array = np.asarray(values)
    if dtype == "BF16":
        return dtype, array.shape, bf16(array)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        codes = {_small_float(code, dtype): code for code in reversed(range(256)) if code != 0x80}
        return dtype, array.shape, bytes(codes[float(value)] for value in array.reshape(-1))
    return dtype, array.shape, array.astype(NUMPY[dtype]).tobytes()


def _small_float(code: int, dtype: str) -> float:
    """Value of an fp8 code, by the definition of the OCP formats."""
    exponent_bits, mantissa_bits, bias = {"F8_E4M3": (4, 3, 7), "F8_E5M2": (5, 2, 15)}[dtype]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if dtype == "F8_E4M3" and code & 0x7F == 0x7F:
        return float("nan")
    if dtype == "F8_E5M2" and exponent == 31:
        return sign * (float("nan") if mantissa else float("inf"))
    if not exponent:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def values(shape: tuple[int, ...], seed: int, dtype: str = "<f4") -> np.ndarray[Any, Any]:
    """Small random numbers, the same for the same seed."""
    return (0.1 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def failing(name: str, nth: int, number: int) -> tuple[Callable[..., Any], list[int]]:
    """A function of `os` whose n-th call, from any thread, fails with that error; and a list, filled once it did."""
    real, count, hit, lock = getattr(os, name), itertools.count(1), [], threading.Lock()

    def call(*args: Any, **options: Any) -> Any:
        with lock:
            fails = next(count) == nth
        if not fails:
            return real(*args, **options)
        hit.append(1)
        if name == "close":  # it fails, and the descriptor is closed all the same
            real(*args, **options)
        raise OSError(number, os.strerror(number))

    return call, hit


def descriptors() -> int:
    """Open files of this process, where the system tells."""
    table = Path("/proc/self/fd")
    return len(list(table.iterdir())) if table.is_dir() else 0
