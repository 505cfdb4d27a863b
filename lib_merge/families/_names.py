"""From an adapter's module names to the tensors of one model, and back: one index for every trainer's spelling."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ._alias import BARE, Span, squash
from ._family import Detected, Tensors
from ._naming import Naming, spellings, written
from ._paths import PARAMS, component, read_key, read_stem, split_param, wrapped_in
from ._places import Place, Written, cut, joined
from ._wrappers import endings, unwrapped
from .text_encoder import NAMES as ENCODER_NAMES

# Which stored parameter answers a question for one, best first; "" is a parameter by itself.
_STORED = {"weight": ("weight", "scale", "gamma", ""), "bias": ("bias", "beta"), "scale": ("scale", "weight")}


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

    Attributes:
        by_end: the stems that `find` knew by the ends of their paths alone.
    """

    def __init__(self, tensors: Tensors, found: Detected | None = None) -> None:
        self._tensors = tensors
        self._found = found or Detected()
        self._naming = Naming(self._found.family)
        self._own: dict[tuple[str, str], _Module] = {}
        self._natives: dict[tuple[str, str], list[_Module]] = defaultdict(list)
        self._highest: dict[str, int] = {}
        self._ends: dict[str, list[_Module]] | None = None
        self.by_end: set[str] = set()
        for key in tensors:
            self._enter(key)

    def find(self, stem: str, param: str = "weight") -> tuple[Place, ...]:
        """Where the change of an adapter's module goes; empty: this model has no such module.

        Args:
            stem: the module's name in the adapter, prefix included, without its role.
            param: which parameter of it; "" when the stem is the parameter's full name itself.
        """
        for slot, path in read_stem(stem, self._found):
            for spelling in spellings(path):
                for asked, wanted in _questions(spelling, param):
                    if places := self._places(slot, asked, wanted):
                        return places
        places = self._by_suffix(stem, param)
        if places:
            self.by_end.add(stem)
        return places

    def write(self, key: str, style: str) -> tuple[Written, ...]:
        """The module names of a tensor, in the order of its rows; `find` leads from each of them back to it.

        Args:
            key: full tensor name in the model: a weight or a bias.
            style: "kohya", "diffusers" or "peft".

        Returns:
            empty when the style has no names for that part of the model.
        """
        slot, name = read_key(key, self._found)
        path, _ = split_param(name)
        if self._found.kind == "llm":
            return (Written(f"base_model.model.{split_param(key)[0].removeprefix(BARE)}"),) if style == "peft" else ()
        head = self._naming.head(slot, style)
        if head is None:
            return ()
        module = self._own[slot, squash(path)]
        shape = self._tensors[key][1]
        found = []
        for own in self._current(module.spans):
            others = self._naming.named(slot, own.native, style)
            kept = self._current([span for _, span in others])
            for other, span in others:
                common = cut(span.rows, own.rows, shape[0] if shape else 1)
                if common is not None and span in kept:
                    post = joined(span.post, own.post)
                    found.append(Written(written(head, other, style), common.rows, common.part, post))
        return tuple(sorted(found, key=lambda item: item.rows or (0, 0))) or (Written(written(head, path, style)),)

    def doubles(self, stems: Iterable[str]) -> dict[str, str]:
        """Modules of one adapter that change rows which another of its modules changes already.

        Some files hold the fused and the split copy of the same modules; only one of them counts: the one with more
        rows, then the first in the file.

        Args:
            stems: the adapter's modules of one format, in the order of the file.

        Returns:
            module to leave out -> module that is kept.
        """
        ranges = {stem: self._ranges(self.find(stem)) for stem in stems}
        taken: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        left_out: dict[str, str] = {}
        for stem in sorted(ranges, key=lambda stem: -sum(stop - start for _, start, stop in ranges[stem])):
            own = ranges[stem]
            hits = (name for key, start, stop in own for low, high, name in taken[key] if start < high and low < stop)
            if (kept := next(hits, None)) is not None:
                left_out[stem] = kept
                continue
            for key, start, stop in own:
                taken[key].append((start, stop, stem))
        return left_out

    def _ranges(self, places: Sequence[Place]) -> list[tuple[str, int, int]]:
        """(tensor, first row, row behind the last) of some places."""
        shapes = {place.key: self._tensors[place.key][1] for place in places}
        ends = [(place.key, *(place.rows or (0, (shapes[place.key] or (1,))[0]))) for place in places]
        return [(key, start, start + count) for key, start, count in ends]

    def component(self, stem: str) -> str:
        """The part of the model that an adapter's module belongs to: "unet" (any denoiser), "te1" …, "llm"."""
        return component(next(read_stem(stem, self._found))[0], self._found)

    def _enter(self, key: str) -> None:
        slot, name = read_key(key, self._found)
        path, param = split_param(name)
        place = (slot, squash(path))
        if place not in self._own:
            table = self._naming.table(slot)
            spans = table.spans(path)
            self._own[place] = module = _Module(slot, path, {}, spans)
            for native in {squash(span.native) for span in spans}:
                self._natives[slot, native].append(module)
            for span in spans:
                if span.row.native in table.counted:
                    self._highest[span.row.native] = max(self._highest.get(span.row.native, 0), int(span.numbers[0]))
        self._own[place].keys[param] = key

    def _places(self, slot: str, path: str, param: str) -> tuple[Place, ...]:
        """Places by the exact path, dotted or squashed."""
        own = self._own.get((slot, squash(path)))
        if own is not None and (stored := _stored(own, param)) is not None:
            return (Place(own.keys[stored]),)
        for span in self._current(self._naming.table(slot).spans(path)):
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
            common = cut(span.rows, own.rows, shape[0] if shape else 1)
            if common is not None:
                yield common.share, Place(key, common.rows, common.part, joined(span.post, own.post))

    def _by_suffix(self, stem: str, param: str) -> tuple[Place, ...]:
        """Places by the end of the path, when a wrapper stands before the adapter's names or the model's."""
        slots = wrapped_in(stem)
        for path in unwrapped(next(read_stem(stem, self._found))[1], _heads()) if slots else ():
            found = {self._places(slot, path, param) for slot in slots} - {()}
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


def _stored(module: _Module, param: str) -> str | None:
    """The parameter of a module that answers for `param`; None: it has none."""
    return next((name for name in _STORED.get(param, (param,)) if name in module.keys), None)


def _questions(path: str, param: str) -> Iterator[tuple[str, str]]:
    """(path, parameter) to look up, best first."""
    if param in PARAMS:
        yield path, param
        if param == "weight":
            yield BARE + path, ""
        return
    if param:
        yield f"{BARE}{path}.{param}", ""
        return
    yield BARE + path, ""
    module, own = split_param(path)
    if own:
        yield module, own


@lru_cache(maxsize=1)
def _heads() -> re.Pattern[str]:
    """The first words of every family's own paths: what stands there is no wrapper."""
    from . import FAMILIES

    starts = [row.start for family in FAMILIES for row in family.rules]
    rows = [row for family in FAMILIES for row in family.names] + list(ENCODER_NAMES)
    starts += [path.lstrip(BARE) for row in rows for path in (row.name, row.native)]
    words = {start.split(".")[0] for start in starts} - {""}
    return re.compile(rf"(?:{'|'.join(map(re.escape, sorted(words)))})(?:[._]|$)")
