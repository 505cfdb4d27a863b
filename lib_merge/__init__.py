"""Merge checkpoints by streaming: exact, reproducible, verifiable, in a few hundred MB of memory.

Importing this package loads no torch; it is loaded when tensors are first computed.
"""

from . import starting  # noqa: F401 - first of all: what follows takes a while, and Ctrl-C may come meanwhile
from .analyze import Comparison, compare
from .errors import (
    CancelledError,
    FileError,
    MergeError,
    NumberError,
    OutputError,
    PlanError,
    Problem,
    RecipeError,
)
from .events import CancelToken, Progress
from .execute import Result
from .fold import Checked, Folded, Reproduced, fold, fold_check, quantizer_check
from .inspection import inspect
from .job import Job
from .lora import Converted, LoraResult, compare_loras, convert_lora, extract_lora, merge_loras, resize_lora
from .merge import bake, convert, merge, run
from .plan import Plan, make_plan
from .recipe import Recipe
from .verify import Verified, verify
from .version import __version__

__all__ = [
    "CancelToken",
    "CancelledError",
    "Checked",
    "Comparison",
    "Converted",
    "FileError",
    "Folded",
    "Job",
    "LoraResult",
    "MergeError",
    "NumberError",
    "OutputError",
    "Plan",
    "PlanError",
    "Problem",
    "Progress",
    "Recipe",
    "RecipeError",
    "Reproduced",
    "Result",
    "Verified",
    "__version__",
    "bake",
    "compare",
    "compare_loras",
    "convert",
    "convert_lora",
    "extract_lora",
    "fold",
    "fold_check",
    "inspect",
    "make_plan",
    "merge",
    "merge_loras",
    "quantizer_check",
    "resize_lora",
    "run",
    "verify",
]
