"""Numba, where it is installed.

It brings a numpy of its own choice, so nothing asks for it: it is used where it is found and works, and whatever it
compiles gives the bytes of the code that stands beside it.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def compiler() -> Any:
    """The module numba; None where it is missing or does not go with this numpy."""
    try:
        return importlib.import_module("numba")
    except Exception:  # it checks its numpy while it is imported, and says so by errors of many types
        return None
