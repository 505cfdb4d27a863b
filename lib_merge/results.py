"""Numbers on their way out: one rounding to the dtype that is stored, and what is wrong with those that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .buffers import Buffer
from .errors import NumberError
from .files.dtypes import DTYPES, Dtype
from .kernels.measure import all_finite
from .kernels.rounding import to_odd
from .lazy import torch
from .operands import Operands
from .steps import Step

if TYPE_CHECKING:
    from torch import Tensor


class Results:
    """Rounds and checks the results of one thread.

    Args:
        operands: what they are computed from, for errors to name the damaged one.

    Attributes:
        saturated: how many values were cut to the largest one of fp8.
    """

    def __init__(self, operands: Operands) -> None:
        self._in = operands
        self.saturated = 0

    def round(self, step: Step, values: Tensor, out: Buffer, start: int) -> None:
        """Round to the stored dtype, from element `start` of a buffer on, and check.

        Raises:
            NumberError: a value of a merged tensor is not finite, or one becomes so by the cast.
        """
        raw, dtype = self.narrow(step, values, out, start), DTYPES[step.dtype]
        if not out.finite(dtype, values.numel(), start):
            self._explain(step, values, raw, dtype)

    def narrow(self, step: Step, values: Tensor, out: Buffer, start: int) -> Tensor:
        """Round to the stored dtype, from element `start` of a buffer on; whoever calls checks what comes out."""
        dtype = DTYPES[step.dtype]
        if dtype.rank == 1:
            values = self._within(values, dtype)
        raw = out.tensor(getattr(torch, dtype.torch), values.numel(), start)
        narrow = values.dtype == torch.float64 and dtype.bits < 32
        return raw.copy_(to_odd(values) if narrow else values)

    def blame(self, step: Step) -> NoReturn:
        """Refuse a result.

        Raises:
            NumberError: always.
        """
        raise NumberError(
            "the result holds a value that is not finite",
            file=self._in.path(step.node),
            tensor=step.key,
            hint="lower the method's parameters, or exclude the tensor",
        )

    def _within(self, part: Tensor, dtype: Dtype) -> Tensor:
        """Finite values cut to the range of fp8; how many were is counted."""
        beyond = int((part.abs() > dtype.largest).sum()) if all_finite(part) else 0
        self.saturated += beyond
        return part.clamp(-dtype.largest, dtype.largest) if beyond else part

    def _explain(self, step: Step, part: Tensor, raw: Tensor, dtype: Dtype) -> None:
        """Say what is wrong with a result; a copied tensor may keep what was not finite before its cast."""
        part = part.cpu()
        before = torch.isfinite(part)
        after = torch.isfinite(raw.to(part.dtype))
        born = before & ~after
        if step.action == "merged":
            self._in.blame_inputs(step.node)  # reads over `raw`
        if bool(born.any()):
            largest = float(part[born].abs().max())
            raise NumberError(
                f"a value of {largest:g} does not fit {dtype.option}, which ends at {dtype.largest:g}",
                file=self._in.path(step.node),
                tensor=step.key,
                hint="store it wider: --save-dtype bf16 or fp32",
            )
        if step.action == "merged":
            self.blame(step)
