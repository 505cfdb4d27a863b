"""LoRAs as lines of text, one each, and back: `FILE @ strength @ text encoders' strength: block weights`.

Tags of prompts, `<lora:name:0.8>`, are read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import RecipeError
from ..host import Models
from ..lora_tags import read_tags
from ..recipe import Lora

_NUMBER = r"\s*@\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*"
_LINE = re.compile(rf"(?P<name>.+?){_NUMBER}(?:{_NUMBER})?(?::(?P<blocks>.*))?", re.IGNORECASE)
_HOW = "write FILE @ STRENGTH, or FILE @ STRENGTH @ STRENGTH OF THE TEXT ENCODERS"


@dataclass(frozen=True)
class Line:
    """One LoRA as it was typed.

    Attributes:
        path: the file or PEFT folder.
        strength: multiplier of what it changes.
        te_strength: of the text encoders; None for the same.
        blocks: block weights as text.
    """

    path: Path
    strength: float
    te_strength: float | None
    blocks: str


def read(text: str, models: Models) -> tuple[Line, ...]:
    """The LoRAs of a text; empty lines do not count.

    Args:
        text: as typed.
        models: the LoRAs that may be named.

    Raises:
        RecipeError, FileError: a line that cannot be read, or names no LoRA; says which.
    """
    return tuple(found for line in names(text) for found in (_tags(line, models) or [_read(line, models)]))


def names(text: str) -> Iterator[str]:
    """The lines that are not empty."""
    return (line.strip() for line in (text or "").splitlines() if line.strip())


def _tags(line: str, models: Models) -> list[Line]:
    """The LoRAs of a line of prompt tags; none where it is another line."""
    return [Line(_resolved(name, models), strength, text, "") for name, strength, text in read_tags(line)]


def _resolved(name: str, models: Models) -> Path:
    """The LoRA of that name; its ending may be left out where one LoRA alone is called so."""
    name = name.strip()
    if name not in models.names:
        whole = [other for other in models.names if PurePosixPath(other).with_suffix("").as_posix() == name]
        same = whole or [other for other in models.names if PurePosixPath(other).stem == name]
        name = same[0] if len(same) == 1 else name
    return models.resolve(name)


def _read(line: str, models: Models) -> Line:
    if line in models.names:  # also one whose name ends like a strength
        return Line(models.resolve(line), 1.0, None, "")
    found = _LINE.fullmatch(line)
    if found is None and "@" in line:
        raise RecipeError(f"the strength in {line!r} cannot be read", hint=_HOW)
    if found is None:
        return Line(_resolved(line, models), 1.0, None, "")
    name, strength, text, blocks = found.groups()
    return Line(_resolved(name, models), float(strength), None if text is None else float(text), (blocks or "").strip())


def write(loras: Iterable[tuple[str, Lora]]) -> str:
    """(name as listed, LoRA) -> text.

    Raises:
        RecipeError: block weights of several lines, which no line can hold.
    """
    return "\n".join(_written(name, lora) for name, lora in loras)


def _written(name: str, lora: Lora) -> str:
    if len(lora.blocks.splitlines()) > 1:
        raise RecipeError(f"this form cannot show the block weights of {lora.file}", hint="write them in one line")
    text = "" if lora.te_strength is None else f" @ {lora.te_strength!r}"
    return f"{name} @ {lora.strength!r}{text}" + (f": {lora.blocks}" if lora.blocks else "")


def added(text: str, name: str) -> str:
    """The text with one LoRA more, at strength 1."""
    return "\n".join([*names(text), f"{name} @ 1"])
