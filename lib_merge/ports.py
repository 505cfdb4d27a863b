"""What the work asks of its surroundings: where results go, and who sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .files.source import Source
from .steps import Step

if TYPE_CHECKING:
    from torch import Tensor


class Sink(Protocol):
    """Where results go: bytes at an offset of a tensor, or whole ranges of an input."""

    def place(self, key: str) -> tuple[int, int]:
        """(part, absolute offset), by which work is ordered."""

    def write(self, key: str, offset: int, view: memoryview) -> None:
        """Bytes of a tensor from byte `offset` on."""

    def copy(self, key: str, offset: int, source: Source, source_key: str, count: int) -> None:
        """`count` bytes of an input as they are."""


class Watch(Protocol):
    """Sees the operands and the result of a merged step, for reports; must not change them."""

    def before(self, step: Step, low: int, operands: list[Tensor]) -> None:
        """Operands of the step's method from element `low` on."""

    def after(self, step: Step, low: int, result: Tensor) -> None:
        """Result of the same tile."""
