"""HiDream."""

from __future__ import annotations

from ._family import OUT_RULES, Family, Mark, Sign, numbered

FAMILY = Family(
    "hidream",
    "HiDream",
    62,
    signs=(Sign(has=("caption_projection.0.linear.weight",)),),
    rules=(
        *numbered("D", "double_stream_blocks"),
        *numbered("S", "single_stream_blocks"),
        *OUT_RULES,
    ),
    adapter=(Mark(r"(?:double|single)_stream_blocks.\d"),),
)
