"""LoRAs as prompts name them: `<lora:name:0.8>`."""

from __future__ import annotations

import math
import re

from .errors import RecipeError

# With two numbers the first is the text encoders' strength, as A1111 reads it.
_TAG = re.compile(r"<(?:lora|lyco):([^:<>]+)(?::([^<>]*))?>", re.IGNORECASE)


def read_tags(text: str) -> list[tuple[str, float, float | None]]:
    """The LoRAs of a text that holds nothing but tags; none where it is another text.

    Args:
        text: tags, with spaces and commas between them.

    Returns:
        (name, strength, strength of the text encoders or None for the same) of each.

    Raises:
        RecipeError: a strength that is no finite number.

    Example:
        >>> read_tags("<lora:ink:0.8>, <lora:light:0.5:1>")
        [('ink', 0.8, None), ('light', 1.0, 0.5)]
    """
    if _TAG.sub("", text).strip(" ,"):
        return []
    return [_tag(found[1].strip(), found[2]) for found in _TAG.finditer(text)]


def _tag(name: str, numbers: str | None) -> tuple[str, float, float | None]:
    try:
        given = [float(number) for number in (numbers or "1").split(":")]
    except ValueError:
        given = []
    if not 1 <= len(given) <= 2 or not all(map(math.isfinite, given)):
        raise RecipeError(f"the strength in <lora:{name}:{numbers}> cannot be read", hint="write <lora:NAME:0.8>")
    return name, given[-1], given[0] if given[0] != given[-1] else None
