"""Random draws that depend on the seed, the tensor's name and the element's index alone.

Counter-based, so that any tile of any tensor can be drawn on any thread in any order with the same bits
(Philox 4x64 of numpy, whose streams are guaranteed; 16 bits an element).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from ..lazy import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

DRAWS_PER_BLOCK = 16
STEPS = 65536
_FULL = 2**64 - 1
_PROBE = 64


def stream_key(seed: int, name: str, *more: str) -> int:
    """128-bit Philox key: first 16 bytes (little-endian) of SHA-256("lib_merge/1", seed, name, more …, joined by NUL).

    Args:
        seed: the user's, 0 … 2**64 − 1.
        name: the tensor's name in model A.
        more: slot of a second or later donor, path of a nested recipe.
    """
    text = "\0".join(("lib_merge/1", str(seed), name, *more))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def raw_draws(key: int, start: int, count: int) -> NDArray[np.uint16]:
    """Draws `start` … `start + count` of a stream, uniform over 0 … 65535."""
    block, skip = divmod(start, DRAWS_PER_BLOCK)
    generator = np.random.Philox(key=key)
    generator.advance(block)
    words = _words()(generator, (skip + count + 3) // 4)
    drawn: NDArray[np.uint16] = np.asarray(words, dtype="<u8").view("<u2")[skip : skip + count]
    return drawn


def _unlocked(generator: np.random.Philox, count: int) -> NDArray[np.uint64]:
    """A generator's next words, made while other threads may use the interpreter."""
    return np.random.Generator(generator).integers(0, _FULL, count, dtype=np.uint64, endpoint=True)


def _locked(generator: np.random.Philox, count: int) -> NDArray[np.uint64]:
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


@cache
def _words() -> Callable[[np.random.Philox, int], NDArray[np.uint64]]:
    """The faster way to the words where it gives the same: numpy promises the words, not what is drawn from them."""
    fast, sure = (words(np.random.Philox(key=1), _PROBE) for words in (_unlocked, _locked))
    return _unlocked if np.array_equal(fast, sure) else _locked


def draws(key: int, start: int, count: int) -> Tensor:
    """The same draws for torch: int32, uniform over 0 … 65535."""
    return widened(raw_draws(key, start, count))


def widened(raw: NDArray[np.uint16], out: Tensor | None = None) -> Tensor:
    """Draws as int32, for torch has no arithmetic on uint16.

    Args:
        raw: from `raw_draws`.
        out: int32 buffer of as many elements to fill; None takes a new one.
    """
    values = torch.empty(len(raw), dtype=torch.int32) if out is None else out
    values.numpy()[:] = raw
    return values


def threshold(probability: float) -> int:
    """T of 65536 such that raw draws below t are chosen: u = (raw + ½)/65536 < probability."""
    return max(0, min(STEPS, math.ceil(STEPS * probability - 0.5)))
