"""Replacing a checkpoint's VAE by that of another file: whose tensors stand for which."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import RecipeError
from .families import Detected, component_of, detect
from .quant.coded import coded_tensors
from .steps import Node, Stored
from .wording import count_of, named

# Where a VAE's tensors stand in a checkpoint, and in a file of its own (bare names).
_PREFIXES = ("first_stage_model.", "vae.", "vae/", "")


def replaced_vae(base: Mapping[str, Node], family: Detected, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Match A's VAE tensors with those of the VAE file; all of them must be there, half a VAE decodes nothing.

    Args:
        base: A's tensors.
        family: of A.
        tensors: those of the VAE file.

    Returns:
        key of A -> tensor that takes its place.

    Raises:
        RecipeError: A has no VAE, the file lacks a part of it, or holds codes.
    """
    theirs = _by_bare_name(tensors)
    mine = [key for key in base if component_of(key, family) == "vae"]
    found = {key: other for key in mine if (other := theirs.get(_bare(key))) and other.shape == base[key].shape}
    lacking = [key for key in mine if key not in found]
    if lacking or not mine:
        what = f"lacks {count_of(lacking)} that A's VAE has, or in another shape: {named(lacking)}"
        raise RecipeError(
            f"the VAE file {what}" if mine else "model A has no VAE that could be replaced",
            hint="take a VAE of the same family, with the names of a checkpoint's VAE" if mine else None,
        )
    coded = coded_tensors({key: node.dtype for key, node in tensors.items()})
    for node in found.values():
        if node.key in coded:
            raise RecipeError(f"the VAE file holds coded weights ({coded[node.key]})", tensor=node.key)
    return found


def _by_bare_name(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    family = detect({key: (node.dtype, node.shape) for key, node in tensors.items()})
    return {_bare(key) if component_of(key, family) == "vae" else key: node for key, node in tensors.items()}


def _bare(key: str) -> str:
    """A VAE key without the prefix that checkpoints give it."""
    return key.removeprefix(next(prefix for prefix in _PREFIXES if key.startswith(prefix)))
