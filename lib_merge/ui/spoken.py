"""Messages of the library in the form's words: they name options of the command line, the tab has labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from .tasks.registry import TASKS

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
# Options that no field is named after -> what the tab has for them.
_ENTRIES: Mapping[str, str] = {
    "overwrite": "“Saving: overwrite it”",
    "number": "“Saving: add a number”",
    "base": "“Base checkpoint”",
    "lora": "“LoRAs”",
    "quantize": "“Quantized model”",
    "models": "the host's folders of models",
}


def spoken(text: str | None) -> str | None:
    """A message with the labels of the form instead of options; None stays None."""
    return None if text is None else _OPTION.sub(lambda found: _entry(found[1]), text)


def _entry(option: str) -> str:
    return _ENTRIES.get(option) or _labels().get(option) or f"“{option.replace('-', ' ')}”"


@lru_cache(maxsize=1)
def _labels() -> dict[str, str]:
    """Option -> label of the field of that name; of several, the first task's."""
    fields = [field for task in TASKS for field in task.fields]
    return {field.name.replace("_", "-"): f"“{field.label}”" for field in reversed(fields)}
