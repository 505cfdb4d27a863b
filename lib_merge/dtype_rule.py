"""Which dtype a tensor is stored in: the highest of what contributes and of what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import Problem
from .files.dtypes import BY_OPTION, DTYPES, is_float
from .recipe import Output
from .wording import count_of, named


def stored_dtype(contributing: Sequence[str], output: Output) -> str:
    """Dtype of an output tensor.

    Rank: fp64 > fp32 > {bf16, fp16} > fp8. A tie goes to the dtype asked for, among sources to the earlier one.

    Args:
        contributing: safetensors dtypes of the tensors that have a say, model A's first.
        output: `save_dtype` auto names no dtype, keep takes A's; `override_dtype` forces every float tensor.

    Returns:
        safetensors dtype; that of A where A holds no floats.
    """
    base = contributing[0]
    if not is_float(base) or output.save_dtype == "keep":
        return base
    if output.save_dtype == "auto":
        return max(contributing, key=rank)
    wanted = BY_OPTION[output.save_dtype].name
    return wanted if output.override_dtype else max([wanted, *contributing], key=rank)


def rank(dtype: str) -> int:
    """Precision order of a safetensors dtype."""
    return DTYPES[dtype].rank


def width_notes(stored: Mapping[str, str], base: Mapping[str, str], output: Output) -> list[Problem]:
    """Notes on tensors that take more room than in A, or than asked for.

    Args:
        stored: key -> dtype in the output.
        base: key -> dtype in A.
        output: what was asked for.
    """
    wanted = BY_OPTION.get(output.save_dtype)
    wider = [key for key, dtype in stored.items() if rank(dtype) > rank(base[key])]
    over = [key for key, dtype in stored.items() if wanted and rank(dtype) > wanted.rank]
    found = (
        (wider, "stored wider than in A", "--save-dtype keep stores them as A does"),
        (over, f"still wider than {output.save_dtype}", "--override-dtype forces every float tensor to it"),
    )
    return [Problem("note", f"{count_of(keys)} {what}: {named(keys)}", hint=hint) for keys, what, hint in found if keys]
