"""A LoRA's modules under another trainer's names, planned from its header: renamed, split or joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .. import families
from ..adapters import Adapter, Piece, split
from ..families import Detected, Renamed, Tensors

Shape = tuple[int, ...]

# Ends of the parts that each style writes its own way; other parts keep the end they have.
_ENDS = {
    "kohya": {"down": ".lora_down.weight", "up": ".lora_up.weight", "up_bias": ".lora_up.bias"},
    "diffusers": {"down": ".lora_A.weight", "up": ".lora_B.weight", "up_bias": ".lora_B.bias"},
}
_ENDS["peft"] = _ENDS["diffusers"]
# Parts with a row for each output row, then those that all parts of a split module share.
BY_ROW = frozenset({"up", "up_bias", "diff", "diff_b"})
_SHARED = frozenset({"down", "mid", "alpha", "scale"})
_JOINED = frozenset({"down", "up", "alpha"})
_ALL = (Fraction(0), Fraction(1))


@dataclass(frozen=True)
class Module:
    """A module of the LoRA.

    Attributes:
        stem: its name in the file.
        keys: role -> key.
        shapes: role -> shape.
        rank: of its factors.
        alpha: from the configuration, where no tensor holds it.
    """

    stem: str
    keys: Mapping[str, str]
    shapes: Mapping[str, Shape]
    rank: int | None
    alpha: float | None


@dataclass(frozen=True)
class Member:
    """What an old module gives to a new one.

    Attributes:
        module: the old module.
        rows: (start, count) of its output rows; None: all.
        start: the first output row of the new module that these are.
        swapped: the two halves of these rows change places.
    """

    module: Module
    rows: tuple[int, int] | None = None
    start: int = 0
    swapped: bool = False


@dataclass(frozen=True)
class Target:
    """A module of the result.

    Attributes:
        name: its name.
        members: one, unless several old modules are joined.
        rows: output rows of a joined module; None where nothing is joined.
    """

    name: str
    members: tuple[Member, ...]
    rows: int | None = None

    @property
    def plain(self) -> bool:
        """True when only names change."""
        member = self.members[0]
        return self.rows is None and member.rows is None and not member.swapped


@dataclass(frozen=True)
class Renaming:
    """The modules of the result, and (old name, why) of what has no place in it; of tensors that change nothing too."""

    targets: tuple[Target, ...]
    unused: tuple[tuple[str, str], ...]
    ignored: tuple[tuple[str, str], ...] = ()


def name_modules(adapter: Adapter, tensors: Tensors, style: str, found: Detected) -> Renaming:
    """Plan the renaming.

    Args:
        adapter: its pieces.
        tensors: key -> (dtype, shape).
        style: "kohya", "diffusers" or "peft".
        found: what the adapter is, its family known.
    """
    modules = _modules(adapter.pieces, tensors)
    given: dict[str, list[tuple[Module, Renamed]]] = defaultdict(list)
    unused = dict.fromkeys(adapter.leftover, "it belongs to no known format")
    for module in modules:
        names = families.rename(module.stem, style, found, short=_is_short(module))
        if problem := _problem(module, names, style):
            unused[module.stem] = problem
        else:
            for item in names:
                given[item.name].append((module, item))
    targets = []
    for name, members in given.items():
        target = _target(name, members)
        if isinstance(target, str):
            unused |= {module.stem: target for module, _ in members}
        else:
            targets.append(target)
    return Renaming(tuple(targets), tuple(unused.items()), adapter.ignored)


def end_of(role: str, key: str, style: str) -> str:
    """What stands behind the module's name."""
    return _ENDS[style].get(role) or key[len(split(key)[0]) :]


def _modules(pieces: Sequence[Piece], tensors: Tensors) -> list[Module]:
    by_stem: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_stem[next(split(key)[0] for key in piece.keys.values())].append(piece)
    found = []
    for stem, own in by_stem.items():
        keys = {split(key)[1]: key for piece in own for key in piece.keys.values()}
        rank = next((piece.rank for piece in own if piece.rank is not None), None)
        alpha = next((_configured(piece) for piece in own if "alpha" in piece.settings), None)
        found.append(Module(stem, keys, {role: tensors[key][1] for role, key in keys.items()}, rank,
                            None if "alpha" in keys else alpha))  # fmt: skip
    return found


def _configured(piece: Piece) -> float:
    """The alpha of a configuration, so that alpha / rank is the scale: rsLoRA divides by the root of the rank."""
    alpha = float(piece.settings["alpha"])
    return alpha * (piece.rank or 1) ** 0.5 if piece.settings.get("rslora") else alpha


def _is_short(module: Module) -> bool:
    """Two rows for each column: a scale and a shift and nothing else."""
    up, down = module.shapes.get("up"), module.shapes.get("down")
    return up is not None and down is not None and len(down) > 1 and up[0] == 2 * down[1]


def _problem(module: Module, names: Sequence[Renamed], style: str) -> str:
    """Why a module cannot have these names; empty: it can."""
    if not names:
        return f"{style} has no name for it"
    if sum(item.part[1] - item.part[0] for item in names) != 1:
        return f"{style} has names for some of its rows only"
    if all((item.part, item.place, item.post) == (_ALL, _ALL, "") for item in names):
        return ""
    if any(item.post == "transpose" for item in names):
        return "it is stored transposed there"
    roles = set(module.keys)
    if any(item.place != _ALL for item in names):
        return "" if roles >= {"up", "down"} and roles <= _JOINED else "only a plain LoRA can be joined with others"
    return "" if roles <= BY_ROW | _SHARED else f"{', '.join(sorted(roles - BY_ROW - _SHARED))} cannot be split by rows"


def _target(name: str, given: Sequence[tuple[Module, Renamed]]) -> Target | str:
    """The new module, or why it cannot be made."""
    first, item = given[0]
    if len(given) == 1 and item.place == _ALL:
        rows = None if item.part == _ALL else _whole(item.part, _rows(first))
        if item.part != _ALL and rows is None:
            return "its rows cannot be divided so"
        return Target(name, (Member(first, rows, swapped=item.post == "swap"),))
    if any(other.place == _ALL or other.part != _ALL or other.post for _, other in given):
        return f"several modules are {name}"
    sizes = {_rows(module) / (other.place[1] - other.place[0]) for module, other in given}
    if len(sizes) != 1 or next(iter(sizes)).denominator != 1:
        return f"its rows do not fit those of the others in {name}"
    total = int(next(iter(sizes)))
    places = [_whole(other.place, total) for _, other in given]
    edges = sorted(place for place in places if place is not None)
    if len(edges) < len(given) or any(a + n > b for (a, n), (b, _) in pairwise(edges)):
        return f"its rows do not fit those of the others in {name}"
    members = [Member(module, None, place[0]) for (module, _), place in zip(given, places, strict=True) if place]
    return Target(name, tuple(sorted(members, key=lambda member: member.start)), total)


def _rows(module: Module) -> int:
    return next(module.shapes[role][0] for role in ("up", "diff", "diff_b", "up_bias") if role in module.shapes)


def _whole(part: tuple[Fraction, Fraction], rows: int) -> tuple[int, int] | None:
    return families.counted(part, rows)
