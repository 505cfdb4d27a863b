"""Modules of GGUF files: names, the order of rows that some converters change, and how weights are stored."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MergeError, NumberError
from ..files.dtypes import DTYPES
from ..files.gguf import Gguf
from ..kernels.measure import all_finite
from ..lazy import torch
from ..quant import ggml
from .names import DENOISER, choose, forms
from .storage import Leaf
from .values import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F32", "F16", "BF16")
# Language models: name of a module in Hugging Face's checkpoints -> in GGUF files.
_LAYER = re.compile(r"(?:model\.language_model\.|language_model\.model\.|model\.)layers\.(\d+)\.(.+)")
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ALONE = {"lm_head": "output", "language_model.lm_head": "output"}
_BLOCK = re.compile(r"blk\.\d+\.(.+)")
# Language models by `general.architecture`: those whose converter (llama.cpp's convert_hf_to_gguf.py) brings the two
# halves of each head of q and k together, row by row, as it does for Llama, Mistral and Mixtral under the name `llama`;
# and those whose rows keep Hugging Face's order. Others may change their weights in some way of their own.
INTERLEAVED = ("llama", "llama-embed", "mistral3", "arcee", "smollm3", "granite", "minicpm", "olmo")
IN_ORDER = (
    *("qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"),
    *("gemma", "gemma2", "gemma3", "phi3", "llama4", "olmo2", "apertus", "seed_oss", "command-r", "cohere2", "exaone4"),
)
# Where the number of heads stands, and where it stands if it is not there.
_HEADS = {
    "attn_q": ("attention.head_count",),
    "attn_k": ("attention.head_count_kv", "attention.head_count"),
}


@dataclass(frozen=True)
class Blocks:
    """A module stored in blocks of 32 codes; see `Storage`."""

    leaves: tuple[Leaf, ...]
    kind: str
    unit: int = ggml.BLOCK
    dtype: str = ""
    roundings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"GGUF {self.kind}"

    def encode(self, values: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...]:
        """See `Storage`."""
        return (torch.from_numpy(ggml.encode(values.numpy(), self.kind, first_row)),)

    def encode_sum(self, dense: Tensor, change: Tensor, rounding: str, first_row: int) -> None:
        """See `Storage`."""
        return

    def beyond(self, values: Tensor, first_row: int) -> int:
        """See `Storage`: every block has a scale of its own."""
        return 0

    def decode(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        return torch.from_numpy(ggml.decode(raw[0].numpy(), self.kind))

    def codes(self, raw: Sequence[Tensor]) -> Tensor:
        """See `Storage`."""
        return torch.from_numpy(ggml.codes(raw[0].numpy(), self.kind))

    def steps(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        return torch.from_numpy(ggml.scales(raw[0].numpy(), self.kind)).abs()


@dataclass(frozen=True)
class Floats:
    """A module stored as plain floats; see `Storage`."""

    leaves: tuple[Leaf, ...]
    kind: str
    unit: int = 1
    dtype: str = ""
    roundings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"GGUF {self.kind}"

    def encode(self, values: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...]:
        """See `Storage`; rounded to the nearest, ties to even."""
        narrow = values.to(torch_dtype(self.kind))
        if not all_finite(narrow.float()):
            raise NumberError(f"a sum in the rows from {first_row} on is not finite or beyond {self.kind}")
        return (narrow.view(torch.uint8) if narrow is not values else values.clone().view(torch.uint8),)

    def encode_sum(self, dense: Tensor, change: Tensor, rounding: str, first_row: int) -> None:
        """See `Storage`."""
        return

    def beyond(self, values: Tensor, first_row: int) -> int:
        """See `Storage`: what is beyond the dtype is refused."""
        return 0

    def decode(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`."""
        return raw[0].view(torch_dtype(self.kind)).float()

    def codes(self, raw: Sequence[Tensor]) -> Tensor:
        """See `Storage`: the bits of each number."""
        return raw[0].view(self._bits())

    def steps(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """See `Storage`: distance to the next larger magnitude."""
        bits = raw[0].view(self._bits())
        dtype = torch_dtype(self.kind)
        return ((bits + 1).view(dtype).float() - bits.view(dtype).float()).abs()

    def _bits(self) -> torch.dtype:
        return torch.int16 if DTYPES[self.kind].bits == 16 else torch.int32


def gguf_forms(module: str) -> tuple[str, ...]:
    """Names that a module may have in a GGUF file."""
    found = [module, module.removeprefix(DENOISER)]
    if module in _ALONE:
        found.append(_ALONE[module])
    if (layer := _LAYER.fullmatch(module)) and layer[2] in _IN_LAYER:
        found.append(f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}")
    return tuple(dict.fromkeys(found))


def resolve(module: str, dense: Container[str], shipped: Container[str]) -> tuple[str, str]:
    """The module's name in the dense checkpoint and in the GGUF file.

    Raises:
        MergeError: no pair of names is in both, or more than one is; lists every pair that was tried.
    """
    here = dict.fromkeys([*forms(module), DENOISER + module.removeprefix(DENOISER)])
    there = dict.fromkeys(name for form in forms(module) for name in gguf_forms(form))
    return choose(module, [(one, other) for one in here for other in there], dense, shipped)


def storage(module: str, file: Gguf, shape: Sequence[int]) -> Blocks | Floats:
    """How a module is stored.

    Args:
        module: name in the GGUF file.
        file: the GGUF file.
        shape: of the dense weight.

    Raises:
        MergeError: its shape is another, or its kind cannot be written.
    """
    key = f"{module}.weight"
    kind, info = file.types[key], file.source.tensors[key]
    if kind not in ggml.KINDS and kind not in FLOATS:
        raise MergeError(
            f"the module {module} is stored as {kind}, which cannot be written",
            tensor=key,
            hint="make the GGUF file as Q8_0 (llama-quantize MODEL OUT Q8_0) and fold into that one",
        )
    if file.shapes[key] != tuple(shape):
        raise MergeError(
            f"the module {module} has the shape {list(file.shapes[key])}, the dense weight {list(shape)}", tensor=key
        )
    leaf = Leaf(key, 0, info.offset, info.shape[1], info.shape[0])
    return Floats((leaf,), kind) if kind in FLOATS else Blocks((leaf,), kind)


def head_rows(module: str, fields: Mapping[str, Any], rows: int) -> int:
    """Rows of a head whose two halves the converter has interleaved; 0 where rows keep their order.

    Args:
        module: name in the GGUF file.
        fields: of the GGUF file.
        rows: of the weight.

    Raises:
        MergeError: a language model of an architecture whose converter is not known, or without its number of heads.
    """
    block, architecture = _BLOCK.fullmatch(module), fields.get("general.architecture")
    if block is None or architecture in IN_ORDER:
        return 0
    if architecture not in INTERLEAVED:
        known = ", ".join(sorted((*INTERLEAVED, *IN_ORDER)))
        raise MergeError(
            f"the GGUF file's architecture is {architecture!r}, of which it is not known how converters order its rows",
            tensor=f"{module}.weight",
            hint=f"language models that can be folded into as GGUF: {known}",
        )
    if block[1] not in _HEADS:
        return 0
    names = [f"{architecture}.{name}" for name in _HEADS[block[1]]]
    heads = next((fields[name] for name in names if name in fields), None)
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise MergeError(
            f"the rows of {module} are in the order of its heads, but {names[0]} is {heads} for {rows} rows",
            tensor=f"{module}.weight",
            hint="make the GGUF file again with a converter that writes the number of heads",
        )
    return rows // heads
