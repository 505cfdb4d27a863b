"""What an adapter's module stands for, told by its name and its family alone: no model is needed."""

from __future__ import annotations

from dataclasses import dataclass

from ._alias import WHOLE, Post, Shares, squash
from ._family import Detected
from ._naming import Naming, spellings
from ._paths import read_stem


@dataclass(frozen=True)
class Target:
    """A module, or some of its output rows.

    Attributes:
        slot: the part of the model.
        native: the module's path in the model's original files, as one word; the name itself where nobody knows it.
        rows: (start, count, of): `count` of `of` equal shares of the rows.
        post: what tells the two apart besides: halves of the output axis swapped, or transposed.
    """

    slot: str
    native: str
    rows: Shares = WHOLE
    post: Post = ""


def target_of(stem: str, found: Detected) -> Target:
    """The module that a name means: equal for every trainer's name of it.

    Args:
        stem: the module's name in the adapter, prefix included, without its role.
        found: what the adapter was made for.
    """
    naming = Naming(found.family)
    readings = list(read_stem(stem, found))
    for slot, path in readings:
        for spelling in spellings(path):
            spans = [span for span in naming.table(slot).spans(spelling) if not span.row.last]
            if spans:
                return Target(slot, squash(spans[0].native), spans[0].rows, spans[0].post)
    slot, path = readings[0]
    return Target(slot, squash(path))
