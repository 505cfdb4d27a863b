"""From a file's keys and shapes to what it is: the first family, by priority, one of whose signs fits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from ._adapters import adapter_family, is_adapter
from ._components import PREFIXES, component_of
from ._family import Detected, Family, Sign, Tensors

_NUMBER = re.compile(r"\d+")
# Prefixes that say "denoiser" even where the family is unknown.
_CLEAR = ("model.diffusion_model.", "diffusion_model.", "transformer/", "unet/")

# Parts of a model: asked about only when there is no model.
_PARTS = ("vae", "text encoder")


class Index:
    """Finds keys by patterns without reading all of them each time."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._by_form: dict[str, list[str]] = defaultdict(list)
        for key in tensors:
            self._by_form[_form(key)].append(key)

    def fits(self, sign: Sign, prefix: str) -> bool:
        """True when the sign's tensors stand below the prefix."""
        return (
            all(self._find(name, prefix) for name in sign.has)
            and all(self._has_size(name, axis, sizes, prefix) for name, axis, sizes in sign.sizes)
            and not any(self._find(name, prefix) for name in sign.lacks)
        )

    def starts(self, start: str) -> bool:
        """True when a key starts so."""
        form = _form(start)
        return any(
            other.startswith(form) and any(key.startswith(start) for key in keys)
            for other, keys in self._by_form.items()
        )

    def _has_size(self, name: str, axis: int, sizes: tuple[int, ...], prefix: str) -> bool:
        key = self._find(name, prefix)
        if key is None:
            return False
        shape = self._tensors[key][1]
        return axis < len(shape) and shape[axis] in sizes

    def _find(self, name: str, prefix: str) -> str | None:
        """The first key of that name, or the name itself where a start is looked for."""
        full = name[1:] if name.startswith("^") else prefix + name
        if full.endswith("."):
            return self._find_start(full)
        if "#" not in name:
            return full if full in self._tensors else None
        pattern = _pattern(full)
        return next((key for key in self._by_form.get(_form(full), ()) if pattern.fullmatch(key)), None)

    def _find_start(self, start: str) -> str | None:
        form, pattern = _form(start), _pattern(start)
        for other, keys in self._by_form.items():
            if other.startswith(form):
                found = next((key for key in keys if pattern.match(key)), None)
                if found is not None:
                    return found
        return None


def _form(name: str) -> str:
    return _NUMBER.sub("#", name)


@lru_cache(maxsize=2048)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\#", r"\d+"))


def detect(tensors: Tensors, families: Sequence[Family]) -> Detected:
    """What a file is.

    Args:
        tensors: key -> (dtype, shape).
        families: in the order they are asked.
    """
    if is_adapter(tensors):
        family = adapter_family(tensors, families)
        return Detected(family.id, family.name, "adapter", family=family) if family else Detected(kind="adapter")
    index = Index(tensors)
    present = tuple(prefix for prefix in PREFIXES if not prefix or index.starts(prefix))
    models = [family for family in families if family.kind not in _PARTS]
    parts = [family for family in families if family.kind in _PARTS]
    rounds = [(family, family.signs) for family in models]
    rounds += [(family, family.loose) for family in models]
    if not any(
        prefix in present for prefix in _CLEAR
    ):  # beside a denoiser, a VAE or an encoder is a part, not the model
        rounds += [(family, family.signs) for family in parts]
    for family, signs in rounds:
        for prefix in family.prefixes or present:
            for sign in signs:
                if index.fits(sign, prefix):
                    return _detected(tensors, index, family, prefix, sign)
    return Detected(prefix=next((prefix for prefix in _CLEAR if prefix in present), ""))


def _detected(tensors: Tensors, index: Index, family: Family, prefix: str, sign: Sign) -> Detected:
    variant = next((name for name, mark in family.variants if index.fits(mark, prefix)), family.variant)
    found = Detected(family.id, family.name, family.kind, prefix, variant, sign.naming, family)
    if family.kind != "denoiser":
        return found
    parts = {component_of(key, found) for key in tensors}
    whole = any(part == "vae" or part.startswith("te") for part in parts)
    return Detected(family.id, family.name, "checkpoint" if whole else "denoiser", prefix, variant, sign.naming, family)
