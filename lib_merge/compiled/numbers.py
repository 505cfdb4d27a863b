"""Stored bits to float32 and back, one rounding to nearest even, in compiled code.

Which format bits are of is told by the type they are kept in: float16 in uint16, bfloat16 in int16, float32 in float32.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

from ..kernels import random as constants

# Never fastmath, and no contraction: those bits differ from processor to processor.
compiled = numba.njit(nogil=True, error_model="numpy")


class _Kept(FunctionCache):  # type: ignore[misc]
    """Machine code on the disk, found by what it is made of: numba looks at the function's own file only."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__(function)
        self._name = name
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, _sources())

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), self._name


def kept(function: Any, name: str = "") -> Any:
    """`compiled`, and kept on the disk for the next process until a source of this room changes.

    Args:
        function: to be compiled.
        name: tells functions of one source apart.
    """
    found = compiled(function)
    with suppress(Exception):  # no folder may be written to, or this numba keeps its code in another way
        found._cache = _Kept(function, name)
    return found


@lru_cache(maxsize=1)
def _sources() -> str:
    """Of everything that the machine code is made of; numba itself looks at the function's own file only."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(constants.__file__)]
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


_HALF, _FLOAT, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)

# safetensors dtype -> what its bits are kept in.
KEPT_IN: dict[str, Any] = {"F16": np.uint16, "BF16": np.int16, "F32": np.float32}
# safetensors dtype -> smallest float32 that rounds to infinity.
BEYOND = {"F16": 65520.0, "BF16": float.fromhex("0x1.ffp127"), "F32": float("inf")}


@lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """The safetensors dtypes that this processor converts in one instruction, or in a few on integers."""
    features = llvmlite.binding.get_host_cpu_features()
    x86 = llvmlite.binding.get_process_triple().startswith(("x86_64", "i686"))
    return frozenset(KEPT_IN) - (frozenset({"F16"}) if x86 and not features.get("f16c") else frozenset())


@intrinsic
def widen(typing: Any, stored: Any) -> Any:
    """The float32 that stored bits stand for; exact."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.uint16:
            return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)
        if stored == types.int16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _FLOAT)
        return args[0]

    return types.float32(stored), code


@intrinsic
def narrow(typing: Any, value: Any, like: Any) -> Any:
    """The stored bits nearest to a float32 that is not NaN, of the format of `like`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.uint16:
            return builder.bitcast(builder.fptrunc(args[0], _HALF), _I16)
        if like == types.int16:
            bits = builder.bitcast(args[0], _I32)
            last = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            rounded = builder.add(bits, builder.add(last, ir.Constant(_I32, 0x7FFF)))
            return builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        return args[0]

    return like(types.float32, like), code


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32, of a float64 as int64; of numbers that are not negative, in the same order."""
    found = types.int64 if value == types.float64 else types.int32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(found))

    return found(value), code


@intrinsic
def upper_half(typing: Any, x: Any, y: Any) -> Any:
    """Upper 64 bits of the product of two uint64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = [builder.zext(each, ir.IntType(128)) for each in args]
        return builder.trunc(builder.lshr(builder.mul(*wide), ir.Constant(ir.IntType(128), 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), code
