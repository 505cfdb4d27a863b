"""The plan's small language: where each output tensor comes from, as a tree of stored tensors and methods."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from .adapters import Format
from .families import Place
from .kernels.registry import Value

Action = Literal["merged", "copied"]


@dataclass(frozen=True)
class Stored:
    """A tensor of an input: slot path of the model, key in that model, dtype and shape as stored."""

    slot: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    inputs: ClassVar[tuple[Node, ...]] = ()


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros, standing in for one that a model lacks."""

    dtype: str
    shape: tuple[int, ...]
    inputs: ClassVar[tuple[Node, ...]] = ()


@dataclass(frozen=True)
class Counting:
    """The whole numbers 0, 1, 2 … in row-major order; never an operand of a method."""

    shape: tuple[int, ...]
    dtype: ClassVar[str] = "I64"
    inputs: ClassVar[tuple[Node, ...]] = ()


@dataclass(frozen=True)
class Scaled:
    """Codes of a coded storage times their scale, which are numbers.

    Attributes:
        codes: the weight as stored.
        scale: its scale, in a layout that `quant.fp8.decode` knows.
        dtype: what it counts as in the dtype rule.
    """

    codes: Stored
    scale: Stored
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return self.codes.shape

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What is read."""
        return (self.codes, self.scale)


@dataclass(frozen=True)
class Channels:
    """The first `count` input channels (second dimension) of a node; those that it lacks are zeros."""

    node: Node
    count: int

    @property
    def dtype(self) -> str:
        """The node's."""
        return self.node.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The node's, with `count` input channels."""
        return (self.node.shape[0], self.count, *self.node.shape[2:])

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The node."""
        return (self.node,)


@dataclass(frozen=True)
class Joined:
    """`first`, and behind it those input channels of `wider` that it lacks.

    Attributes:
        first: the input channels from 0 on.
        wider: a node of the same shape but for more input channels.
        dtype: dtype it would be stored in.
    """

    first: Node
    wider: Node
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the wider one."""
        return self.wider.shape

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Both."""
        return (self.first, self.wider)


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
        strengths: of every operand but the first, where the method takes them.
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
    strengths: tuple[float, ...] = ()

    @property
    def columns(self) -> int:
        """Columns of the matrix [first dimension, rest]; 1 for vectors and scalars."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Change:
    """What one module of a LoRA does to a tensor.

    Attributes:
        slot: slot path of the LoRA.
        format: id of its adapter format.
        keys: role -> key in the LoRA's file.
        settings: of the format.
        strength: multiplier, block weight included; 0: nothing is done.
        place: which rows of the tensor are meant, and how the module's own stand to them.
        shape: of the module's own weight; [out, in …] as many elements as its change.
        rank: where the format has one.
        numel: elements of the parts that are held in memory.
        whole: it needs the whole tensor; the others may be cut between rows.
        guessed: its file does not say how it is scaled: the scale is 1.
    """

    slot: str
    format: str
    keys: Mapping[str, str]
    settings: Mapping[str, Value | str]
    strength: float
    place: Place
    shape: tuple[int, ...]
    rank: int | None = None
    numel: int = 0
    whole: bool = False
    guessed: bool = False


@dataclass(frozen=True)
class Baked:
    """LoRAs added to another node's value, before the one rounding.

    Attributes:
        base: what they change.
        changes: in the order of the recipe.
        dtype: dtype it would be stored in.
    """

    base: Node
    changes: tuple[Change, ...]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The base's."""
        return self.base.shape

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The base."""
        return (self.base,)

    @property
    def columns(self) -> int:
        """Columns of the matrix [first dimension, rest]; 1 for vectors and scalars."""
        return math.prod(self.shape[1:])

    @property
    def whole(self) -> bool:
        """True when it needs the whole tensor at once."""
        return any(change.whole and change.strength for change in self.changes)


@dataclass(frozen=True)
class FreshScale:
    """The scale of codes that are made anew: float32, computed and written by the step of the codes.

    Attributes:
        key: its name in the output.
        shape: in a layout that `quant.fp8` knows.
        weight: the numbers that are coded.
    """

    key: str
    shape: tuple[int, ...]
    weight: Node
    dtype: ClassVar[str] = "F32"

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The numbers."""
        return (self.weight,)


Node = Stored | Zeros | Counting | Scaled | Channels | Joined | Merged | Baked | FreshScale


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
        scale: what is written beside it, where it is stored as codes with a fresh scale; a step of its own names it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    action: Action
    node: Node
    reason: str = ""
    scale: FreshScale | None = None

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
        return any(_needs_whole(node, node is self.node) for node in walk(self.node))

    @property
    def wide(self) -> bool:
        """True when it is computed in float64: sources of float64, or LoRAs on top of float32."""
        return any(leaf.dtype == "F64" for leaf in leaves(self.node)) or any(
            isinstance(node, Baked) and node.base.dtype == "F32" for node in walk(self.node)
        )

    @property
    def measured(self) -> bool:
        """True when its method measures the whole tensor first."""
        return isinstance(self.node, Merged) and self.node.measured

    @property
    def merge(self) -> Merged | None:
        """The outermost method that makes it, the one of reports; None where no method does."""
        node = self.node.base if isinstance(self.node, Baked) else self.node
        node = node.first if isinstance(node, Joined) else node
        return node if isinstance(node, Merged) else None

    @property
    def methods(self) -> str:
        """What is applied, for reports: a method's id, `bake`, or both; empty for what is copied."""
        merge = self.merge if self.action == "merged" else None
        return " + ".join(([merge.method] if merge else []) + (["bake"] if isinstance(self.node, Baked) else []))


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, operands first to last."""
    yield node
    for item in node.inputs:
        yield from walk(item)


def _needs_whole(node: Node, outermost: bool) -> bool:
    """True when a node keeps the step from being cut where the work is shared out."""
    if isinstance(node, Baked):
        return node.whole or not outermost
    if isinstance(node, Merged):
        return node.whole or (not outermost and (node.rows or node.measured))
    return isinstance(node, (Channels, Joined))


def sliced_roles(form: Format, roles: Iterable[str], place: Place) -> tuple[str, ...]:
    """Parts of which only the rows that are worked on need be read; of low-rank formats none: their parts are small."""
    if form.factors is not None or place.post or form.stage not in ("replace", "add"):
        return ()
    return form.by_rows(frozenset(roles))


def leaves(node: Node) -> Iterator[Stored]:
    """The stored tensors below a node."""
    return (item for item in walk(node) if isinstance(item, Stored))
