"""Other names of a family's modules: rows of data, and a table that looks a module path up in them.

One name of each module is its native one; every other name stands for all or some of the native module's output rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Post = Literal["", "swap", "transpose"]
Style = Literal["diffusers", "kohya", "read"]
# (start, count, of): `count` of `of` equal shares of the native module's output rows.
Shares = tuple[int, int, int]

WHOLE: Shares = (0, 1, 1)
# Before the path of a parameter that is no module's weight or bias: `=text_projection`, `=blocks.#.modulation`.
BARE = "="


@dataclass(frozen=True)
class Alias:
    """Another name of a module.

    Paths stand below the component's prefix, `#` is any number (the same ones on both sides, in order), a `=` in front
    says that the path is a parameter's own.

    Attributes:
        name: the other path.
        native: the path in the model's original files.
        rows: which output rows of the native module it stands for.
        post: what tells the two apart besides: halves of the output axis swapped, or transposed.
        last: only for the highest number that the model has in the place of the first `#`.
        style: whose name it is; "read": understood, never written.
    """

    name: str
    native: str
    rows: Shares = WHOLE
    post: Post = ""
    last: bool = False
    style: Style = "diffusers"


def renamed(*pairs: tuple[str, str], style: Style = "diffusers") -> tuple[Alias, ...]:
    """Rows for (other name, native name)."""
    return tuple(Alias(name, native, style=style) for name, native in pairs)


def same(*paths: str) -> tuple[Alias, ...]:
    """Rows for paths that are the same everywhere."""
    return tuple(Alias(path, path) for path in paths)


def fused(native: str, *names: str, shares: tuple[int, ...] = (), style: Style = "diffusers") -> tuple[Alias, ...]:
    """Rows for one native module that others keep in several.

    Args:
        native: the fused module.
        names: its parts, in the order of their rows.
        shares: relative sizes of the parts; empty: all equal.
        style: whose names these are.
    """
    sizes = shares or (1,) * len(names)
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return tuple(
        Alias(name, native, (start, size, sum(sizes)), style=style)
        for name, start, size in zip(names, starts, sizes, strict=True)
    )


def below(name: str, native: str, *rows: Alias) -> tuple[Alias, ...]:
    """The rows with a head put before both sides: `below("transformer_blocks.#", "blocks.#", …)`."""
    return tuple(replace(row, name=_join(name, row.name), native=_join(native, row.native)) for row in rows)


def _join(head: str, path: str) -> str:
    return f"{BARE}{head}.{path[1:]}" if path.startswith(BARE) else f"{head}.{path}"


def squash(path: str) -> str:
    """A module path as trainers write it into one word: dots become underscores."""
    return path.replace(".", "_")


class Span(NamedTuple):
    """What a path stands for: rows of a native module.

    Attributes:
        native: dotted path, numbers filled in.
        rows: as in `Alias`.
        post: as in `Alias`.
        row: where it stands in the table.
        numbers: what stood in the place of each `#`.
    """

    native: str
    rows: Shares
    post: Post
    row: Alias
    numbers: tuple[str, ...]


# form -> [(places of the fixed numbers, their values -> rows)]
_Forms = dict[str, dict[tuple[int, ...], dict[tuple[str, ...], list[Alias]]]]


class Table:
    """The names of one kind of model.

    Args:
        rows: in any order; of two that name the same rows of a native module in one style the first is written.

    Attributes:
        counted: native patterns whose highest number decides which rows hold.
    """

    def __init__(self, rows: Iterable[Alias]) -> None:
        self._names: _Forms = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        self._natives: _Forms = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        self.counted: set[str] = set()
        for row in rows:
            if row.last:
                self.counted.add(row.native)
            _enter(self._names, row.name, row)
            _enter(self._natives, row.native, row)

    @property
    def empty(self) -> bool:
        """True when there are no rows: nobody gives these modules other names."""
        return not self._names

    def spans(self, path: str) -> list[Span]:
        """What a path stands for by any row; empty: no row knows it.

        Args:
            path: squashed or dotted; a native path stands for itself.
        """
        form, numbers = _form(path)
        for row, free in _rows(self._natives, form, numbers):
            return [Span(_fill(row.native, free), WHOLE, "", row, free)]
        return [Span(_fill(row.native, free), row.rows, row.post, row, free)
                for row, free in _rows(self._names, form, numbers)]  # fmt: skip

    def names(self, native: str) -> Iterator[tuple[str, Span]]:
        """(other name, what it stands for) of a native path."""
        form, numbers = _form(native)
        for row, free in _rows(self._natives, form, numbers):
            yield _fill(row.name, free), Span(_fill(row.native, free), row.rows, row.post, row, free)


def _enter(forms: _Forms, path: str, row: Alias) -> None:
    form, tokens = _form(path)
    fixed = tuple(place for place, token in enumerate(tokens) if token != "#")
    forms[form][fixed][tuple(tokens[place] for place in fixed)].append(row)


def _rows(forms: _Forms, form: str, numbers: tuple[str, ...]) -> Iterator[tuple[Alias, tuple[str, ...]]]:
    """Rows that fit, with the numbers that their `#` stand for; those with more fixed numbers first."""
    groups = forms.get(form)
    for fixed in sorted(groups, key=len, reverse=True) if groups else ():
        rows = groups[fixed].get(tuple(numbers[place] for place in fixed)) if groups else None
        if rows:
            free = tuple(number for place, number in enumerate(numbers) if place not in fixed)
            yield from ((row, free) for row in rows)


def _form(path: str) -> tuple[str, tuple[str, ...]]:
    """A path with its numbers taken out, and the numbers; `#` counts as one."""
    parts = path.replace(".", "_").split("_")
    numbers = tuple(part for part in parts if part.isdecimal() or part == "#")
    return "_".join("#" if part.isdecimal() else part for part in parts) if numbers else "_".join(parts), numbers


def _fill(pattern: str, numbers: tuple[str, ...]) -> str:
    pieces = pattern.split("#")
    return "".join(piece + number for piece, number in zip(pieces, (*numbers, ""), strict=True))
