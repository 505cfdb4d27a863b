"""Block codes of GGUF files: 32 weights of a row share a scale, and in some kinds a smallest weight.

d is the scale, stored as float16, id = 1/d in float32 of the unrounded d (0 where that is beyond float32); the
arithmetic is float32, as in the reference code of ggml (`quantize_row_*_ref`):

    Q8_0         d = max|x|/127                 code = round(x·id), halves away from zero; weight ≈ d·code
    Q4_0, Q5_0   d = −x*/2^(bits−1), x* the x of largest magnitude (the first of equals)
                 code = min(⌊x·id + 2^(bits−1) + 0.5⌋, 2^bits − 1); weight ≈ d·(code − 2^(bits−1))
    Q4_1, Q5_1   d = (max − min)/(2^bits − 1)   code = ⌊(x − min)·id + 0.5⌋; weight ≈ d·code + min
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import NumberError
from ..lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 32


@dataclass(frozen=True)
class Kind:
    """One kind of block code.

    Attributes:
        bits: of a code.
        form: `signed` codes around 0, `offset` codes of which the middle is 0, `floor` codes above the smallest weight.
        bytes: of a block.
    """

    bits: int
    form: Literal["signed", "offset", "floor"]
    bytes: int


KINDS: Mapping[str, Kind] = {
    "Q8_0": Kind(8, "signed", 34),
    "Q4_0": Kind(4, "offset", 18),
    "Q4_1": Kind(4, "floor", 20),
    "Q5_0": Kind(5, "offset", 22),
    "Q5_1": Kind(5, "floor", 24),
}


def encode(values: NDArray[np.float32], name: str, first_row: int = 0) -> NDArray[np.uint8]:
    """Code some rows of a weight.

    Args:
        values: float32 [rows, columns], columns a multiple of 32.
        name: of a kind in `KINDS`.
        first_row: number of the first row in the whole weight, for errors.

    Returns:
        bytes [rows, columns/32 · bytes of a block].

    Raises:
        NumberError: a weight that is not finite, or a scale beyond float16; names the block.
    """
    kind = KINDS[name]
    rows, columns = values.shape
    blocks = values.reshape(-1, BLOCK)
    with np.errstate(all="ignore"):  # what goes wrong is found block by block
        scale, least, codes = _FORMS[kind.form](blocks, kind.bits)
        head = [each.astype("<f2") for each in ((scale, least) if kind.form == "floor" else (scale,))]
    bad = ~np.isfinite(np.concatenate(head, 1)).all(1)
    if bad.any():
        number = int(np.argmax(bad))
        row, block = divmod(number, columns // BLOCK)
        what = "a weight is not finite" if not np.isfinite(blocks[number]).all() else "its scale is beyond float16"
        raise NumberError(f"block {block} of row {first_row + row} cannot be quantized: {what}")
    parts = [each.view(np.uint8) for each in head]
    if kind.bits == 8:
        parts.append(codes)
    else:
        if kind.bits == 5:
            parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
        parts.append((codes[:, :16] & 15) | (codes[:, 16:] << 4))
    return np.concatenate(parts, 1).reshape(rows, -1)


def codes(raw: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """Codes [rows, columns] of bytes [rows, row_bytes]; those of Q8_0 in two's complement."""
    return _codes(_blocks(raw, name), KINDS[name]).reshape(raw.shape[0], -1)


def scales(raw: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Scales [rows, blocks] of bytes [rows, row_bytes]."""
    return _number(_blocks(raw, name), 0).reshape(raw.shape[0], -1)


def decode(raw: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Weights [rows, columns] that bytes [rows, row_bytes] stand for."""
    kind, blocks = KINDS[name], _blocks(raw, name)
    found = _codes(blocks, kind)
    if kind.form == "signed":
        values = found.view(np.int8).astype(np.float32) * _number(blocks, 0)
    elif kind.form == "offset":
        values = (found.astype(np.float32) - np.float32(1 << (kind.bits - 1))) * _number(blocks, 0)
    else:
        values = found.astype(np.float32) * _number(blocks, 0) + _number(blocks, 2)
    return values.reshape(raw.shape[0], -1)


def _blocks(raw: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    return raw.reshape(-1, KINDS[name].bytes)


def _number(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _codes(blocks: NDArray[np.uint8], kind: Kind) -> NDArray[np.uint8]:
    if kind.bits == 8:
        return np.ascontiguousarray(blocks[:, 2:])
    packed = blocks[:, -16:]
    found = np.concatenate([packed & 15, packed >> 4], 1)
    if kind.bits == 5:
        high = np.ascontiguousarray(blocks[:, -20:-16])
        found |= np.unpackbits(high, axis=1, bitorder="little") << 4
    return found


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1/scale; 0 where that is beyond float32: such blocks are stored with scale 0, whatever their codes."""
    inverse: NDArray[np.float32] = np.float32(1) / scale
    inverse[np.isinf(inverse)] = 0
    return inverse


def _signed(x: NDArray[np.float32], bits: int) -> tuple[Any, Any, NDArray[np.uint8]]:
    scale = np.abs(x).max(1, keepdims=True) / np.float32((1 << (bits - 1)) - 1)
    steps = x * _inverse(scale)
    whole = np.trunc(steps)
    whole += np.trunc(2 * (steps - whole))  # exact, so that halves and nothing else go away from zero
    return scale, scale, whole.astype(np.int8).view(np.uint8)


def _offset(x: NDArray[np.float32], bits: int) -> tuple[Any, Any, NDArray[np.uint8]]:
    middle = 1 << (bits - 1)
    edge = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    scale = edge / np.float32(-middle)
    steps = np.trunc(x * _inverse(scale) + np.float32(middle + 0.5))
    return scale, scale, np.clip(steps, 0, 2 * middle - 1).astype(np.uint8)


def _floor(x: NDArray[np.float32], bits: int) -> tuple[Any, Any, NDArray[np.uint8]]:
    top = (1 << bits) - 1
    least = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - least) / np.float32(top)
    steps = np.trunc((x - least) * _inverse(scale) + np.float32(0.5))
    return scale, least, np.clip(steps, 0, top).astype(np.uint8)


_FORMS = {"signed": _signed, "offset": _offset, "floor": _floor}
