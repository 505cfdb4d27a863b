"""Philox 4x64 of ten rounds, as numpy's generator of that name counts (Salmon and others, Random123, 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.random import DRAWS_PER_BLOCK
from ..kernels.scratch import flat_room
from ..lazy import torch
from .numbers import compiled, kept, upper_half

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Draws:
    """The draws of a tile, made as they are asked for: that is as fast as to read them.

    Attributes:
        key: of the stream, 128 bits; see `kernels.random.stream_key`.
        first: number of the tile's first draw.
    """

    key: int
    first: int

    def of(self, piece: slice) -> NDArray[np.uint16]:
        """Those of some elements, as `kernels.random.raw_draws` gives them; good until the thread's next call."""
        block, skip = divmod(self.first + piece.start, DRAWS_PER_BLOCK)
        count = piece.stop - piece.start
        blocks = -(-(skip + count) // DRAWS_PER_BLOCK)
        words = flat_room("words", 4 * blocks, torch.int64).numpy().view(np.uint64)
        _fill(np.uint64(self.key & _WORD), np.uint64(self.key >> 64), np.uint64(block + 1), words)
        return words.view(np.uint16)[skip : skip + count]


@compiled
def _block(counter: Any, k: Any, q: Any) -> Any:
    """The four words of a counter below 2**64."""
    a, b, c, d = counter, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(_ROUNDS):
        left, right = upper_half(_MULTIPLIERS[0], a), upper_half(_MULTIPLIERS[1], c)
        a, b, c, d = right ^ b ^ k, c * _MULTIPLIERS[1], left ^ d ^ q, a * _MULTIPLIERS[0]
        k, q = k + _STEPS[0], q + _STEPS[1]
    return a, b, c, d


@kept
def _fill(low_key: Any, high_key: Any, counter: Any, out: Any) -> None:
    """Blocks from a counter on, two at a time: neither waits for the other."""
    for at in range(0, out.size - 7, 8):
        first = counter + np.uint64(at // 4)
        a, b, c, d = _block(first, low_key, high_key)
        e, f, g, h = _block(first + np.uint64(1), low_key, high_key)
        out[at], out[at + 1], out[at + 2], out[at + 3] = a, b, c, d
        out[at + 4], out[at + 5], out[at + 6], out[at + 7] = e, f, g, h
    if out.size % 8:
        at = out.size - 4
        out[at], out[at + 1], out[at + 2], out[at + 3] = _block(counter + np.uint64(at // 4), low_key, high_key)
