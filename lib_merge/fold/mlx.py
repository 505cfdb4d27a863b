"""Modules of MLX checkpoints in affine mode: their layout from shapes and config, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MergeError
from ..files.dtypes import DTYPES
from ..files.header import TensorInfo
from ..lazy import torch
from ..quant.affine import BITS, GROUPS, ROUNDINGS, SCALE_DTYPES, Coded, dequantize, quantize, unpack
from ..quant.affine_compiled import quantize_sum
from .storage import Leaf

if TYPE_CHECKING:
    from torch import Tensor

_LEAVES = ("weight", "scales", "biases")
_OTHER_DENSE = "name the dense checkpoint that the quantized one was made from"
_OTHER = "quantize the dense model in affine mode: mlx_lm.convert -q"


@dataclass(frozen=True)
class Affine:
    """A module coded in affine mode; see `Storage`."""

    leaves: tuple[Leaf, ...]
    bits: int
    unit: int
    dtype: str

    @property
    def label(self) -> str:
        """For people."""
        return f"MLX {self.bits}-bit, groups of {self.unit}"

    @property
    def roundings(self) -> tuple[str, ...]:
        """See `Storage`."""
        return tuple(ROUNDINGS)

    def encode(self, values: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...]:
        """See `Storage`."""
        return _raw(quantize(values, rounding=rounding, first_row=first_row, **self._layout()))

    def encode_sum(self, dense: Tensor, change: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...] | None:
        """See `Storage`."""
        coded = quantize_sum(dense, change, rounding=rounding, first_row=first_row, **self._layout())
        return None if coded is None else _raw(coded)

    def beyond(self, values: Tensor, first_row: int) -> int:
        """See `Storage`: every group has a scale of its own."""
        return 0

    def decode(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        return dequantize(self._coded(raw), bits=self.bits, group=self.unit)

    def codes(self, raw: Sequence[Tensor]) -> Tensor:
        """See `Storage`."""
        return torch.from_numpy(unpack(raw[0].numpy(), self.bits))

    def steps(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        return self._coded(raw).scales.float().abs()

    def _layout(self) -> dict[str, Any]:
        return {"bits": self.bits, "group": self.unit, "dtype": getattr(torch, DTYPES[self.dtype].torch)}

    def _coded(self, raw: Sequence[Tensor]) -> Coded:
        dtype = getattr(torch, DTYPES[self.dtype].torch)
        return Coded(raw[0], raw[1].view(dtype), raw[2].view(dtype))


def _raw(coded: Coded) -> tuple[Tensor, ...]:
    """The bytes of each leaf."""
    return coded.words, coded.scales.view(torch.uint8), coded.biases.view(torch.uint8)


def is_mlx(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """True when a module has the leaves of MLX's codes, of whatever mode."""
    weight = tensors.get(f"{module}.weight")
    return weight is not None and weight.dtype == "U32" and f"{module}.scales" in tensors


def affine(module: str, tensors: Mapping[str, TensorInfo], shape: Sequence[int], config: Mapping[str, Any]) -> Affine:
    """The layout of a module, from the shapes of its leaves and of the dense weight.

    Args:
        module: name in the quantized checkpoint; `is_mlx` is true of it.
        tensors: of the quantized checkpoint.
        shape: of the dense weight, (rows, columns).
        config: parsed config.json of the quantized checkpoint; empty where there is none.

    Raises:
        MergeError: it is stored in another way than affine codes of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128,
            or not as config.json says.
    """

    def refuse(what: str, hint: str | None = None) -> MergeError:
        return MergeError(f"the module {module} {what}", tensor=f"{module}.weight", hint=hint)

    given = _given(module, config)
    mode = given.get("mode", "affine")
    if mode != "affine" or f"{module}.biases" not in tensors:
        name = mode if mode != "affine" else "a mode without biases"
        raise refuse(f"is quantized in {name}, not in affine mode", _OTHER)
    words, scales, biases = (tensors[f"{module}.{leaf}"] for leaf in _LEAVES)
    if any(len(info.shape) != 2 for info in (words, scales, biases)):
        raise refuse(f"is a stack of weights {list(words.shape)}, as of experts: only plain matrices can be folded")
    rows, columns = shape
    if scales.dtype not in SCALE_DTYPES or biases.dtype != scales.dtype:
        raise refuse(f"has scales of {scales.dtype} and biases of {biases.dtype}: BF16, F16 or F32 was expected")
    if scales.shape != biases.shape or {info.shape[0] for info in (words, scales)} != {rows}:
        found = ", ".join(f"{leaf} {list(tensors[f'{module}.{leaf}'].shape)}" for leaf in _LEAVES)
        raise refuse(f"has {found}, which does not fit the dense weight {list(shape)}", _OTHER_DENSE)
    bits, group = words.shape[1] * 32 / columns, columns / max(1, scales.shape[1])
    if bits not in BITS:
        raise refuse(f"has {bits:g}-bit codes: {', '.join(map(str, BITS))} bits can be folded", _OTHER)
    if group not in GROUPS:
        raise refuse(f"has groups of {group:g} weights: {', '.join(map(str, GROUPS))} can be folded", _OTHER)
    for name, value in (("bits", bits), ("group_size", group)):
        if given.get(name, value) != value:
            raise refuse(f"has {name} {value:g} by its shapes, {given[name]} by config.json")
    leaves = tuple(
        Leaf(f"{module}.{leaf}", info.file, info.offset, info.nbytes // rows, rows)
        for leaf, info in zip(_LEAVES, (words, scales, biases), strict=True)
    )
    return Affine(leaves, int(bits), int(group), scales.dtype)


def _given(module: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a module: its own entry, else the general one."""
    for name in ("quantization", "quantization_config"):
        general = config.get(name)
        if isinstance(general, dict):
            own = general.get(module, general)
            if own is False:
                raise MergeError(
                    f"the module {module} is stored as codes, but config.json says that it is not quantized",
                    tensor=f"{module}.weight",
                )
            return dict(own) if isinstance(own, dict) else {k: v for k, v in general.items() if not isinstance(v, dict)}
    return {}
