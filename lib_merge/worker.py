"""One thread's work: read a tile of every operand, apply the methods, round once, write; with reused buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .baking import Baking
from .buffers import Buffer
from .errors import NumberError
from .files.dtypes import DTYPES, Dtype
from .files.source import Source
from .kernels.measure import all_finite
from .kernels.random import draws
from .kernels.registry import Method, method
from .kernels.rounding import to_odd
from .lazy import torch
from .quant.fp8 import scaled
from .steps import Baked, Channels, Counting, Joined, Merged, Node, Scaled, Step, Stored, Zeros, leaves
from .tiles import bake_rows, cut

if TYPE_CHECKING:
    from torch import Tensor


class Sink(Protocol):
    """Where results go: bytes at an offset of a tensor, or whole ranges of an input."""

    def place(self, key: str) -> tuple[int, int]:
        """(part, absolute offset), by which work is ordered."""

    def write(self, key: str, offset: int, view: memoryview) -> None:
        """Bytes of a tensor from byte `offset` on."""

    def copy(self, key: str, offset: int, source: Source, source_key: str, count: int) -> None:
        """`count` bytes of an input as they are."""


class Watch(Protocol):
    """Sees the operands and the result of a merged step, for reports; must not change them."""

    def before(self, step: Step, low: int, operands: list[Tensor]) -> None:
        """Operands of the step's method from element `low` on."""

    def after(self, step: Step, low: int, result: Tensor) -> None:
        """Result of the same tile."""


@dataclass(frozen=True)
class Tile:
    """Elements `low` … `high` of a step, all of them where it cannot be cut; `wide` is computed in float64."""

    step: Step
    low: int
    high: int
    wide: bool = False


class Worker:
    """Buffers and the functions that use them; one for each thread.

    Args:
        sources: slot path -> input.
        sink: takes the results.
        tile: elements worked on at a time.
        keep: elements of a measured tensor that may be kept in memory between its two passes.
        watch: sees operands and results.
        device: torch's name of where methods are computed.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        sink: Sink,
        tile: int,
        keep: int,
        watch: Watch | None,
        device: str = "cpu",
    ) -> None:
        self._sources, self._sink, self._tile, self._watch, self._device = sources, sink, tile, watch, device
        self._keep = max(tile, keep)
        self._raw = Buffer(tile)
        self._random = Buffer(tile)
        self._pool: list[Buffer] = []
        self._scales: dict[Stored, Tensor] = {}
        self._taken = 0
        self.saturated = 0

    def run(self, tile: Tile, measures: Sequence[Any] = ()) -> None:
        """Compute and write one tile.

        Args:
            tile: part of a step, or all of it.
            measures: of the step's method, where the tile is a part; of a whole step they are taken here.

        Raises:
            NumberError: a value is not finite, or becomes so by the cast to the output dtype.
        """
        self._taken = 0
        step = tile.step
        if isinstance(step.node, Counting):
            numbers = np.arange(tile.low, tile.high, dtype="<i8")
            self._sink.write(step.key, numbers.itemsize * tile.low, numbers.data.cast("B"))
            return
        if isinstance(step.node, Baked):
            self._bake(tile, step.node)
            return
        result = self._value(step.node, tile, _number(tile), measures, merged=False)
        self._store(step, tile.low, result)

    def measure(self, tile: Tile, number: int, measures: Sequence[Any]) -> Any:
        """A tile's part of its method's measure of that number; see `kernels.registry.Measure`."""
        self._taken = 0
        node = tile.step.node
        assert isinstance(node, Merged)
        operands = self._operands(node, tile, _number(tile))
        return self._part(node, operands, tile.low, number, measures)

    def _value(self, node: Node, tile: Tile, number: torch.dtype, measures: Sequence[Any], *, merged: bool) -> Tensor:
        """Elements of a node in float; `merged` when a method will use them, so that they must be finite."""
        if isinstance(node, Zeros):
            return self._take(tile.high - tile.low, number).zero_()
        if isinstance(node, Stored):
            return self._load(node, tile, number, must_be_finite=merged)
        if isinstance(node, Scaled):
            codes = self._load(node.codes, tile, number, must_be_finite=merged)
            return scaled(codes, self._scale(node.scale), node.shape, tile.low)
        if isinstance(node, (Channels, Joined)):
            return self._side_by_side(node, tile, number, merged=merged)
        if isinstance(node, Baked):
            return self._baked_whole(node, tile, number)
        assert isinstance(node, Merged)
        operands = self._operands(node, tile, number)
        watch = self._watch if node is tile.step.merge and tile.step.action == "merged" else None
        if watch is not None:
            watch.before(tile.step, tile.low, operands)
        if node.measured and not measures:
            result = self._in_two_passes(node, operands)
        else:
            result = self._apply(node, operands, tile.low, measures)
        if watch is not None and not self._seen_baked(tile.step):
            watch.after(tile.step, tile.low, result)
        if node is not tile.step.node and not all_finite(result):
            file = next((self._sources[leaf.slot].path for leaf in leaves(node)), None)
            raise NumberError(f"{node.method} gives values that are not finite", file=file, tensor=tile.step.key)
        return result

    def _bake(self, tile: Tile, node: Baked) -> None:
        """Compute and write a whole tensor with LoRAs, in blocks of rows where they allow it."""
        step, number, watch = tile.step, _number(tile), self._watch
        baking = Baking(node, self._sources, number, self._device)
        size = max(1, step.numel if step.whole else bake_rows(node.columns) * node.columns)
        for low in range(0, step.numel, size):
            self._taken = 0
            piece = replace(tile, low=low, high=min(low + size, step.numel))
            values = self._value(node.base, piece, number, (), merged=True).cpu()  # where the LoRAs are multiplied
            if watch is not None and step.merge is None:
                watch.before(step, low, [values])
            baking.apply(values.view(-1, node.columns), low // node.columns)
            if watch is not None and self._seen_baked(step):
                watch.after(step, low, values)
            self._store(step, low, values)

    def _baked_whole(self, node: Baked, tile: Tile, number: torch.dtype) -> Tensor:
        """A whole tensor with LoRAs that another node needs; flat."""
        values = self._value(node.base, tile, number, (), merged=True).cpu()
        if values.numel():
            Baking(node, self._sources, number, self._device).apply(values.view(-1, node.columns), 0)
        if not all_finite(values):
            file = next((self._sources[change.slot].path for change in node.changes), None)
            raise NumberError("a LoRA gives values that are not finite", file=file, tensor=tile.step.key)
        return values.to(self._device)

    @staticmethod
    def _seen_baked(step: Step) -> bool:
        """True when reports are about the values with LoRAs; a method on some of the channels is seen by itself."""
        return isinstance(step.node, Baked) and not isinstance(step.node.base, Joined)

    def _side_by_side(self, node: Channels | Joined, tile: Tile, number: torch.dtype, *, merged: bool) -> Tensor:
        """Input channels cut off or put together; of whole tensors, flat."""
        first, *wider = [
            self._value(item, Tile(tile.step, 0, math.prod(item.shape), tile.wide), number, (), merged=merged).reshape(
                item.shape
            )
            for item in node.inputs
        ]
        result = wider[0] if wider else first.new_zeros(node.shape)
        shared = min(first.shape[1], result.shape[1])
        result[:, :shared] = first[:, :shared]
        return result.reshape(-1)

    def _scale(self, node: Stored) -> Tensor:
        """A scale as numbers, read once."""
        found = self._scales.get(node)
        if found is None:
            whole = Tile(Step(node.key, node.dtype, node.shape, "copied", node), 0, math.prod(node.shape))
            loaded = self._load(node, whole, torch.float32, must_be_finite=True)
            found = self._scales[node] = loaded.reshape(node.shape).clone()
        return found

    def _operands(self, node: Merged, tile: Tile, number: torch.dtype) -> list[Tensor]:
        return [self._value(item, tile, number, (), merged=True) for item in node.inputs]

    def _apply(self, node: Merged, operands: list[Tensor], low: int, measures: Sequence[Any]) -> Tensor:
        """The method's result for flat operands that start at element `low`; flat."""
        chosen = method(node.method)
        return chosen.function(
            *_shaped(node, operands), **self._settings(chosen, node, operands, low, measures)
        ).reshape(-1)

    def _part(self, node: Merged, operands: list[Tensor], low: int, number: int, measures: Sequence[Any]) -> Any:
        """A measure's part from flat operands that start at element `low`."""
        chosen = method(node.method)
        settings = self._settings(chosen, node, operands, low, measures, drawn=chosen.measures[number].drawn)
        return chosen.measures[number].tile(*_shaped(node, operands), **settings)

    def _settings(
        self,
        chosen: Method,
        node: Merged,
        operands: list[Tensor],
        low: int,
        measures: Sequence[Any],
        *,
        drawn: bool = True,
    ) -> dict[str, Any]:
        """What the method takes by name: parameters, draws, measures."""
        settings: dict[str, Any] = dict(node.params)
        if chosen.random:
            drawn = drawn and chosen.needs_draws(node.params)
            settings["draws"] = self._draws(chosen, node, operands[0].numel(), low) if drawn else None
        if chosen.measures:
            settings["measures"] = measures
        return settings

    def _draws(self, chosen: Method, node: Merged, count: int, low: int) -> Tensor:
        if chosen.random == "tensor":
            return draws(node.stream, 0, 1)
        room = self._random.tensor(torch.int32, count) if count <= self._tile else None
        drawn = draws(node.stream, low, count, out=room).to(self._device)
        return _shaped(node, [drawn])[0]

    def _in_two_passes(self, node: Merged, operands: list[Tensor]) -> Tensor:
        """Measure whole operands piece by piece, then apply the method piece by piece, while they are in memory."""
        chosen = method(node.method)
        size = cut(node, self._tile)
        pieces = [
            (low, [operand[low : low + size] for operand in operands]) for low in range(0, operands[0].numel(), size)
        ]
        measures: list[Any] = []
        for number, measure in enumerate(chosen.needed_measures(node.params)):
            parts = [self._part(node, piece, low, number, measures) for low, piece in pieces]
            measures.append(measure.combine(parts))
        for low, piece in pieces:
            place = operands[0][low : low + size]
            result = self._apply(node, piece, low, measures)
            if result.data_ptr() != place.data_ptr():
                place.copy_(result)
        return operands[0]

    def _load(self, node: Stored, tile: Tile, number: torch.dtype, *, must_be_finite: bool) -> Tensor:
        """Stored elements as float; read piece by piece through the raw buffer."""
        source, dtype = self._sources[node.slot], DTYPES[node.dtype]
        stored_as, size = getattr(torch, dtype.torch), dtype.bits // 8
        values = self._take(tile.high - tile.low, number)
        for low, high in self._pieces(tile.high - tile.low):
            count = high - low
            source.read_into(node.key, (tile.low + low) * size, self._raw.bytes(count * size))
            if must_be_finite and not self._raw.finite(dtype, count):
                raise NumberError(
                    f"model {node.slot} holds a value that is not finite",
                    file=source.path,
                    tensor=node.key,
                    hint="exclude the tensor, or use a file without the damage",
                )
            part = values if count == values.numel() else values[low:high]
            part.copy_(self._raw.tensor(stored_as, count))
        return values

    def _store(self, step: Step, first: int, values: Tensor) -> None:
        """Round to the stored dtype, check, write; piece by piece through the raw buffer."""
        dtype = DTYPES[step.dtype]
        stored_as, size = getattr(torch, dtype.torch), dtype.bits // 8
        for low, high in self._pieces(values.numel()):
            count = high - low
            part = values if count == values.numel() else values[low:high]
            if dtype.rank == 1:
                part = self._within(part, dtype)
            raw = self._raw.tensor(stored_as, count)
            narrow = part.dtype == torch.float64 and size < 4
            raw.copy_(to_odd(part) if narrow else part)
            if not self._raw.finite(dtype, count):
                self._explain(step, part, raw, dtype)
            self._sink.write(step.key, (first + low) * size, self._raw.bytes(count * size))

    def _within(self, part: Tensor, dtype: Dtype) -> Tensor:
        """Finite values cut to the range of fp8; how many were is counted."""
        beyond = int((part.abs() > dtype.largest).sum()) if all_finite(part) else 0
        self.saturated += beyond
        return part.clamp(-dtype.largest, dtype.largest) if beyond else part

    def _explain(self, step: Step, part: Tensor, raw: Tensor, dtype: Dtype) -> None:
        """Say what is wrong with a result; a copied tensor may keep what was not finite before its cast."""
        part = part.cpu()
        before = torch.isfinite(part)
        after = torch.isfinite(raw.to(part.dtype))
        born = before & ~after
        file = next((self._sources[leaf.slot].path for leaf in leaves(step.node)), None)
        if bool(born.any()):
            largest = float(part[born].abs().max())
            raise NumberError(
                f"a value of {largest:g} does not fit {dtype.option}, which ends at {dtype.largest:g}",
                file=file,
                tensor=step.key,
                hint="store it wider: --save-dtype bf16 or fp32",
            )
        if step.action == "merged":
            raise NumberError(
                "the result holds a value that is not finite",
                file=file,
                tensor=step.key,
                hint="lower the method's parameters, or exclude the tensor",
            )

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        return ((low, min(low + self._tile, count)) for low in range(0, count, self._tile))

    def _take(self, count: int, number: torch.dtype) -> Tensor:
        """Room for `count` elements: a buffer of this worker, or a new one for what is larger than it keeps."""
        if count > self._keep:
            return torch.empty(count, dtype=number, device=self._device)
        if self._taken == len(self._pool):
            self._pool.append(Buffer(self._tile, self._device))
        if self._pool[self._taken].elements < count:
            self._pool[self._taken] = Buffer(self._keep, self._device)
        self._taken += 1
        return self._pool[self._taken - 1].tensor(number, count)


def _number(tile: Tile) -> torch.dtype:
    return torch.float64 if tile.wide else torch.float32


def _shaped(node: Merged, operands: list[Tensor]) -> list[Tensor]:
    """Flat operands in the shape that the method asks for."""
    if node.whole:
        return [operand.reshape(node.shape) for operand in operands]
    return [operand.reshape(-1, node.columns) for operand in operands] if node.rows else operands
