"""The sums that tell how tensors differ, streamed over several models at once by a few threads; nothing is written."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from .errors import CancelledError
from .events import CancelToken, OnProgress, Progress
from .files.dtypes import DTYPES
from .files.source import Source
from .kernels.measure import BLOCK, all_finite, bits_finite, dot
from .lazy import np, torch
from .pairs import Pair, slots
from .quant.fp8 import scaled

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    from torch import Tensor


# Elements compared at a time.
COMPARED = 1 << 18
_BEAT_S = 0.1
# Elements of all models together that a thread holds: where there are many models its tiles become smaller.
_HELD = 4 * COMPARED


@dataclass
class Sums:
    """What was measured of a pair.

    Attributes:
        totals: name of a sum and slots -> its value: `aa`, `bb`, `ab`, and `dd` of X − A for a slot; `de`, `both` and
            `conflicts` of X − A and Y − A for two.
        largest: slot -> largest |X − A| of an element.
        alike: slot -> equal bytes would mean equal values: dtype and scale are those of A.
        same: slot -> alike, and the bytes are those of A.
        damaged: slots that hold a value that is not finite.
    """

    totals: dict[tuple[str, ...], float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    alike: dict[str, bool] = field(default_factory=dict)
    same: dict[str, bool] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)

    def total(self, name: str, *slots: str) -> float:
        """A sum over the whole tensor; NaN where it is not known, or a model that it is about is damaged."""
        return math.nan if self.damaged & {"A", *slots} else self.totals.get((name, *slots), math.nan)


# Name of a sum and slots -> one number for each block.
_Parts = dict[tuple[str, ...], list[float]]


def measure(
    sources: Mapping[str, Source],
    pairs: Sequence[Pair],
    *,
    threads: int,
    tile: int,
    on_progress: OnProgress,
    cancel: CancelToken,
) -> list[Sums]:
    """The sums of every pair, in order; they depend neither on threads nor on the tile.

    Raises:
        FileError: a model cannot be read.
        CancelledError: it was asked for.
    """
    if not any(pair.numbers or pair.bits for pair in pairs):
        return [Sums() for _ in pairs]
    reader = _Reader(sources, tile, cancel)
    total = sum(reader.size(pair) for pair in pairs)
    torch_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "lib_merge", initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures = [pool.submit(reader.measure, pair) for pair in pairs]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _BEAT_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            on_progress(Progress("comparing", reader.done_bytes, total, reader.key))
        return [future.result() for future in futures]
    finally:  # an error or an interrupt ends here too: no thread may outlive the sources
        reader.stopped = True
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)  # torch hands a worker's setting on to threads that start later


class _Reader:
    """Reads pairs tile by tile; used by all threads."""

    def __init__(self, sources: Mapping[str, Source], tile: int, cancel: CancelToken) -> None:
        # Whole blocks, so that a block is the same elements whatever the tile.
        self._tile = max(BLOCK, min(tile, _HELD // len(sources)) // BLOCK * BLOCK)
        self._sources, self._cancel, self._lock = sources, cancel, threading.Lock()
        self.done_bytes, self.key, self.stopped = 0, "", False

    def size(self, pair: Pair) -> int:
        """Bytes that are read of a pair."""
        return sum(self._sources[slot].tensors[pair.keys[slot]].nbytes for slot in slots(pair))

    def measure(self, pair: Pair) -> Sums:
        """All sums of a pair."""
        found, read = Sums(), slots(pair)
        if not read:
            return found
        info = {slot: self._sources[slot].tensors[pair.keys[slot]] for slot in read}
        width = {slot: DTYPES[info[slot].dtype].bits // 8 if pair.numbers else 1 for slot in read}
        count = info["A"].numel if pair.numbers else info["A"].nbytes
        buffers = {slot: np.empty(min(self._tile, count) * width[slot], np.uint8) for slot in read}
        scales = {slot: self._scale(slot, key) for slot, key in pair.scales.items() if slot in read}
        found.damaged |= {slot for slot, scale in scales.items() if not all_finite(scale)}
        found.alike = {slot: info[slot].dtype == info["A"].dtype and _same(scales, slot) for slot in read[1:]}
        found.same = dict(found.alike)
        found.largest = dict.fromkeys(pair.numbers, 0.0)
        parts: _Parts = {name: [0.0] for name in _sum_names(pair.numbers)}
        for low in range(0, count, self._tile):
            if self.stopped or self._cancel.cancelled:
                raise CancelledError("the comparison was stopped")
            number = min(self._tile, count - low)
            raw = {slot: buffers[slot][: number * width[slot]] for slot in read}
            for slot in read:
                self._sources[slot].read_into(pair.keys[slot], low * width[slot], raw[slot].data)
            if pair.numbers:
                decode = {slot: _Decode(info[slot].dtype, scales.get(slot), info[slot].shape, low) for slot in read}
                _add_numbers(found, parts, raw, decode)
            else:
                _add_bits(found, raw)
            with self._lock:
                self.done_bytes += sum(map(len, raw.values()))
                self.key = pair.key
        found.totals = {name: _sum(values) for name, values in parts.items()}
        return found

    def _scale(self, slot: str, key: str) -> Tensor:
        """A scale of fp8 codes, in float32."""
        info = self._sources[slot].tensors[key]
        raw = np.empty(info.nbytes, np.uint8)
        self._sources[slot].read_into(key, 0, raw.data)
        return torch.from_numpy(raw).view(getattr(torch, DTYPES[info.dtype].torch)).float().reshape(info.shape)


@dataclass(frozen=True)
class _Decode:
    """Stored bytes of a tile to numbers.

    Attributes:
        dtype: of the stored elements.
        scale: of fp8 codes, or None.
        shape: of the whole tensor.
        start: element that the tile starts at.
    """

    dtype: str
    scale: Tensor | None
    shape: tuple[int, ...]
    start: int

    def block(self, data: Bytes, low: int, high: int) -> Tensor:
        """Elements `low` … `high` of the tile, float64."""
        values = torch.from_numpy(data).view(getattr(torch, DTYPES[self.dtype].torch))[low:high]
        if self.scale is None:
            return values.double()
        return scaled(values.float(), self.scale, self.shape, self.start + low).double()


def _same(scales: Mapping[str, Tensor], slot: str) -> bool:
    """True when a model's codes mean what those of A do: neither has a scale, or both have the same."""
    one, other = scales.get("A"), scales.get(slot)
    return (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))


def _sum(values: list[float]) -> float:
    """Rounded once, so that the order of the blocks does not matter; NaN where squares are beyond float64."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
    return total if math.isfinite(total) else math.nan


def _sum_names(donors: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield from ((name, slot) for slot in donors for name in ("aa", "bb", "ab", "dd"))
    yield from ((name, *two) for two in combinations(donors, 2) for name in ("de", "both", "conflicts"))


def _add_bits(found: Sums, raw: Mapping[str, Bytes]) -> set[str]:
    """Look whether the bytes of a tile are those of A; returns the slots where they are, and mean the same."""
    alike = {slot for slot, same in found.alike.items() if same and np.array_equal(raw["A"], raw[slot])}
    for slot in found.same.keys() - alike:
        found.same[slot] = False
    return alike


def _add_numbers(found: Sums, parts: _Parts, raw: Mapping[str, Bytes], decode: Mapping[str, _Decode]) -> None:
    """Add the sums of one tile, block by block."""
    for slot, data in raw.items():
        dtype = DTYPES[decode[slot].dtype]
        if not bits_finite(data, dtype.bits, dtype.unbounded):
            found.damaged.add(slot)
    equal = _add_bits(found, raw)
    sound = [] if "A" in found.damaged else [slot for slot in found.same if slot not in found.damaged]
    size = DTYPES[decode["A"].dtype].bits // 8
    for low in range(0, raw["A"].size // size if sound else 0, BLOCK):
        a = decode["A"].block(raw["A"], low, low + BLOCK)
        aa = dot(a, a)
        for name, slot in product(("aa", "bb", "ab"), equal.intersection(sound)):
            parts[name, slot].append(aa)
        deltas = {}
        for slot in sound:
            if slot in equal:
                continue
            x = decode[slot].block(raw[slot], low, low + BLOCK)
            delta = deltas[slot] = x - a
            for name, value in (("aa", aa), ("bb", dot(x, x)), ("ab", dot(a, x)), ("dd", dot(delta, delta))):
                parts[name, slot].append(value)
            found.largest[slot] = max(found.largest[slot], abs(float(delta.amin())), abs(float(delta.amax())))
        for (one, d), (other, e) in combinations(deltas.items(), 2):
            agreement = torch.sign(d).mul_(torch.sign(e))
            both = dot(agreement, agreement)
            conflicts = (both - float(torch.sum(agreement))) / 2
            for name, value in (("de", dot(d, e)), ("both", both), ("conflicts", conflicts)):
                parts[name, one, other].append(value)
