"""Arguments of the command line as text to values: models with `@`, NAME=VALUE, rules, metadata, recipes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .. import rule_text
from ..errors import RecipeError
from ..files.folders import WEIGHTS
from ..files.open import OUTPUT_SUFFIX
from ..kernels.registry import method
from ..lora_tags import read_tags

# What stands behind an @ and was meant for a strength, rather than for a part of a name.
_MEANT = re.compile(r"[-+]?(nan|inf|infinity|[\d.,e+-]*)%?", re.IGNORECASE)


def model_argument(text: str, method_id: str) -> str | tuple[str, float]:
    """A model argument: a path, or path and strength of `PATH@W` where the method takes one for each model."""
    rest, numbers, _ = _split(text, ends_in_blocks=False)
    if len(numbers) == 1 and method(method_id).more:
        return rest, numbers[0]
    if numbers and method(method_id).more:
        raise RecipeError(f"a checkpoint takes one strength, not two ({text})", hint=f"write {rest}@{numbers[0]:g}")
    if numbers:
        raise RecipeError(
            f"{method_id} takes no weight for each model ({text})",
            hint=f"write {rest} and set --{method(method_id).strength}",
        )
    return rest


def lora_argument(text: str) -> tuple[str, float, float | None, str]:
    """Split `FILE[@W[@TE_W]][:BLOCKS]` into path, strength, the text encoders' strength and block weights.

    A prompt's `<lora:NAME:0.8>` is understood too; its name leaves the file's ending out.

    Raises:
        RecipeError: what stands in the place of a strength is no finite number.
    """
    tags = [] if os.path.exists(text) else read_tags(text)
    if len(tags) > 1:
        raise RecipeError(f"{text!r} names {len(tags)} LoRAs", hint="give each one as an argument of its own")
    if tags:
        name, strength, text_strength = tags[0]
        path = name if os.path.exists(name) else f"{name}{OUTPUT_SUFFIX}"
        return path, strength, text_strength, ""
    rest, numbers, blocks = _split(text, ends_in_blocks=True)
    return rest, numbers[0] if numbers else 1.0, numbers[1] if len(numbers) > 1 else None, blocks


def _split(text: str, *, ends_in_blocks: bool) -> tuple[str, list[float], str]:
    """Path, up to two strengths, and block weights of `PATH[@W[@TE_W]][:BLOCKS]`.

    What names a file or folder is the path, as much of the text as does; where nothing does, strengths are what
    looks like them.
    """
    path = _existing(text, "@:" if ends_in_blocks else "@")
    rest = text[len(path) :]
    if path and rest.startswith(":"):
        return path, [], rest[1:]
    if path and Path(rest.partition(":")[0]).suffix.lower() in WEIGHTS:
        path, rest = "", text  # the name of another file, which is not there, begins like this one's
    if not path:
        path, rest = _looks(text, ends_in_blocks)
    if not rest:
        return path, [], ""
    numbers, _, blocks = rest.partition(":") if ends_in_blocks else (rest, "", "")
    return path, _strengths(numbers.split("@")[1:], path, text), blocks


def _existing(text: str, ends: str) -> str:
    """The longest beginning of a text that names a file or folder, up to its end or one of these letters."""
    places = [len(text), *(at for at in range(len(text) - 1, 0, -1) if text[at] in ends)]
    return next((text[:at] for at in places if os.path.exists(text[:at])), "")


def _looks(text: str, ends_in_blocks: bool) -> tuple[str, str]:
    """Path and the rest of a text that names no file: the rest is what looks like strengths, from the first @ on."""
    for at in (at for at, letter in enumerate(text) if letter == "@" and at):
        tail = text[at + 1 :]
        given = (tail.partition(":")[0] if ends_in_blocks else tail).split("@")
        if all(map(_MEANT.fullmatch, given)):
            return text[:at], text[at:]
    return text, ""


def _strengths(texts: Sequence[str], path: str, text: str) -> list[float]:
    found = []
    for number in texts:
        try:
            found.append(float(number))
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            told = f"the strength {number!r} of {path}" if number else f"the strength behind the @ of {path}"
            raise RecipeError(f"{told} is {'no finite number' if number else 'missing'}", hint=f"write {path}@0.8")
    if len(found) > 2:
        what = f"{len(found)} strengths are too many ({text})"
        raise RecipeError(what, hint=f"write {path}@0.8, or {path}@0.8@0.5 with one of the text encoders")
    return found


def parameters(texts: Sequence[str], short: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of `-p NAME=VALUE` options and of short ones such as `--alpha`."""
    given: dict[str, Any] = dict(short)
    for text in texts:
        for name, value in assignments(text, exactly=1).items():
            if name in given:
                raise RecipeError(f"{name} is given twice", hint="give each parameter once")
            given[name] = value
    return given


def assignments(text: str, *, exactly: int | None = None) -> dict[str, Any]:
    """Read `NAME=VALUE NAME=VALUE …`, at least one, or so many."""
    with _usage():
        return rule_text.assignments(text, exactly=exactly)


def rule(text: str) -> tuple[str, dict[str, Any]]:
    """Split `PATTERN: NAME=VALUE …`; the pattern may hold colons itself."""
    with _usage():
        read = rule_text.parse(text)
        return read.match, dict(read.params)


@contextmanager
def _usage() -> Iterator[None]:
    """What cannot be read is a fault of the command line."""
    try:
        yield
    except rule_text.UnreadableError as error:
        raise click.UsageError(f"{error.what}: {error.hint}" if error.hint else error.what) from error


def metadata_object(text: str | None) -> dict[str, Any]:
    """The JSON object of --metadata; empty where it is not given."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"--metadata is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecipeError("--metadata is not a JSON object", hint='write it as {"name": "value"}')
    return value
