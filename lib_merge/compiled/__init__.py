"""Methods as loops in machine code, by numba: formulas for one element, what they need to know, and one loop for all.

Nothing here refuses: what a loop meets that is not finite goes back to `kernels`, whose bytes it gives.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..compiler import compiler


def available() -> Any:
    """The module `loops`; None where nothing can be compiled."""
    return importlib.import_module(f"{__package__}.loops") if compiler() is not None else None
