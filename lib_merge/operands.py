"""What one thread reads: bytes and draws of a tile at once, turned into numbers piece by piece, in reused memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .buffers import WIDEST_BYTES, Buffer
from .errors import NumberError
from .files.dtypes import DTYPES
from .files.source import Source
from .kernels.random import raw_draws, widened
from .kernels.registry import method
from .lazy import torch
from .steps import Baked, Merged, Node, Step, Stored, leaves, walk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

# (first element, how many) -> a node's values, flat; good until the next call.
Program = Callable[[int, int], "Tensor"]


@dataclass(frozen=True)
class Tile:
    """Elements `low` … `high` of a step.

    Attributes:
        step: the output tensor.
        low, high: first element, and the one behind the last.
        piece: elements computed at a time; 0 for a tensor that cannot be cut.
        wide: computed in float64.
    """

    step: Step
    low: int
    high: int
    piece: int = 0
    wide: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.high - self.low

    @property
    def number(self) -> torch.dtype:
        """What it is computed in."""
        return torch.float64 if self.wide else torch.float32


class Operands:
    """Memory of one thread and what it holds of the tile at hand.

    Args:
        sources: slot path -> input.
        most: elements read at a time of a tensor that is not read ahead.
        keep: elements for which memory is kept; tensors beyond get new memory each time.
        device: torch's name of where numbers go.
    """

    def __init__(self, sources: Mapping[str, Source], most: int, keep: int, device: str) -> None:
        self._sources, self._most, self._keep, self._device = sources, most, max(most, keep), device
        self.raw = Buffer(most)
        self._random = Buffer(most)
        self._pool: list[Buffer] = []
        self._taken = 0
        self._ahead: list[Buffer] = []
        self._read: dict[Stored, Buffer] = {}
        self._drawn: dict[int, tuple[int, NDArray[np.uint16]]] = {}
        self._scales: dict[Stored, Tensor] = {}

    def begin(self) -> None:
        """Forget the last tile."""
        self._read, self._drawn, self._taken = {}, {}, 0

    def read_ahead(self, tile: Tile, *, drawn: bool = True) -> None:
        """The stored bytes and, where wanted, the draws of all elements; neither needs the interpreter."""
        for node in walk(tile.step.node):
            if isinstance(node, Stored) and node not in self._read and node.shape == tile.step.shape:
                size = DTYPES[node.dtype].bits // 8
                buffer = self._buffer(len(self._read), tile.count * size)
                self._sources[node.slot].read_into(node.key, tile.low * size, buffer.bytes(tile.count * size))
                self._read[node] = buffer
            elif isinstance(node, Merged) and drawn:
                self.draw_ahead(node, tile.low, tile.count)

    def draw_ahead(self, node: Merged, low: int, count: int) -> None:
        """The draws of a method's elements, for all that asks for them until the next tile."""
        chosen = method(node.method)
        if chosen.random == "element" and chosen.needs_draws(node.params):
            self._drawn[node.stream] = (low, raw_draws(node.stream, low, count))

    def room_for_result(self, tile: Tile) -> Buffer:
        """Where a result goes: over the bytes of an operand, in the cache already, or beside them if it is wider."""
        bits = DTYPES[tile.step.dtype].bits
        over = (buffer for node, buffer in self._read.items() if DTYPES[node.dtype].bits >= bits)
        return next(over, None) or self._buffer(len(self._read), tile.count * bits // 8)

    def room_beside(self, tile: Tile) -> Buffer:
        """Where a result goes that does not lie over what it is computed from."""
        return self._buffer(len(self._read), tile.count * DTYPES[tile.step.dtype].bits // 8)

    def stored(self, tile: Tile) -> list[NDArray[np.uint8]]:
        """The bytes that were read ahead of the operands of a step's method, in their order."""
        return [
            self._read[node].array(tile.count * DTYPES[node.dtype].bits // 8)
            for node in tile.step.node.inputs
            if isinstance(node, Stored)
        ]

    def room(self, tile: Tile) -> Callable[[int], Tensor]:
        """Room for the numbers of one more node; takes how many are wanted."""
        size = tile.piece or tile.count
        if size > self._keep:
            return lambda count: torch.empty(count, dtype=tile.number, device=self._device)
        if self._taken == len(self._pool):
            self._pool.append(Buffer(0, self._device))
        if self._pool[self._taken].elements < size:  # one of two sizes: growing by and by leaves holes in memory
            self._pool[self._taken] = Buffer(self._most if size <= self._most else self._keep, self._device)
        self._taken += 1
        return partial(self._pool[self._taken - 1].tensor, tile.number)

    def loading(self, node: Stored, tile: Tile, *, examined: bool) -> Program:
        """Stored elements as numbers: those read ahead, or read then, in parts.

        Args:
            node: what is stored.
            tile: what is computed.
            examined: values that are not finite are an error.
        """
        dtype, room = DTYPES[node.dtype], self.room(tile)
        stored_as = getattr(torch, dtype.torch)

        def convert(raw: Buffer, start: int, values: Tensor) -> Tensor:
            count = values.numel()
            if examined and not raw.finite(dtype, count, start):
                raise self._damaged(node)
            return values.copy_(raw.tensor(stored_as, count, start))

        def from_file(low: int, count: int) -> Tensor:
            values = room(count)
            for at, end in self.parts(count):
                self._read_now(node, low + at, end - at)
                convert(self.raw, 0, values if end - at == count else values[at:end])
            return values

        ahead = self._read.get(node)
        if ahead is not None and examined:  # once for all pieces
            if not ahead.finite(dtype, tile.count):
                raise self._damaged(node)
            examined = False
        return from_file if ahead is None else lambda low, count: convert(ahead, low - tile.low, room(count))

    def scale(self, node: Stored) -> Tensor:
        """A scale of coded weights as float32, in its shape; read once."""
        found = self._scales.get(node)
        if found is None:
            numel = math.prod(node.shape)
            whole = Tile(Step(node.key, node.dtype, node.shape, "copied", node), 0, numel)
            loaded = self.loading(node, whole, examined=True)(0, numel)
            found = self._scales[node] = loaded.reshape(node.shape).clone()
        return found

    def draws(self, stream: int, low: int, count: int) -> Tensor:
        """Draws `low` … of a stream as int32, flat; those drawn ahead, or drawn now."""
        first, drawn = self._drawn.get(stream, (low, None))
        raw = raw_draws(stream, low, count) if drawn is None else drawn[low - first : low - first + count]
        room = self._random.tensor(torch.int32, count) if count <= self._most else None
        values = widened(raw, room)
        return values if self._device == "cpu" else values.to(self._device)

    def blame_inputs(self, node: Node) -> None:
        """Read the operands of a bad result once more: damage in one of them is what the user must hear of.

        Raises:
            NumberError: an operand of a method, or what LoRAs are added to, is not finite.
        """
        for leaf in leaves(node) if isinstance(node, (Baked, Merged)) else ():
            dtype = DTYPES[leaf.dtype]
            for low, high in self.parts(math.prod(leaf.shape)):
                self._read_now(leaf, low, high - low)
                if not self.raw.finite(dtype, high - low):
                    raise self._damaged(leaf)

    def path(self, node: Node) -> Path | None:
        """The first file that a node's values come from."""
        return next((self._sources[leaf.slot].path for leaf in leaves(node)), None)

    def parts(self, count: int) -> Iterator[tuple[int, int]]:
        """First element and end of the parts in which so many elements go through the raw buffer."""
        return ((low, min(low + self._most, count)) for low in range(0, count, self._most))

    def _buffer(self, number: int, count: int) -> Buffer:
        """Room for `count` bytes of an operand, or of the result behind the last one."""
        if number == len(self._ahead):
            self._ahead.append(Buffer(0))
        if self._ahead[number].elements * WIDEST_BYTES < count:
            self._ahead[number] = Buffer(-(-count // WIDEST_BYTES))
        return self._ahead[number]

    def _read_now(self, node: Stored, low: int, count: int) -> None:
        """Some elements' bytes into the raw buffer."""
        size = DTYPES[node.dtype].bits // 8
        self._sources[node.slot].read_into(node.key, low * size, self.raw.bytes(count * size))

    def _damaged(self, node: Stored) -> NumberError:
        return NumberError(
            f"model {node.slot} holds a value that is not finite",
            file=self._sources[node.slot].path,
            tensor=node.key,
            hint="exclude the tensor, or use a file without the damage",
        )
