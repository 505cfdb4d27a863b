"""Names of one module in two checkpoints: the exact name first, then one table of prefixes that converters exchange."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..errors import MergeError
from ..families import Names

# Multimodal language models: as transformers names them, and as MLX does. Both directions are tried.
PREFIXES: tuple[tuple[str, str], ...] = (("model.language_model.", "language_model.model."),)
# What checkpoints of image models put before the denoiser's names, and files of the denoiser alone leave out.
DENOISER = "model.diffusion_model."


class SeveralError(MergeError):
    """A name fits more than one pair of modules."""


def forms(module: str) -> tuple[str, ...]:
    """The names that a module may have, its own first."""
    found = [module]
    for one, other in (*PREFIXES, *((b, a) for a, b in PREFIXES)):
        if module.startswith(one):
            found.append(other + module.removeprefix(one))
    return tuple(dict.fromkeys(found))


def resolve(module: str, dense: Container[str], shipped: Container[str]) -> tuple[str, str]:
    """The module's name in the dense and in the quantized checkpoint.

    Args:
        module: as the adapter or the user names it, in either way.
        dense: tensor names of the dense checkpoint.
        shipped: tensor names of the quantized one.

    Raises:
        MergeError: no pair of names is in both, or more than one is; lists every pair that was tried.
    """
    return choose(module, [(here, there) for here in forms(module) for there in forms(module)], dense, shipped)


def by_trainer(module: str, dense: Names, shipped: Container[str]) -> tuple[str, str] | None:
    """As `resolve`, for the names that trainers of image and video models use; None where they lead nowhere.

    Raises:
        MergeError: the module is only a part of a stored weight, or several of them.
    """
    places = dense.find(module)
    if not places:
        return None
    (place, *more) = places
    if more or place.rows or place.part or place.post or not place.key.endswith(".weight"):
        keys = ", ".join(dict.fromkeys(place.key for place in places))
        raise MergeError(
            f"the adapter's {module} is no whole weight of the dense model ({keys}): only whole ones can be folded",
            tensor=module,
            hint="convert the adapter to the model's own names: lib-merge lora convert",
        )
    here = place.key.removesuffix(".weight")
    names = dict.fromkeys((here, here.removeprefix(DENOISER), DENOISER + here))
    return next(((here, name) for name in names if f"{name}.weight" in shipped), None)


def choose(
    module: str, tried: Sequence[tuple[str, str]], dense: Container[str], shipped: Container[str]
) -> tuple[str, str]:
    """The one pair of names of which both checkpoints have a weight; see `resolve`."""
    found = [(here, there) for here, there in tried if f"{here}.weight" in dense and f"{there}.weight" in shipped]
    if len(found) == 1:
        return found[0]
    pairs = "; ".join(f"{here} in the dense, {there} in the quantized one" for here, there in tried)
    if found:
        raise SeveralError(f"the module {module} may be several pairs of tensors: tried {pairs}", tensor=module)
    raise MergeError(
        f"the module {module} is not in both checkpoints{_where(tried, dense, shipped)}: tried {pairs}",
        tensor=module,
        hint="name the dense checkpoint that the quantized one was made from, and an adapter of that model",
    )


def _where(tried: Sequence[tuple[str, str]], dense: Container[str], shipped: Container[str]) -> str:
    lacking = [
        name
        for number, (name, keys) in enumerate((("dense", dense), ("quantized", shipped)))
        if not any(f"{pair[number]}.weight" in keys for pair in tried)
    ]
    return f" (the {' and the '.join(lacking)} one lack{'s' if len(lacking) == 1 else ''} it)" if lacking else ""
