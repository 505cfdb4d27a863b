"""How tensors are cut for the work: tile sizes, what stays in memory, and what that takes."""

from __future__ import annotations

from .kernels.measure import BLOCK, row_block
from .steps import Baked, Merged, Node, Step, Stored, leaves

# Elements per tile and worker: small enough for the cache, large enough that calls cost nothing.
TILE = 1 << 18
# What all workers together keep in memory of measured tensors between their two passes; larger ones are read twice.
KEEP_BYTES = 64 << 20
_BAKE_ELEMENTS = 1 << 18
# What a worker holds beside its tiles, and the widest element of a raw buffer.
_WORKER_BYTES = 4 << 20
_WIDEST_BYTES = 8


def bake_rows(columns: int) -> int:
    """Rows that LoRAs are added to at a time: as many as fit 2**18 elements, at least one.

    A constant of the definition, not a setting: where a product of matrices is cut may change its last bit.
    """
    return max(1, _BAKE_ELEMENTS // max(1, columns))


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
    if isinstance(step.node, Baked):
        return _baked_bytes(step, step.node)
    if step.whole:
        inputs = sum(1 for _ in leaves(step.node))
        return _WORKER_BYTES + (inputs + 3) * 4 * step.numel
    return _WORKER_BYTES + (_alive(step.node) + 2) * _WIDEST_BYTES * cut(step.node, TILE)


def _baked_bytes(step: Step, node: Baked) -> int:
    """Of a tensor with LoRAs: their parts as stored, as numbers and side by side, and what they are added to."""
    width = _WIDEST_BYTES if step.wide else 4
    parts = 3 * width * sum(change.numel for change in node.changes)
    if step.whole:
        return _WORKER_BYTES + parts + (sum(1 for _ in leaves(node)) + 3) * width * step.numel
    block = min(step.numel, bake_rows(node.columns) * node.columns)
    return _WORKER_BYTES + parts + (_alive(node) + 2) * _WIDEST_BYTES * max(block, TILE)


def _alive(node: Node) -> int:
    """Tiles alive at once for a node, raw buffers included."""
    return 2 if isinstance(node, Stored) else sum(_alive(item) for item in node.inputs) + 1
