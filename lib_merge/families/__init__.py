"""What model families are told by, their components and blocks, and what is never averaged: names and shapes only.

No tensor data, no torch, no file and no adapter arithmetic may come in here.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from ..errors import RecipeError
from . import _detect
from ._blocks import OVERRIDES, block_of, blocks_of, layer_names
from ._blocks import block_names as _block_names
from ._components import PREFIXES, component_of, is_first_layer
from ._family import Detected, Family, Kind, Mark, Rule, Sign, Tensors
from ._kinds import kind_of
from ._names import Names
from ._naming import STYLES
from ._never import never_merged
from ._places import Place, Written, counted
from ._renaming import Renamed, has_names, rename
from ._targets import Target, target_of

__all__ = [
    "FAMILIES",
    "OVERRIDES",
    "PREFIXES",
    "STYLES",
    "Detected",
    "Family",
    "Kind",
    "Mark",
    "Names",
    "Place",
    "Renamed",
    "Rule",
    "Sign",
    "Target",
    "Tensors",
    "Written",
    "block_names",
    "block_of",
    "blocks_of",
    "collect",
    "component_of",
    "counted",
    "detect",
    "family",
    "has_names",
    "is_first_layer",
    "kind_of",
    "layer_names",
    "never_merged",
    "rename",
    "target_of",
]


def collect(tables: Iterable[ModuleType]) -> tuple[Family, ...]:
    """The families of some modules, in the order of detection.

    Args:
        tables: modules with `FAMILY` or `FAMILIES`.

    Raises:
        ValueError: two families have the same id or the same name.
    """
    found: list[Family] = []
    for table in tables:
        found += getattr(table, "FAMILIES", None) or (table.FAMILY,)
    for field in ("id", "name"):
        values = [getattr(item, field) for item in found]
        if twice := {value for value in values if values.count(value) > 1}:
            raise ValueError(f"two model families have the {field} {', '.join(sorted(twice))}")
    return tuple(sorted(found, key=lambda item: (item.priority, item.id)))


def _siblings() -> list[ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


FAMILIES = collect(_siblings())


def family(family_id: str) -> Family:
    """The family of that id.

    Raises:
        RecipeError: there is none; suggests the nearest.
    """
    known = {item.id: item for item in FAMILIES}
    if family_id in known:
        return known[family_id]
    near = difflib.get_close_matches(family_id, known, n=1)
    raise RecipeError(f"there is no model family {family_id!r}", hint=f"did you mean {near[0]}?" if near else
                      f"known: {', '.join(known)}")  # fmt: skip


def detect(tensors: Tensors) -> Detected:
    """What a file or folder is.

    Args:
        tensors: key -> (dtype, shape). In a folder of components each key starts with its folder (`unet/…`).
    """
    return _detect.detect(tensors, FAMILIES)


def block_names(tensors: Tensors, found: Detected | None = None, *, overrides: bool = False) -> list[str]:
    """The blocks of a model, in order.

    Args:
        tensors: key -> (dtype, shape).
        found: what it is, if that is known already.
        overrides: add, at the end, the names that may be set besides: VAE, TIME, CLIPL … as far as they reach
            a tensor.
    """
    return _block_names(tensors, found or detect(tensors), overrides=overrides)
