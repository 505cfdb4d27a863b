"""Build rule: what a host finds beside lib_merge/ travels in the wheel as lib_merge/_data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = ("presets", "javascript", "style.css")


class DataHook(BuildHookInterface):
    """Adds each of `DATA` that the tree has; the tree stays the one source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs; a missing one is left out."""
        for name in DATA:
            path = Path(self.root, name)
            if path.exists():
                build_data["force_include"][str(path)] = f"lib_merge/_data/{name}"
