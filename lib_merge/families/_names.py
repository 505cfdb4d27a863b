"""From an adapter's module names to the tensors of one model, and back: one index for every trainer's spelling."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ._alias import BARE, Post, Shares, Span, Table, squash
from ._family import Detected, Family, Tensors
from ._paths import component, read_key, read_stem, wrapped_in
from ._wrappers import endings, unwrapped
from .text_encoder import NAMES as ENCODER_NAMES

Rows = tuple[int, int]

# Parameters that modules have; anything else is a parameter by itself.
_PARAMS = ("weight", "bias", "scale", "gamma", "beta")
# Which stored parameter answers a question for one, best first; "" is a parameter by itself.
_STORED = {"weight": ("weight", "scale", "gamma", ""), "bias": ("bias", "beta"), "scale": ("scale", "weight")}
_IN_PROJ = re.compile(r"(.*\.in_proj)_(weight|bias)$")
# Other spellings of a path, tried in this order when the path itself is not known.
_SPELLINGS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"_lora$", ""),
        (r"\.processor(?=\.)", ""),
        (r"\.processor\.(to_\w+?)(?:_lora)?$", r".\1"),
        (r"([._]to_out)(?:_lora)?$", r"\1.0"),
        (r"\.processor\.(to_out)(?:_lora)?$", r".\1.0"),
        (r"^sformer_blocks\.", "transformer_blocks."),
    )
)


@dataclass(frozen=True)
class Place:
    """Where a module's change goes.

    Attributes:
        key: full tensor name in the model.
        rows: (start, count) of the stored tensor's output rows that are meant; None: all.
        part: (start, count) of the adapter module's own output rows that go there; None: all.
        post: done to the module's change before it is added: halves of the output axis swapped, or transposed.
    """

    key: str
    rows: Rows | None = None
    part: Rows | None = None
    post: Post = ""


class _Module(NamedTuple):
    """A module of the model.

    Attributes:
        slot: the part of the model.
        path: dotted, below the slot's prefix; `=` in front of a parameter by itself.
        keys: parameter -> full tensor name.
        spans: what it stands for in native rows.
    """

    slot: str
    path: str
    keys: dict[str, str]
    spans: list[Span]


class Names:
    """The modules of one model under every name that trainers give them.

    Args:
        tensors: key -> (dtype, shape) of the model.
        found: what it is, if that is known already.
    """

    def __init__(self, tensors: Tensors, found: Detected | None = None) -> None:
        self._tensors = tensors
        self._found = found or Detected()
        self._tables = {"unet": _table(self._found.family), "unet2": _table(self._found.family)}
        self._own: dict[tuple[str, str], _Module] = {}
        self._natives: dict[tuple[str, str], list[_Module]] = defaultdict(list)
        self._highest: dict[str, int] = {}
        self._ends: dict[str, list[_Module]] | None = None
        for key in tensors:
            self._enter(key)

    def find(self, stem: str, param: str = "weight") -> tuple[Place, ...]:
        """Where the change of an adapter's module goes; empty: this model has no such module.

        Args:
            stem: the module's name in the adapter, prefix included, without its role.
            param: which parameter of it; "" when the stem is the parameter's full name itself.
        """
        for slot, path in read_stem(stem, self._found):
            for spelling in _spellings(path):
                for asked, wanted in _questions(spelling, param):
                    if places := self._places(slot, asked, wanted):
                        return places
        return self._by_suffix(stem, param)

    def component(self, stem: str) -> str:
        """The part of the model that an adapter's module belongs to: "unet" (any denoiser), "te1" …, "llm"."""
        return component(next(read_stem(stem, self._found))[0], self._found)

    def _enter(self, key: str) -> None:
        slot, name = read_key(key, self._found)
        path, param = _split(name)
        place = (slot, squash(path))
        if place not in self._own:
            spans = self._table(slot).spans(path)
            self._own[place] = module = _Module(slot, path, {}, spans)
            for native in {squash(span.native) for span in spans}:
                self._natives[slot, native].append(module)
            for span in spans:
                if span.row.native in self._table(slot).counted:
                    self._highest[span.row.native] = max(self._highest.get(span.row.native, 0), int(span.numbers[0]))
        self._own[place].keys[param] = key

    def _table(self, slot: str) -> Table:
        return self._tables.get(slot) or _ENCODERS

    def _places(self, slot: str, path: str, param: str) -> tuple[Place, ...]:
        """Places by the exact path, dotted or squashed."""
        own = self._own.get((slot, squash(path)))
        if own is not None and (stored := _stored(own, param)) is not None:
            return (Place(own.keys[stored]),)
        for span in self._current(self._table(slot).spans(path)):
            modules = self._natives.get((slot, squash(span.native)), ())
            found = [item for module in modules for item in self._shared(span, module, param)]
            # A module whose rows only partly have a place here is not this model's.
            if found and sum(share for share, _ in found) == 1:
                return tuple(sorted((place for _, place in found), key=lambda place: place.part or (0, 0)))
        return ()

    def _current(self, spans: Sequence[Span]) -> list[Span]:
        """Of rows that hold for the highest number only, and those for all, the ones that hold here."""
        kept = [span for span in spans if span.row.last and int(span.numbers[0]) == self._highest.get(span.row.native)]
        return kept or [span for span in spans if not span.row.last]

    def _shared(self, span: Span, module: _Module, param: str) -> Iterator[tuple[Fraction, Place]]:
        """Where the rows that a name stands for lie in a module that holds some rows of the same native one.

        With each place comes the share of the name's rows that go there.
        """
        stored = _stored(module, param)
        if stored is None:
            return
        key = module.keys[stored]
        shape = self._tensors[key][1]
        for own in self._current(module.spans):
            if squash(own.native) != squash(span.native):
                continue
            post: Post = own.post if not span.post else ("" if own.post else span.post)
            cut = _cut(span.rows, own.rows, shape[0] if shape else 1)
            if cut is not None:
                yield cut.share, Place(key, cut.rows, cut.part, post)

    def _by_suffix(self, stem: str, param: str) -> tuple[Place, ...]:
        """Places by the end of the path, when a wrapper stands before the adapter's names or the model's."""
        for path in unwrapped(stem, _heads()):
            found = {self._places(slot, path, param) for slot in wrapped_in(stem)} - {()}
            if found:
                return found.pop() if len(found) == 1 else ()
        if self._found.family is not None and self._found.kind != "llm":
            return ()  # the prefix of a known model is known
        for _, path in read_stem(stem, self._found):
            modules = self._suffixes().get(squash(path), [])
            stored = _stored(modules[0], param) if len(modules) == 1 else None
            if stored is not None:
                return (Place(modules[0].keys[stored]),)
        return ()

    def _suffixes(self) -> dict[str, list[_Module]]:
        if self._ends is None:
            self._ends = defaultdict(list)
            for module in self._own.values():
                for end in endings(module.path):
                    self._ends[squash(end)].append(module)
        return self._ends


class _Cut(NamedTuple):
    rows: Rows | None
    part: Rows | None
    share: Fraction


def _cut(asked: Shares, own: Shares, length: int) -> _Cut | None:
    """The rows that two shares of one native module have in common.

    Args:
        asked: what a name stands for.
        own: what a stored tensor of `length` rows holds.
        length: rows of the stored tensor.

    Returns:
        the common rows as rows of the stored tensor and as rows of the named module, None where they are all of it,
        and their share of the named module; or None when nothing is common or the rows cannot be cut so.
    """
    fine = asked[2] * own[2]
    asked_start, asked_stop = asked[0] * own[2], (asked[0] + asked[1]) * own[2]
    own_start, own_stop = own[0] * asked[2], (own[0] + own[1]) * asked[2]
    start, stop = max(asked_start, own_start), min(asked_stop, own_stop)
    if start >= stop:
        return None
    whole, rest = divmod(length * fine, own_stop - own_start)  # rows of the native module
    if rest:
        return None
    ends = [divmod(edge * whole, fine) for edge in (start, stop, own_start, asked_start)]
    if any(rest for _, rest in ends):
        return None
    first, last, own_first, asked_first = (edge for edge, _ in ends)
    rows = None if (start, stop) == (own_start, own_stop) else (first - own_first, last - first)
    part = None if (start, stop) == (asked_start, asked_stop) else (first - asked_first, last - first)
    return _Cut(rows, part, Fraction(stop - start, asked_stop - asked_start))


def _split(name: str) -> tuple[str, str]:
    """(module path, parameter) of a tensor's path; a parameter by itself gets `=` in front."""
    path, _, param = name.rpartition(".")
    if path and param in _PARAMS:
        return path, param
    if found := _IN_PROJ.match(name):
        return found[1], found[2]
    return BARE + name, ""


def _stored(module: _Module, param: str) -> str | None:
    """The parameter of a module that answers for `param`; None: it has none."""
    return next((name for name in _STORED.get(param, (param,)) if name in module.keys), None)


def _spellings(path: str) -> Iterator[str]:
    yield path
    for pattern, text in _SPELLINGS:
        other = pattern.sub(text, path)
        if other != path:
            yield other


def _questions(path: str, param: str) -> Iterator[tuple[str, str]]:
    """(path, parameter) to look up, best first."""
    if param in _PARAMS:
        yield path, param
        if param == "weight":
            yield BARE + path, ""
        return
    if param:
        yield f"{BARE}{path}.{param}", ""
        return
    yield BARE + path, ""
    module, own = _split(path)
    if own:
        yield module, own


@lru_cache(maxsize=64)
def _table(family: Family | None) -> Table:
    return Table(family.names if family else ())


@lru_cache(maxsize=1)
def _heads() -> frozenset[str]:
    """The first words of every family's own paths: what stands there is no wrapper."""
    from . import FAMILIES

    starts = [row.start for family in FAMILIES for row in family.rules]
    rows = [row for family in FAMILIES for row in family.names] + list(ENCODER_NAMES)
    starts += [path.lstrip(BARE) for row in rows for path in (row.name, row.native)]
    return frozenset(start.split(".")[0] for start in starts)


_ENCODERS = Table(ENCODER_NAMES)
