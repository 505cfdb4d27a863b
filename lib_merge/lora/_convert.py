"""Write a LoRA under another trainer's names: bytes are kept where only names change, rows split, factors joined."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import families
from ..adapter_facts import read_scalar
from ..adapters import read
from ..errors import FileError, MergeError, PlanError, Problem, RecipeError
from ..files.claim import Claim
from ..files.companion import adapter_config, adapter_path
from ..files.dtypes import DTYPES
from ..files.hashes import sha256_file
from ..files.open import open_model
from ..files.sink import FileSink, OutPart
from ..files.source import Source
from ..files.target import numbered, target_problems
from ..lazy import torch
from ..memory import peak_rss_mb
from ..metadata import STALE
from ..wording import count_of, named
from ._naming import BY_ROW, Member, Module, Renaming, Target, end_of, name_modules

if TYPE_CHECKING:
    from torch import Tensor

# Says under the old names what tensors say under the new ones.
_OUTDATED = "lora_adapter_metadata"
_SHOWN = 3


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        output: file written, or to be written in a dry run.
        renamed, split, joined: modules of the result whose names alone changed, that are rows of an old one, that
            are made of several or hold others' places empty.
        unused: (old module, why) of what is not in the result.
        warnings: what the user should know; `notes` what may interest.
        sha256: of the output, when it was asked for.
        seconds: wall time.
        peak_rss_mb: peak memory of this process so far.
    """

    output: Path
    renamed: int
    split: int
    joined: int
    unused: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sha256: str | None = None
    seconds: float = 0.0
    peak_rss_mb: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """The fields of the command line's `--json`."""
        return {
            **vars(self),
            "output": str(self.output),
            "merged": self.joined,
            "copied": self.renamed + self.split,
            "discarded": 0,
            "unused": [name for name, _ in self.unused],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
        }


@dataclass
class _Output:
    """Tensors of the result: what they are, and how their bytes come about."""

    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    contents: dict[str, Callable[[], bytes]] = field(default_factory=dict)

    def add(self, key: str, dtype: str, shape: tuple[int, ...], content: Callable[[], bytes]) -> None:
        self.tensors[key], self.contents[key] = (dtype, shape), content


def convert_lora(
    lora: Path | str,
    out: Path | str,
    *,
    names: str,
    family: str | None = None,
    lora_alpha: float | None = None,
    overwrite: bool = False,
    number: bool = False,
    fsync: bool = True,
    hash: bool = False,
    strict: bool = False,
    dry_run: bool = False,
) -> Converted:
    """Write a LoRA with other module names.

    Args:
        lora: file or PEFT folder.
        out: `.safetensors` file.
        names: "kohya", "diffusers" or "peft".
        family: id of the model family, where the LoRA's own names fit several.
        lora_alpha: of a PEFT adapter that came without its configuration.
        overwrite: an existing output may be replaced.
        number: NAME_1, NAME_2 … where the output exists.
        fsync: wait until the output is on the disk.
        hash: compute the output's sha256.
        strict: a module without a name is an error.
        dry_run: write nothing.

    Raises:
        RecipeError: a style that does not exist, or a family that is not known.
        FileError: the LoRA cannot be read, or is no LoRA.
        PlanError: the output cannot be written, or nothing in the LoRA has a name in the style.
    """
    if names not in families.STYLES:
        raise RecipeError(f"there is no naming {names!r}", hint=f"known: {', '.join(families.STYLES)}")
    path, target, start = adapter_path(lora), Path(out), time.monotonic()
    with closing(open_model(path)) as source:
        target = numbered(target) if number else target
        planned = _plan(source, path, names, family, lora_alpha)
        size = sum(info.nbytes for info in source.tensors.values())
        _refuse(target, path, size, overwrite, planned, strict)
        warnings = (f"{len(planned.unused)} modules are left out: {_few(planned.unused)}",) if planned.unused else ()
        kinds = Counter(_kind(item) for item in planned.targets)
        counts = kinds["renamed"], kinds["split"], kinds["joined"]
        made = Converted(target, *counts, planned.unused, warnings, _notes(planned))
        if dry_run:
            return made
        with Claim(target):
            _write(source, target, _contents(source, planned.targets, names), overwrite, fsync)
    digest = sha256_file(target) if hash else None
    return replace(made, sha256=digest, seconds=time.monotonic() - start, peak_rss_mb=peak_rss_mb())


def _plan(source: Source, path: Path, names: str, family: str | None, lora_alpha: float | None) -> Renaming:
    tensors = {key: (info.dtype, info.shape) for key, info in source.tensors.items()}
    found = families.detect(tensors)
    if found.kind != "adapter":
        raise FileError("it is no LoRA", file=path, hint="lib-merge inspect FILE tells what it is")
    config = adapter_config(source)
    try:
        adapter = read(tensors, source.metadata, config)
        if adapter.needs_alpha and lora_alpha is not None:
            adapter = read(tensors, source.metadata, {**(config or {}), "lora_alpha": lora_alpha})
    except MergeError as error:
        raise type(error)(error.what, file=path, tensor=error.tensor, hint=error.hint) from error
    if family is not None:
        found = replace(found, id=family, family=families.family(family))
    if adapter.needs_alpha and names != "peft":
        hint = "put adapter_config.json beside it, or give the number it was trained with: --lora-alpha X"
        raise RecipeError("the LoRA has PEFT's names but no alpha", file=path, hint=hint)
    if found.family is not None:
        return name_modules(adapter, tensors, names, found)
    known = [item for item in families.FAMILIES if item.adapter and families.has_names(item)]
    fitting = candidates({
        item.id: name_modules(adapter, tensors, names, replace(found, id=item.id, family=item)) for item in known
    })  # fmt: skip
    if not fitting:
        raise RecipeError("the LoRA's modules are those of no model family that is known", file=path)
    groups: list[list[str]] = []  # families that call everything the same
    for id, renaming in fitting.items():
        group = next((group for group in groups if fitting[group[0]].targets == renaming.targets), None)
        group.append(id) if group else groups.append([id])
    if len(groups) > 1:
        names_of = [[target.name for target in fitting[group[0]].targets] for group in groups]
        common = set.intersection(*map(set, names_of))
        telling = [next((name for name in own if name not in common), own[0]) for own in names_of]
        known_as = [f"{_few_ids(group)} ({name} …)" for group, name in zip(groups, telling, strict=True)]
        raise RecipeError(
            "the LoRA's modules could be those of several model families",
            file=path,
            hint=f"say which one with --family: {'; '.join(known_as)}",
        )
    return fitting[groups[0][0]]


def _few_ids(ids: Sequence[str]) -> str:
    return " or ".join(ids[:_SHOWN]) + (f" … ({len(ids)} in all)" if len(ids) > _SHOWN else "")


def candidates(renamings: Mapping[str, Renaming]) -> dict[str, Renaming]:
    """The families that have names for most of a LoRA's modules, in their order; none where no family has any."""
    left = {id: len(renaming.unused) for id, renaming in renamings.items() if renaming.targets}
    return {id: renamings[id] for id, count in left.items() if count == min(left.values())}


def _refuse(target: Path, path: Path, size_bytes: int, overwrite: bool, planned: Renaming, strict: bool) -> None:
    """Everything that would keep the result from being written."""
    inputs = {"LORA": path}
    problems = list(target_problems(target, folder=False, overwrite=overwrite, inputs=inputs, size_bytes=size_bytes))
    if not planned.targets:
        problems.append(Problem("error", f"nothing in the LoRA can be named so: {_few(planned.unused)}", str(path)))
    elif planned.unused and strict:
        problems.append(Problem("error", f"not everything can be named so: {_few(planned.unused)}", str(path)))
    if any(problem.level == "error" for problem in problems):
        raise PlanError([problem for problem in problems if problem.level == "error"])


def _notes(planned: Renaming) -> tuple[str, ...]:
    shown = [f"{key} ({why})" for key, why in planned.ignored]
    return (f"{count_of(shown)} not needed and left out: {named(shown)}",) if shown else ()


def _few(unused: Sequence[tuple[str, str]]) -> str:
    """The first of them with their reasons."""
    shown = "; ".join(f"{name} ({why})" for name, why in unused[:_SHOWN])
    return shown + (f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else "")


def _kind(target: Target) -> str:
    if target.plain:
        return "renamed"
    return "split" if target.rows is None else "joined"


def _contents(source: Source, targets: Sequence[Target], style: str) -> _Output:
    output = _Output()
    for target in targets:
        if target.rows is None:
            _add_module(output, source, target.name, target.members[0], style)
        else:
            _add_joined(output, source, target, style)
    return output


def _add_module(output: _Output, source: Source, name: str, member: Member, style: str) -> None:
    """A module whose tensors are those of one old module, or some of their rows."""
    module = member.module
    for role, key in module.keys.items():
        info = source.tensors[key]
        ranges = [(0, info.nbytes)]
        shape = info.shape
        if role in BY_ROW and (member.rows or member.swapped):
            start, count = member.rows or (0, shape[0])
            row = info.nbytes // shape[0]
            half = count // 2 if member.swapped else 0
            ranges = [((start + half) * row, (count - half) * row), (start * row, half * row)]
            shape = (count, *shape[1:])
        output.add(name + end_of(role, key, style), info.dtype, shape, partial(_bytes, source, key, ranges))
    if module.alpha is not None:
        output.add(f"{name}.alpha", "F32", (), partial(_float32, module.alpha))


def _bytes(source: Source, key: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Some byte ranges (start, count) of a tensor, one behind the other."""
    data = bytearray(sum(count for _, count in ranges))
    at = 0
    for start, count in ranges:
        source.read_into(key, start, memoryview(data)[at : at + count])
        at += count
    return bytes(data)


def _float32(value: float) -> bytes:
    return struct.pack("<f", value)


def _add_joined(output: _Output, source: Source, target: Target, style: str) -> None:
    """One module out of several that act on different rows of it: exact, with the ranks added up.

    Members with one and the same `down` share it, so that what was split before gets its old rank back.
    """
    modules = [member.module for member in target.members]
    scales = [_scale(source, module) for module in modules]
    known = [scale for scale in scales if scale is not None]
    first = known[0] if known else 1.0
    downs = [_tensor(source, module.keys["down"]) for module in modules]
    shared = all(torch.equal(down, downs[0]) for down in downs)
    rank = downs[0].shape[0] if shared else sum(down.shape[0] for down in downs)
    dtype = source.tensors[modules[0].keys["up"]].dtype
    kind = getattr(torch, DTYPES[dtype].torch)
    tail = modules[0].shapes["up"][2:]
    up = torch.zeros((target.rows or 0, rank), dtype=kind)
    at = 0
    for member, scale in zip(target.members, scales, strict=True):
        part = _tensor(source, member.module.keys["up"]).flatten(1)
        ratio = (1.0 if scale is None else scale) / first
        part = part.to(kind) if ratio == 1 else (part.double() * ratio).to(kind)
        up[member.start : member.start + part.shape[0], at : at + part.shape[1]] = part
        at += 0 if shared else part.shape[1]
    down = downs[0] if shared else torch.cat([item.to(downs[0].dtype) for item in downs])
    for role, tensor in (("up", up.reshape(*up.shape, *tail)), ("down", down)):
        key = modules[0].keys[role]
        name = target.name + end_of(role, key, style)
        output.add(name, source.tensors[key].dtype, tuple(tensor.shape), partial(_raw, tensor.contiguous()))
    if known:
        output.add(f"{target.name}.alpha", "F32", (), partial(_float32, first * rank))


def _scale(source: Source, module: Module) -> float | None:
    """Alpha / rank, 1 where the stored alpha is 0; None where there is no alpha, which means 1."""
    alpha = module.alpha
    if "alpha" in module.keys:
        alpha = read_scalar(source, module.keys["alpha"])
        alpha = float(module.rank or 0) if alpha == 0 else alpha
    return None if alpha is None or not module.rank else alpha / module.rank


def _tensor(source: Source, key: str) -> Tensor:
    info = source.tensors[key]
    data = bytearray(info.nbytes)
    source.read_into(key, 0, memoryview(data))
    return torch.frombuffer(data, dtype=getattr(torch, DTYPES[info.dtype].torch)).reshape(info.shape)


def _raw(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _write(source: Source, target: Path, output: _Output, overwrite: bool, fsync: bool) -> None:
    dropped = (*STALE, _OUTDATED)
    kept = {key: value for key, value in source.metadata.items() if not key.startswith(dropped)}
    part = OutPart(target.name, "", output.tensors, {"format": "pt", **kept})
    with FileSink(target, [part], folder=False, overwrite=overwrite, fsync=fsync) as sink:
        for key, content in output.contents.items():
            sink.write(key, 0, memoryview(content()))
        if changed := source.changed():
            raise FileError("the input was changed while it was read", file=changed, hint="run it again")
        sink.publish([part.metadata])
