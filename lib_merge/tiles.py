"""How tensors are cut for the work: tile sizes, what stays in memory, and what that takes."""

from __future__ import annotations

import math

from .files.dtypes import DTYPES
from .kernels.measure import BLOCK, row_block
from .steps import Baked, Merged, Node, Step, Stored, leaves, walk

# Elements that a worker reads and writes at a time: large enough that threads seldom wait for each other.
TILE = 1 << 21
# Elements computed at a time: few enough that all numbers at hand stay in a core's cache.
PIECE = 1 << 16
# Elements measured at a time, and those read at a time of tensors that cannot be cut.
MEASURED = 1 << 19
# What all workers together keep in memory of measured tensors between their two passes; larger ones are read twice.
KEEP_BYTES = 64 << 20
_BAKE_ELEMENTS = 1 << 17
# What a worker holds beside its tiles, and the widest element of a raw buffer.
_WORKER_BYTES = 4 << 20
_WIDEST_BYTES = 8
_DRAW_BYTES = 2
# Blocks alive beside the values while they are coded: magnitudes, factors, quotients, and their rounding.
_CODING_BLOCKS = 4


def bake_rows(columns: int) -> int:
    """Rows that LoRAs are added to at a time: as many as fit 2**17 elements, at least one.

    A constant of the definition, not a setting: where a product of matrices is cut may change its last bit.
    """
    return max(1, _BAKE_ELEMENTS // max(1, columns))


def block_elements(step: Step) -> int:
    """Elements of a step's blocks of rows, at least one; see `bake_rows`."""
    columns = math.prod(step.shape[1:])
    return max(1, min(step.numel, bake_rows(columns) * columns))


def cut(node: Node, tile: int) -> int:
    """Elements of a node's tiles: about `tile`, in whole blocks of what is summed as one where sums are taken."""
    if not isinstance(node, Merged) or not (node.rows or node.measured):
        return tile
    block = row_block(node.columns) * max(1, node.columns) if node.rows else BLOCK
    return block * max(1, tile // block)


def keep_elements(threads: int) -> int:
    """Elements of float32 that one of so many workers may keep between two passes."""
    return KEEP_BYTES // threads // 4


def kept(step: Step, threads: int) -> bool:
    """True when a measured tensor stays in memory between its passes."""
    return step.measured and step.numel * sum(1 for _ in leaves(step.node)) <= keep_elements(threads)


def worker_bytes(step: Step) -> int:
    """What one worker holds while it works on a step, kept tensors aside."""
    coding = _CODING_BLOCKS * _WIDEST_BYTES * block_elements(step) if step.scale else 0
    return coding + _computing_bytes(step)


def _computing_bytes(step: Step) -> int:
    if isinstance(step.node, Baked):
        return _baked_bytes(step, step.node)
    if step.whole:
        inputs = sum(1 for _ in leaves(step.node))
        return _WORKER_BYTES + (inputs + 3) * 4 * step.numel
    tile, piece = (min(cut(step.node, size), step.numel) for size in (TILE, MEASURED if step.measured else PIECE))
    return _WORKER_BYTES + _ahead_bytes(step) * tile + (_alive(step.node) + 2) * _WIDEST_BYTES * piece


def _ahead_bytes(step: Step) -> int:
    """What an element takes that is read ahead and written later: operands, draws, result."""
    draws = sum(_DRAW_BYTES for node in walk(step.node) if isinstance(node, Merged) and node.stream)
    return sum(DTYPES[leaf.dtype].bits // 8 for leaf in leaves(step.node)) + DTYPES[step.dtype].bits // 8 + draws


def _baked_bytes(step: Step, node: Baked) -> int:
    """Of a tensor with LoRAs: their parts as stored, as numbers and side by side, and what they are added to."""
    width = _WIDEST_BYTES if step.wide else 4
    parts = 3 * width * sum(change.numel for change in node.changes)
    if step.whole:
        return _WORKER_BYTES + parts + (sum(1 for _ in leaves(node)) + 3) * width * step.numel
    block = block_elements(step)
    ahead = _ahead_bytes(step) * min(step.numel, max(block, TILE))
    return _WORKER_BYTES + parts + ahead + (_alive(node) + 2) * _WIDEST_BYTES * max(block, MEASURED)


def _alive(node: Node) -> int:
    """Pieces alive at once for a node."""
    return 1 if isinstance(node, Stored) else sum(_alive(item) for item in node.inputs) + 1
