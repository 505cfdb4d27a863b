"""One module of a result: low-rank factors or a whole change, and the tensors that it is stored as."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..kernels.lowrank import product_norm
from ..lazy import torch
from ._rounding import rounded_to

if TYPE_CHECKING:
    from torch import Tensor

# Parameter -> end of the key of a change stored whole; others are named by their own path.
_DIFF = {"weight": ".diff", "bias": ".diff_b", "modulation": ".diff_m"}
_PARTS = ("up", "down", "whole")
_UP_DOWN = {"kohya": (".lora_up.weight", ".lora_down.weight"), "peft": (".lora_B.weight", ".lora_A.weight")}


@dataclass(frozen=True)
class Module:
    """What is stored for one parameter of one module.

    Attributes:
        stem: its name.
        param: which parameter.
        style: how parts are called: `kohya` (with alpha), `peft` or `embedding` (without; PEFT's other names).
        component: unet, te1 …
        up: [out, r], None where the change is stored whole.
        down: [r, in·k].
        alpha: scale times rank; None: the rank.
        whole: the change in its own shape, where it is no product.
        kernel: (in, kernel…) of a convolution; empty: a matrix.
        rank_before: added ranks of what went in.
        error: relative error of the cut.
        note: what the report says.
        facts: further columns of the report.
        rounding: (‖what rounding changed‖, ‖ΔW‖ before it); None where it was not measured.
    """

    stem: str
    param: str
    style: str
    component: str
    up: Tensor | None = None
    down: Tensor | None = None
    alpha: float | None = None
    whole: Tensor | None = None
    kernel: tuple[int, ...] = ()
    rank_before: int | None = None
    error: float = 0.0
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    rounding: tuple[float, float] | None = None

    @property
    def rank(self) -> int | None:
        """Rank of the factors."""
        return None if self.down is None else int(self.down.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        """Key -> tensor, as computed; `alpha` in float32, which holds any rank exactly."""
        if self.up is None or self.down is None:
            assert self.whole is not None
            return {self.stem + _DIFF.get(self.param, f".{self.param}.diff"): self.whole}
        if self.style == "embedding":
            return {f"{self.stem}.lora_embedding_A": self.up.T, f"{self.stem}.lora_embedding_B": self.down.T}
        up_end, down_end = _UP_DOWN[self.style]
        rank = self.down.shape[0]
        kernel = self.kernel if math.prod(self.kernel) == self.down.shape[1] else ()
        ones = (1,) * (len(kernel) - 1) if kernel else ()
        stored = {
            self.stem + up_end: self.up.reshape(-1, rank, *ones),
            self.stem + down_end: self.down.reshape(rank, *kernel) if kernel else self.down,
        }
        if self.style == "kohya":
            alpha = float(rank) if self.alpha is None else self.alpha
            stored[self.stem + ".alpha"] = torch.tensor(alpha, dtype=torch.float32)
        return stored

    @property
    def is_zero(self) -> bool:
        """True when it changes nothing, or no more than its factors are rounded by (LoRAs that cancel each other)."""
        if self.up is None or self.down is None:
            return self.whole is None or not bool(self.whole.any())
        if self.alpha == 0:
            return True
        norms = [float(torch.linalg.vector_norm(part.double())) for part in (self.up, self.down)]
        return product_norm(self.up, self.down) <= norms[0] * norms[1] * torch.finfo(self.up.dtype).eps / 2

    def size(self) -> float:
        """‖ΔW‖ of what is stored."""
        if self.up is None or self.down is None:
            assert self.whole is not None
            return float(torch.linalg.vector_norm(self.whole.double()))
        return self._scale * product_norm(self.up, self.down)

    @property
    def _scale(self) -> float:
        return 1.0 if self.alpha is None or self.down is None else abs(self.alpha) / self.down.shape[0]

    def rounded(self, dtype: str, measured: bool = False) -> tuple[Module, int]:
        """The module in the dtype that it is stored in, and how many values were cut to the largest one of fp8.

        Args:
            dtype: safetensors name.
            measured: say how much rounding changed, unless all was in that dtype before.

        Raises:
            NumberError: a value is not finite, or does not fit.
        """
        fields: dict[str, Any] = {}
        saturated = 0
        for name in _PARTS:
            tensor = getattr(self, name)
            if tensor is not None:
                fields[name], beyond = rounded_to(tensor, dtype, f"{self.stem} ({name})")
                saturated += beyond
        found = replace(self, **fields)
        if measured and any(getattr(self, name).dtype != part.dtype for name, part in fields.items()):
            found = replace(found, rounding=self._changed_by(found))
        return found, saturated

    def _changed_by(self, stored: Module) -> tuple[float, float]:
        """‖ΔW − ΔW as stored‖ and ‖ΔW‖, in float64.

        UD − U'D' is taken as (U − U')D + U'(D − D'): no difference of large products.
        """
        if self.up is None or self.down is None:
            assert self.whole is not None
            assert stored.whole is not None
            before = self.whole.double()
            return float((before - stored.whole.double()).norm()), float(before.norm())
        assert stored.up is not None
        assert stored.down is not None
        up, down, up_stored = self.up.double(), self.down.double(), stored.up.double()
        left, right = torch.cat([up - up_stored, up_stored], 1), torch.cat([down, down - stored.down.double()])
        return self._scale * product_norm(left, right), self._scale * product_norm(up, down)

    def moved(self, keep: Callable[[Tensor], Tensor]) -> Module:
        """The module with its tensors as `keep` hands them back."""
        fields: dict[str, Any] = {}
        for name in _PARTS:
            if (part := getattr(self, name)) is not None:
                fields[name] = keep(part)
        return replace(self, **fields)


def added_by_rounding(modules: Sequence[Module]) -> float | None:
    """Relative error that rounding adds to the whole change, in the Frobenius norm; None: not measured."""
    measured = [module.rounding for module in modules if module.rounding is not None]
    size = math.hypot(*(before for _, before in measured))
    return math.hypot(*(changed for changed, _ in measured)) / size if size else None
