"""Every adapter format as data: its parts, when it is applied, and the functions that carry it out.

A file in this folder whose name starts with a letter and that calls `register` is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ._config import Config, Value

if TYPE_CHECKING:
    from torch import Tensor

Stage = Literal["replace", "add", "multiply", "dora"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Settings = Mapping[str, Value]
Parts = Mapping[str, "Tensor"]

# Parts that several pieces of one module may need at once.
SHARED = frozenset({"alpha", "scale"})


def _no_rows(roles: frozenset[str]) -> tuple[str, ...]:
    return ()


def _no_settings(config: Config, stem: str, shapes: Shapes) -> dict[str, Value]:
    return {}


@dataclass(frozen=True)
class Format:
    """One adapter format.

    Attributes:
        id: name in plans and reports.
        label: name for people.
        stage: when it is applied to a tensor: `replace`, then `add` (all summed), then `multiply`, then `dora`; in the
            order of the list inside a stage.
        needs: roles that must be there.
        takes: roles that may be there.
        rank: shapes of the parts by role -> rank, or None where the format has none.
        linear: the effect is proportional to the strength.
        factors: (parts, settings) -> (up [out, r], down [r, in·k]) with the scale folded into `up`; `up @ down` is the
            change of the weight as it is stored, as a matrix [first axis, rest]. None where the format has none; the
            function itself answers None for parts that have none.
        delta: of stage `add`: (parts, settings, shape) -> change at strength 1, of `shape`.
        apply: of the other stages: (weight, parts, settings, strength) -> new weight of the same shape. `weight` is
            not overwritten; strength 0 gives the weight itself.
        param: the parameter of the module that it changes.
        shape: (shapes of the parts, settings) -> shape of the weight as the format sees it, a matrix where it sees
            one; -1 on an axis that shapes do not tell, None where they tell nothing.
        by_rows: roles that are there -> roles whose first axis is the weight's first axis, so that any slice of rows
            may be computed from the same slice of these parts. Empty: the whole tensor is needed.
        rows: (parts, settings, first, count) -> so many rows of the change as a matrix, where they cost less one by one
            than from `factors`.
        complete: shapes of the parts that are there -> whether they make one; by default all of `needs`.
        settings: (configuration for the module, stem, shapes of the parts) -> what its functions take as `settings`.

    Parts are tensors of one float dtype with the shapes that the file has; scalars such as `alpha` are parts too.
    Results have that dtype.
    """

    id: str
    label: str
    stage: Stage
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    rank: Callable[[Shapes], int | None]
    linear: bool = True
    factors: Callable[[Parts, Settings], tuple[Tensor, Tensor] | None] | None = None
    delta: Callable[[Parts, Settings, Shape], Tensor] | None = None
    apply: Callable[[Tensor, Parts, Settings, float], Tensor] | None = None
    param: str = "weight"
    shape: Callable[[Shapes, Settings], Shape | None] | None = None
    by_rows: Callable[[frozenset[str]], tuple[str, ...]] = _no_rows
    rows: Callable[[Parts, Settings, int, int], Tensor] | None = None
    complete: Callable[[Shapes], bool] | None = None
    settings: Callable[[Config, str, Shapes], dict[str, Value]] = _no_settings

    def claims(self, shapes: Shapes) -> tuple[str, ...]:
        """The roles among these that make up this format; empty when some are missing."""
        whole = self.complete(shapes) if self.complete else shapes.keys() >= set(self.needs)
        return tuple(role for role in (*self.needs, *self.takes) if role in shapes) if whole else ()


_FORMATS: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Make a format known.

    Raises:
        ValueError: another one has its id, or it lacks the function of its stage.
    """
    if format.id in _FORMATS:
        raise ValueError(f"two adapter formats are called {format.id}")
    if (format.delta if format.stage == "add" else format.apply) is None:
        raise ValueError(f"{format.id} lacks the function of stage {format.stage}")
    _FORMATS[format.id] = format
    return format


@lru_cache(maxsize=1)
def all_formats() -> dict[str, Format]:
    """Every format by id, those that need more parts first; imports the files of this folder but not torch."""
    package: Any = importlib.import_module(__package__)
    for name in sorted(item.name for item in pkgutil.iter_modules(package.__path__)):
        if not name.startswith("_"):
            importlib.import_module(f"{__package__}.{name}")
    return dict(sorted(_FORMATS.items(), key=lambda item: (-len(item[1].needs), item[0])))


def no_rank(shapes: Shapes) -> int | None:
    """For formats that have no rank."""
    return None


def length(shapes: Shapes, role: str, axis: int = 0) -> int:
    """Length of a part along an axis."""
    return shapes[role][axis]
