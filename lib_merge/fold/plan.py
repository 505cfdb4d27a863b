"""What headers and configurations tell of a fold: which modules, where their bytes lie, what stands against it."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import FileError, MergeError, PlanError, Problem
from ..families import Names, detect
from ..files.gguf import Gguf, is_gguf, open_gguf
from ..files.header import load_json
from ..files.open import OUTPUT_SUFFIX, open_model
from ..files.patched import Range
from ..files.source import Source
from ..quant.coded import coded_tensors
from . import fp8, gguf, mlx
from .adapter import AdapterFile, LowRank, open_adapter, regular
from .names import SeveralError, by_trainer, resolve
from .storage import Storage

T = TypeVar("T")

DENSE_DTYPES = ("F32", "BF16", "F16")
_FOLD_DENSE = "fold into the dense model instead: lib-merge bake"
_SHOWN = 8  # modules that are told one by one: a wrong adapter has hundreds


@dataclass(frozen=True)
class Shipped:
    """The quantized checkpoint: what of it is copied and what its tensors are.

    Attributes:
        source: its tensors.
        files: every file of it.
        names: of the files, relative to its folder; one empty name for a single file.
        config: parsed config.json, empty where there is none.
        notes: what a user should know.
        gguf: its header, where it is a GGUF file.
    """

    source: Source
    files: tuple[Path, ...]
    names: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    gguf: Gguf | None = None

    @property
    def folder(self) -> bool:
        """True for a folder."""
        return self.source.kind == "folder"

    @property
    def suffix(self) -> str:
        """What the name of its copy ends in; empty for a folder."""
        return "" if self.folder else ".gguf" if self.gguf else OUTPUT_SUFFIX

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Module:
    """One weight that is computed anew.

    Attributes:
        name: in the quantized checkpoint.
        dense: key in the dense one.
        shape: (rows, columns).
        storage: how it is stored.
        change: what the adapter adds; None where only the dense weight counts.
        head_rows: rows of a head of which row i of the first half is stored as row 2i, of the second as 2i + 1; else 0.
    """

    name: str
    dense: str
    shape: tuple[int, int]
    storage: Storage
    change: LowRank | None = None
    head_rows: int = 0


@dataclass
class FoldPlan:
    """The three inputs, opened, and the modules to fold."""

    dense: Source
    adapter: AdapterFile
    shipped: Shipped
    modules: tuple[Module, ...]
    notes: tuple[str, ...] = ()

    @property
    def holes(self) -> list[Range]:
        """Where the folded modules lie in the quantized checkpoint."""
        leaves = (leaf for module in self.modules for leaf in module.storage.leaves)
        return [Range(leaf.file, leaf.offset, leaf.nbytes) for leaf in leaves]

    def close(self) -> None:
        """Close the inputs."""
        for source in (self.dense, self.adapter.source, self.shipped.source):
            source.close()


def make_fold_plan(dense: Path, adapter: Path, shipped: Path, lora_alpha: float | None = None) -> FoldPlan:
    """Open the inputs and find each module of the adapter in both checkpoints.

    Args:
        dense: the checkpoint that the quantized one was made from.
        adapter: see `open_adapter`.
        shipped: the quantized checkpoint.
        lora_alpha: see `open_adapter`.

    Raises:
        PlanError: something stands against it; all findings.
    """
    problems: list[Problem] = []
    base = _opened(open_dense, dense, problems)
    changes = _opened(lambda path: open_adapter(path, lora_alpha), adapter, problems)
    target = _opened(open_shipped, shipped, problems)
    if base is None or changes is None or target is None:
        raise PlanError(problems)
    if (mistaken := _mistaken(base, target)) is not None:
        raise PlanError([mistaken])
    modules: list[Module] = []
    by_target: dict[str, str] = {}
    for change in changes.changes:
        try:
            module = find_module(change.module, base, target, change)
            if module.name in by_target:
                what = f"the adapter changes {module.name} twice, as {by_target[module.name]} and as {change.module}"
                raise MergeError(what, tensor=change.module)
            by_target[module.name] = change.module
            modules.append(module)
        except MergeError as error:
            problems.append(_problem(error, shipped))
    if problems:
        raise PlanError(_shortened(problems, shipped))
    modules.sort(key=lambda module: (base.tensors[module.dense].file, base.tensors[module.dense].offset))
    notes = (*base.notes, *target.notes, *changes.notes)
    return FoldPlan(base, changes, target, tuple(modules), notes)


def _opened(load: Callable[[Path], T], path: Path, problems: list[Problem]) -> T | None:
    """An input, or None and one more problem."""
    try:
        return load(path)
    except MergeError as error:
        problems.append(_problem(error, path))
        return None


def _mistaken(dense: Source, shipped: Shipped) -> Problem | None:
    """What is wrong with a checkpoint as a whole: it would be told of every module otherwise."""
    if shipped.gguf is not None or _coded(shipped.source):
        return None
    path = str(shipped.source.path)
    if (coded := _coded(dense)) and not shipped.source.path.samefile(dense.path):
        storage = next(iter(coded.values()))
        what = f"it holds no coded weights, and the dense checkpoint does ({storage}): the two seem to be swapped"
        return Problem("error", what, path, hint="lib-merge fold DENSE ADAPTER OUT --quantize SHIPPED")
    return Problem("error", "the checkpoint to fold into holds no coded weights", path, hint=_FOLD_DENSE)


def _coded(source: Source) -> dict[str, str]:
    """Coded weights and their storage, by name."""
    return coded_tensors({key: info.dtype for key, info in source.tensors.items()})


def _shortened(problems: list[Problem], shipped: Path) -> list[Problem]:
    """The first problems, and how many more there are."""
    more = len(problems) - _SHOWN
    if more <= 1:
        return problems
    return [*problems[:_SHOWN], Problem("error", f"{more} more modules of the adapter cannot be folded", str(shipped))]


def _problem(error: MergeError, path: Path) -> Problem:
    return Problem("error", error.what, error.file or str(path), error.tensor, error.hint)


def open_dense(path: Path) -> Source:
    """The dense checkpoint; each of its weights files must be a plain file."""
    source = open_model(path)
    for file in source.files:
        regular(file)
    return source


def open_shipped(path: Path) -> Shipped:
    """The quantized checkpoint with every file that its copy will have.

    Raises:
        MergeError: it cannot be read, or its folder holds something other than plain files.
    """
    if path.is_file() and is_gguf(path):
        file = open_gguf(path)
        return Shipped(file.source, (path,), ("",), gguf=file)
    source = open_model(path)
    if source.kind != "folder":
        return Shipped(source, (regular(path),), ("",))
    names, notes = listing(path)
    config = path / "config.json"
    parsed = load_json(config.read_bytes(), config, "configuration") if config.is_file() else {}
    order = [file.name for file in source.files]
    names = order + [name for name in names if name not in order]
    return Shipped(source, tuple(path / name for name in names), tuple(names), parsed, (*source.notes, *notes))


def listing(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the files of a folder, and notes on hidden folders, which download tools leave and no copy needs."""
    names, notes = [], []
    for path in sorted(folder.iterdir()):
        name = path.name
        try:
            mode = path.stat().st_mode
        except OSError as error:
            broken = path.is_symlink() and not path.exists()
            what = "a broken link" if broken else f"cannot read: {error.strerror or error}"
            raise FileError(what, file=path, hint="download the file that it should lead to") from error
        if stat.S_ISREG(mode):
            names.append(name)
        elif stat.S_ISDIR(mode) and name.startswith("."):
            notes.append(f"{name} is a hidden folder and was left out")
        else:
            kind = "a folder" if stat.S_ISDIR(mode) else "no plain file"
            raise FileError(f"the quantized checkpoint holds {name}, {kind}", file=path, hint="move it elsewhere")
    return names, notes


def find_module(name: str, dense: Source, shipped: Shipped, change: LowRank | None = None) -> Module:
    """A module in both checkpoints, checked against each other and against the change.

    Args:
        name: in either way of naming.
        dense: the dense checkpoint.
        shipped: the quantized one.
        change: what the adapter does to it.

    Raises:
        MergeError: it is missing, ambiguous, not quantized, or does not fit; says why.
    """
    here, there = _names(name, dense, shipped)
    key = f"{here}.weight"
    info = dense.tensors[key]
    if len(info.shape) != 2:
        raise MergeError(
            f"the dense weight of {name} has the shape {list(info.shape)}: only matrices can be folded",
            file=dense.path,
            tensor=key,
        )
    if info.dtype not in DENSE_DTYPES:
        raise MergeError(
            f"the dense weight of {name} is stored as {info.dtype}: F32, BF16 or F16 was expected",
            file=dense.path,
            tensor=key,
            hint="name the dense checkpoint that the quantized one was made from",
        )
    storage = _storage(there, info.shape, shipped)
    if change is not None:
        _check_fit(change, info.shape)
    heads = gguf.head_rows(there, shipped.gguf.fields, info.shape[0]) if shipped.gguf else 0
    return Module(there, key, (info.shape[0], info.shape[1]), storage, change, heads)


def _names(name: str, dense: Source, shipped: Shipped) -> tuple[str, str]:
    """The module's names in both checkpoints: as they write them, else as trainers do."""
    find = resolve if shipped.gguf is None else gguf.resolve
    try:
        return find(name, dense.tensors, shipped.source.tensors)
    except SeveralError:
        raise
    except MergeError:
        names = _trainer_names(tuple((key, info.dtype, info.shape) for key, info in dense.tensors.items()))
        found = by_trainer(name, names, shipped.source.tensors) if names else None
        if found is None:
            raise
        return found


@lru_cache(maxsize=1)
def _trainer_names(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Names | None:
    """The index of an image or video model; language models have one name for each module."""
    found = {key: (dtype, shape) for key, dtype, shape in tensors}
    model = detect(found)
    return Names(found, model) if model.kind in ("denoiser", "checkpoint") else None


def _storage(module: str, shape: Sequence[int], shipped: Shipped) -> Storage:
    if shipped.gguf is not None:
        return gguf.storage(module, shipped.gguf, shape)
    tensors = shipped.source.tensors
    if mlx.is_mlx(module, tensors):
        return mlx.affine(module, tensors, shape, shipped.config)
    if (coded_fp8 := fp8.scaled_fp8(module, tensors, shape, shipped.source)) is not None:
        return coded_fp8
    weight = tensors[f"{module}.weight"]
    coded = _coded(shipped.source)
    if f"{module}.weight" in coded:
        raise MergeError(
            f"the module {module} is stored as {coded[f'{module}.weight']}, which cannot be written",
            tensor=f"{module}.weight",
            hint="fold into an MLX checkpoint in affine mode, or into the dense model: lib-merge bake",
        )
    raise MergeError(
        f"the module {module} is not quantized: it is stored as {weight.dtype} {list(weight.shape)}",
        tensor=f"{module}.weight",
        hint=_FOLD_DENSE,
    )


def _check_fit(change: LowRank, shape: Sequence[int]) -> None:
    """Shapes are known from headers, so a wrong adapter is found before any work."""
    if change.shape != tuple(shape):
        raise MergeError(
            f"the adapter's change of {change.module} has the shape {list(change.shape)}, the weight {list(shape)}",
            tensor=change.up,
            hint="is the adapter made for this model?",
        )
