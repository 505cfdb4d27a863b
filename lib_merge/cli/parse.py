"""Arguments of the command line as text to values: models with `@`, NAME=VALUE, rules, metadata, recipes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..errors import RecipeError
from ..files.open import OUTPUT_SUFFIX
from ..kernels.registry import method
from ..lora_tags import read_tags

_NUMBER = re.compile(r"^(?P<rest>.+?)@(?P<number>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)$", re.IGNORECASE)
_LORA = re.compile(
    r"^(?P<rest>.+?)(?P<numbers>(@[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?){1,2})(:(?P<blocks>.*))?$",
    re.IGNORECASE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\s*=\s*([^\s,]+)")


def model_argument(text: str, method_id: str) -> str | tuple[str, float]:
    """A model argument: a path, or path and strength of `PATH@W` where the method takes one for each model."""
    rest, numbers = text, []
    for _ in range(2):  # W and TE_W
        if not os.path.exists(rest) and (match := _NUMBER.match(rest)):
            rest = match["rest"]
            numbers.append(float(match["number"]))
    if len(numbers) == 1 and method(method_id).more:
        return rest, numbers[0]
    if len(numbers) == 2 and method(method_id).more:
        raise RecipeError(f"a checkpoint takes one strength, not two ({text})", hint=f"write {rest}@{numbers[1]:g}")
    if rest != text:
        raise RecipeError(
            f"{method_id} takes no weight for each model ({text})",
            hint=f"write {rest} and set --{method(method_id).strength}",
        )
    return text


def lora_argument(text: str) -> tuple[str, float, float | None, str]:
    """Split `FILE[@W[@TE_W]][:BLOCKS]` into path, strength, the text encoders' strength and block weights.

    A prompt's `<lora:NAME:0.8>` is understood too; its name leaves the file's ending out.
    """
    if os.path.exists(text):
        return text, 1.0, None, ""
    tags = read_tags(text)
    if len(tags) > 1:
        raise RecipeError(f"{text!r} names {len(tags)} LoRAs", hint="give each one as an argument of its own")
    if tags:
        name, strength, text_strength = tags[0]
        path = name if os.path.exists(name) else f"{name}{OUTPUT_SUFFIX}"
        return path, strength, text_strength, ""
    named = next((at for at, letter in enumerate(text) if letter == ":" and os.path.exists(text[:at])), None)
    if named is not None:
        return text[:named], 1.0, None, text[named + 1 :]
    found = _LORA.match(text)
    if found is None:
        return text, 1.0, None, ""
    rest, texts = found["rest"], found["numbers"].split("@")[1:]
    if len(texts) == 2 and os.path.exists(f"{rest}@{texts[0]}"):  # a file whose name ends like a strength
        rest, texts = f"{rest}@{texts[0]}", texts[1:]
    values = [float(number) for number in texts]
    return rest, values[0], values[1] if len(values) > 1 else None, found["blocks"] or ""


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
    found = _ASSIGNMENT.findall(text)
    rest = _ASSIGNMENT.sub("", text).strip(" ,")
    if rest or not found or (exactly is not None and len(found) != exactly):
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"{name} is given twice in {text!r}", hint="give each parameter once")
    return {name: _value(name, value) for name, value in found}


def _value(name: str, text: str) -> float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"{name}={text}: neither a number nor true or false") from None


def rule(text: str) -> tuple[str, dict[str, Any]]:
    """Split `PATTERN: NAME=VALUE …`; the pattern may hold colons itself."""
    pattern, colon, values = text.rpartition(":")
    if not colon or not pattern.strip():
        raise click.UsageError(f'{text!r} is not a rule: write it as "PATTERN: alpha=0.3 beta=0.1"')
    return pattern.strip(), assignments(values)


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
