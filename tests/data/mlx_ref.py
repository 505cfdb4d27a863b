"""MLX affine quantization, plainly, in numpy: what the fast implementation is compared with.

bf16 arrays are uint16 arrays of their bits. All arithmetic is float32 with IEEE division; codes come from the unrounded
scale and bias, which are rounded for storage only.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "mlx"
DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U32": np.uint32}
# rounding -> (halves to even, maximum starts at 0)
ROUNDINGS = {"even": (True, False), "away": (False, False), "metal": (False, True)}


def load(path):
    """{name: array} of a safetensors file or of all of a folder."""
    tensors = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for key, entry in json.loads(raw[8 : 8 + length]).items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                data = raw[8 + length + begin : 8 + length + end]
                tensors[key] = np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def bf16_to_f32(bits):
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values):
    """Bits of the nearest bf16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)


def widened(array):
    """Numbers as float32; uint16 is bf16."""
    return bf16_to_f32(array) if array.dtype == np.uint16 else np.array(array, np.float32)


def stored(values, dtype):
    """float32 as it is stored: bf16 bits, f16 or f32."""
    return {"bf16": f32_to_bf16, "f16": np.float16, "f32": np.float32}[dtype](values)


def whole(values, half_even):
    """Round to whole numbers; x − rint(x) is exact, so ties are told apart exactly."""
    nearest = np.rint(values)
    if half_even:
        return nearest
    rest = values - nearest
    nearest = np.where((rest == 0.5) & (values > 0), nearest + 1, nearest)
    return np.where((rest == -0.5) & (values < 0), nearest - 1, nearest)


def params(weights, bits, group, rounding):
    """Unrounded scale and bias [..., groups, 1] of float32 weights."""
    half_even, from_zero = ROUNDINGS[rounding]
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    high, low = groups.max(-1, keepdims=True), groups.min(-1, keepdims=True)
    high = np.maximum(high, np.float32(0)) if from_zero else high
    low_is_farther = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32(2**bits - 1), np.float32(1e-7))
    scale = np.where(low_is_farther, scale, -scale)
    edge = np.where(low_is_farther, low, high)
    q0 = whole(edge / scale, half_even)
    on_grid = q0 != 0
    scale = np.where(on_grid, edge / np.where(on_grid, q0, np.float32(1)), scale).astype(np.float32)
    return scale, np.where(on_grid, edge, np.float32(0)).astype(np.float32)


def quantized(weights, bits, group, rounding, dtype="f32"):
    """(words uint32, scales, biases) of float32 weights [rows, columns]; scales and biases as `dtype` is stored."""
    scale, bias = params(weights, bits, group, rounding)
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    steps = whole((groups - bias) / scale, ROUNDINGS[rounding][0])
    codes = np.clip(steps, 0, 2**bits - 1).astype(np.uint8).reshape(weights.shape)
    return packed(codes, bits), stored(scale[..., 0], dtype), stored(bias[..., 0], dtype)


def packed(codes, bits):
    """Codes [rows, columns] as a stream of bits, lowest first, in words of 32 bits."""
    stream = np.unpackbits(codes.reshape(-1, 1), axis=1, bitorder="little")[:, :bits].reshape(len(codes), -1)
    return np.ascontiguousarray(np.packbits(stream, axis=-1, bitorder="little")).view("<u4")


def unpacked(words, bits):
    """The inverse of `packed`."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return (stream.reshape(len(words), -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def dequantized(words, scales, biases, bits, group):
    """Numbers as float32 from words and from scales and biases as float32."""
    codes = unpacked(words, bits).astype(np.float32)
    return codes * np.repeat(scales, group, -1) + np.repeat(biases, group, -1)


def merged(dense, down, up, scale):
    """f32(f64(w) + scale · Σ up·down), the sum over the rank in float64 and in order; dense float32 [out, in]."""
    down, up = down.astype(np.float64), up.astype(np.float64)
    total = np.zeros(dense.shape, np.float64)
    for number in range(len(down)):
        total += up[:, number : number + 1] * down[number : number + 1]
    return (dense.astype(np.float64) + total * float(scale)).astype(np.float32)
