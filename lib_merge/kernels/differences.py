"""Methods that add a part of a difference, or of several, to A."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import torch
from .arithmetic import step_towards
from .registry import Param, merge_method
from .scratch import scalar

if TYPE_CHECKING:
    from torch import Tensor

# Constants of the tools in which these methods became known.
TRAIN_GAIN = 1.8
_BIAS_STEPS = 15

_LIKENESS = (
    "d = ((cos + 1)/2)^(15·gamma), cos = cosine of B − A and C − A in each row of the matrix [out, rest], 0 where one "
    "of them is 0 in the whole row; each element of a vector is a row"
)


def _subtract(a: Tensor, back: Tensor) -> Tensor:
    """A − back; overwrites both.

    Where nothing is taken off, the bits of A stay: adding 0 first turns −0.0 into 0.0, and A − 0.0 is A.
    """
    return a.sub_(back.add_(scalar(0.0, back)))


@merge_method(
    "train_difference",
    label="Train difference",
    inputs="ABC",
    strength="alpha",
    params=(Param("alpha", 1.0, "how much of what B learned over C is added to A", slider=(-1.0, 2.0)),),
    formula="A + alpha·1.8·(B − C)·|B − A|/(|B − C| + |B − A|); A where both differences are 0",
    shows=(),
    exact_arithmetic=True,
    exact_a="alpha = 0",
)
def train_difference(a: Tensor, b: Tensor, c: Tensor, *, alpha: float) -> Tensor:
    """Add to A what B learned over its base C, less where A already has it.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype.
        c: same shape and dtype; overwritten.
        alpha: multiplier, any finite number.

    Returns:
        The sum, same shape and dtype.
    """
    if alpha == 0:
        return a
    missing = torch.sub(b, a).abs_()
    back = torch.sub(c, b, out=c)
    number = torch.finfo(a.dtype)
    smallest = number.smallest_normal * number.eps  # a subnormal: 0/0 becomes 0, every other quotient stays
    missing.div_(torch.abs(back).add_(missing).clamp_(min=smallest))
    return _subtract(a, back.mul_(missing).mul_(scalar(TRAIN_GAIN * alpha, back)))


@merge_method(
    "extract_features",
    label="Extract features",
    inputs="ABC",
    strength="delta",
    params=(
        Param("alpha", 0.5, "whose change is added: 0 is B's, 1 is C's", 0.0, 1.0),
        Param(
            "beta", 0.0, "which rows: 0 those that B and C changed alike, 1 those they changed differently", 0.0, 1.0
        ),
        Param("gamma", 1.0, "how strictly rows are told apart: 0 takes all rows as alike", 0.0, slider=(0.0, 2.0)),
        Param("delta", 1.0, "multiplier of the change that is added", slider=(-1.0, 4.0)),
    ),
    formula="A + delta·w·((1 − alpha)·(B − A) + alpha·(C − A)), w = (1 − beta)·d + beta·(1 − d), " + _LIKENESS,
    rows=True,
    exact_a="delta = 0",
    exact_b="alpha = 0, beta = 0, gamma = 0 and delta = 1",
)
def extract_features(
    a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, gamma: float, delta: float
) -> Tensor:
    """Add to A the rows of weights that B and C changed alike, or those that they changed differently.

    Args:
        a: matrix [rows, columns], float32 or float64; overwritten.
        b: same shape and dtype; overwritten.
        c: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: 0 … 1.
        gamma: 0 or more.
        delta: multiplier, any finite number.

    Returns:
        The sum, same shape and dtype.
    """
    if gamma == 0 and (alpha in (0, 1) or beta == 1):
        return step_towards(a, c if alpha == 1 else b, delta * (1 - beta))
    if delta == 0:
        return a
    first, second = torch.sub(a, b, out=b), torch.sub(a, c, out=c)
    alike = _likeness(first, second, gamma)
    weight = (alike * (1 - beta)).add_((1 - alike).mul_(beta)).mul_(delta).to(a.dtype)
    return _subtract(a, _between(first, second, alpha).mul_(weight))


def _between(first: Tensor, second: Tensor, share: float) -> Tensor:
    """(1 − share)·first + share·second; overwrites both."""
    if share in (0, 1):
        return second if share else first
    return first.add_(second.sub_(first).mul_(share))


def _likeness(x: Tensor, y: Tensor, bias: float) -> Tensor:
    """((cos + 1)/2)^(15·bias) of each row, 0 … 1.

    Args:
        x: matrix [rows, columns], float32 or float64.
        y: same shape and dtype.
        bias: 0 gives 1 for every row.

    Returns:
        float64 [rows, 1].
    """
    if bias == 0:
        return torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    left, right = x.double(), y.double()
    lengths = _row_sums(left * left).sqrt_().mul_(_row_sums(right * right).sqrt_())
    cosine = _row_sums(left * right).div_(lengths).nan_to_num_(nan=0.0).clamp_(-1.0, 1.0)
    return cosine.add_(1).div_(2).log_().mul_(_BIAS_STEPS * bias).exp_()


def _row_sums(products: Tensor) -> Tensor:
    return products.sum(1, keepdim=True)


@merge_method(
    "add_dissimilarities",
    label="Add dissimilarities",
    inputs="ABC",
    strength="beta",
    params=(
        Param("alpha", 0.5, "whose change is added: 0 is B's, 1 is C's", 0.0, 1.0),
        Param("beta", 1.0, "multiplier of the change that is added", slider=(-1.0, 4.0)),
        Param("gamma", 1.0, "how strictly rows are told apart: 0 takes all rows as alike", 0.0, slider=(0.0, 2.0)),
    ),
    formula="A + beta·(1 − d)·((1 − alpha)·(B − A) + alpha·(C − A)), " + _LIKENESS,
    rows=True,
    exact_a="beta = 0 or gamma = 0",
)
def add_dissimilarities(a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, gamma: float) -> Tensor:
    """Add to A the rows of weights that B and C changed differently.

    Args:
        a: matrix [rows, columns], float32 or float64; overwritten.
        b: same shape and dtype; overwritten.
        c: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: multiplier, any finite number.
        gamma: 0 or more.

    Returns:
        The sum, same shape and dtype.
    """
    return extract_features(a, b, c, alpha=alpha, beta=1.0, gamma=gamma, delta=beta)


@merge_method(
    "multiply_difference",
    label="Multiply difference",
    inputs="AB",
    strength="alpha",
    params=(Param("alpha", 1.0, "multiplier of the difference", slider=(-1.0, 2.0)),),
    formula="A·(1 + alpha·(B − A))",
    shows=(),
    exact_arithmetic=True,
    exact_a="alpha = 0",
)
def multiply_difference(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Scale each weight of A by how far B is above it.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: any finite number.

    Returns:
        The product, same shape and dtype.
    """
    return a if alpha == 0 else a.mul_(torch.sub(b, a, out=b).mul_(scalar(alpha, b)).add_(scalar(1.0, b)))


@merge_method(
    "subtract_weights",
    label="Subtract weights",
    inputs="AB",
    strength="alpha",
    params=(
        Param("alpha", 1.0, "how far to go from A to the result: 0 is A, 1 the result", 0.0, 1.0),
        Param("beta", 0.5, "how much of B is subtracted", slider=(-1.0, 2.0)),
        Param("gamma", 1.0, "multiplier of what is left", slider=(-1.0, 2.0)),
    ),
    formula="A + alpha·(gamma·(A − beta·B) − A): gamma·(A − beta·B) at alpha = 1",
    shows=(),
    exact_arithmetic=True,
    exact_a="alpha = 0",
)
def subtract_weights(a: Tensor, b: Tensor, *, alpha: float, beta: float, gamma: float) -> Tensor:
    """Subtract a part of B's weights from A's.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: any finite number.
        gamma: any finite number.

    Returns:
        The difference, same shape and dtype.
    """
    if alpha == 0:
        return a
    rest = torch.sub(a, b.mul_(scalar(beta, b)), out=b).mul_(scalar(gamma, b))
    return step_towards(a, rest, alpha)
