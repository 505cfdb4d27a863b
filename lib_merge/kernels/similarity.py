"""How similar A and B are, weight by weight, and blending with a share of B that follows from it.

Similarity is s = 1 − |B − A|/M with M the largest |B − A| of the tensor: 1 where a weight is the same in both, 0 where
they differ most. The mode document calls it "diff", and so says "difference" where similarity is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..lazy import torch
from .arithmetic import as_bits, chosen_or, mask_below
from .random import STEPS
from .scratch import PIECE, room, scalar

if TYPE_CHECKING:
    from torch import Tensor

    Share = Callable[[Tensor, Tensor, Tensor], Tensor]

SIMILARITY = "s = 1 − |B − A|/max|B − A| (max over the tensor)"
_LARGEST_EXPONENT = 1e30  # float32 has it
_BITS_OF_1 = {4: 0x3F800000, 8: 0x3FF0000000000000}


def gaps(a: Tensor, b: Tensor, wide: bool, back: Tensor | None = None) -> Tensor:
    """|A − B|, in float64 if `wide`; good until this thread's next call.

    Args:
        a: float32 or float64, any shape.
        b: same shape and dtype.
        wide: see `needs_wide`.
        back: A − B, where it is known.
    """
    if not wide:
        gap = room("gap", a)
        return torch.sub(a, b, out=gap).abs_() if back is None else torch.abs(back, out=gap)
    gap, other = room("gap", a, torch.float64), room("other", a, torch.float64)
    return gap.copy_(a).sub_(other.copy_(b)).abs_()


def similarities(a: Tensor, b: Tensor, largest: float, wide: bool, back: Tensor | None = None) -> Tensor:
    """Similarity, in the dtype of `a`; good until this thread's next call.

    Args:
        a: float32 or float64, any shape.
        b: same shape and dtype.
        largest: M, not 0.
        wide: see `needs_wide`.
        back: A − B, where it is known.
    """
    found = gaps(a, b, wide, back)
    found.div_(scalar(-largest, found)).add_(scalar(1.0, found))
    return room("similarity", a).copy_(found) if wide else found


def exponent_of(alpha: float) -> float:
    """The exponent of s; 0 at alpha 1, where every share is 1 (0 to the power 0 too)."""
    return min(1 / alpha - 1, _LARGEST_EXPONENT)


def needs_wide(alpha: float) -> bool:
    """True where s^e is so steep near s = 0 that a float32 rounding of B − A would be seen in the result."""
    return 0.5 < alpha < 1


def raised(base: Tensor, exponent: float) -> Tensor:
    """base^exponent, in place; torch's own pow and exp2 give bits that depend on the length of the tile."""
    if exponent == 1:
        return base
    if exponent == 2:
        return base.mul_(base)
    if exponent == 3:
        return base.mul_(torch.mul(base, base, out=room("other", base)))
    return base.log_().mul_(scalar(exponent, base)).exp_()


def blend(a: Tensor, b: Tensor, share: Share, smoothness: float, draws: Tensor | None) -> None:
    """A + k·(B − A) in place of `a`, k = smoothness·m + (1 − smoothness)·(1 with probability m, else 0).

    Where k is 0 the bits of A stay, where it is 1 those of B come.

    Args:
        a: at least one dimension; overwritten.
        b: same shape; overwritten.
        share: a piece of A, of B and of A − B -> m, 0 … 1; it leaves them as they are.
        smoothness: 0 … 1; at 0 nothing is calculated, bits are chosen.
        draws: int32, same shape; not needed where smoothness is 1.
    """
    size = max(1, PIECE // math.prod(a.shape[1:]))
    for low in range(0, len(a), size):
        x, y = a[low : low + size], b[low : low + size]
        back = torch.sub(x, y, out=room("back", x))
        m = share(x, y, back)
        if smoothness == 1:
            _interpolate(x, y, m, back)
            continue
        assert draws is not None
        chosen = _chosen(m, draws[low : low + size])
        if smoothness == 0:
            chosen_or(y, x, chosen.bitwise_not_())
        else:
            _interpolate(x, y, _mixed(m, chosen, smoothness), back)


def _chosen(m: Tensor, draws: Tensor) -> Tensor:
    """Mask of the draws that choose B: draw < 65536·m − ½, as `random.threshold`; nothing in this rounds."""
    limit = torch.mul(m, scalar(STEPS, m), out=room("other", m)).sub_(scalar(0.5, m))
    distance = room("chosen", m).copy_(draws).sub_(limit)
    return as_bits(distance).bitwise_right_shift_(8 * m.element_size() - 1)


def _mixed(m: Tensor, chosen: Tensor, smoothness: float) -> Tensor:
    """smoothness·m + (1 − smoothness)·(1 where chosen), in place of m; exactly 1 for 1 and chosen, 0 for 0."""
    part = scalar(smoothness, m)
    rest = int(as_bits(1 - part))
    return m.mul_(part).add_(chosen.bitwise_and_(rest).view(m.dtype))


def _interpolate(a: Tensor, b: Tensor, share: Tensor, back: Tensor) -> None:
    """A + share·(B − A) in place of `a`: the bits of A where share is 0, those of B where it is 1.

    Written as `step_towards`; the added 0 makes 0.0 of −0.0, and A − 0.0 has the bits of A. Overwrites `share` and
    `back`, which is A − B.
    """
    a.sub_(back.mul_(share).add_(scalar(0.0, back)))
    chosen_or(b, a, mask_below(as_bits(share), _BITS_OF_1[share.element_size()], a))


def undefined(a: Tensor) -> Tensor:
    """The result where B − A is beyond its dtype's range: not finite, so that the run fails and names the tensor."""
    return a.fill_(math.nan)
