"""Torch pickles as inert data: a machine that walks through a pickle and executes nothing.

A name in a pickle is compared with the few that tables of tensors hold and stays a text; it is never looked up in
Python. Any other name, and any operation that is not needed for such tables, ends the reading.
"""

from __future__ import annotations

import io
import os
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

from ..errors import FileError
from .dtypes import BY_TORCH

MAX_PICKLE_BYTES = 100_000_000
MAX_OPERATIONS = 5_000_000
MAX_LINE_BYTES = 4096
MAX_DIMENSIONS = 64
AGAIN = "download or copy the file again"
RESAVE = "if you trust it, load it in the program that made it and save the model as .safetensors"


class Stream(io.BufferedReader):
    """A file that gives `left` bytes and no more: no length word of a hostile file can fill the memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.path = path
        self.size = os.fstat(self.fileno()).st_size

    def at(self, start: int, length: int) -> Stream:
        """Go to byte `start`, from where `length` bytes may be read."""
        self.seek(start)
        self.left = length
        return self

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any stream, within what is left."""
        wanted = self.left if size is None or size < 0 else min(size, self.left)
        data = super().read(wanted if wanted < 1 << 16 else max(0, min(wanted, self.size - self.tell())))
        self.left -= len(data)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        """As of any stream, within what is left, of at most `MAX_LINE_BYTES`."""
        data = super().readline(min(self.left, MAX_LINE_BYTES))
        self.left -= len(data)
        return data

    def bad(self, what: str, hint: str = AGAIN, tensor: str | None = None) -> FileError:
        """An error about this file."""
        return FileError(what, file=self.path, tensor=tensor, hint=hint)


def count_tensors(value: object) -> int:
    """How many tensors a table holds under names; 0 for what is no table."""
    pairs = value.items() if isinstance(value, dict) else ()
    return sum(isinstance(key, str) and isinstance(item, Tensor) for key, item in pairs)


def kind_of(value: object) -> str:
    """What a value that was left out is, in a word."""
    return f"{count_tensors(value)} tensors" if count_tensors(value) else type(value).__name__.lstrip("_").lower()


def are_sizes(values: Any) -> bool:
    """Whether a value of a pickle is a short tuple of sizes; a bool is none."""
    short = isinstance(values, tuple) and len(values) <= MAX_DIMENSIONS
    return short and all(type(value) is int and 0 <= value < 2**63 for value in values)


class Storage(NamedTuple):
    """A block of bytes that tensors share: `numel` elements of a torch dtype, `nbytes` bytes."""

    key: str
    dtype: str
    numel: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """What a pickle says of a tensor, unchecked; `flaw` says why it cannot be read."""

    storage: Storage | None = None
    offset: Any = 0
    size: Any = ()
    stride: Any = ()
    dtype: str = ""
    flaw: str = ""


class _Opaque:
    """Stands for whatever is no tensor, text, number, list or table."""

    def __str__(self) -> str:
        return "(no text)"


def _tensor(args: tuple[Any, ...], dtype: str = "") -> Tensor:
    """Args as in torch: storage, offset, size, stride, requires_grad, hooks, metadata of a view."""
    storage, offset, size, stride, *rest = args
    if not isinstance(storage, Storage) or len(rest) > 3:
        raise ValueError("no tensor")
    flaw = "is a conjugated or negated view" if len(rest) == 3 and rest[2] else ""
    return Tensor(storage, offset, size, stride, (dtype or storage.dtype).removeprefix("torch."), flaw)


_CALLS: dict[str, Callable[[tuple[Any, ...]], object]] = {
    "collections.OrderedDict": lambda _: {},
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda args: _tensor(args[:6] + args[7:], args[6]),
    "torch._utils._rebuild_parameter": lambda args: args[0],
    "torch._utils._rebuild_parameter_with_state": lambda args: args[0],
    "torch._tensor._rebuild_from_type_v2": lambda args: _call(args[0], args[2]),
    "torch._utils._rebuild_sparse_tensor": lambda _: Tensor(flaw="is sparse"),
    "torch._utils._rebuild_qtensor": lambda _: Tensor(flaw="is quantized by torch"),
    "torch._utils._rebuild_meta_tensor_no_storage": lambda _: Tensor(flaw="is on the meta device: no data"),
}
# What real checkpoints hold beside tensors: numpy's random states and metrics, sets, counters of schedulers,
# shapes and devices among settings. What these calls would make is no tensor: it becomes an opaque dot.
_INERT = (
    "numpy.dtype numpy.ndarray numpy.core.multiarray.scalar numpy.core.multiarray._reconstruct "
    "numpy._core.multiarray.scalar numpy._core.multiarray._reconstruct _codecs.encode "
    "builtins.set __builtin__.set builtins.bytearray __builtin__.bytearray collections.Counter "
    "collections.defaultdict torch.Size torch.device torch.serialization._get_layout"
)
_CALLS |= dict.fromkeys(_INERT.split(), lambda _: _Opaque())
# Named, not called: dtypes, classes of tensors, the callback that SD 1.x releases use as a key.
_WORDS = (
    "torch.Tensor torch.nn.parameter.Parameter torch.nn.parameter.Buffer torch.complex32 torch.complex128 "
    "torch.float4_e2m1fn_x2 torch.per_tensor_affine torch.per_channel_affine builtins.dict __builtin__.dict "
    "builtins.list __builtin__.list pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
)
_KINDS = {  # class of storage -> torch dtype
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "Untyped": "untyped",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "QInt8": "qint8", "QUInt8": "quint8",
    "QInt32": "qint32", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip
_HOMES = ("torch", "torch.cuda", "torch.storage")
_STORAGES = {f"{home}.{kind}Storage": dtype for home in _HOMES for kind, dtype in _KINDS.items()}
_ITEM_BYTES = {"complex128": 16, "qint32": 4, **{name: dtype.bits // 8 for name, dtype in BY_TORCH.items()}}
_NAMES = {*_CALLS, *_WORDS.split(), *_STORAGES, *(f"torch.{name}" for name in BY_TORCH)}


def _call(name: Any, args: Any) -> object:
    """What a call in the pickle is taken to give: a stand-in of ours, nothing that the file names."""
    if not isinstance(name, str) or not isinstance(args, tuple):
        raise ValueError("no call")
    return _CALLS[name](args)


@dataclass
class Machine:
    """Walks through the pickles of one file; `storages` gathers what their tensors refer to."""

    stream: Stream
    storages: dict[str, Storage] = field(default_factory=dict)
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, start: int, length: int = MAX_PICKLE_BYTES, what: str = "the pickle is damaged") -> Any:
        """The value of the pickle at `start`, of at most `length` bytes: plain values and stand-ins."""
        self.stack, self.marks, self.memo = [], [], {}
        self.stream.at(start, min(length, MAX_PICKLE_BYTES))
        # Without `tell`, which would ask the system for the place of every single operation.
        source: Any = SimpleNamespace(read=self.stream.read, readline=self.stream.readline)
        try:
            for count, (operation, argument, _) in enumerate(pickletools.genops(source)):
                if count == MAX_OPERATIONS:
                    raise ValueError("too many operations")
                if operation.name not in _STEPS:
                    self.refuse(f"{operation.name} {argument if isinstance(argument, str) else ''}")
                _STEPS[operation.name](self, argument)
            return self.stack[-1]
        # A damaged pickle can do things to values of another kind, nest calls without end and, where warnings
        # are errors, meet the one on odd backslashes.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, Warning) as error:
            raise self.stream.bad(f"{what}, or cut off, at byte {self.stream.tell()}") from error

    def refuse(self, name: str) -> NoReturn:
        """Stop at something that the pickle asks for."""
        what = f"the pickle asks for {name.strip()[:200]!a}, which no table of tensors needs"
        raise self.stream.bad(f"{what}; nothing was executed", RESAVE)

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        if isinstance(value, str):
            value.encode()  # half a surrogate pair is an error here, not when a name is written or shown
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        """Take the last values off the stack."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def pop_mark(self) -> list[Any]:
        """Take what lies above the last mark off the stack."""
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def name(self, name: str) -> None:
        """Put a name that is in the tables on the stack, as text."""
        if name not in _NAMES:
            self.refuse(name)
        self.push(name)

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top; what goes into an opaque value is dropped."""
        if not isinstance(self.stack[-1], _Opaque):
            self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        """Set keys and values, in turn, of the table on top; those of an opaque value are dropped."""
        if isinstance(self.stack[-1], _Opaque):
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys are not hashed: nested tuples and chosen numbers make that slow or too deep at will.
            self.stack[-1][key if isinstance(key, str) else _Opaque()] = value

    def build(self, _: Any) -> None:
        """Attributes of an OrderedDict or of an opaque value are dropped; anything else has none."""
        self.stack.pop()
        if not isinstance(self.stack[-1], (dict, _Opaque)):
            self.refuse(f"BUILD on {kind_of(self.stack[-1])}")

    def storage(self, _: Any) -> None:
        """A persistent id ("storage", class, key, device, numel[, None]); old torch had views at the end."""
        mark, kind, key, _device, numel, *view = self.stack.pop()
        texts = all(isinstance(text, str) for text in (mark, kind, key))
        if not texts or not key.isascii() or mark != "storage" or not are_sizes((numel,)) or view not in ([], [None]):
            raise ValueError("no storage")
        dtype = _STORAGES[kind]
        found = Storage(key, dtype, numel, numel * _ITEM_BYTES.get(dtype, 1))
        if self.storages.setdefault(key, found)[2:] != found[2:]:
            raise ValueError("one storage in two sizes")
        self.push(found)


_PLAIN = (
    "NONE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 STRING BINSTRING SHORT_BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8"
)
# Operations that are not here (INST, OBJ, NEWOBJ, NEWOBJ_EX; EXT codes; buffers) are refused by name. A name
# that the pickle asks for stays a text: whatever it is in Python, here it is an entry of a table above.
_STEPS: dict[str, Callable[[Machine, Any], object]] = {
    **dict.fromkeys(_PLAIN.split(), Machine.push),
    "NEWTRUE": lambda m, _: m.push(True), "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}), "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_SET": lambda m, _: m.push([]), "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))), "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))), "TUPLE": lambda m, _: m.push(tuple(m.pop_mark())),
    "FROZENSET": lambda m, _: m.push(tuple(m.pop_mark())), "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "POP": lambda m, _: m.stack.pop(), "POP_MARK": lambda m, _: m.pop_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "APPEND": lambda m, _: m.extend(m.pop(1)), "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.update(m.pop(2)), "SETITEMS": lambda m, _: m.update(m.pop_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, at: m.memo.update({at: m.stack[-1]})),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, at: m.push(m.memo[at])),
    "MEMOIZE": lambda m, _: m.memo.update({len(m.memo): m.stack[-1]}),
    "GLOBAL": lambda m, names: m.name(names.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(".".join(m.pop(2))),
    "REDUCE": lambda m, _: m.push(_call(*m.pop(2))), "BUILD": Machine.build, "BINPERSID": Machine.storage,
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, _: None),
}  # fmt: skip
