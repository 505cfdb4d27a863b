"""An adapter's module names in another style, without a model at hand: the family's tables are enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._alias import BARE, WHOLE, Alias, Post, Span
from ._family import Detected, Family
from ._naming import Naming, spellings, written
from ._paths import read_stem
from ._places import Part, joined, overlap

_PEFT = "base_model.model."


@dataclass(frozen=True)
class Renamed:
    """A name that some or all of a module's rows have in another style.

    Attributes:
        name: whole module name, prefix included.
        part: (start, stop) of the old module's output rows, 0 to 1.
        place: (start, stop) of the new module's output rows that these are, 0 to 1.
        post: what tells the two apart besides: halves of the output axis swapped, or transposed.
    """

    name: str
    part: Part
    place: Part
    post: Post = ""


def rename(stem: str, style: str, found: Detected, *, short: bool = False) -> tuple[Renamed, ...]:
    """The names of an adapter's module in a style; empty: it has none there, or is not known.

    Args:
        stem: as in the file, prefix included.
        style: one of `STYLES`.
        found: what the adapter is, its family known.
        short: the module has the form that only a model's last block has, where a family makes a difference.
    """
    if found.family is not None and found.family.kind == "llm":
        path = stem.removeprefix(_PEFT)
        whole = overlap(WHOLE, WHOLE)
        return (Renamed(_PEFT + path, *whole),) if style == "peft" and "." in path and whole else ()
    naming = Naming(found.family)
    for slot, path in read_stem(stem, found):
        head = naming.head(slot, style)
        for span in _spans(naming, slot, path, short) if head is not None else ():
            names = list(_named(naming, slot, style, span, head or "", short))
            if names:
                return tuple(sorted(names, key=lambda item: item.part))
    return ()


def has_names(family: Family) -> bool:
    """Whether a family's modules are known by name; else any dotted path stands for itself."""
    return family.kind != "llm" and not Naming(family).table("unet").empty


def _spans(naming: Naming, slot: str, path: str, short: bool) -> list[Span]:
    """What a path stands for; in a family without other names a dotted path stands for itself."""
    for spelling in spellings(path):
        for asked in (spelling, BARE + spelling):
            if found := _holding(naming.table(slot).spans(asked), short):
                return found
    return [Span(path, WHOLE, "", Alias(path, path), ())] if "." in path and naming.table(slot).empty else []


def _holding(spans: list[Span], short: bool) -> list[Span]:
    """The rows that hold: of those for the last block and those for all others, one kind."""
    return [span for span in spans if span.row.last == short] or [span for span in spans if not span.row.last]


def _named(naming: Naming, slot: str, style: str, span: Span, head: str, short: bool) -> Iterator[Renamed]:
    names = naming.named(slot, span.native, style)
    kept = _holding([other for _, other in names], short)
    for name, other in names:
        common = overlap(span.rows, other.rows)
        if common is not None and other in kept:
            post = joined(span.post, other.post)
            yield Renamed(written(head, name, style), common.first, common.second, post)
