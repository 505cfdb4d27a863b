"""The table of dtypes against the format's own list and hand-made decoders, and each dtype through file and back."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import safetensors

from lib_merge.files.dtypes import BY_OPTION, BY_TORCH, DTYPES, is_float, nbytes
from lib_merge.files.open import open_model
from lib_merge.files.sink import FileSink, OutPart

pytestmark = pytest.mark.portable

# Bits of each dtype of the format, as its documentation and its names have them.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
# Sign, exponent and mantissa bits of those that can be merged, and whether the highest exponent holds numbers too.
FLOATS = {
    "F64": (11, 52, False),
    "F32": (8, 23, False),
    "F16": (5, 10, False),
    "BF16": (8, 7, False),
    "F8_E4M3": (4, 3, True),
    "F8_E5M2": (5, 2, False),
}


def decoded(pattern, exponent_bits, mantissa_bits, all_finite):
    """Value of a positive float pattern, by the definition of such formats."""
    exponent, mantissa = divmod(pattern, 1 << mantissa_bits)
    last = (1 << exponent_bits) - 1
    if exponent == last and not (all_finite and mantissa != (1 << mantissa_bits) - 1):
        return math.inf if mantissa == 0 else math.nan
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def test_the_table_has_every_dtype_of_the_format():
    assert {name: dtype.bits for name, dtype in DTYPES.items()} == BITS
    assert all(dtype.name == name for name, dtype in DTYPES.items())


def test_what_can_be_merged():
    assert {name for name in DTYPES if is_float(name)} == set(FLOATS)
    assert {name for name, dtype in DTYPES.items() if dtype.kind == "integer"} == {
        "BOOL", *(sign + bits for sign in "IU" for bits in ("8", "16", "32", "64"))
    }  # fmt: skip


def test_ranks_follow_precision():
    ranks = {name: DTYPES[name].rank for name in FLOATS}
    assert ranks == {"F64": 4, "F32": 3, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
    assert all(dtype.rank == 0 for name, dtype in DTYPES.items() if name not in FLOATS)


@pytest.mark.parametrize("name", FLOATS)
def test_the_largest_value_and_the_first_pattern_that_is_not_finite(name):
    dtype, form = DTYPES[name], FLOATS[name]
    assert 1 + form[0] + form[1] == dtype.bits
    assert not math.isfinite(decoded(dtype.unbounded, *form))
    assert decoded(dtype.unbounded - 1, *form) == dtype.largest
    assert 0 < dtype.unbounded < 1 << (dtype.bits - 1)


@pytest.mark.parametrize("name", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_patterns_are_finite_exactly_below_it(name):
    dtype = DTYPES[name]
    for pattern in range(1 << (dtype.bits - 1)):
        assert math.isfinite(decoded(pattern, *FLOATS[name])) == (pattern < dtype.unbounded), hex(pattern)


@pytest.mark.parametrize(("name", "kind"), [("F64", np.float64), ("F32", np.float32), ("F16", np.float16)])
def test_numpy_agrees(name, kind):
    dtype = DTYPES[name]
    assert dtype.largest == float(np.finfo(kind).max)
    unsigned = np.dtype(f"u{dtype.bits // 8}")
    assert np.array(dtype.unbounded, unsigned).view(kind) == np.inf


def test_bf16_is_the_upper_half_of_float32():
    dtype = DTYPES["BF16"]
    assert struct.unpack(">f", struct.pack(">HH", dtype.unbounded, 0)) == (math.inf,)
    assert struct.unpack(">f", struct.pack(">HH", dtype.unbounded - 1, 0)) == (dtype.largest,)


def test_names_lead_back():
    assert set(BY_OPTION) == {"fp64", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"}
    assert all(BY_OPTION[dtype.option] is dtype for dtype in DTYPES.values() if dtype.option)
    assert all(BY_TORCH[dtype.torch] is dtype for dtype in DTYPES.values() if dtype.torch)
    assert len(BY_TORCH) == sum(bool(dtype.torch) for dtype in DTYPES.values())


@pytest.mark.parametrize(("name", "numel", "count"), [
    ("F64", 3, 24), ("BF16", 5, 10), ("U8", 7, 7), ("F4", 4, 2), ("F6_E2M3", 4, 3), ("F6_E3M2", 8, 6),
    ("F4", 0, 0), ("F32", 0, 0), ("F4", 3, 2), ("F6_E2M3", 3, 3), ("U8", 2**40, 2**40),
])  # fmt: skip
def test_bytes_of_a_tensor(name, numel, count):
    assert nbytes(name, numel) == count


def contents(name, seed=0):
    """Bytes of a tensor of shape (3, 8); for BOOL zeros and ones."""
    values = np.random.default_rng(seed).integers(0, 256, 3 * BITS[name], dtype=np.uint8)
    return (values % 2 if name == "BOOL" else values).tobytes()


@pytest.mark.parametrize("name", BITS)
def test_every_dtype_goes_into_a_file_and_comes_back(tmp_path, name):
    path, data = tmp_path / "model.safetensors", contents(name)
    part = OutPart("", "", {"w": (name, (3, 8)), "none": (name, (0, 8))}, {})
    with FileSink(path, [part], folder=False) as sink:
        sink.write("w", 0, memoryview(data))
        sink.publish([{}])
    source, back = open_model(path), bytearray(len(data))
    source.read_into("w", 0, memoryview(back))
    source.close()
    assert (source.tensors["w"].dtype, source.tensors["w"].shape) == (name, (3, 8))
    assert (source.tensors["none"].dtype, source.tensors["none"].shape) == (name, (0, 8))
    assert back == data
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert (theirs["w"]["dtype"], theirs["w"]["shape"], bytes(theirs["w"]["data"])) == (name, [3, 8], data)
    assert (theirs["none"]["dtype"], theirs["none"]["shape"]) == (name, [0, 8])


def test_all_dtypes_in_one_file(tmp_path):
    path = tmp_path / "model.safetensors"
    part = OutPart("", "", {name.lower(): (name, (3, 8)) for name in sorted(BITS)}, {"format": "pt"})
    with FileSink(path, [part], folder=False) as sink:
        for name in BITS:
            sink.write(name.lower(), 0, memoryview(contents(name, BITS[name])))
        sink.publish([{"format": "pt"}])
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert {key: bytes(item["data"]) for key, item in theirs.items()} == {
        name.lower(): contents(name, BITS[name]) for name in BITS
    }
    size = path.stat().st_size - sum(len(contents(name)) for name in BITS)
    assert size == 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
