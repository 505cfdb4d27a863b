"""Modules to a finished file or PEFT folder: one rounding, finite numbers only, published by one rename."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CancelledError, NumberError, PlanError, RecipeError
from ..execute import Running
from ..files.dtypes import DTYPES
from ..files.sink import FileSink, OutPart
from ..files.target import target_problems
from ..files.temporary import sweep
from ..kernels.rounding import to_odd
from ..lazy import torch
from ._module import Module

if TYPE_CHECKING:
    from torch import Tensor

PEFT_STEM = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Stored:
    """Tensors as they are written.

    Attributes:
        tensors: key -> (dtype name, tensor of that dtype).
        config: of a PEFT adapter; None for others.
        saturated: values cut to the largest one of fp8.
    """

    tensors: Mapping[str, tuple[str, Tensor]]
    config: Mapping[str, Any] | None
    saturated: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors.values())


def stored(modules: Sequence[Module], dtype: str, kept: Mapping[str, tuple[str, Tensor]]) -> Stored:
    """Round the modules' tensors once.

    Args:
        modules: computed.
        dtype: safetensors name of the float dtype.
        kept: tensors that are handed on as they are.

    Raises:
        NumberError: a value is not finite or does not fit the dtype (fp8 is cut instead, and counted).
        RecipeError: two modules have the same name.
    """
    tensors: dict[str, tuple[str, Tensor]] = {}
    saturated = 0
    for module in modules:
        for key, tensor in module.tensors().items():
            if key in tensors or key in kept:
                raise RecipeError("two modules of the result have the same name", tensor=key)
            own = "F32" if key.endswith(".alpha") else dtype
            rounded, beyond = rounded_to(tensor, own, key)
            tensors[key], saturated = (own, rounded), saturated + beyond
    return Stored({**tensors, **kept}, _peft_config(modules), saturated)


def rounded_to(tensor: Tensor, dtype: str, key: str) -> tuple[Tensor, int]:
    """A tensor in another dtype, and how many values were cut to the largest one of fp8.

    Raises:
        NumberError: a value is not finite, or does not fit.
    """
    target = DTYPES[dtype]
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    if not largest < float("inf"):
        raise NumberError("a value of the result is not finite", tensor=key)
    beyond = 0
    if largest > target.largest:
        if target.rank > 1:
            raise NumberError(
                f"a value of {largest:g} does not fit {target.option}, which ends at {target.largest:g}",
                tensor=key,
                hint="--save-dtype bf16 or fp32",
            )
        beyond = int((tensor.abs() > target.largest).sum())
        tensor = tensor.clamp(-target.largest, target.largest)
    narrow = tensor.dtype == torch.float64 and target.bits < 32
    return (to_odd(tensor) if narrow else tensor).to(getattr(torch, target.torch)).contiguous(), beyond


def _peft_config(modules: Sequence[Module]) -> dict[str, Any] | None:
    """What PEFT needs to load the modules: ranks by module; alpha is the rank, so that the scale is 1."""
    ranks = {
        module.stem.removeprefix(PEFT_STEM): module.rank
        for module in modules
        if module.rank is not None and module.style == "peft" and module.stem.startswith(PEFT_STEM)
    }
    if not ranks:
        return None
    common = max(set(ranks.values()), key=lambda rank: (list(ranks.values()).count(rank), rank))
    others = {f"^{name.replace('.', chr(92) + '.')}": rank for name, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }


def check_target(target: Path, inputs: Mapping[str, Path], nbytes: int, how: Running) -> None:
    """Everything that would keep the result from being published.

    Raises:
        PlanError: says all of it.
    """
    folder = target.suffix != ".safetensors"
    problems = list(target_problems(target, folder=folder, overwrite=how.overwrite, inputs=inputs, size_bytes=nbytes))
    if problems:
        raise PlanError(problems)


def write(target: Path, result: Stored, metadata: Mapping[str, str], how: Running) -> None:
    """Write and publish.

    Args:
        target: `.safetensors` file, or a folder for PEFT.
        result: what to write.
        metadata: of the header, complete.
        how: overwrite, fsync, cancel.

    Raises:
        MergeError: it could not be written; nothing stands under the name that was not there before.
    """
    folder = target.suffix != ".safetensors"
    if folder and result.config is None:
        raise RecipeError(
            "the output is a folder, but these names are not PEFT's",
            file=target,
            hint=f"write {target.name}.safetensors",
        )
    shapes = {key: (dtype, tuple(tensor.shape)) for key, (dtype, tensor) in result.tensors.items()}
    part = OutPart(_WEIGHTS if folder else target.name, "", shapes, metadata)
    sweep(target.parent)
    with FileSink(target, [part], folder=folder, overwrite=how.overwrite, fsync=how.fsync) as sink:
        for key, (_, tensor) in result.tensors.items():
            if how.cancel.cancelled:
                raise CancelledError("the run was stopped")
            sink.write(key, 0, raw(tensor))
        if folder:
            text = json.dumps(result.config, indent=2, ensure_ascii=False) + "\n"
            sink.add_file(_CONFIG, text.encode())
        sink.publish([metadata])


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def data_hash(result: Stored) -> str:
    """sha256 over the tensors' bytes as they lie in the file, without the header."""
    shapes = {key: (dtype, tuple(tensor.shape)) for key, (dtype, tensor) in result.tensors.items()}
    digest = hashlib.sha256()
    for key in OutPart("", "", shapes, {}).entries():
        digest.update(raw(result.tensors[key][1]))
    return digest.hexdigest()
