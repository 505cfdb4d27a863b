"""The names that one family's modules have with everybody, without a model at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from ._alias import BARE, WHOLE, Alias, Span, Table, squash
from ._family import Family
from .text_encoder import NAMES as ENCODER_NAMES

STYLES = ("kohya", "diffusers", "peft")
DENOISERS = ("unet", "unet2")
ENCODERS = ("te1", "te2", "t5")

# Other spellings of a path, tried in this order when the path itself is not known.
_SPELLINGS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"_lora$", ""),
        (r"\.processor(?=\.)", ""),
        (r"\.processor\.(to_\w+?)(?:_lora)?$", r".\1"),
        (r"([._]to_out)(?:_lora)?$", r"\1.0"),
        (r"\.processor\.(to_out)(?:_lora)?$", r".\1.0"),
        (r"^sformer_blocks\.", "transformer_blocks."),
    )
)
_ENCODER_TABLE = Table(ENCODER_NAMES)
# What stands before a module's path: style -> slot -> prefix.
_HEADS: Mapping[str, Mapping[str, str]] = {
    "kohya": {"unet": "lora_unet_", "te1": "lora_te1_", "te2": "lora_te2_", "t5": "lora_te3_"},
    "diffusers": {"unet2": "transformer_2.", "te1": "text_encoder.", "te2": "text_encoder_2."},
    "peft": {"unet": "base_model.model.", "lm": "base_model.model."},
}


class Naming:
    """The names of a family's modules.

    Args:
        family: whose; None: only text encoders are known.
    """

    def __init__(self, family: Family | None) -> None:
        self._family = family
        self._denoiser = _table(family)

    def table(self, slot: str) -> Table:
        """The rows that hold for a part of a model."""
        return self._denoiser if slot in DENOISERS else _ENCODER_TABLE

    def head(self, slot: str, style: str) -> str | None:
        """What a style puts before a path, or None when it has no names for that part of a model."""
        family = self._family
        if style == "kohya" and slot == "te1" and family is not None and family.encoders == ("te1",):
            return "lora_te_"
        if style != "kohya" and slot in ENCODERS:
            number = family.encoders.index(slot) if family is not None and slot in family.encoders else 0
            number = 1 if slot == "te2" else number
            wrapper = "base_model.model." if style == "peft" else ""
            return f"text_encoder{f'_{number + 1}' if number else ''}.{wrapper}"
        if style == "diffusers" and slot == "unet":
            return f"{family.root}." if family is not None else None
        return _HEADS[style].get(slot)

    def named(self, slot: str, native: str, style: str) -> list[tuple[str, Span]]:
        """(path, what it stands for) of the names that cover a native path in a style.

        Rows that hold for the highest number only are among them.
        """
        rows = list(self.table(slot).names(native))
        if slot in DENOISERS and style == "kohya" and (self._family is None or self._family.kohya == "native"):
            return [item for item in rows if item[1].row.style == "kohya"][:1] or [_itself(native)]
        return [item for item in rows if item[1].row.style == "diffusers"] or [_itself(native)]


def spellings(path: str) -> Iterator[str]:
    """A path, then what else may be meant by it."""
    yield path
    for pattern, text in _SPELLINGS:
        other = pattern.sub(text, path)
        if other != path:
            yield other


def written(head: str, path: str, style: str) -> str:
    """A whole module name; kohya's is one word."""
    plain = path.removeprefix(BARE)
    return head + (squash(plain) if style == "kohya" else plain)


def _itself(native: str) -> tuple[str, Span]:
    return native, Span(native, WHOLE, "", Alias(native, native), ())


@lru_cache(maxsize=64)
def _table(family: Family | None) -> Table:
    return Table(family.names if family else ())
