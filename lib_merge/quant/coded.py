"""Recognising coded weights by names and dtypes alone, so that codes are never taken for numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import fp8

_FP8 = tuple(fp8.FORMATS)
HINT = "merge the 16-bit version of the model instead"


@dataclass(frozen=True)
class Side:
    """A side tensor that marks a weight as coded.

    Attributes:
        ending: of the side tensor's name.
        weight: what stands in its place in the coded weight's name.
        dtypes: dtypes the coded weight then has; empty for any.
        storage: name of the storage, for messages.
    """

    ending: str
    weight: str
    dtypes: tuple[str, ...]
    storage: str


SIDES = (
    *(
        Side(ending, "", (), "NF4/FP4 (bitsandbytes)")
        for ending in (
            ".absmax",
            ".quant_map",
            ".nested_absmax",
            ".nested_quant_map",
            ".quant_state.bitsandbytes__nf4",
            ".quant_state.bitsandbytes__fp4",
        )
    ),
    Side(".SCB", ".weight", ("I8",), "int8 (bitsandbytes)"),
    *(Side(ending, ".qweight", ("I32",), "GPTQ/AWQ") for ending in (".qweight", ".qzeros", ".scales", ".g_idx")),
    *(Side(ending, ".weight", ("U32",), "MLX affine") for ending in (".scales", ".biases")),
    *(Side(f".{ending}", ".weight", _FP8, "scaled fp8") for ending in (*fp8.SCALES, *fp8.SIDES)),
    *(Side(ending, ".weight", ("I8",), "scaled int8") for ending in (".weight_scale", ".weight_zero_point")),
    *(Side(ending, ".weight", ("U8",), "NVFP4") for ending in (".weight_scale", ".weight_scale_2", ".input_scale")),
    *(
        Side(ending, ".weight_packed", ("I32", "U8"), "compressed-tensors")
        for ending in (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_global_scale")
    ),
    *(Side(ending, "_blocks", ("U8",), "MXFP4") for ending in ("_blocks", "_scales")),
)

# Dtypes that hold codes or parts of numbers whatever the tensor is called.
PACKED = {
    "F4": "4-bit float",
    "F6_E2M3": "6-bit float",
    "F6_E3M2": "6-bit float",
    "F8_E8M0": "block scale",
    "F8_E4M3FNUZ": "fp8 FNUZ",
    "F8_E5M2FNUZ": "fp8 FNUZ",
}


def coded_tensors(dtypes: Mapping[str, str]) -> dict[str, str]:
    """The tensors that are codes or belong to codes.

    Args:
        dtypes: key -> safetensors dtype, of a whole model.

    Returns:
        key -> name of the storage, for coded weights and their side tensors.
    """
    found = {key: PACKED[dtype] for key, dtype in dtypes.items() if dtype in PACKED}
    for key in dtypes:
        for side in SIDES:
            if not key.endswith(side.ending):
                continue
            weight = key.removesuffix(side.ending) + side.weight
            if weight in dtypes and (not side.dtypes or dtypes[weight] in side.dtypes):
                found[key] = found[weight] = side.storage
    if any(key.endswith(fp8.MARKER) for key in dtypes):
        found.update({key: "scaled fp8" for key, dtype in dtypes.items() if dtype in _FP8})
    return found
