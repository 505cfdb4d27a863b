"""torch and numpy, imported at first use: commands that only read headers answer at once and load neither."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Stands for a module and imports it when the first attribute is asked for; never enters `sys.modules`."""

    def __getattr__(self, name: str) -> Any:
        """Attribute of the real module, kept here so that the next look-up is a plain one."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy

    np = numpy
    import torch as torch
else:
    np = LazyModule("numpy")
    torch = LazyModule("torch")
