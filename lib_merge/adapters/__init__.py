"""What an adapter file holds and what it does to a weight: one file per format, its parts and their change.

No file is opened here, nothing is known of model families or of their names, and torch is loaded at first use.
"""

from __future__ import annotations

from ._algebra import scale_of
from ._config import Value
from ._grammar import split
from ._read import Adapter, Piece, lacks_alpha, read
from ._registry import Format, all_formats

__all__ = ["FORMATS", "Adapter", "Format", "Piece", "Value", "lacks_alpha", "read", "scale_of", "split"]

FORMATS: dict[str, Format] = all_formats()
