"""Where a change goes, and what a weight is called: rows and parts of modules, and how shares become whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ._alias import Post, Shares

# (start, count) of output rows.
Rows = tuple[int, int]
# (start, stop) of output rows, 0 to 1.
Part = tuple[Fraction, Fraction]

ALL: Part = (Fraction(0), Fraction(1))


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


@dataclass(frozen=True)
class Written:
    """A module name for a weight, or for some of its rows.

    Attributes:
        name: whole module name, prefix included, without a role.
        rows: (start, count) of the weight's output rows that it stands for; None: all.
        part: (start, count) of the named module's own output rows that these are; None: all.
        post: what tells the two apart besides: halves of the output axis swapped, or transposed.
    """

    name: str
    rows: Rows | None = None
    part: Rows | None = None
    post: Post = ""


class Overlap(NamedTuple):
    """The rows that two shares of one native module have in common: as a part of the first and of the second."""

    first: Part
    second: Part


def overlap(first: Shares, second: Shares) -> Overlap | None:
    """What two shares of one module's rows have in common, or None for nothing."""
    one, two = _ends(first), _ends(second)
    start, stop = max(one[0], two[0]), min(one[1], two[1])
    if start >= stop:
        return None
    return Overlap(_within(start, stop, one), _within(start, stop, two))


def _ends(rows: Shares) -> Part:
    return Fraction(rows[0], rows[2]), Fraction(rows[0] + rows[1], rows[2])


def _within(start: Fraction, stop: Fraction, ends: Part) -> Part:
    length = ends[1] - ends[0]
    return (start - ends[0]) / length, (stop - ends[0]) / length


class Cut(NamedTuple):
    """Common rows in numbers; None: all rows of that side.

    Attributes:
        rows: of the stored tensor.
        part: of the named module.
        share: of the named module's rows, 0 to 1.
    """

    rows: Rows | None
    part: Rows | None
    share: Fraction


@lru_cache(maxsize=1024)
def cut(named: Shares, stored: Shares, length: int) -> Cut | None:
    """The rows that a name and a stored tensor have in common.

    Args:
        named: what the name stands for.
        stored: what the stored tensor holds.
        length: rows of the stored tensor.

    Returns:
        None when nothing is common or the rows cannot be cut so.
    """
    common = overlap(named, stored)
    own = Fraction(length * stored[2] * named[1], stored[1] * named[2])
    if common is None or own.denominator != 1:
        return None
    rows, part = counted(common.second, length), counted(common.first, int(own))
    if rows is None or part is None:
        return None
    share = common.first[1] - common.first[0]
    return Cut(None if common.second == ALL else rows, None if common.first == ALL else part, share)


def counted(part: Part, length: int) -> Rows | None:
    """A part of `length` rows in whole rows, or None when they cannot be cut so."""
    start, stop = part[0] * length, part[1] * length
    if start.denominator != 1 or stop.denominator != 1:
        return None
    return int(start), int(stop - start)


def joined(first: Post, second: Post) -> Post:
    """What two operations make together; each undoes itself."""
    return first if not second else ("" if first else second)
