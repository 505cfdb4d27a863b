"""What a way of storing a quantized weight must offer to be folded into: where its bytes lie, and codes <-> numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """One stored tensor of a module, row after row.

    Attributes:
        key: its name.
        file: number of the file it lies in.
        offset: absolute byte offset.
        row_bytes: bytes of one row.
        rows: how many.
    """

    key: str
    file: int
    offset: int
    row_bytes: int
    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.row_bytes * self.rows


class Storage(Protocol):
    """A module of the quantized checkpoint; rows of the weight are coded one by one, in any portions."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The stored tensors, the one with the codes first."""

    @property
    def label(self) -> str:
        """For people: `MLX 4-bit, groups of 64`."""

    @property
    def dtype(self) -> str:
        """Dtype that a converter casts dense weights to before it codes them; empty for none."""

    @property
    def roundings(self) -> tuple[str, ...]:
        """Roundings that it may have been made with; empty where there is only one."""

    @property
    def unit(self) -> int:
        """Weights of a row that stand or fall together: a group, a block."""

    def encode(self, values: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...]:
        """Bytes [rows, row_bytes] for each leaf, of float32 weights [rows, columns], which are overwritten.

        Raises:
            NumberError: weights that cannot be stored; names row and group.
        """

    def encode_sum(self, dense: Tensor, change: Tensor, rounding: str, first_row: int) -> tuple[Tensor, ...] | None:
        """As `encode`, of the float32 nearest to dense + change; None where that is no faster.

        Args:
            dense: [rows, columns] of any float dtype.
            change: float64 of that shape.
            rounding: as in `encode`, like the rest.
            first_row: number of the first row.
        """

    def beyond(self, values: Tensor, first_row: int) -> int:
        """How many weights are beyond the largest code and will be cut to it; 0 where scales are made anew."""

    def decode(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """float32 weights [rows, columns] of the leaves' bytes [rows, row_bytes]."""

    def codes(self, raw: Sequence[Tensor]) -> Tensor:
        """Codes [rows, columns] of the leaves' bytes."""

    def steps(self, raw: Sequence[Tensor], first_row: int) -> Tensor:
        """Distance of two codes, float32 [rows, groups]."""
