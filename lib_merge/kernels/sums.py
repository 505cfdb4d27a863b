"""Weighted sums of three models, and the choice of whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arithmetic import step_towards
from .random import threshold
from .registry import Param, merge_method

if TYPE_CHECKING:
    from torch import Tensor


@merge_method(
    "triple_sum",
    label="Triple sum",
    inputs="ABC",
    strength="alpha",
    params=(
        Param("alpha", 0.5, "share of B and C together: 0 is A, 1 leaves nothing of A", 0.0, 1.0),
        Param("beta", 0.5, "C's part of that share: 0 is all B, 1 is all C", 0.0, 1.0),
    ),
    formula="A·(1 − alpha) + alpha·((1 − beta)·B + beta·C)",
    shows=("alpha", "beta"),
    exact_arithmetic=True,
    exact_a="alpha = 0",
    exact_b="alpha = 1 and beta = 0",
)
def triple_sum(a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float) -> Tensor:
    """Blend three models evenly: the shares of A, B and C add up to 1.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        c: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: 0 … 1.

    Returns:
        The blend, same shape and dtype.
    """
    return step_towards(a, step_towards(b, c, beta), alpha)


@merge_method(
    "sum_twice",
    label="Sum twice",
    inputs="ABC",
    strength="gamma",
    params=(
        Param("alpha", 0.5, "first sum: share of B against A", 0.0, 1.0),
        Param("beta", 0.5, "second sum: share of C against the first sum", 0.0, 1.0),
        Param("gamma", 1.0, "how far to go from A to the second sum: 0 is A", 0.0, 1.0),
    ),
    formula="A + gamma·((1 − beta)·((1 − alpha)·A + alpha·B) + beta·C − A)",
    shows=("alpha", "beta"),
    exact_arithmetic=True,
    exact_a="gamma = 0, or alpha = 0 and beta = 0",
    exact_b="alpha = 1, beta = 0 and gamma = 1",
)
def sum_twice(a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, gamma: float) -> Tensor:
    """Blend A with B, then the blend with C.

    Args:
        a: float32 or float64, any shape; overwritten.
        b: same shape and dtype; overwritten.
        c: same shape and dtype; overwritten.
        alpha: 0 … 1.
        beta: 0 … 1.
        gamma: 0 … 1.

    Returns:
        The blend, same shape and dtype.
    """
    if gamma == 0 or alpha == beta == 0:
        return a
    first = step_towards(a.clone(), b, alpha)
    return step_towards(a, step_towards(first, c, beta), gamma)


@merge_method(
    "tensor_select",
    label="Tensor select",
    inputs="AB",
    strength="alpha",
    params=(Param("alpha", 0.5, "probability that a tensor is B's: 0 is A, 1 is B", 0.0, 1.0),),
    formula="B with probability alpha, else A; one draw for each tensor",
    random="tensor",
    exact_arithmetic=True,
    exact_a="alpha = 0, and every tensor that is not drawn",
    exact_b="alpha = 1, and every tensor that is drawn",
)
def tensor_select(a: Tensor, b: Tensor, *, alpha: float, draws: Tensor) -> Tensor:
    """Take each tensor whole, from A or from B by chance.

    Args:
        a: float32 or float64, any shape.
        b: same shape and dtype.
        alpha: 0 … 1.
        draws: int32, the tensor's first draw; see `kernels.random.draws`.

    Returns:
        One of the two.
    """
    return b if int(draws.reshape(-1)[0]) < threshold(alpha) else a
