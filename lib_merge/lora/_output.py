"""Modules to a finished file or PEFT folder: one rounding, finite numbers only, published by one rename."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CancelledError, PlanError, Problem, RecipeError
from ..execute import Running
from ..files.companion import ADAPTER_CONFIG
from ..files.folders import WEIGHTS
from ..files.sink import FileSink, OutPart
from ..files.target import target_problems
from ..files.temporary import sweep
from ..lazy import torch
from ._module import Module

if TYPE_CHECKING:
    from torch import Tensor

PEFT_STEM = "base_model.model."
# Stands in for a sha256 that is not known yet.
NO_HASH = "0" * 64
_WEIGHTS = "adapter_model.safetensors"
_FORGET_BYTES = 32 << 20


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


def stored(
    modules: Sequence[Module],
    dtype: str,
    kept: Mapping[str, tuple[str, Tensor]],
    saturated: int = 0,
    fan_in_fan_out: bool = False,
) -> Stored:
    """The modules' tensors by key.

    Args:
        modules: rounded.
        dtype: safetensors name of their dtype.
        kept: tensors that are handed on as they are.
        saturated: values that rounding cut.
        fan_in_fan_out: the base stores its weights as [in, out].

    Raises:
        RecipeError: two modules have the same name.
    """
    tensors: dict[str, tuple[str, Tensor]] = {}
    for module in modules:
        for key, tensor in module.tensors().items():
            if key in tensors or key in kept:
                raise RecipeError("two modules of the result have the same name", tensor=key)
            tensors[key] = ("F32" if key.endswith(".alpha") else dtype, tensor.contiguous())
    return Stored({**tensors, **kept}, _peft_config(modules, fan_in_fan_out), saturated)


def _peft_config(modules: Sequence[Module], fan_in_fan_out: bool) -> dict[str, Any] | None:
    """What PEFT needs to load the modules: ranks by module; alpha is the rank, so that the scale is 1."""
    ranks = {
        module.stem.removeprefix(PEFT_STEM): module.rank
        for module in modules
        if module.rank is not None and module.style != "kohya" and module.stem.startswith(PEFT_STEM)
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
        "fan_in_fan_out": fan_in_fan_out,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }


def check_target(
    target: Path, inputs: Mapping[str, Path], nbytes: int, how: Running, names: Callable[[], Sequence[str]]
) -> None:
    """Everything that would keep the result from being published.

    Args:
        target: `.safetensors` file, or a folder for PEFT.
        inputs: slot -> path.
        nbytes: expected size of the result, 0 where it is not known.
        how: overwrite.
        names: the names of the result's modules; asked for only where they count.

    Raises:
        PlanError: says all of it.
    """
    folder = target.suffix != ".safetensors"
    if target.suffix.lower() in WEIGHTS:
        folder = False  # meant as a file, of a kind that is not written
    problems = list(target_problems(target, folder=folder, overwrite=how.overwrite, inputs=inputs, size_bytes=nbytes))
    if folder and not problems and not any(name.startswith(PEFT_STEM) for name in names()):
        problems.append(_no_folder(target))
    if problems:
        raise PlanError(problems)


def _no_folder(target: Path) -> Problem:
    what = "the output is a folder, but these names are not PEFT's"
    return Problem("error", what, str(target), hint=f"write {target.name}.safetensors")


def write(
    target: Path, result: Stored, metadata: Mapping[str, str], how: Running, forget: Callable[[], None] = lambda: None
) -> None:
    """Write and publish.

    Args:
        target: `.safetensors` file, or a folder for PEFT.
        result: what to write.
        metadata: of the header, with a place holder for the hash of the data, which is computed meanwhile.
        how: overwrite, fsync, cancel.
        forget: called now and then: what was written need not stay in memory.

    Raises:
        MergeError: it could not be written; nothing stands under the name that was not there before.
    """
    folder = target.suffix != ".safetensors"
    if folder and result.config is None:
        raise PlanError([_no_folder(target)])
    shapes = {key: (dtype, tuple(tensor.shape)) for key, (dtype, tensor) in result.tensors.items()}
    part = OutPart(_WEIGHTS if folder else target.name, "", shapes, metadata)
    sweep(target.parent)
    with (
        ThreadPoolExecutor(1) as beside,
        FileSink(target, [part], folder=folder, overwrite=how.overwrite, fsync=how.fsync) as sink,
    ):
        digest = beside.submit(data_hash, result, forget)
        for key, tensor in _in_turn(result, result.tensors, forget):
            if how.cancel.cancelled:
                raise CancelledError("the run was stopped")
            sink.write(key, 0, raw(tensor))
        if folder:
            text = json.dumps(result.config, indent=2, ensure_ascii=False) + "\n"
            sink.add_file(ADAPTER_CONFIG, text.encode())
        sink.publish([with_hash(metadata, digest.result())])


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def with_hash(metadata: Mapping[str, str], digest: str) -> dict[str, str]:
    """Metadata with the sha256 of the result's own data; of one length with any."""
    return {**metadata, "modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}


def _in_turn(result: Stored, keys: Iterable[str], forget: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
    """Key and tensor, one after the other; memory is asked back after each large run of them."""
    waiting = 0
    for key in keys:
        tensor = result.tensors[key][1]
        yield key, tensor
        waiting += tensor.numel() * tensor.element_size()
        if waiting >= _FORGET_BYTES:
            forget()
            waiting = 0
    forget()


def data_hash(result: Stored, forget: Callable[[], None] = lambda: None) -> str:
    """sha256 over the tensors' bytes as they lie in the file, without the header."""
    shapes = {key: (dtype, tuple(tensor.shape)) for key, (dtype, tensor) in result.tensors.items()}
    digest = hashlib.sha256()
    for _, tensor in _in_turn(result, OutPart("", "", shapes, {}).entries(), forget):
        digest.update(raw(tensor))
    return digest.hexdigest()
