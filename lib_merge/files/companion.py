"""PEFT keeps half of an adapter in a file beside its weights: where that is, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .header import load_json
from .source import Source

# Its numbers count as much as the weights, also in the folder's hash.
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model"


def adapter_path(path: Path | str) -> Path:
    """The PEFT folder where its weights file is named, since half of the adapter lies in the file beside it."""
    path = Path(path)
    beside = path.is_file() and path.stem == _WEIGHTS and (path.parent / ADAPTER_CONFIG).is_file()
    return path.absolute().parent if beside else path


def adapter_config(source: Source) -> Mapping[str, object] | None:
    """What a PEFT folder says of its adapter, or None.

    Raises:
        FileError: it is no JSON table.
    """
    path = source.path / ADAPTER_CONFIG
    if source.kind != "folder" or not path.is_file():
        return None
    return load_json(path.read_bytes(), path, "adapter config")
