"""`open_model`: a path to a `Source`, by what the file or folder holds and not by its name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ..errors import FileError
from .folders import open_folder
from .source import Part, Source
from .weights import read_weights

OUTPUT_SUFFIX = ".safetensors"
_ENDINGS = (OUTPUT_SUFFIX, ".ckpt", ".pt", ".pth", ".bin", ".gguf")  # of models whose name is typed without it


def open_model(path: Path | str) -> Source:
    """Open a checkpoint, LoRA or model folder; reads headers only and imports no torch.

    Args:
        path: a `.safetensors` file, a `.ckpt`/`.pt`/`.bin` pickle, or a folder (HF shards with index, diffusers, MLX).

    Raises:
        FileError: it is missing, of another kind, cut off, or breaks its format.
    """
    path = Path(path)
    if os.path.isdir(path):
        return open_folder(path)
    try:
        os.lstat(path)
    except (FileNotFoundError, ValueError):
        raise FileError("no such file or folder", file=path, hint=_similar(path)) from None
    except OSError:
        pass  # reading it says what is wrong
    return open_file(path)


def open_file(path: Path) -> Source:
    """Open one weights file; see `open_model`."""
    found = read_weights(path)
    name = path.name if found.kind == "safetensors" else path.with_suffix(OUTPUT_SUFFIX).name
    part = Part(name, "", tuple(found.tensors), found.metadata)
    return Source(path, found.kind, (path,), found.tensors, dict(found.metadata), (part,), notes=found.notes)


def _similar(path: Path) -> str | None:
    """A file of that name with an ending, or of nearly the same name, in the same folder, as a hint."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return None
    if whole := [name for name in names if os.path.splitext(name)[0] == path.name and name.endswith(_ENDINGS)]:
        return f"did you mean {' or '.join(sorted(whole))}?"
    same = [name for name in names if name.lower() == path.name.lower()]  # as another system would find it
    close = same or difflib.get_close_matches(path.name, names, 1)
    return f"did you mean {close[0]}?" if close else None
