"""What a model's header says of it, in one line; remembered as long as the file stays the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..files.open import open_model
from ..inspection import inspect

# dtype of the format -> as people write it
_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2"}


@dataclass(frozen=True)
class Facts:
    """A model file.

    Attributes:
        name: of the file or folder.
        text: family, precision and size: `SD1, fp16, 2.13 GB`; of a LoRA also format and ranks.
        blocks: names that block weights may use, in order.
        layers: those of them that a shape runs over.
    """

    name: str
    text: str
    blocks: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


def facts(path: Path) -> Facts:
    """What the header of a model says.

    Raises:
        FileError: it cannot be opened.
    """
    stat = path.stat()
    return _facts(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _facts(path: Path, size: int, mtime_ns: int) -> Facts:
    found = inspect(path)
    known = _adapter(found) if found["kind"] == "adapter" else [_family(found)]
    parts = [*known, _dtype(found), size_text(found["bytes"])]
    return Facts(path.name, ", ".join(part for part in parts if part), tuple(found["blocks"]), tuple(found["layers"]))


def _adapter(found: dict[str, Any]) -> list[str]:
    """Format, family where it is known, and ranks of a LoRA or its kin."""
    ranks = sorted(int(rank) for rank in found["ranks"])
    said = "" if not ranks else f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} … {ranks[-1]}"
    family = _family(found)
    return [found["format"], "" if family == "family not known" else family, said]


def _family(found: dict[str, Any]) -> str:
    known = " ".join(part for part in (found["family"], found["variant"]) if part)
    return "family not known" if known in ("", "unknown") else known


def _dtype(found: dict[str, Any]) -> str:
    if found["coded"]:
        return ", ".join(found["coded"])
    floats = [name for name in found["dtype"] if name in _DTYPES]
    return _DTYPES[floats[0]] if floats else next(iter(found["dtype"]), "")


def tensor_names(path: Path) -> tuple[str, ...]:
    """Names of a model's tensors, as its header has them.

    Raises:
        FileError: it cannot be opened.
    """
    stat = path.stat()
    return _names(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _names(path: Path, size: int, mtime_ns: int) -> tuple[str, ...]:
    with closing(open_model(path)) as source:
        return tuple(source.tensors)


def size_text(count: float) -> str:
    """Bytes for people: 2.13 GB, 8.6 MB."""
    return (
        f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"
    )
