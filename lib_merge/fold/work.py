"""Rows of a module from the inputs: dense weights, the adapter's exact change, the sum, and their codes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import NumberError
from ..files.dtypes import DTYPES
from ..files.source import Source
from ..kernels.in_order import product
from ..kernels.measure import all_finite, bits_finite
from ..lazy import torch
from .adapter import LowRank
from .plan import Module, Shipped
from .storage import Leaf
from .values import Scratch, read_rows, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

TILE = 1 << 20  # weights that are written at once
PORTION = 1 << 18  # weights: enough that calls cost little, few enough for a cache that cores share
PRODUCT_ROWS = 16  # matrix multiplication is slow for fewer


@dataclass(frozen=True)
class Rows:
    """Some rows of a module."""

    module: Module
    low: int
    high: int


def row_tiles(modules: Sequence[Module], tile: int = TILE) -> Iterator[Rows]:
    """All rows of all modules, in portions of about `tile` weights."""
    for module in modules:
        yield from tiles_of(module, tile)


def tiles_of(module: Module, tile: int = TILE, low: int = 0, high: int | None = None) -> Iterator[Rows]:
    """The rows of one module from `low` to `high` in portions."""
    end = module.shape[0] if high is None else high
    step = max(1, tile // max(1, module.shape[1]))
    return (Rows(module, at, min(at + step, end)) for at in range(low, end, step))


class Factors:
    """The adapter's factors in float64, read when they are first needed; the last few are kept.

    Args:
        source: the adapter.
        keep: modules whose factors stay in memory.
    """

    def __init__(self, source: Source, keep: int) -> None:
        self._source, self._keep = source, keep
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def of(self, change: LowRank) -> tuple[Tensor, Tensor]:
        """Both factors in float64, up [out, rank] and down [rank, in].

        Raises:
            NumberError: a value that is not finite; names the tensor.
        """
        with self._lock:
            found = self._kept.get(change.module)
            if found is None:
                up, down = (self._read(key) for key in (change.up, change.down))
                found = (up.T.contiguous(), down.T.contiguous()) if change.transposed else (up, down)
                self._kept[change.module] = found
                while len(self._kept) > self._keep:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(change.module)
            return found

    def exact_products(self, change: LowRank) -> bool:
        """True when products of the factors are exact in float64, as those of float32 values are."""
        return all(self._source.tensors[key].dtype != "F64" for key in (change.up, change.down))

    def is_zero(self, change: LowRank) -> bool:
        """True when the change has no effect: scale 0, or a factor all of whose values are 0 or −0."""
        return change.scale == 0 or any(not bool(factor.any()) for factor in self.of(change))

    def _read(self, key: str) -> Tensor:
        values = read_rows(self._source, key, 0, self._source.tensors[key].shape[0]).double()
        if not all_finite(values):
            raise NumberError("the adapter holds a value that is not finite", file=self._source.path, tensor=key)
        return values


@dataclass
class Portion:
    """Some rows of a tile, few enough to stay in a core's cache; overwritten by the next portion.

    Attributes:
        rows: which.
        dense: [rows, columns] in their own dtype, the dense weights as the converter saw them.
        change: float64 of that shape, what the adapter adds; None for a module without a change.
        fresh: bytes [rows, row_bytes] for each leaf, as they are to be stored.
        cut: weights that were beyond the largest code and became it.
        scratch: memory of the thread.
    """

    rows: Rows
    dense: Tensor
    change: Tensor | None
    scratch: Scratch
    fresh: tuple[Tensor, ...] = ()
    cut: int = 0

    @cached_property
    def base(self) -> Tensor:
        """The dense weights in float64."""
        return self.scratch.double("base", self.dense)

    @cached_property
    def total(self) -> Tensor:
        """Their sum with the change in float64, which the codes stand for."""
        if self.change is None:
            return self.base
        return torch.add(self.base, self.change, out=self.scratch.of("total", torch.float64, self.dense.shape))


class Worker:
    """One thread's work on rows of modules.

    Args:
        dense: the dense checkpoint.
        shipped: the quantized one.
        factors: of the adapter, shared between threads; None where no change is asked for.
        rounding: see `quant.affine.ROUNDINGS`.
        round_dense: round the sum to the dense dtype before it is coded, as merging with PEFT and converting does.
    """

    def __init__(
        self, dense: Source, shipped: Shipped, factors: Factors | None, rounding: str, round_dense: bool = False
    ) -> None:
        self._dense, self._shipped, self._factors = dense, shipped, factors
        self._rounding, self._round_dense = rounding, round_dense
        self.scratch = Scratch()

    def portions(self, rows: Rows, *, fast: bool = True) -> Iterator[Portion]:
        """Rows computed from dense weights and adapter, portion by portion.

        Args:
            rows: of one module.
            fast: False to sum over the rank without matrix multiplication.

        Raises:
            NumberError: a value that is not finite, or that cannot be stored; names the tensor.
        """
        module, columns = rows.module, rows.module.shape[1]
        for slab in tiles_of(module, max(PORTION, PRODUCT_ROWS * columns), rows.low, rows.high):
            change = self._change(slab, fast)
            for part in tiles_of(module, PORTION, slab.low, slab.high):
                wanted = None if change is None else change[part.low - slab.low : part.high - slab.low]
                yield self._coded(Portion(part, self.dense(part), wanted, self.scratch))

    def fresh(self, rows: Rows, *, fast: bool = True) -> list[Tensor]:
        """The rows as they are to be stored: bytes [rows, row_bytes] for each leaf."""
        return joined([portion.fresh for portion in self.portions(rows, fast=fast)])

    def dense(self, rows: Rows) -> Tensor:
        """The dense weights of these rows as the converter saw them.

        Returns:
            [rows, columns] in the dtype of the dense file, or in that which the converter cast them to.

        Raises:
            NumberError: a value that is not finite; names the tensor.
        """
        module, source = rows.module, self._dense
        stored, dtype = DTYPES[source.tensors[module.dense].dtype], module.storage.dtype
        values = self._stored(rows)
        raw = values.view(torch.uint8).view(-1).numpy()
        if not bits_finite(raw, stored.bits, stored.unbounded):
            raise NumberError(
                "the dense weight holds a value that is not finite", file=source.path, tensor=module.dense
            )
        if dtype and dtype != stored.name and not self._round_dense:
            values = values.to(torch_dtype(dtype))
            if not all_finite(values.float()):
                what = f"the dense weight holds a value beyond {dtype}, which the quantized checkpoint stores scales in"
                raise NumberError(what, file=source.path, tensor=module.dense)
        return values

    def encode(self, rows: Rows, values: Tensor) -> tuple[Tensor, ...]:
        """Bytes of each leaf [rows, row_bytes]; `values` are overwritten.

        Raises:
            NumberError: values that cannot be stored; names module and group.
        """
        with self._named(rows):
            return rows.module.storage.encode(values, self._rounding, rows.low)

    @contextmanager
    def _named(self, rows: Rows) -> Iterator[None]:
        """Errors of a storage name the module too."""
        try:
            yield
        except NumberError as error:
            key = rows.module.storage.leaves[0].key
            raise NumberError(error.what, file=self._shipped.source.path, tensor=key, hint=error.hint) from error

    def _coded(self, portion: Portion) -> Portion:
        """With its codes, made in one pass where the storage can do that."""
        rows, storage, fresh = portion.rows, portion.rows.module.storage, None
        if portion.change is not None and not self._round_dense:
            with self._named(rows):
                fresh = storage.encode_sum(portion.dense, portion.change, self._rounding, rows.low)
        if fresh is None:
            values = self._rounded(rows, portion.total)
            portion.cut = storage.beyond(values, rows.low)
            fresh = self.encode(rows, values)
        portion.fresh = fresh
        return portion

    def _stored(self, rows: Rows) -> Tensor:
        """Dense weights in their own dtype, in the order in which the quantized checkpoint has them."""
        key, head = rows.module.dense, rows.module.head_rows
        if not head:
            count = (rows.high - rows.low) * rows.module.shape[1] * DTYPES[self._dense.tensors[key].dtype].bits // 8
            room = self.scratch.of("stored", torch.uint8, (count,))
            return read_rows(self._dense, key, rows.low, rows.high, room)
        low, high = rows.low // head * head, -(-rows.high // head) * head
        return read_rows(self._dense, key, low, high)[dense_rows(rows) - low]

    def _change(self, rows: Rows, fast: bool) -> Tensor | None:
        """The float64 sum over the rank, in order, times the scale once."""
        change = rows.module.change
        if change is None or self._factors is None:
            return None
        up, down = self._factors.of(change)
        out = self.scratch.of("change", torch.float64, (rows.high - rows.low, rows.module.shape[1]))
        fast = fast and self._factors.exact_products(change)
        mine = up[dense_rows(rows)] if rows.module.head_rows else up[rows.low : rows.high]
        return product(mine, down, out, fast=fast).mul_(change.scale)

    def _rounded(self, rows: Rows, total: Tensor) -> Tensor:
        """What is to be coded: the sum in float32, rounded to the dense dtypes where that was asked for."""
        values = self.scratch.of("rounded", torch.float32, total.shape).copy_(total)
        if self._round_dense:
            stored = self._dense.tensors[rows.module.dense].dtype
            for dtype in (stored, rows.module.storage.dtype or stored):
                values = values.to(torch_dtype(dtype)).float()
        return values


def dense_rows(rows: Rows) -> Tensor:
    """Number in the dense weight of each of these rows, where the halves of heads are interleaved."""
    head = rows.module.head_rows
    number = torch.arange(rows.low, rows.high)
    inside = number % head
    return number - inside + inside % 2 * (head // 2) + inside // 2


def joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The leaves of several portions one below the other."""
    return [torch.cat(leaf) for leaf in zip(*parts, strict=True)]


def read_leaves(model: Shipped, leaves: Sequence[Leaf], rows: Rows) -> list[Tensor]:
    """Bytes [rows, row_bytes] of a module's leaves."""
    found = []
    for leaf in leaves:
        raw = torch.empty(rows.high - rows.low, leaf.row_bytes, dtype=torch.uint8)
        model.source.read_into(leaf.key, rows.low * leaf.row_bytes, raw.view(-1).numpy().data)
        found.append(raw)
    return found
