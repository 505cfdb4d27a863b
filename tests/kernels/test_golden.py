"""Methods against values worked by hand, the independent reference in float64, and loops written from the formula."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from lib_merge.kernels.arithmetic import smoothed
from lib_merge.kernels.registry import method
from tests.data import modes_ref
from tests.kernels.applying import NAME, apply, generic, same_bits

SHAPES = [(7,), (6, 5), (4, 3, 3, 3), (), (0,), (3, 0), (1,), (1, 1, 1, 1), (129, 65)]
STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("stored", STORED.values(), ids=STORED)

WEIGHTED_SUM = method("weighted_sum")
POWER_UP_DARE = method("power_up_dare")
ADD_DIFFERENCE = method("add_difference")
SLERP = method("slerp")

A = torch.zeros(2, 4)
B = torch.tensor([[0.0, 1, 2, 4], [4, 2, 1, 0]])


# Worked by hand.


def test_weighted_sum_by_hand():
    a, b = torch.tensor([0.0, 4, -2]), torch.tensor([8.0, 0, -2])
    assert apply(WEIGHTED_SUM, [a, b], {"alpha": 0.25}).tolist() == [2, 3, -2]


@pytest.mark.parametrize(("alpha", "same_as"), [(-0.5, 0), (1.5, 1)])
def test_weighted_sum_clamps_its_share(alpha, same_as):
    a, b = generic(WEIGHTED_SUM, (50,))
    assert same_bits(apply(WEIGHTED_SUM, [a, b], {"alpha": alpha}), (a, b)[same_as])


def test_dare_without_drops_scales_the_difference():
    assert torch.equal(apply(POWER_UP_DARE, [A, B], {"alpha": 0, "beta": 0.5}), B / 2)
    assert torch.equal(apply(POWER_UP_DARE, [A, B], {"alpha": 0, "beta": -2}), -2 * B)


def test_dare_drops_by_the_golden_draws():
    result = apply(POWER_UP_DARE, [A, B], {"alpha": 0.5, "beta": 1}, seed=42, name="a.weight")
    assert result.tolist() == [[0, 0, 4, 8], [0, 0, 2, 0]]


@pytest.mark.parametrize("params", [{"alpha": 1}, {"alpha": 1, "beta": -3}, {"alpha": 1 - 1e-7}, {"beta": 0}], ids=str)
def test_dare_that_keeps_nothing_is_a(params):
    a, b = generic(POWER_UP_DARE, (50,))
    assert same_bits(apply(POWER_UP_DARE, [a, b], params), a)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.75, 0.25), (1 - 2**-10, 2**-10)])
def test_dare_whose_survivors_move_all_the_way_gives_them_the_bits_of_b(alpha, beta):
    a, b = generic(POWER_UP_DARE, (400, 200))
    result = apply(POWER_UP_DARE, [a, b], {"alpha": alpha, "beta": beta})
    keep = modes_ref.dare_keep(a.shape, alpha, 0, NAME)
    assert keep.any()
    assert same_bits(result, torch.where(keep, b, a))


def test_add_difference_by_hand():
    a, b, c = torch.tensor([1.0, -2, 0]), torch.tensor([5.0, 1, -0.5]), torch.tensor([1.0, 3, -0.5])
    assert apply(ADD_DIFFERENCE, [a, b, c], {"alpha": 0.5}).tolist() == [3, -3, 0]
    assert apply(ADD_DIFFERENCE, [a, b, c], {"alpha": -1}).tolist() == [-3, 0, 0]


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("alpha", [-0.7, 0.3, 1])
def test_add_difference_of_a_donor_that_learned_nothing_keeps_the_bits_of_a(alpha, smooth):
    a, b, _ = generic(ADD_DIFFERENCE, (6, 5))
    a[0] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38])
    assert same_bits(apply(ADD_DIFFERENCE, [a, b, b], {"alpha": alpha, "smooth": smooth}), a)


@pytest.mark.parametrize("params", [{"alpha": 0.3, "beta": -2}, {"alpha": 0.85, "beta": -0.5}], ids=str)
def test_negative_strengths_keep_the_sign_of_a_zero_where_nothing_changed(params):
    a = torch.tensor([0.0, -0.0, 1, -1]).repeat(50)
    assert same_bits(apply(POWER_UP_DARE, [a, a], params), a)


def test_slerp_by_hand():
    a, b = torch.tensor([1.0, 0]), torch.tensor([0.0, 1])
    half = apply(SLERP, [a, b], {"alpha": 0.5})
    assert torch.allclose(half, torch.tensor([math.sqrt(0.5)] * 2), rtol=1e-7, atol=0)
    third = apply(SLERP, [2 * a, 2 * b], {"alpha": 1 / 3})
    assert torch.allclose(third, torch.tensor([math.sqrt(3), 1]), rtol=3e-7, atol=0)


@pytest.mark.parametrize("factor", [1, -1, 2.5, -0.3, 0])
def test_slerp_of_parallel_opposite_or_missing_directions_is_the_straight_blend(factor):
    a, _ = generic(SLERP, (40, 30))
    wanted = 0.75 * a.double() + 0.25 * factor * a.double()
    result = apply(SLERP, [a, factor * a], {"alpha": 0.25})
    assert torch.allclose(result.double(), wanted, rtol=1e-6, atol=1e-7)
    assert same_bits(apply(SLERP, [0 * a, factor * a], {"alpha": 0.5}), factor * a / 2) or factor <= 0


@pytest.mark.parametrize("angle", [2.0, 0.5, 0.09, 1e-2, 1e-3, 1e-5])
def test_slerp_walks_along_the_arc_at_any_angle_that_is_one(angle):
    a = torch.tensor([1.0, 0], dtype=torch.float64)
    b = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    for alpha in (0.25, 0.5, 0.9):
        wanted = torch.tensor([math.cos(alpha * angle), math.sin(alpha * angle)], dtype=torch.float64)
        assert torch.allclose(apply(SLERP, [a, b], {"alpha": alpha}), wanted, rtol=0, atol=1e-13)


def test_slerp_keeps_the_length_where_both_have_it():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(300, 200, generator=generator, dtype=torch.float64) for _ in range(2))
    b *= a.norm() / b.norm()
    for alpha in (0.1, 0.5, 0.8):
        assert float(apply(SLERP, [a, b], {"alpha": alpha}).norm()) == pytest.approx(float(a.norm()), rel=1e-12)


# Against the independent reference, which gets float64.


def ulp(scale: torch.Tensor, wide: bool) -> torch.Tensor:
    """Spacing of float32 (float64 where the method worked in it) at the magnitude of `scale`."""
    kind = np.float64 if wide else np.float32
    return torch.from_numpy(np.asarray(np.spacing(scale.abs().numpy().astype(kind)), dtype=np.float64))


def assert_within(result: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
    assert bool(((result.double() - wanted).abs() <= bound).all())


def stored_as(tensors: list[torch.Tensor], stored: torch.dtype) -> list[torch.Tensor]:
    """The tensors as a file of that dtype gives them to a method: rounded to it, widened to float32 at least."""
    return [tensor.to(stored).to(torch.promote_types(stored, torch.float32)) for tensor in tensors]


@shapes
@dtypes
def test_weighted_sum_is_the_reference_within_a_few_units_in_the_last_place(shape, stored):
    a, b = stored_as(generic(WEIGHTED_SUM, shape, torch.float64), stored)
    unit = ulp(torch.maximum(a.abs(), b.abs()), stored == torch.float64)
    for alpha in (0.001, 0.1, 1 / 3, 0.5, 0.7, 0.999):
        result = apply(WEIGHTED_SUM, [a, b], {"alpha": alpha})
        wanted = modes_ref.weight_sum(a.double(), b.double(), alpha)
        assert_within(result, wanted, (2 + 2 / alpha) * unit)


@shapes
@dtypes
def test_dare_is_the_reference_within_a_few_units_in_the_last_place(shape, stored):
    """The share that survives, 1 − alpha, stands where weighted_sum has alpha.

    Survivors move by k = beta/(1 − alpha) times the difference, which may be far larger than A and B, and every
    rounding is relative to what is rounded: so the units are those of the largest of |A|, |B| and the result. In these
    the worst case is 0.5 for the last difference, 1 for the product, 2 each for k and for A − B: 5.5 in all, met by no
    generic input.
    """
    a, b = stored_as(generic(POWER_UP_DARE, shape, torch.float64), stored)
    name = "blocks.1.weight"
    for alpha, beta in itertools.product((0, 0.1, 0.5, 0.85, 0.999), (-1.5, 0.1, 1, 4)):
        result = apply(POWER_UP_DARE, [a, b], {"alpha": alpha, "beta": beta}, seed=7, name=name)
        wanted = modes_ref.dare(a.double(), b.double(), alpha, beta, 7, name)
        unit = ulp(torch.maximum(torch.maximum(a.abs(), b.abs()), wanted.abs()), stored == torch.float64)
        assert_within(result, wanted, (2 + 2 / (1 - alpha)) * unit)
        dropped = ~modes_ref.dare_keep(a.shape, alpha, 7, name)
        assert same_bits(result[dropped], a[dropped])


# Against loops that read like the printed formula. They know nothing of tensors.


def loop_slerp(a: list[float], b: list[float], alpha: float) -> list[float]:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    norms = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
    theta = math.acos(max(-1, min(1, dot / norms))) if norms else 0
    if math.sin(theta) < 1e-6:
        return [x + alpha * (y - x) for x, y in zip(a, b, strict=True)]
    from_a, from_b = math.sin((1 - alpha) * theta) / math.sin(theta), math.sin(alpha * theta) / math.sin(theta)
    return [x * from_a + y * from_b for x, y in zip(a, b, strict=True)]


@shapes
@dtypes
def test_slerp_is_its_formula(shape, stored):
    a, b = stored_as(generic(SLERP, shape, torch.float64), stored)
    unit = ulp(torch.maximum(a.abs(), b.abs()), stored == torch.float64)
    for alpha in (0.001, 0.25, 0.5, 0.9):
        result = apply(SLERP, [a, b], {"alpha": alpha})
        wanted = loop_slerp(a.flatten().tolist(), b.flatten().tolist(), alpha)
        assert_within(result, torch.tensor(wanted, dtype=torch.float64).reshape(shape), (2 + 2 / alpha) * unit)


def along(matrix: list[list[float]], axis: int, smooth) -> list[list[float]]:
    """Apply a function of a list to every column (axis 0) or row (axis 1)."""
    if axis == 1:
        return [smooth(row) for row in matrix]
    return [list(row) for row in zip(*[smooth(list(column)) for column in zip(*matrix, strict=True)], strict=True)]


def mirrored(values: list[float], at: int) -> float:
    """d c b a | a b c d | d c b a …"""
    at %= 2 * len(values)
    return values[at] if at < len(values) else values[2 * len(values) - 1 - at]


def median_of_3(values: list[float]) -> list[float]:
    return [statistics.median(mirrored(values, at + by) for by in (-1, 0, 1)) for at in range(len(values))]


def gaussian(values: list[float]) -> list[float]:
    taps = [math.exp(-by * by / 2) for by in range(-4, 5)]
    total = math.fsum(taps)
    return [
        math.fsum(taps[by + 4] / total * mirrored(values, at + by) for by in range(-4, 5)) for at in range(len(values))
    ]


def loop_smoothed(delta: np.ndarray) -> np.ndarray:
    if delta.ndim == 0 or delta.size == 0:
        return delta
    matrix = delta.reshape(len(delta), -1).tolist()
    axes = (0,) if delta.ndim == 1 else (0, 1)
    for smooth in (median_of_3, gaussian):
        for axis in axes:
            matrix = along(matrix, axis, smooth)
    return np.array(matrix).reshape(delta.shape)


@pytest.mark.parametrize("shape", [*SHAPES[:-1], (2,), (3,), (2, 9), (9, 2), (5, 1), (17, 23)], ids=str)
@dtypes
@pytest.mark.parametrize("smooth", [False, True])
def test_add_difference_is_its_formula(shape, stored, smooth):
    a, b, c = stored_as(generic(ADD_DIFFERENCE, shape, torch.float64), stored)
    difference = b.double().numpy() - c.double().numpy()
    if smooth:
        difference = loop_smoothed(difference)
    scale = torch.maximum(torch.maximum(a.abs(), b.abs()), c.abs())
    scale = scale.max().expand(shape) if smooth and scale.numel() else scale  # a mean knows its neighbours' magnitude
    for alpha in (-0.5, 0.3, 1, 1.7):
        result = apply(ADD_DIFFERENCE, [a, b, c], {"alpha": alpha, "smooth": smooth})
        wanted = torch.from_numpy(np.asarray(a.double().numpy() + alpha * difference))
        assert_within(result, wanted, 6 * ulp(scale, stored == torch.float64))


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 12), columns=st.integers(0, 12), seed=st.integers(0, 1000), wide=st.booleans())
def test_smoothing_is_what_scipy_does_one_axis_at_a_time(rows, columns, seed, wide):
    shape = (rows, columns) if columns else (rows,)
    dtype = torch.float64 if wide else torch.float32
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    wanted = delta.double().numpy()
    for axis in range(wanted.ndim):
        window = [3 if at == axis else 1 for at in range(wanted.ndim)]
        wanted = ndimage.median_filter(wanted, size=window, mode="reflect")
    for axis in range(wanted.ndim):
        wanted = ndimage.gaussian_filter1d(wanted, sigma=1, axis=axis, truncate=4, mode="reflect")
    tolerance = 4 * torch.finfo(dtype).eps * float(delta.abs().max())
    assert np.abs(smoothed(delta.clone()).double().numpy() - wanted).max() <= tolerance


def test_smoothing_leaves_a_constant_and_removes_a_lone_spike():
    assert torch.allclose(smoothed(torch.full((9, 9), 0.3)), torch.full((9, 9), 0.3), rtol=1e-6)
    spike = torch.zeros(9, 9)
    spike[4, 4] = 100
    assert not smoothed(spike).any()


def test_a_convolution_is_smoothed_as_the_matrix_of_its_outputs_and_the_rest():
    delta = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    assert same_bits(smoothed(delta.clone()), smoothed(delta.reshape(8, 27).clone()).reshape(8, 3, 3, 3))
