"""The plan's small language: where each output tensor comes from, as a tree of stored tensors and methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from .kernels.registry import Value

Action = Literal["merged", "copied"]


@dataclass(frozen=True)
class Stored:
    """A tensor of an input: slot path of the model, key in that model, dtype and shape as stored."""

    slot: str
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros, standing in for one that a model lacks."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Merged:
    """A method applied to other nodes; its value stays in float32 (or wider) until the end of the run.

    Attributes:
        method: id.
        params: all parameters of the method.
        inputs: operands in the order of the method's slots; all of `shape`.
        dtype: dtype it would be stored in, which counts in the dtype rule.
        shape: of the result.
        stream: Philox key of its random draws; 0 for methods without.
        whole: it needs whole tensors in their shape.
        rows: it may be cut between rows of the matrix [first dimension, rest] only.
        measured: it needs measures of the whole tensor before it can touch an element.
    """

    method: str
    params: Mapping[str, Value]
    inputs: tuple[Node, ...]
    dtype: str
    shape: tuple[int, ...]
    stream: int
    whole: bool = False
    rows: bool = False
    measured: bool = False

    @property
    def columns(self) -> int:
        """Columns of the matrix [first dimension, rest]; 1 for vectors and scalars."""
        return math.prod(self.shape[1:])


Node = Stored | Zeros | Merged


@dataclass(frozen=True)
class Step:
    """One output tensor.

    Attributes:
        key: name in the output.
        dtype: stored dtype.
        shape: stored shape.
        action: `merged` when a method is applied, `copied` when A's (or the VAE file's) values are kept.
        node: where the values come from.
        reason: why it is copied, or which rule set its parameters; empty for the plain case.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    action: Action
    node: Node
    reason: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def verbatim(self) -> bool:
        """True when the stored bytes are copied as they are."""
        return isinstance(self.node, Stored) and self.action == "copied" and self.node.dtype == self.dtype

    @property
    def whole(self) -> bool:
        """True when it cannot be cut into tiles: only the outermost method may choose where."""
        return any(
            isinstance(node, Merged) and (node.whole or (node is not self.node and (node.rows or node.measured)))
            for node in walk(self.node)
        )

    @property
    def measured(self) -> bool:
        """True when its method measures the whole tensor first."""
        return isinstance(self.node, Merged) and self.node.measured


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, operands first to last."""
    yield node
    if isinstance(node, Merged):
        for item in node.inputs:
            yield from walk(item)


def leaves(node: Node) -> Iterator[Stored]:
    """The stored tensors below a node."""
    return (item for item in walk(node) if isinstance(item, Stored))
