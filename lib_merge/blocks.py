"""Block-weight text to values and back: `BASE=0, IN00-IN05=0.2, OUT=0.7`, a shape, or a list of numbers.

A value stands under the name of its parameter; a bare number under the empty name: it is the method's strength.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from .errors import RecipeError

Values = dict[str, dict[str, float]]
_Reached = tuple[dict[str, float], list[str], list[str]]

_WHOLE_NAMES = ("T5",)  # they end in a digit that is no number of a block
_LAST_INDEX = 999
_LARGEST = sys.float_info.max
_HINT = 'write it as "BASE=0, IN00-IN05=0.2, OUT=0.7" or "IN00=alpha:0.3 beta:0.1"'

_NAME = re.compile(r"([A-Za-z_](?:[\w.]*[A-Za-z_.])?)(\d{0,6})", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.ASCII | re.IGNORECASE)
_PARAMETER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _run(group: str, *parts: range) -> tuple[str, ...]:
    return tuple(f"{group}{number:02d}" for part in parts for number in part)


# Lists of numbers by their length: the names that the numbers belong to, in order.
LISTS: dict[int, tuple[str, ...]] = {
    12: ("BASE", *_run("IN", range(4, 6), range(7, 9)), "M00", *_run("OUT", range(6))),
    17: ("BASE", *_run("IN", range(1, 3), range(4, 6), range(7, 9)), "M00", *_run("OUT", range(3, 12))),
    20: ("BASE", *_run("IN", range(9)), "M00", *_run("OUT", range(9))),
    26: ("BASE", *_run("IN", range(12)), "M00", *_run("OUT", range(12))),
    61: ("CLIP", "T5", "IN", *_run("D", range(19)), *_run("S", range(38)), "OUT"),
}
_LISTS_FOR = {12: "SDXL LoRA", 17: "SD1 LoRA", 20: "SDXL", 26: "SD1, SD2 and LoCon", 61: "Flux"}


def parse(text: str) -> Values:
    """Read block weights.

    Entries are separated by commas, semicolons, new lines or spaces; `#` starts a comment. A name is a block (IN04),
    a range (IN00-IN05), a group (OUT: every block of that kind) or a shape (`gradient_up`, `V=0.8`; see `SHAPES`),
    which runs over the layers and leaves those that are named besides to their own entry.

    Args:
        text: as typed; empty for none.

    Returns:
        name as typed, in its usual spelling -> parameter -> value.

    Raises:
        RecipeError: what is wrong, and how it is written.

    Example:
        >>> parse("in0-in5 = 0.2, M00=alpha:0.3 beta:0.1")
        {'IN00-IN05': {'': 0.2}, 'M00': {'alpha': 0.3, 'beta': 0.1}}
    """
    tokens = _tokens(text)
    if tokens and not any("=" in token or ":" in token or shape_of(token) for token in tokens):
        return _parse_list(tokens)
    entries: list[tuple[str, dict[str, float]]] = []
    for token in tokens:
        left, equals, right = token.partition("=")
        if equals or shape_of(token):
            entries.append((_spelled(left), {}))
        elif not entries:
            raise RecipeError(f"cannot read {token!r} in the block weights", hint=_HINT)
        _add(*entries[-1], right if equals else "1" if shape_of(token) else left)
    _check_overlaps([name for name, _ in entries])
    return dict(entries)


def _tokens(text: str) -> list[str]:
    """The pieces between separators: `NAME=value`, and further `parameter:value` of the entry before."""
    for shape in sorted(SHAPES, key=len, reverse=True):
        text = re.sub(rf"(?i)(?<![\w.]){shape.replace('_', '[ _-]')}(?![\w.])", shape, text)
    text = re.sub(r"#.*", "", text)
    text = re.sub(r"\s*([=:])\s*", r"\1", text)
    text = re.sub(r"(?<=\w)\s*[-–]\s*(?=[A-Za-z_])", "-", text)
    return [token for token in re.split(r"[\s,;]+", text) if token]


def _parse_list(tokens: Sequence[str]) -> Values:
    numbers = [_number(token, "the list of block weights") for token in tokens]
    if len(numbers) not in LISTS:
        accepted = ", ".join(f"{length} ({used})" for length, used in _LISTS_FOR.items())
        raise RecipeError(
            f"{len(numbers)} numbers are no known list of block weights", hint=f"known: {accepted}; {_HINT}"
        )
    return {name: {"": number} for name, number in zip(LISTS[len(numbers)], numbers, strict=True)}


def _add(block: str, values: dict[str, float], text: str) -> None:
    """Read `0.3` or `alpha:0.3` into the values of a block."""
    parameter, colon, number = text.rpartition(":")
    if colon and not _PARAMETER.fullmatch(parameter):
        raise RecipeError(f"cannot read the parameter {parameter!r} of block {block}", hint=_HINT)
    if parameter in values:
        which = f"parameter {parameter}" if parameter else "the value"
        raise RecipeError(f"{which} of block {block} is given twice", hint=_HINT)
    values[parameter] = _number(number, f"block {block}")


def _number(text: str, where: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise RecipeError(f"cannot read the number {text!r} in {where}", hint=_HINT)
    if not math.isfinite(float(text)):
        raise RecipeError(f"{text} is no finite number, in {where}")
    return float(text)


def _spelled(text: str) -> str:
    """A block name, range, group or shape as it is usually written: `in4` is IN04, `IN0-5` is IN00-IN05."""
    if (shape := shape_of(text)) is not None:
        return shape
    first, dash, last = text.partition("-")
    last = _split(first)[0] + last if last.isdigit() else last
    if not all(map(_NAME.fullmatch, (first, last) if dash else (first,))):
        raise RecipeError(f"{text!r} is no block name", hint=_HINT)
    (group, low), (other, high) = _split(first), _split(last if dash else first)
    if not dash:
        return _join(group, low)
    if low is None or high is None or group != other:
        raise RecipeError(f"{text} is no range of blocks", hint="a range has two numbers of one group: IN00-IN05")
    if low > high:
        raise RecipeError(f"the range {text} runs backwards", hint=f"write {_join(group, high)}-{_join(group, low)}")
    if high > _LAST_INDEX:
        raise RecipeError(f"the range {text} goes beyond block {_LAST_INDEX}", hint="no model has so many blocks")
    return f"{_join(group, low)}-{_join(group, high)}"


def _split(name: str) -> tuple[str, int | None]:
    """(group, number); names taken from tensors, such as `encoder.layers.03`, keep their case."""
    found = _NAME.fullmatch(name)
    if found is None or name.upper() in _WHOLE_NAMES:
        return name.upper(), None
    group = found[1].upper() if found[1].isalpha() else found[1]
    return group, int(found[2]) if found[2] else None


def _place(name: str) -> tuple[str, int | None]:
    """As `_split`, for comparisons: `encoder.layers` is the group of `encoder.layers.03`."""
    group, number = _split(name)
    return group.rstrip(".").upper(), number


def _join(group: str, number: int | None) -> str:
    return group if number is None else f"{group}{number:02d}"


def _members(name: str) -> tuple[str, range | None]:
    """(group, numbers) that a spelled name reaches; None for the whole group."""
    first, _, last = name.partition("-")
    group, low = _place(first)
    high = _place(last)[1] if last else low
    return group, None if low is None or high is None else range(low, high + 1)


def _check_overlaps(names: Iterable[str]) -> None:
    """Refuse a block that two entries name."""
    seen: dict[str, list[tuple[str, range | None]]] = {}
    for name in names:
        group, numbers = _members(name)
        for other, taken in seen.setdefault(group, []):
            if numbers is None or taken is None or (numbers.start < taken.stop and taken.start < numbers.stop):
                by = f", by {other} and by {name}" if name != other else f": {name}"
                raise RecipeError(f"a block is named twice{by}", hint="name each block once")
        seen[group].append((name, numbers))


def _checked(spec: Mapping[str, Mapping[str, float]]) -> Values:
    """The same in the usual spelling; a recipe may hold anything."""
    names = [_spelled(text) for text in spec]
    _check_overlaps(names)
    for name, entry in zip(names, spec.values(), strict=True):
        for parameter, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
                raise RecipeError(f"{parameter or 'the value'} of block {name} must be a finite number, not {value!r}")
    return {name: dict(entry) for name, entry in zip(names, spec.values(), strict=True)}


def expand(
    spec: Mapping[str, Mapping[str, float]], names: Sequence[str], layers: Sequence[str] | None = None
) -> Values:
    """Give every block of a model its values.

    Args:
        spec: as `parse` returns it.
        names: the model's blocks, those that are only overrides (VAE, TIME …) included.
        layers: the blocks that a shape runs over, in order; None for all.

    Returns:
        block -> parameter -> value, in the order of `names`, for the blocks that `spec` reaches. What the model lacks
        is left out; `unknown` lists it.

    Raises:
        RecipeError: `spec` names a block twice, or holds a value that is no finite number.
    """
    named = {block: dict(values) for values, blocks, _ in _reach(spec, names) for block in blocks}
    shaped = _shaped(spec, names if layers is None else layers)
    return {name: (shaped | named)[name] for name in names if name in named or name in shaped}


def unknown(spec: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[str]:
    """The names in `spec` that the model has no block for; arguments and errors as for `expand`."""
    return [missing for *_, lacking in _reach(spec, names) for missing in lacking]


def _reach(spec: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Iterator[_Reached]:
    """(values, the model's blocks, names the model lacks) of every entry."""
    by_place = {_place(name): name for name in names}
    for text, values in _checked(spec).items():
        if text in SHAPES:
            continue
        group, numbers = _members(text)
        if numbers is None:
            blocks = [name for (other, _), name in by_place.items() if other == group]
            yield values, blocks, [] if blocks else [text]
        else:
            blocks = [by_place[group, number] for number in numbers if (group, number) in by_place]
            start = _split(text.partition("-")[0])[0]
            lacking = [_join(start, number) for number in numbers if (group, number) not in by_place]
            yield values, blocks, lacking if blocks else [text]


def format(values: Mapping[str, Mapping[str, float]]) -> str:
    """The text that `parse` reads back to the same values.

    Raises:
        RecipeError: as for `expand`.
    """
    return ", ".join(f"{name}={_format_values(entry)}" for name, entry in _checked(values).items() if entry)


def _format_values(entry: Mapping[str, float]) -> str:
    texts = {name: repr(float(value)).removesuffix(".0") for name, value in entry.items()}
    return " ".join(f"{name}:{texts[name]}" if name else texts[name] for name in sorted(texts, key=bool))


def _up(count: int) -> list[float]:
    return [place / (count - 1) for place in range(count)] if count > 1 else [0.5] * count


def _valley(count: int) -> list[float]:
    return [abs(2 * place - 1) for place in _up(count)] if count > 1 else [0.5] * count


# Shapes by name: the number of blocks -> one value each, 0 … 1.
SHAPES: dict[str, Callable[[int], list[float]]] = {
    "flat": lambda count: [0.5] * count,
    "gradient_up": _up,
    "gradient_down": lambda count: _up(count)[::-1],
    "V": _valley,
    "inverted_V": lambda count: [1 - value for value in _valley(count)],
}


def shape_of(text: str) -> str | None:
    """The shape of that name, however its words are joined and in capitals or not; None for other texts."""
    wanted = re.sub(r"[ -]", "_", text.strip()).lower()
    return next((shape for shape in SHAPES if shape.lower() == wanted), None)


def _shaped(spec: Mapping[str, Mapping[str, float]], layers: Sequence[str]) -> Values:
    """Layer -> parameter -> value, of the shapes in `spec`."""
    found: Values = {layer: {} for layer in layers}
    for shape, values in _checked(spec).items():
        if shape not in SHAPES:
            continue
        for layer, share in zip(layers, SHAPES[shape](len(layers)), strict=True):
            for parameter, value in values.items():
                if parameter in found[layer]:
                    raise RecipeError(f"two shapes give {parameter or 'a value'}", hint="one shape for each parameter")
                found[layer][parameter] = value * share
    return {layer: entry for layer, entry in found.items() if entry}
