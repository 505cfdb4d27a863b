"""Adds what LoRAs change to a tensor: sums of low rank in fixed blocks of rows, everything else on whole tensors.

A tensor is seen as the matrix [first axis, rest]. Blocks of rows do not depend on threads or tiles, so that the bytes
of a result do not either: a product of matrices may round differently when it is cut elsewhere.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .adapters import FORMATS
from .errors import FileError, NumberError
from .files.dtypes import DTYPES, is_float
from .files.source import Source
from .kernels.measure import bits_finite
from .lazy import np, torch
from .steps import Baked, Change, sliced_roles
from .tiles import bake_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_ROOM_BYTES = 4 << 20
_ROOMS = threading.local()
_STAGES = ("replace", "add", "multiply", "dora")


@dataclass(frozen=True)
class _Product:
    """up @ down, added to some rows."""

    rows: tuple[int, int]
    up: Tensor
    down: Tensor

    def apply(self, values: Tensor, low: int) -> None:
        """Change `values` by what belongs to rows `low` … of those meant."""
        _within(values, self.down).addmm_(self.up.narrow(0, low, values.shape[0]), self.down)


@dataclass(frozen=True)
class _Matrix:
    """A change that is there as numbers."""

    rows: tuple[int, int]
    delta: Tensor

    def apply(self, values: Tensor, low: int) -> None:
        """See `_Product`."""
        _within(values, self.delta).add_(self.delta.narrow(0, low, values.shape[0]))


@dataclass(frozen=True)
class _Sliced:
    """A change that is computed for a few rows at a time, of parts that are read as far as they are needed."""

    rows: tuple[int, int]
    change: Change
    source: Source
    number: torch.dtype
    sliced: tuple[str, ...]
    parts: Mapping[str, Tensor]

    def apply(self, values: Tensor, low: int) -> None:
        """See `_Product`."""
        change, form = self.change, FORMATS[self.change.format]
        first = low + (change.place.part[0] if change.place.part else 0)
        read = {
            role: load_part(self.source, change.keys[role], self.number, first, len(values)) for role in self.sliced
        }
        parts, shape = {**self.parts, **read}, (len(values), *change.shape[1:])
        if form.stage == "replace":
            assert form.apply is not None
            replaced = form.apply(values.reshape(shape), parts, change.settings, change.strength)
            values.copy_(replaced.reshape(values.shape))
            return
        assert form.delta is not None
        delta = form.delta(parts, change.settings, shape)
        if bool(delta.any()):
            delta = delta.reshape(len(values), -1)
            _within(values, delta).add_(delta * change.strength)


@dataclass(frozen=True)
class _Computed:
    """A change of which any rows can be computed from all of its parts."""

    rows: tuple[int, int]
    change: Change
    parts: Mapping[str, Tensor]

    def apply(self, values: Tensor, low: int) -> None:
        """See `_Product`."""
        change, form = self.change, FORMATS[self.change.format]
        first = low + (change.place.part[0] if change.place.part else 0)
        assert form.rows is not None
        delta = form.rows(self.parts, change.settings, first, len(values))
        if bool(delta.any()):
            _within(values, delta).add_(delta.mul_(change.strength))


_Term = _Product | _Matrix | _Sliced | _Computed


class Baking:
    """The changes of one tensor, their parts loaded once; computed on the CPU.

    Args:
        node: what is baked.
        sources: slot path -> input.
        number: dtype of the arithmetic, float32 or float64.

    Attributes:
        only_adds: nothing but sums: a value of the base that is not finite stays so.

    Raises:
        NumberError: a part holds a value that is not finite.
    """

    def __init__(self, node: Baked, sources: Mapping[str, Source], number: torch.dtype) -> None:
        self._node, self._sources, self._number = node, sources, number
        self.only_adds = all(FORMATS[change.format].stage == "add" for change in node.changes)
        self._others: dict[str, list[Change]] = defaultdict(list)
        terms = []
        for change in sorted(node.changes, key=_stage):
            stage = FORMATS[change.format].stage
            if change.strength and (stage == "add" or _sliced(change)):
                with self._told(change):
                    terms.append(self._term(change))
            elif change.strength:
                self._others[stage].append(change)
        self._terms = _joined([term for term in terms if term is not None])
        self._block_rows = bake_rows(node.columns)

    def apply(self, values: Tensor, first: int) -> None:
        """Change rows `first` … of the tensor in place: all of them where `node.whole`, else whole blocks.

        Args:
            values: matrix [rows, columns] of the dtype given.
            first: row of the tensor that it starts with, a multiple of `bake_rows`.
        """
        for stage in _STAGES if self._others else ("add",):
            if stage == "add":
                self._apply_terms(values, first)
            for change in self._others.get(stage, ()):
                with self._told(change):
                    self._apply_whole(change, values)

    def _apply_terms(self, values: Tensor, first: int) -> None:
        end = first + values.shape[0]
        for at in range(first, end, self._block_rows):
            until = min(at + self._block_rows, end)
            for term in self._terms:
                start, count = term.rows
                low, high = max(at, start), min(until, start + count)
                if low >= high:
                    continue
                rows = values if high - low == end - first else values.narrow(0, low - first, high - low)
                if isinstance(term, (_Sliced, _Computed)):  # their parts meet only now
                    with self._told(term.change):
                        term.apply(rows, low - start)
                else:
                    term.apply(rows, low - start)

    def _term(self, change: Change) -> _Term | None:
        """A linear change with its strength; None where it is zero, so that not even the sign of a zero changes."""
        form, rows = FORMATS[change.format], self._rows_of(change)
        sliced = _sliced(change)
        parts = {role: self._part(change, role) for role in change.keys if role not in sliced}
        if sliced:
            return _Sliced(rows, change, self._sources[change.slot], self._number, sliced, parts)
        if form.rows is not None and not change.place.post:
            return _Computed(rows, change, parts)
        pair = form.factors(parts, change.settings) if form.factors is not None else None
        if pair is None:
            assert form.delta is not None
            delta = form.delta(parts, change.settings, change.shape)
            delta = _placed(delta.reshape(change.shape[0] if change.shape else 1, -1), change) * change.strength
            return _Matrix(rows, delta) if _changes(delta) else None
        up, down = pair
        if up.shape[1] != down.shape[0]:
            raise RuntimeError(f"{list(up.shape)} times {list(down.shape)}")
        up, down = (down.T, up.T) if change.place.post == "transpose" else (_placed(up, change), down)
        return _Product(rows, up * change.strength, down) if _changes(up) and _changes(down) else None

    def _rows_of(self, change: Change) -> tuple[int, int]:
        """(first row, number of rows) of the tensor that a change means."""
        return change.place.rows or (0, self._node.shape[0] if self._node.shape else 1)

    def _apply_whole(self, change: Change, values: Tensor) -> None:
        """Let a format that is not a sum change its rows."""
        form = FORMATS[change.format]
        assert form.apply is not None
        start, count = self._rows_of(change)
        rows = values[start : start + count]
        weight = _turned(rows, change.place.post).reshape(change.shape)
        result = form.apply(weight, self._parts(change), change.settings, change.strength)
        shape = (rows.shape[1], rows.shape[0]) if change.place.post == "transpose" else tuple(rows.shape)
        rows.copy_(_turned(result.reshape(shape), change.place.post))

    @contextmanager
    def _told(self, change: Change) -> Iterator[None]:
        """Says which module it was, where torch cannot compute one: parts whose shapes contradict each other."""
        try:
            yield
        except RuntimeError as error:
            raise FileError(
                f"the parts of a {FORMATS[change.format].label} module do not fit together: {error}",
                file=self._sources[change.slot].path,
                tensor=next(iter(change.keys.values())),
                hint="use an undamaged file",
            ) from error

    def _parts(self, change: Change) -> dict[str, Tensor]:
        return {role: self._part(change, role) for role in change.keys}

    def _part(self, change: Change, role: str) -> Tensor:
        return load_part(self._sources[change.slot], change.keys[role], self._number)


def _stage(change: Change) -> int:
    return _STAGES.index(FORMATS[change.format].stage)


def _sliced(change: Change) -> tuple[str, ...]:
    return sliced_roles(FORMATS[change.format], change.keys, change.place)


def _joined(terms: Sequence[_Term]) -> list[_Term]:
    """Products that mean the same rows and columns side by side: one product for all LoRAs."""
    groups: dict[tuple[object, ...], list[_Product]] = {}
    joined: list[_Term] = []
    for term in terms:
        if isinstance(term, _Product):
            groups.setdefault((term.rows, term.down.shape[1]), []).append(term)
        else:
            joined.append(term)
    for group in groups.values():
        if len(group) == 1:
            joined.append(group[0])
            continue
        up = torch.cat([term.up for term in group], 1).contiguous()
        joined.append(_Product(group[0].rows, up, torch.cat([term.down for term in group]).contiguous()))
    return joined


def _within(values: Tensor, change: Tensor) -> Tensor:
    """The columns that a change has; a first layer may have more of them."""
    return values if values.shape[1] == change.shape[1] else values[:, : change.shape[1]]


def _changes(part: Tensor) -> bool:
    """True when not all of it is zero; the first number mostly tells, and a look at all costs as much as a product."""
    return part.numel() > 0 and (bool(part[0, 0]) or bool(part.any()))


def _room() -> NDArray[np.uint8]:
    """Memory for the bytes of a part until they are numbers; one for each thread."""
    if not hasattr(_ROOMS, "memory"):
        _ROOMS.memory = np.empty(_ROOM_BYTES, np.uint8)
    return _ROOMS.memory  # type: ignore[no-any-return]


def load_part(source: Source, key: str, number: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
    """A tensor of an adapter; floats in the dtype asked for, integers as they are.

    Args:
        source: the adapter's file.
        key: name in it.
        number: float32 or float64.
        first: first row that is wanted.
        count: number of rows; None for all.

    Raises:
        NumberError: it holds a value that is not finite.
    """
    info = source.tensors[key]
    dtype = DTYPES[info.dtype]
    shape = info.shape if count is None else (count, *info.shape[1:])
    row = math.prod(info.shape[1:]) * dtype.bits // 8
    size = math.prod(shape) * dtype.bits // 8
    kept = not is_float(info.dtype) or getattr(torch, dtype.torch) == number  # what is read is what is given back
    raw = np.empty(size, np.uint8) if kept or size > _ROOM_BYTES else _room()[:size]
    source.read_into(key, first * row, raw.data)
    if is_float(info.dtype) and not bits_finite(raw, dtype.bits, dtype.unbounded):
        raise NumberError(
            "the LoRA holds a value that is not finite", file=source.path, tensor=key, hint="use an undamaged file"
        )
    values = torch.from_numpy(raw).view(getattr(torch, dtype.torch)).reshape(shape)
    return values.to(number) if is_float(info.dtype) else values


def _placed(rows: Tensor, change: Change) -> Tensor:
    """Rows of a module's change, or of its up, as they stand in the tensor."""
    place = change.place
    if place.part is not None:
        rows = rows[place.part[0] : sum(place.part)]
    return _turned(rows, place.post)


def _turned(matrix: Tensor, post: str) -> Tensor:
    """Halves of the rows swapped, or rows and columns; each is its own inverse."""
    if post == "swap":
        half = len(matrix) // 2
        return torch.cat([matrix[half:], matrix[:half]])
    return matrix.T if post == "transpose" else matrix
