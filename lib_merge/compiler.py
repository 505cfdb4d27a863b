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
    """The module numba; None where it is missing, does not go with this numpy, or was told to compile nothing."""
    try:
        numba = importlib.import_module("numba")
        return None if numba.config.DISABLE_JIT else numba
    except Exception:  # it checks its numpy while it is imported, and says so by errors of many types
        return None
