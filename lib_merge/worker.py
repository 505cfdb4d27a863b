"""One thread's work: read a tile of every operand, apply the methods, round once, write; with reused buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import fused
from .baking import Baking
from .buffers import Buffer
from .errors import NumberError
from .files.dtypes import DTYPES
from .files.source import Source
from .kernels.measure import all_finite
from .kernels.random import draws
from .kernels.registry import Method, method
from .lazy import np, torch
from .operands import Operands, Program, Tile
from .ports import Sink, Watch
from .quant.fp8 import fresh_scale, in_units, scaled, widen
from .results import Results
from .steps import Baked, Channels, Counting, FreshScale, Joined, Merged, Node, Scaled, Step, Stored
from .tiles import TILE, bake_rows, block_elements, cut

if TYPE_CHECKING:
    from torch import Tensor


# (flat operands, first element) -> a method's result, flat.
Application = Callable[[list["Tensor"], int], "Tensor"]


class Worker:
    """What computes and writes tiles; one for each thread.

    Args:
        sources: slot path -> input.
        sink: takes the results.
        most: elements read at a time of a tensor that cannot be cut.
        keep: elements of a measured tensor that may be kept in memory between its two passes.
        turn: held while a tile is computed; lets other threads read and write meanwhile.
        watch: sees operands and results.
        device: torch's name of where methods are computed.
        loops: steps that are computed by compiled code.

    Attributes:
        results: rounds what was computed, and counts what it cut.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        sink: Sink,
        most: int,
        keep: int,
        turn: AbstractContextManager[Any],
        watch: Watch | None,
        device: str = "cpu",
        loops: fused.Loops = fused.NONE,
    ) -> None:
        self._loops = loops
        self._sources, self._sink, self._most, self._turn = sources, sink, most, turn
        self._watch, self._device = watch, device
        self._in = Operands(sources, most, keep, device)
        self.results = Results(self._in)

    def run(self, tile: Tile, measures: Sequence[Any] = ()) -> None:
        """Compute and write one tile.

        Args:
            tile: part of a step, or all of it.
            measures: of the step's method, where the tile is a part; of a whole step they are taken here.

        Raises:
            NumberError: a value is not finite, or becomes so by the cast to the output dtype.
        """
        self._in.begin()
        step = tile.step
        if isinstance(step.node, Counting):
            numbers = np.arange(tile.low, tile.high, dtype="<i8")
            self._sink.write(step.key, numbers.itemsize * tile.low, numbers.data.cast("B"))
        elif step.scale is not None:
            self._encode(tile, step.scale, measures)
        elif isinstance(step.node, Baked):
            self._bake(tile, step.node)
        elif tile.piece:
            out = fused.compute(self._loops.of(step), self._in, tile, measures)
            self._write(tile, out or self._compute_in_pieces(tile, measures))
        elif step.measured and (out := fused.compute(self._loops.of(step), self._in, tile, ())):
            self._write(tile, out)
        else:
            self._in.begin()
            self._store(step, tile.low, self._program(step.node, tile, measures)(tile.low, tile.count))

    def _write(self, tile: Tile, out: Buffer) -> None:
        size = DTYPES[tile.step.dtype].bits // 8
        self._sink.write(tile.step.key, tile.low * size, out.bytes(tile.count * size))

    def _compute_in_pieces(self, tile: Tile, measures: Sequence[Any]) -> Buffer:
        """All of a tile by its method, piece by piece."""
        step, dtype, saturated = tile.step, DTYPES[tile.step.dtype], self.results.saturated
        self._in.begin()
        self._in.read_ahead(tile)
        # What takes long to compute gains more from all threads than it loses while they wait for the interpreter.
        with nullcontext() if step.measured else self._turn:
            out = self._compute(tile, measures, self.results.narrow)
        if not out.finite(dtype, tile.count):  # asked once for all pieces; now one by one, for the one to blame
            self.results.saturated = saturated
            self._in.begin()
            self._in.read_ahead(tile)
            out = self._compute(tile, measures, self.results.round)
        return out

    def _compute(
        self, tile: Tile, measures: Sequence[Any], put: Callable[[Step, Tensor, Buffer, int], object]
    ) -> Buffer:
        """Compute what was read ahead piece by piece; returns what `put` made of it."""
        out = self._in.room_for_result(tile)
        program = self._program(tile.step.node, tile, measures)
        for low in range(tile.low, tile.high, tile.piece):
            put(tile.step, program(low, min(tile.piece, tile.high - low)), out, low - tile.low)
        return out

    def measure(self, tile: Tile, number: int, measures: Sequence[Any]) -> Any:
        """A tile's part of its method's measure of that number; see `kernels.registry.Measure`."""
        self._in.begin()
        node = tile.step.node
        assert isinstance(node, Merged)
        loop = self._loops.of(tile.step)
        if loop is not None:
            try:
                return fused.measure(loop, self._in, tile, number, measures)
            except ArithmeticError:
                self._in.begin()  # and the method says what is wrong
        operands = [self._program(item, tile, examined=True)(tile.low, tile.count) for item in node.inputs]
        return self._part(node, operands, tile.low, number, measures)

    def _program(self, node: Node, tile: Tile, measures: Sequence[Any] = (), *, examined: bool = False) -> Program:
        """What gives a node's numbers, for as many pieces of the tile as there are.

        Args:
            node: the step's, or one below it.
            tile: what is computed.
            measures: of the step's method.
            examined: stored values must be finite, for a method will use them.
        """
        if isinstance(node, Stored):
            return self._in.loading(node, tile, examined=examined)
        if isinstance(node, Merged):
            return self._merging(node, tile, measures)
        if isinstance(node, Scaled):
            codes = self._in.loading(node.codes, tile, examined=examined)
            return lambda low, count: scaled(codes(low, count), self._in.scale(node.scale), node.shape, low)
        if isinstance(node, (Channels, Joined)):
            return self._side_by_side(node, tile, examined)
        if isinstance(node, Baked):
            return self._baked(node, tile)
        room = self._in.room(tile)
        return lambda low, count: room(count).zero_()

    def _merging(self, node: Merged, tile: Tile, measures: Sequence[Any]) -> Program:
        """The values of a method; those of the step's own are watched, those of others must be finite."""
        examined = not method(node.method).shows_damage(node.params)
        inputs = [self._program(item, tile, examined=examined) for item in node.inputs]
        apply = self._two_passes(node) if node.measured and not measures else self._application(node, measures)
        step, watch = tile.step, self._watch

        def plain(low: int, count: int) -> Tensor:
            return apply([program(low, count) for program in inputs], low)

        def watched(low: int, count: int) -> Tensor:
            assert watch is not None
            operands = [program(low, count) for program in inputs]
            watch.before(step, low, operands)
            result = apply(operands, low)
            if not _seen_baked(step):
                watch.after(step, low, result)
            return result

        compute = watched if watch is not None and node is step.merge and step.action == "merged" else plain
        if node is step.node:
            return compute

        def finite(low: int, count: int) -> Tensor:
            result = compute(low, count)
            if not all_finite(result):
                self._in.blame_inputs(node)
                what = f"{node.method} gives values that are not finite"
                raise NumberError(what, file=self._in.path(node), tensor=step.key)
            return result

        return finite

    def _application(self, node: Merged, measures: Sequence[Any]) -> Application:
        """The method as a function of flat operands and their first element."""
        chosen = method(node.method)
        if node.whole or node.rows or chosen.measures:
            return lambda operands, low: chosen.function(
                *_shaped(node, operands), **self._settings(chosen, node, operands, low, measures)
            ).reshape(-1)
        if chosen.random or chosen.more:
            return lambda operands, low: chosen.function(
                *operands, **self._settings(chosen, node, operands, low, measures)
            )
        params = dict(node.params)
        return lambda operands, low: chosen.function(*operands, **params)

    def _two_passes(self, node: Merged) -> Application:
        """Measure whole operands piece by piece, then apply the method piece by piece, while they are in memory."""
        size = cut(node, self._most)

        def apply(operands: list[Tensor], low: int) -> Tensor:
            self._in.draw_ahead(node, low, operands[0].numel())
            starts = range(0, operands[0].numel(), size)
            pieces = [(at, [operand[at : at + size] for operand in operands]) for at in starts]
            measures: list[Any] = []
            for number, measure in enumerate(method(node.method).needed_measures(node.params)):
                parts = [self._part(node, piece, at, number, measures) for at, piece in pieces]
                measures.append(measure.combine(parts))
            application = self._application(node, measures)
            for at, piece in pieces:
                place = operands[0][at : at + size]
                result = application(piece, at)
                if result.data_ptr() != place.data_ptr():
                    place.copy_(result)
            return operands[0]

        return apply

    def _bake(self, tile: Tile, node: Baked) -> None:
        """Compute and write a whole tensor with LoRAs, in blocks of rows where they allow it."""
        step, size = tile.step, DTYPES[tile.step.dtype].bits // 8
        baking = Baking(node, self._sources, tile.number)
        columns = node.columns
        piece = max(1, step.numel if step.whole else bake_rows(columns) * columns)
        block = max(piece, TILE // piece * piece)
        for first in range(0, step.numel, block):
            part = replace(tile, low=first, high=min(first + block, step.numel), piece=piece)
            self._in.begin()
            self._in.read_ahead(part)
            out = self._in.room_for_result(part)
            base = self._program(node.base, part, examined=not baking.only_adds)
            for low in range(first, part.high, piece):
                values = base(low, min(piece, part.high - low)).cpu()  # where the LoRAs are multiplied
                self._change(step, node, baking, values, low)
                self.results.round(step, values, out, low - first)
            self._sink.write(step.key, first * size, out.bytes(part.count * size))

    def _change(self, step: Step, node: Baked, baking: Baking, values: Tensor, low: int) -> None:
        """Rows from element `low` on with the LoRAs, in place."""
        watch = self._watch
        if watch is not None and step.merge is None:
            watch.before(step, low, [values])
        baking.apply(values.view(-1, node.columns), low // node.columns)
        if watch is not None and _seen_baked(step):
            watch.after(step, low, values)

    def _blocks(self, tile: Tile, measures: Sequence[Any] = ()) -> Iterator[tuple[int, Tensor]]:
        """First element and values of a whole tensor's blocks of rows; of all its rows where they cannot be cut."""
        step = tile.step
        node = step.node if isinstance(step.node, Baked) else None
        baking = Baking(node, self._sources, tile.number) if node else None
        size = self._block_size(step, measures)
        first = replace(tile, high=min(size, step.numel))
        base = self._program(node.base if node else step.node, first, measures, examined=True)
        for low in range(0, step.numel, size):
            values = base(low, min(size, step.numel - low)).cpu()  # where the LoRAs are multiplied
            if node and baking:
                self._change(step, node, baking, values, low)
            yield low, values

    def _block_size(self, step: Step, measures: Sequence[Any]) -> int:
        uncut = step.whole or (step.measured and not measures)
        return max(1, step.numel) if uncut else block_elements(step)

    def _encode(self, tile: Tile, scale: FreshScale, measures: Sequence[Any]) -> None:
        """Compute and write a whole tensor as fp8 codes, and their scale: one pass for the scale, one for the codes."""
        step, shape = tile.step, tile.step.shape
        # What cannot be cut is in memory already and is computed once.
        once = list(self._blocks(tile, measures)) if self._block_size(step, measures) >= step.numel else None
        reach = torch.zeros(scale.shape, dtype=tile.number)
        with nullcontext() if once else self._unwatched():
            for low, values in once or self._blocks(tile, measures):
                if not all_finite(values):
                    self.results.blame(step)
                for at in range(0, values.numel(), block_elements(step)):
                    widen(reach, values[at : at + block_elements(step)], shape, low + at)
        fresh = fresh_scale(reach, step.dtype)
        if once is None:
            self._in.begin()
        for low, values in once or self._blocks(tile, measures):
            for at in range(0, values.numel(), block_elements(step)):
                part = values[at : at + block_elements(step)]
                self._store(step, low + at, in_units(part, fresh, step.dtype, shape, low + at))
        self._sink.write(scale.key, 0, fresh.numpy().reshape(-1).data.cast("B"))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """What is computed a second time is seen then."""
        watch, self._watch = self._watch, None
        try:
            yield
        finally:
            self._watch = watch

    def _baked(self, node: Baked, tile: Tile) -> Program:
        """A whole tensor with LoRAs that another node needs."""
        base = self._program(node.base, tile, examined=True)

        def bake(low: int, count: int) -> Tensor:
            values = base(low, count).cpu()
            if count:
                Baking(node, self._sources, tile.number).apply(values.view(-1, node.columns), 0)
            if not all_finite(values):
                file = next((self._sources[change.slot].path for change in node.changes), None)
                raise NumberError("a LoRA gives values that are not finite", file=file, tensor=tile.step.key)
            return values.to(self._device)

        return bake

    def _side_by_side(self, node: Channels | Joined, tile: Tile, examined: bool) -> Program:
        """Input channels cut off or put together; of whole tensors."""
        counts = [math.prod(item.shape) for item in node.inputs]
        programs = [
            self._program(item, replace(tile, low=0, high=count), examined=examined)
            for item, count in zip(node.inputs, counts, strict=True)
        ]

        def join(low: int, count: int) -> Tensor:
            first, *wider = (
                program(0, count).reshape(item.shape)
                for program, item, count in zip(programs, node.inputs, counts, strict=True)
            )
            result = wider[0] if wider else first.new_zeros(node.shape)
            shared = min(first.shape[1], result.shape[1])
            result[:, :shared] = first[:, :shared]
            return result.reshape(-1)

        return join

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
        if chosen.more:
            settings["strengths"] = node.strengths
        if chosen.random:
            drawn = drawn and chosen.needs_draws(node.params)
            settings["draws"] = self._draws(chosen, node, operands[0].numel(), low) if drawn else None
        if chosen.measures:
            settings["measures"] = measures
        return settings

    def _draws(self, chosen: Method, node: Merged, count: int, low: int) -> Tensor:
        if chosen.random == "tensor":
            return draws(node.stream, 0, 1)
        return _shaped(node, [self._in.draws(node.stream, low, count)])[0]

    def _store(self, step: Step, first: int, values: Tensor) -> None:
        """Round and write elements from `first` on, in parts that go through the raw buffer."""
        size = DTYPES[step.dtype].bits // 8
        for low, high in self._in.parts(values.numel()):
            self.results.round(step, values[low:high], self._in.raw, 0)
            self._sink.write(step.key, (first + low) * size, self._in.raw.bytes((high - low) * size))


def _seen_baked(step: Step) -> bool:
    """True when reports are about the values with LoRAs; a method on some of the channels is seen by itself."""
    return isinstance(step.node, Baked) and not isinstance(step.node.base, Joined)


def _shaped(node: Merged, operands: list[Tensor]) -> list[Tensor]:
    """Flat operands in the shape that the method asks for."""
    if node.whole:
        return [operand.reshape(node.shape) for operand in operands]
    return [operand.reshape(-1, node.columns) for operand in operands] if node.rows else operands
