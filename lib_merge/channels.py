"""The first layer of a denoiser where models take different numbers of input channels (inpainting, pix2pix, depth)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .files.dtypes import is_float
from .steps import Channels, Node


@dataclass(frozen=True)
class Shared:
    """What of a first layer is merged, and what is copied.

    Attributes:
        nodes: slot -> the tensor with the input channels that are merged.
        wider: the tensor that the other input channels are copied from; None where all are merged.
        reason: for the report.
    """

    nodes: dict[str, Node | None]
    wider: Node | None
    reason: str


def shared_channels(nodes: Mapping[str, Node | None]) -> Shared | None:
    """Where models differ in nothing but their input channels, cut them to those that A and the donors share.

    A missing channel of C counts as 0: C is what B was trained from, and training starts new channels at 0.

    Args:
        nodes: slot -> tensor, A first; None where a model lacks it.

    Returns:
        None where there is nothing to do, or more differs than the second dimension.
    """
    there = {slot: node for slot, node in nodes.items() if node is not None}
    if any(len(node.shape) < 2 or not is_float(node.dtype) for node in there.values()):
        return None
    widths = {slot: node.shape[1] for slot, node in there.items()}
    if len({(node.shape[0], *node.shape[2:]) for node in there.values()}) > 1 or len(set(widths.values())) == 1:
        return None
    shared, widest = min(width for slot, width in widths.items() if slot != "C"), max(widths.values())
    cut: dict[str, Node | None] = {slot: node and _cut(node, shared) for slot, node in nodes.items()}
    reasons = []
    if widths.get("C", shared) < shared:
        reasons.append(f"input channels from {widths['C']} on count as 0 in C")
    if shared == widest:
        return Shared(cut, None, reasons[0])
    source = next(slot for slot in there if widths[slot] == widest)
    reasons.append(f"input channels from {shared} on are copied from {source}")
    return Shared(cut, there[source], ", ".join(reasons))


def _cut(node: Node, count: int) -> Node:
    return node if node.shape[1] == count else Channels(node, count)
