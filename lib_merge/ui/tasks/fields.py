"""Options that recipes of several kinds have in common."""

from __future__ import annotations

from typing import get_args

from ...recipe import SaveDtype
from ..task import FIRST_SCREEN, Field

BLOCKS = Field(
    "blocks",
    "Block weights",
    "lines",
    "as BASE=0, IN00-IN05=0.2, OUT=0.7, a shape (gradient_up), or 12, 17, 20, 26 or 61 numbers; empty: all alike",
    section="Block weights",
)
_PATTERNS = "regular expressions, one a line"
RULE = Field(
    "rule",
    "Parameters of their own where the name matches",
    "lines",
    "one rule a line, as PATTERN: alpha=0.3 beta=0.1; later ones win",
    section="Rules and filters",
)
EXCLUDE = Field("exclude", "Keep A's values where the name matches", "lines", _PATTERNS, section="Rules and filters")
INCLUDE_MODE = Field(
    "include_mode", "Turn that round: merge only what matches", "check", default=False, section="Rules and filters"
)
DISCARD = Field("discard", "Leave out tensors whose name matches", "lines", _PATTERNS, section="Rules and filters")
GLOB = Field(
    "glob", "Names are matched by wildcards (* ?) instead", "check", default=False, section="Rules and filters"
)
MISMATCH = Field(
    "mismatch",
    "Where B or C lacks a tensor",
    "choice",
    default="skip",
    choices=(("keep A's and say so", "skip"), ("take zeros for it", "zeros"), ("stop before any work", "error")),
)
ALLOW_MIXED_PREDICTION = Field(
    "allow_mixed_prediction",
    "Merge models that predict differently (v_pred, ztsnr)",
    "check",
    "only one of them has the marker; A's stays",
    default=False,
)
VAE = Field("vae", "VAE from another file", "model", models="vae")
SAVE_DTYPE = Field(
    "save_dtype",
    "Precision of the result",
    "choice",
    "at least this; wider sources stay wider",
    default="auto",
    choices=tuple(
        ({"auto": "as the inputs (auto)", "keep": "as model A (keep)"}.get(name, name), name)
        for name in get_args(SaveDtype)
    ),
)
OVERRIDE_DTYPE = Field("override_dtype", "Force that precision on every tensor", "check", default=False)
SEED = Field("seed", "Seed of random methods", "whole number", default="0")

LORAS = Field(
    "loras",
    "LoRAs",
    "loras",
    "one a line: FILE @ strength, or FILE @ strength @ strength of the text encoders; any number, of any format",
    models="lora",
    section=FIRST_SCREEN,
    needed=True,
)
LORA_ALPHA = Field("lora_alpha", "Alpha of LoRAs that carry none", "number", "empty: their rank, a scale of 1")
RESULT_DTYPE = Field(
    "save_dtype",
    "Precision of the result",
    "choice",
    default="auto",
    choices=tuple(
        ({"auto": "as the inputs (auto)"}.get(name, name), name) for name in get_args(SaveDtype) if name != "keep"
    ),
)
