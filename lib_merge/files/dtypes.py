"""The dtypes of the safetensors format as one table: size, kind, rank, and the names torch and the command line use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "integer", "coded"]


@dataclass(frozen=True)
class Dtype:
    """One safetensors dtype.

    Attributes:
        name: as written in headers, for example `BF16`.
        bits: size of one element in bits (4 and 6 are packed).
        kind: `float` can be merged; `integer` (bool included) is copied; `coded` is copied, never read as numbers.
        rank: precision order of floats: fp64 4 > fp32 3 > bf16 = fp16 2 > fp8 1; 0 for the rest.
        torch: attribute of the torch module, empty where torch has none.
        option: spelling on the command line and in recipes, empty where it cannot be asked for.
        largest: largest finite value of a float.
        unbounded: bits of the first positive pattern that is not finite (infinity, or NaN where there is none).
    """

    name: str
    bits: int
    kind: Kind
    rank: int = 0
    torch: str = ""
    option: str = ""
    largest: float = 0.0
    unbounded: int = 0


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("F64", 64, "float", 4, "float64", "fp64", 1.7976931348623157e308, 0x7FF0000000000000),
        Dtype("F32", 32, "float", 3, "float32", "fp32", 3.4028234663852886e38, 0x7F800000),
        Dtype("BF16", 16, "float", 2, "bfloat16", "bf16", 3.3895313892515355e38, 0x7F80),
        Dtype("F16", 16, "float", 2, "float16", "fp16", 65504.0, 0x7C00),
        Dtype("F8_E4M3", 8, "float", 1, "float8_e4m3fn", "fp8_e4m3fn", 448.0, 0x7F),
        Dtype("F8_E5M2", 8, "float", 1, "float8_e5m2", "fp8_e5m2", 57344.0, 0x7C),
        Dtype("F8_E4M3FNUZ", 8, "coded", torch="float8_e4m3fnuz"),
        Dtype("F8_E5M2FNUZ", 8, "coded", torch="float8_e5m2fnuz"),
        Dtype("F8_E8M0", 8, "coded", torch="float8_e8m0fnu"),
        Dtype("F6_E2M3", 6, "coded"),
        Dtype("F6_E3M2", 6, "coded"),
        Dtype("F4", 4, "coded"),
        Dtype("C64", 64, "coded", torch="complex64"),
        Dtype("I64", 64, "integer", torch="int64"),
        Dtype("I32", 32, "integer", torch="int32"),
        Dtype("I16", 16, "integer", torch="int16"),
        Dtype("I8", 8, "integer", torch="int8"),
        Dtype("U64", 64, "integer", torch="uint64"),
        Dtype("U32", 32, "integer", torch="uint32"),
        Dtype("U16", 16, "integer", torch="uint16"),
        Dtype("U8", 8, "integer", torch="uint8"),
        Dtype("BOOL", 8, "integer", torch="bool"),
    )
}

BY_OPTION: dict[str, Dtype] = {d.option: d for d in DTYPES.values() if d.option}
BY_TORCH: dict[str, Dtype] = {d.torch: d for d in DTYPES.values() if d.torch}


def is_float(name: str) -> bool:
    """True for the dtypes a method may be applied to."""
    return DTYPES[name].kind == "float"


def nbytes(name: str, numel: int) -> int:
    """Bytes that `numel` elements take; packed dtypes are rounded up to whole bytes."""
    return (DTYPES[name].bits * numel + 7) // 8
