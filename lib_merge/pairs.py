"""Which tensors of several models belong together, and how each of them is to be compared; headers only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .families import PREFIXES
from .files.dtypes import is_float
from .files.source import Source
from .matching import finder
from .patterns import Patterns
from .quant.coded import coded_tensors
from .quant.fp8 import scales_of, sides_of

Action = Literal["compared", "missing", "extra", "shape differs", "excluded"]


@dataclass(frozen=True)
class Pair:
    """A tensor of A with those that the others have for it, or a tensor that A lacks.

    Attributes:
        key: A's name of it, or the name in the first model that has it.
        keys: slot -> name, of every model that has it.
        action: what is done with it.
        reason: why it is not compared, or not with all.
        numbers: slots that are measured against A as numbers.
        bits: slots that are compared with A bit for bit.
        unequal: slots that hold another kind of values than A.
        scales: slot -> key of the scale, where a model holds it as scaled fp8.
    """

    key: str
    keys: Mapping[str, str]
    action: Action
    reason: str = ""
    numbers: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    scales: Mapping[str, str] = field(default_factory=dict)


def matched(sources: Mapping[str, Source], exclude: Patterns, include_mode: bool) -> list[Pair]:
    """Every tensor of A with its counterparts, in A's order, then the tensors that A lacks.

    Args:
        sources: slot -> model; A is the first.
        exclude: of A's names.
        include_mode: `exclude` names what is to be compared.
    """
    base = sources["A"].tensors
    donors = [slot for slot in sources if slot != "A"]
    find = {slot: finder(base, sources[slot].tensors, PREFIXES) for slot in donors}
    headers = {slot: {key: (t.dtype, t.shape) for key, t in source.tensors.items()} for slot, source in sources.items()}
    scales = {slot: scales_of(tensors) for slot, tensors in headers.items()}
    sides = {slot: sides_of(tensors, scales[slot]) for slot, tensors in headers.items()}
    values = {slot: _values(source, scales[slot]) for slot, source in sources.items()}
    pairs: list[Pair] = []
    used: set[tuple[str, str]] = set()
    for key in base:
        keys = {"A": key} | {slot: theirs for slot in donors if (theirs := find[slot](key)) is not None}
        used.update(keys.items())
        if exclude.match(key) != include_mode:
            pairs.append(Pair(key, keys, "excluded", "not included" if include_mode else "excluded"))
        elif key in sides["A"]:
            pairs.append(Pair(key, keys, "excluded", _SIDE))
        else:
            pair = _judged(keys, donors, sources, values)
            known = {slot: scales[slot][theirs] for slot, theirs in keys.items() if theirs in scales[slot]}
            pairs.append(replace(pair, scales=known) if pair.numbers else pair)
    extra: dict[str, dict[str, str]] = defaultdict(dict)
    for slot in donors:
        for key in sources[slot].tensors:
            if (slot, key) not in used and exclude.match(key) == include_mode:
                extra[key][slot] = key
    for key, keys in extra.items():
        side = all(theirs in sides[slot] for slot, theirs in keys.items())
        pairs.append(
            Pair(key, keys, "excluded", _SIDE) if side else Pair(key, keys, "extra", f"only in {', '.join(keys)}")
        )
    return pairs


_SIDE = "goes with fp8 codes, which are compared as numbers"


def _values(source: Source, scales: Mapping[str, str]) -> dict[str, str]:
    """Key -> what its values are: `number`, or the dtype of what is compared bit for bit."""
    coded = coded_tensors({key: info.dtype for key, info in source.tensors.items()})
    coded = {key: storage for key, storage in coded.items() if key not in scales}
    return {
        key: f"{info.dtype} codes ({coded[key]})" if key in coded else "number" if is_float(info.dtype) else info.dtype
        for key, info in source.tensors.items()
    }


def _judged(
    keys: Mapping[str, str], donors: Sequence[str], sources: Mapping[str, Source], values: Mapping[str, dict[str, str]]
) -> Pair:
    """What can be compared of a tensor of A."""
    mine, shape = values["A"][keys["A"]], sources["A"].tensors[keys["A"]].shape
    equal: list[str] = []
    unequal: list[str] = []
    reasons: list[str] = []
    actions: list[Action] = []
    for slot in donors:
        if slot not in keys:
            actions.append("missing")
            reasons.append(f"missing in {slot}")
        elif (theirs := sources[slot].tensors[keys[slot]].shape) != shape:
            actions.append("shape differs")
            reasons.append(f"{list(shape)} in A, {list(theirs)} in {slot}")
        elif (other := values[slot][keys[slot]]) != mine:
            unequal.append(slot)
            reasons.append(f"{mine} in A, {other} in {slot}")
        else:
            equal.append(slot)
    if equal and mine != "number":
        reasons.append(f"{mine}: compared bit for bit")
    action = "compared" if equal or unequal else actions[0]
    numbers, bits = ((), tuple(equal)) if mine != "number" else (tuple(equal), ())
    return Pair(keys["A"], keys, action, ", ".join(reasons), numbers, bits, tuple(unequal))


def slots(pair: Pair) -> tuple[str, ...]:
    """The slots whose data is read for a pair, A first."""
    return ("A", *pair.numbers, *pair.bits) if pair.numbers or pair.bits else ()
