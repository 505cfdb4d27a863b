"""Stable Cascade: levels of blocks down and up again."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Sign, numbered

FAMILY = Family(
    "cascade",
    "Stable Cascade",
    64,
    signs=(Sign(has=("clf.1.weight",)),),
    rules=(*numbered("DOWN", "down_blocks"), *numbered("UP", "up_blocks"), *OUT_RULES),
)
