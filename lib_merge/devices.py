"""Where methods are computed: whether this machine and this torch have the device that was asked for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from .errors import RecipeError
from .lazy import torch

DEVICES = ("cpu", "cuda")
_HINT = "leave --device out to compute on the CPU"


def check_device(name: str) -> None:
    """Refuse a device that cannot be used; imports torch only where its build has CUDA.

    Raises:
        RecipeError: unknown, or not there.
    """
    if name not in DEVICES:
        raise RecipeError(f"there is no device {name!r}", hint=f"choose one of: {', '.join(DEVICES)}")
    if name == "cuda" and not _torch_has_cuda():
        raise RecipeError("cuda is not there: this torch was built without it", hint=f"install another, or {_HINT}")
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("cuda is not there: torch finds no GPU it can use", hint=f"check the driver, or {_HINT}")


def _torch_has_cuda() -> bool:
    """What torch's own file of versions says of its build; to import torch would take seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return True  # laid out in another way: torch itself will tell
    kinds = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)  # AMD's GPUs go by the name cuda too
    return not kinds or any(kind != "None" for kind in kinds)
