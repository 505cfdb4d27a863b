"""Rows of a module from the inputs: dense weights, the adapter's exact change, the sum, and their codes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NumberError
from ..files.dtypes import DTYPES
from ..files.source import Source
from ..kernels.in_order import product
from ..kernels.measure import all_finite
from ..lazy import torch
from .adapter import LowRank
from .plan import Module, Shipped
from .storage import Leaf

if TYPE_CHECKING:
    from torch import Tensor

TILE = 1 << 20  # weights: matrix multiplication wants taller tiles than a merge does


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

    def dense(self, rows: Rows) -> Tensor:
        """The dense weights of these rows as the converter saw them.

        Returns:
            float32 [rows, columns]; values as in the dense file, or in the dtype that the converter cast them to.

        Raises:
            NumberError: a value that is not finite; names the tensor.
        """
        module, source = rows.module, self._dense
        values = read_rows(source, module.dense, rows.low, rows.high)
        stored, dtype = source.tensors[module.dense].dtype, module.storage.dtype
        if dtype and dtype != stored and not self._round_dense:
            values = values.to(_torch(dtype))
        wide = values.float()
        if not all_finite(wide):
            what = "the dense weight holds a value that is not finite"
            if dtype != stored and all_finite(read_rows(source, module.dense, rows.low, rows.high).float()):
                what = f"the dense weight holds a value beyond {dtype}, which the quantized checkpoint stores scales in"
            raise NumberError(what, file=source.path, tensor=module.dense)
        return wide

    def change(self, rows: Rows, *, fast: bool = True) -> Tensor | None:
        """The adapter's change of these rows: the float64 sum over the rank, in order, times the scale once.

        Returns:
            float64 [rows, columns]; None for a module without a change.
        """
        change = rows.module.change
        if change is None or self._factors is None:
            return None
        up, down = self._factors.of(change)
        out = torch.empty(rows.high - rows.low, rows.module.shape[1], dtype=torch.float64)
        fast = fast and self._factors.exact_products(change)
        return product(up[rows.low : rows.high], down, out, fast=fast).mul_(change.scale)

    def merged(self, rows: Rows, dense: Tensor, change: Tensor | None) -> Tensor:
        """What is to be coded: f32(f64(dense) + change), rounded to the dense dtypes where that was asked for.

        Returns:
            float32 [rows, columns], not `dense` itself.
        """
        values = dense.clone() if change is None else (dense.double() + change).float()
        if self._round_dense:
            stored = self._dense.tensors[rows.module.dense].dtype
            for dtype in (stored, rows.module.storage.dtype or stored):
                values = values.to(_torch(dtype)).float()
        return values

    def encode(self, rows: Rows, values: Tensor) -> tuple[Tensor, ...]:
        """Bytes of each leaf [rows, row_bytes]; `values` are overwritten.

        Raises:
            NumberError: values that cannot be stored; names module and group.
        """
        try:
            return rows.module.storage.encode(values, self._rounding, rows.low)
        except NumberError as error:
            key = rows.module.storage.leaves[0].key
            raise NumberError(error.what, file=self._shipped.source.path, tensor=key, hint=error.hint) from error

    def fresh(self, rows: Rows, *, fast: bool = True) -> tuple[Tensor, ...]:
        """The rows as they are to be stored, computed from dense weights and adapter."""
        return self.encode(rows, self.merged(rows, self.dense(rows), self.change(rows, fast=fast)))


def read_rows(source: Source, key: str, low: int, high: int) -> Tensor:
    """Rows of a stored matrix in its own dtype."""
    info = source.tensors[key]
    columns = info.shape[1]
    size = DTYPES[info.dtype].bits // 8
    raw = torch.empty((high - low) * columns * size, dtype=torch.uint8)
    source.read_into(key, low * columns * size, raw.numpy().data)
    return raw.view(_torch(info.dtype)).view(high - low, columns)


def read_leaves(model: Shipped, leaves: Sequence[Leaf], rows: Rows) -> list[Tensor]:
    """Bytes [rows, row_bytes] of a module's leaves."""
    found = []
    for leaf in leaves:
        raw = torch.empty(rows.high - rows.low, leaf.row_bytes, dtype=torch.uint8)
        model.source.read_into(leaf.key, rows.low * leaf.row_bytes, raw.view(-1).numpy().data)
        found.append(raw)
    return found


def _torch(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, DTYPES[dtype].torch)
    return found
