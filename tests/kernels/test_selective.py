"""The four methods whose share of B follows from similarity: goldens, the reference, printed formulas, chance, cuts."""

from __future__ import annotations

import itertools
import math
import random
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lib_merge
from lib_merge import tiles as tiles_module
from lib_merge.errors import NumberError, RecipeError
from lib_merge.kernels import interpolate, similarity
from lib_merge.kernels.column_sums import column_sums
from lib_merge.kernels.registry import Method, method
from lib_merge.kernels.scratch import room
from tests.data import modes_ref
from tests.kernels.applying import FLOATS, NAME, apply, edges, generic, same_bits, tiles

COMPARATIVE = method("comparative_interpolation")
MAN = method("enhanced_man_interp")
AUTO = method("enhanced_auto_interp")
CUTOFF = method("weight_sum_cutoff")
METHODS = (COMPARATIVE, MAN, AUTO, CUTOFF)
SMOOTHNESS = {COMPARATIVE: "gamma", MAN: "delta", AUTO: "gamma"}
RANDOM = tuple(SMOOTHNESS)

SHAPES = [(7,), (6, 5), (4, 3, 3, 3), (), (0,), (1,), (1, 1, 1, 1), (2, 1), (257, 129)]
STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
ALPHAS = (0.001, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1)
NEAR = 1e-6

each = pytest.mark.parametrize("chosen", METHODS, ids=lambda chosen: chosen.id)
each_random = pytest.mark.parametrize("chosen", RANDOM, ids=lambda chosen: chosen.id)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
stored_dtypes = pytest.mark.parametrize("stored", STORED.values(), ids=STORED)

A = torch.zeros(2, 4)
B = torch.tensor([[0.0, 1, 2, 4], [4, 2, 1, 0]])


def named(value) -> str:
    """A test's id."""
    return value.id if isinstance(value, Method) else str(value)


def pair(chosen, shape, stored=torch.float32, seed=1) -> list[Tensor]:
    """A and B as a file of that dtype gives them to a method."""
    models = generic(chosen, shape, torch.float64, seed)
    return [model.to(stored).to(torch.promote_types(stored, torch.float32)) for model in models]


# Worked by hand. The pair's similarity: [[1, .75, .5, 0], [0, .5, .75, 1]]; means of its columns: .5, .625, .625, .5;
# mean: .5625.

OPEN_MIDDLE = [[0, 0.75, 1, 0], [0, 1, 0.75, 0]]


@pytest.mark.parametrize(
    ("chosen", "params", "wanted"),
    [
        (COMPARATIVE, {"alpha": 0.5}, OPEN_MIDDLE),
        (COMPARATIVE, {"alpha": 0.5, "beta": 1}, [[0, 0.25, 1, 4], [4, 1, 0.25, 0]]),
        (COMPARATIVE, {"alpha": 0.5, "beta": 0.5}, [[0, 0.5, 1, 2], [2, 1, 0.5, 0]]),
        (COMPARATIVE, {"alpha": 0.25}, [[0, 0.421875, 0.25, 0], [0, 0.25, 0.421875, 0]]),
        (COMPARATIVE, {"alpha": 1 / 3}, [[0, 0.5625, 0.5, 0], [0, 0.5, 0.5625, 0]]),
        (COMPARATIVE, {"alpha": 0.25, "beta": 1}, [[0, 0.015625, 0.25, 4], [4, 0.25, 0.015625, 0]]),
        (COMPARATIVE, {"alpha": 1, "beta": 0.3, "gamma": 0}, B.tolist()),
        (COMPARATIVE, {"alpha": 0}, A.tolist()),
        (MAN, {"alpha": 0.5, "beta": 0.55}, OPEN_MIDDLE),
        (MAN, {"alpha": 0.5}, OPEN_MIDDLE),
        (MAN, {"alpha": 0.5, "beta": 0.5}, OPEN_MIDDLE),  # column means of .5 are not above .5
        (MAN, {"alpha": 0.5, "gamma": 0.625}, A.tolist()),  # here s is 0, 1 in the open columns
        (MAN, {"alpha": 1, "gamma": 0.625}, [[0, 0, 0, 4], [4, 0, 0, 0]]),
        (MAN, {"alpha": 1, "beta": 0.5, "delta": 0}, [[0, 1, 2, 0], [0, 2, 1, 0]]),
        (MAN, {"alpha": 1}, B.tolist()),
        (AUTO, {"alpha": 0.5, "beta": 0.4}, OPEN_MIDDLE),
        (AUTO, {"alpha": 1, "beta": 0.4}, [[0, 1, 2, 0], [0, 2, 1, 0]]),
        (AUTO, {"alpha": 1, "beta": 0.2}, [[0, 0, 2, 0], [0, 2, 0, 0]]),
        (AUTO, {"alpha": 1, "beta": 0.1}, A.tolist()),
        (CUTOFF, {"alpha": 0.25, "beta": 0.6, "gamma": 0.4}, [[0, 0, 0, 1], [1, 0, 0, 0]]),
        (CUTOFF, {"alpha": 0.25, "beta": 0.625}, [[0, 0, 0, 1], [1, 0, 0, 0]]),
        (CUTOFF, {"alpha": 0.25, "gamma": 0.5}, [[0, 0.25, 0.5, 0], [0, 0.5, 0.25, 0]]),
        (CUTOFF, {"alpha": 0.25}, (B / 4).tolist()),
    ],
    ids=named,
)
def test_golden(chosen, params, wanted):
    for dtype in FLOATS:
        assert apply(chosen, [A.to(dtype), B.to(dtype)], params).tolist() == wanted


def test_golden_draws():
    result = apply(COMPARATIVE, [A, B], {"alpha": 0.5, "gamma": 0}, seed=42, name="a.weight")
    assert result.tolist() == [[0, 0, 2, 0], [0, 0, 1, 0]]


def test_a_mean_below_one_half_leaves_all_that_is_more_than_twice_as_similar():
    a, b = torch.zeros(4), torch.tensor([1.0, 1, 0.5, 0.1])  # s = 0, 0, .5, .9; mean .35
    assert apply(AUTO, [a, b], {"alpha": 1, "beta": 1}).tolist() == pytest.approx([0, 0, 0.5, 0])


def test_what_lies_on_a_limit_is_outside():
    a, b = torch.zeros(6), torch.tensor([1.0, 3, 2, 2, 4, 0])  # s = .75, .25, .5, .5, 0, 1; mean .5
    assert apply(AUTO, [a, b], {"alpha": 1, "beta": 0.5}).tolist() == [0, 0, 2, 2, 0, 0]
    for chosen, limits in [(MAN, (0.5, 0.9)), (MAN, (0.1, 0.5)), (CUTOFF, (0.9, 0.5)), (CUTOFF, (0.5, 0.1))]:
        params = dict(zip(("beta", "gamma"), limits, strict=True))
        assert same_bits(apply(chosen, [a, b], params), a)


# Exact ends.


EXACT_A = [
    *[(chosen, {"alpha": 0}) for chosen in METHODS],
    *[(chosen, {"alpha": 0, SMOOTHNESS[chosen]: 0.4}) for chosen in RANDOM],
    (AUTO, {"beta": 0}),
    (AUTO, {"beta": 0, "alpha": 1, "gamma": 0}),
    *[(MAN, {"alpha": alpha, "beta": low, "gamma": high}) for alpha in (0.5, 1) for low, high in [(0.9, 0.2), (1, 1)]],
    *[(MAN, {"alpha": 1, "beta": low, "gamma": high}) for low, high in [(0.5, 0.5), (0, 0), (1, 0.5)]],
    *[(CUTOFF, {"alpha": alpha, "beta": 0.2, "gamma": 0.9}) for alpha in (0.5, 1)],
    *[(CUTOFF, {"alpha": 1, "beta": high, "gamma": low}) for low, high in [(0.5, 0.5), (0, 0), (1, 1)]],
]
EXACT_B = [
    *[(COMPARATIVE, {"alpha": 1, "beta": beta, "gamma": gamma}) for beta in (0, 0.4, 1) for gamma in (0, 0.4, 1)],
    *[(MAN, {"alpha": 1, "delta": delta}) for delta in (0, 0.4, 1)],
    (CUTOFF, {"alpha": 1}),
]


@pytest.mark.parametrize(("chosen", "params"), EXACT_A, ids=named)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exactly_a(chosen, params, dtype):
    special = edges(chosen, dtype)
    if params.get("alpha") != 0:
        special = [tensor.clamp(-1e30, 1e30) for tensor in special]  # there must be a largest difference
    for tensors in (special, *(generic(chosen, shape, dtype) for shape in SHAPES)):
        assert same_bits(apply(chosen, tensors, params), tensors[0])


@pytest.mark.parametrize(("chosen", "params"), EXACT_B, ids=named)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exactly_b(chosen, params, dtype):
    for tensors in (edges(chosen, dtype), *(generic(chosen, shape, dtype) for shape in SHAPES)):
        assert same_bits(apply(chosen, tensors, params), tensors[1])


@each
@pytest.mark.parametrize("alpha", [0.3, 0.5, 1])
def test_equal_tensors_keep_their_bits_even_where_zeros_differ_in_sign(chosen, alpha):
    a, b = torch.tensor([0.0, -0.0, 1]), torch.tensor([-0.0, 0.0, 1])
    assert same_bits(apply(chosen, [a, b], {"alpha": alpha}), b if alpha == 1 and chosen.exact_b else a)


@each_random
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("smoothness", [0, 0.3, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_share_of_0_keeps_the_bits_of_a_and_one_of_1_takes_those_of_b(chosen, alpha, smoothness, dtype):
    a = torch.tensor([-0.0, 0.0, -0.0, 0.0, 1e-12, -0.0, 0.0, 0.25, 0.25], dtype=dtype)
    b = torch.tensor([0.0, -0.0, -0.0, 0.0, -2e-12, 1.0, -1, 0.625, -0.375], dtype=dtype)
    result = apply(chosen, [a, b], {"alpha": alpha, "beta": 1 if chosen is AUTO else 0, SMOOTHNESS[chosen]: smoothness})
    tiny = slice(0, 5 if dtype == torch.float32 else 4)  # s rounds to 1 there
    assert same_bits(result[tiny], b[tiny])
    assert same_bits(result[5:7], a[5:7])  # s = 0


def test_the_most_different_weight_stays_a_and_so_does_a_lone_one():
    a, b = generic(COMPARATIVE, (40, 30))
    most = (a - b).abs().argmax()
    for chosen, gamma in itertools.product((COMPARATIVE, MAN, AUTO), (0, 0.5, 1)):
        result = apply(chosen, [a, b], {"alpha": 0.97, SMOOTHNESS[chosen]: gamma})
        assert result.flatten()[most] == a.flatten()[most]
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert apply(COMPARATIVE, [one, other], {"alpha": 0.97}).item() == 1
    assert apply(COMPARATIVE, [one, other], {"alpha": 0.97, "beta": 1}).item() == 2
    assert apply(CUTOFF, [one, other], {"alpha": 0.5}).item() == 1.5  # a lower limit of 0 is none
    assert apply(CUTOFF, [one, other], {"alpha": 0.5, "gamma": 0.01}).item() == 1
    assert apply(AUTO, [one, other], {"alpha": 1, "beta": 1}).item() == 1


@each_random
@pytest.mark.parametrize("alpha", [1e-3, 1e-30, 5e-324])
def test_tiny_alphas_leave_a_but_for_what_is_the_same(chosen, alpha):
    a, b = generic(chosen, (40, 30))
    b[a == b] += 0.0
    result = apply(chosen, [a, b], {"alpha": alpha})
    assert bool(result.isfinite().all())
    assert float((result - a).abs().max()) <= 1e-3 * float((b - a).abs().max())
    assert same_bits(result[a == b], a[a == b])


@each
def test_differences_beyond_the_dtype_are_not_passed_off_as_a_result(chosen):
    a, b = torch.full((4, 2), 3e38), torch.full((4, 2), -3e38)
    b[:, 0] = 3e38
    for smoothness in (0, 0.5, 1):
        params = {"alpha": 0.3} | ({SMOOTHNESS[chosen]: smoothness} if chosen in SMOOTHNESS else {})
        assert not bool(apply(chosen, [a, b], params).isfinite().all())


@each
@pytest.mark.parametrize("value", [-0.01, 1.01, -1, 2, 10, math.inf, math.nan])
def test_parameters_outside_0_to_1_are_refused(chosen, value):
    for param in chosen.params:
        with pytest.raises(RecipeError):
            chosen.check({param.name: value})


# The reference, in float64.


def reference(chosen, a: Tensor, b: Tensor, params: dict[str, float], seed: int = 0) -> Tensor:
    functions = {
        COMPARATIVE: modes_ref.comparative,
        MAN: modes_ref.enhanced_manual,
        AUTO: modes_ref.enhanced_auto,
        CUTOFF: modes_ref.weight_sum_cutoff,
    }
    chance = {} if chosen is CUTOFF else {"seed": seed, "key": NAME}
    return functions[chosen](a.double(), b.double(), **chosen.check(params), **chance)


def unsure(chosen, a: Tensor, b: Tensor, params: dict[str, float]) -> Tensor:
    """Where rounding may decide: similarity (or its mean) is at a limit, or a draw at its probability."""
    values = chosen.check(params)
    s, _ = modes_ref.similarity(a.double(), b.double())
    if s is None or values["alpha"] == 0:
        return torch.zeros(a.shape, dtype=torch.bool)
    if chosen in (MAN, CUTOFF):
        limits = [values[name] for name in ("beta", "gamma") if 0 < values[name] < 1]
        measured = modes_ref.column_mean(s).expand(a.shape)
    else:
        limits = [float(s.mean()) * (1 + side * values["beta"]) for side in (-1, 1)] if chosen is AUTO else []
        limits = [limit for limit in limits if limit > 0]  # nothing is below a limit of 0
        measured = s
    found = torch.zeros(a.shape, dtype=torch.bool)
    for limit in limits:
        found |= (measured - limit).abs() < NEAR
    smoothness = values.get(SMOOTHNESS.get(chosen, ""), 1)
    if smoothness < 1:
        e, beta = 1 / values["alpha"] - 1, values["beta"] if chosen is COMPARATIVE else 0
        m = (1 - beta) * s**e + beta * (1 - s) ** e
        found |= (modes_ref.uniforms(a.shape, 0, NAME) - m).abs() < NEAR
    return found


def ulp(scale: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.spacing(scale.abs().numpy().astype(np.float32)), dtype=np.float64))


def grid(chosen):
    """Parameters to compare at."""
    if chosen is COMPARATIVE:
        rest = itertools.product((0, 0.35, 1), (0, 0.4, 1))
    elif chosen is MAN:
        rest = [(0, 1, 1), (0, 1, 0.4), (0.45, 0.8, 1), (0.45, 0.8, 0), (0.6, 1, 0.4), (0, 0.7, 1)]
    elif chosen is AUTO:
        rest = itertools.product((0.1, 0.5, 1), (0, 0.4, 1))
    else:
        rest = [(1, 0), (0.8, 0.45), (1, 0.6), (0.7, 0)]
    names = [param.name for param in chosen.params]
    return [dict(zip(names, (alpha, *more), strict=True)) for more in rest for alpha in ALPHAS]


@each
@stored_dtypes
def test_the_reference_within_a_few_units_in_the_last_place(chosen, stored):
    left_out = compared = 0
    for shape, params in itertools.product(SHAPES, grid(chosen)):
        a, b = pair(chosen, shape, stored)
        result, wanted = apply(chosen, [a, b], params), reference(chosen, a, b, params)
        assert (result.dtype, result.shape) == (a.dtype, a.shape)
        skip = unsure(chosen, a, b, params)
        left_out, compared = left_out + int(skip.sum()), compared + skip.numel()
        bound = (2 + 2 / params["alpha"]) * ulp(torch.maximum(a.abs(), b.abs()))
        worse = ((result.double() - wanted).abs() > bound) & ~skip
        assert not bool(worse.any()), (shape, params)
    assert left_out <= 1e-4 * compared


@each
def test_a_vector_is_one_column_and_a_convolution_has_one_for_each_place_of_its_kernel(chosen):
    params = {"alpha": 0.4} | ({"beta": 0.3, "gamma": 0.8} if chosen is MAN else {})
    a, b = generic(chosen, (24, 5, 3, 3))
    flat = apply(chosen, [a.reshape(24, 45), b.reshape(24, 45)], params)
    assert same_bits(apply(chosen, [a, b], params), flat.reshape(a.shape))
    a, b = generic(chosen, (50,))
    column = apply(chosen, [a.reshape(50, 1), b.reshape(50, 1)], params)
    assert same_bits(apply(chosen, [a, b], params), column.reshape(50))


# Loops that read like the printed formulas. They know nothing of tensors.


def loop(chosen, a: np.ndarray, b: np.ndarray, values: dict[str, float], uniforms: np.ndarray) -> np.ndarray:
    rows, columns = (a.shape[0], math.prod(a.shape[1:])) if a.ndim else (1, 1)
    flat_a, flat_b = a.reshape(-1).tolist(), b.reshape(-1).tolist()
    gaps = [abs(y - x) for x, y in zip(flat_a, flat_b, strict=True)]
    if max(gaps, default=0) == 0:
        return a
    s = [1 - gap / max(gaps) for gap in gaps]
    means = [math.fsum(s[row * columns + column] for row in range(rows)) / rows for column in range(columns)]
    mean = math.fsum(s) / len(s)
    out = []
    for at, (x, y) in enumerate(zip(flat_a, flat_b, strict=True)):
        alpha = values["alpha"]
        e = 1 / alpha - 1
        if chosen is COMPARATIVE:
            m = (1 - values["beta"]) * s[at] ** e + values["beta"] * (1 - s[at]) ** e
            smoothness = values["gamma"]
        elif chosen is MAN:
            above = values["beta"] <= 0 or means[at % columns] > values["beta"]
            below = values["gamma"] >= 1 or means[at % columns] < values["gamma"]
            m = s[at] ** e if above and below else 0
            smoothness = values["delta"]
        elif chosen is AUTO:
            m = s[at] ** e if mean * (1 - values["beta"]) < s[at] < mean * (1 + values["beta"]) else 0
            smoothness = values["gamma"]
        else:
            above = values["gamma"] <= 0 or means[at % columns] > values["gamma"]
            below = values["beta"] >= 1 or means[at % columns] < values["beta"]
            m = alpha if above and below else 0
            smoothness = 1
        bit = 1 if uniforms.reshape(-1)[at] < m else 0
        out.append(x + (smoothness * m + (1 - smoothness) * bit) * (y - x))
    return np.array(out).reshape(a.shape)


@each
@pytest.mark.parametrize("shape", [(7,), (9, 6), (5, 3, 2, 2), (), (1,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_printed_formula(chosen, shape, dtype):
    a, b = generic(chosen, shape, dtype, seed=4)
    uniforms = modes_ref.uniforms(shape, 0, NAME).double().numpy()
    for params in grid(chosen):
        wanted = loop(chosen, a.double().numpy(), b.double().numpy(), chosen.check(params), uniforms)
        result = apply(chosen, [a, b], params)
        bound = (2 + 2 / params["alpha"]) * ulp(torch.maximum(a.abs(), b.abs()))
        agree = (result.double() - torch.from_numpy(np.asarray(wanted))).abs() <= bound
        assert bool((agree | unsure(chosen, a, b, params)).all()), params


# Chance.


@each_random
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
def test_at_smoothness_0_each_weight_has_the_bits_of_a_or_of_b(chosen, alpha):
    a, b = generic(chosen, (257, 129))
    values = {"alpha": alpha, SMOOTHNESS[chosen]: 0}
    result = apply(chosen, [a, b], values)
    from_a, from_b = (result.view(torch.int32) == model.view(torch.int32) for model in (a, b))
    assert bool((from_a | from_b).all())
    assert bool((from_a & ~from_b).any())
    assert bool((from_b & ~from_a).any())
    surely = ~unsure(chosen, a, b, values)
    assert torch.equal(result[surely], reference(chosen, a, b, values).float()[surely])


@each_random
@pytest.mark.parametrize("smoothness", [0, 0.4])
@pytest.mark.parametrize("alpha", [0.3, 0.6])
def test_the_mean_over_seeds_is_the_smooth_result(chosen, smoothness, alpha):
    a, b = generic(chosen, (8, 6), torch.float64)
    params = {"alpha": alpha}
    smooth = apply(chosen, [a, b], params)
    seeds = 1500
    results = torch.stack(
        [apply(chosen, [a, b], params | {SMOOTHNESS[chosen]: smoothness}, seed=seed) for seed in range(seeds)]
    )
    m = torch.where(a == b, 0, (smooth - a) / (b - a)).clamp(0, 1)
    error = (1 - smoothness) * (m * (1 - m) / seeds).sqrt() * (b - a).abs()
    step = (b - a).abs() / 65536 + 1e-12  # draws are multiples of that
    assert bool(((results.mean(0) - smooth).abs() <= 4 * error + step).all())


@each_random
def test_smoothness_1_needs_no_draws(chosen):
    a, b = generic(chosen, (24, 18))
    values = chosen.check({"alpha": 0.3})
    (measure,) = chosen.measures
    measures = [measure.combine([measure.tile(a, b, **values)])]
    wanted = apply(chosen, [a, b], values)
    assert same_bits(chosen.function(a.clone(), b.clone(), **values, measures=measures), wanted)


# Cutting.


@each
def test_the_size_of_pieces_changes_nothing(chosen, monkeypatch):
    a, b = generic(chosen, (301, 67))
    grids = [params for params in grid(chosen) if params["alpha"] in (0.3, 0.5, 0.75)]
    before = [apply(chosen, [a, b], params) for params in grids]
    for size in (64, 1001):
        monkeypatch.setattr(similarity, "PIECE", size)
        monkeypatch.setattr(interpolate, "PIECE", size)
        after = [apply(chosen, [a, b], params) for params in grids]
        assert all(same_bits(one, two) for one, two in zip(before, after, strict=True))


@each
@pytest.mark.parametrize("shape", [(200_000,), (700, 700), (3, 300_001), (9, 50_000)], ids=str)
def test_tiles_change_nothing_not_even_limits_on_the_last_bit(chosen, shape):
    """Limits at the mean of a column: one bit more or less opens or closes it."""
    a, b = generic(chosen, shape, seed=9)
    b[: shape[0] // 2] = a[: shape[0] // 2] + (b - a)[: shape[0] // 2] * 1e-9  # sums of large and small
    for columns in ([0], [0, 1, 2]):
        similar = modes_ref.column_mean(modes_ref.similarity(a, b)[0]).reshape(-1)
        limit = float(similar[columns[-1] % similar.numel()])
        params = {"alpha": 0.3} | ({"beta": limit} if chosen in (MAN, CUTOFF) else {})
        whole = apply(chosen, [a, b], params)
        for size in (2**16, 2**17, 2**18):
            cuts = tiles(chosen, shape, size)
            assert same_bits(apply(chosen, [a, b], params, cuts=cuts), whole)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A and B with tensors of all sizes and dtypes."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "wide.weight": (3, 200_003),
        "matrix.weight": (900, 700),
        "half.weight": (520, 1100),
        "double.weight": (310, 420),
        "conv.weight": (96, 64, 3, 3),
        "long.bias": (150_000,),
        "short.bias": (320,),
        "one": (1,),
        "scalar": (),
    }
    dtypes = {"half.weight": torch.float16, "conv.weight": torch.bfloat16, "double.weight": torch.float64}
    models = {"A": {}, "B": {}}
    for key, shape in shapes.items():
        a = torch.randn(shape, generator=generator) * 0.02
        reach = torch.rand(shape[1:], generator=generator)
        models["A"][key] = a.to(dtypes.get(key, torch.float32))
        models["B"][key] = (a + torch.randn(shape, generator=generator) * 0.004 * reach).to(models["A"][key].dtype)
    folder = tmp_path_factory.mktemp("selective")
    for slot, tensors in models.items():
        save_file(tensors, folder / f"{slot}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("chosen", "params"),
    [
        (COMPARATIVE, {"alpha": 0.3, "gamma": 0.5}),
        (COMPARATIVE, {"alpha": 0.75, "beta": 0.4}),
        (MAN, {"alpha": 0.3, "beta": 0.8, "gamma": 0.97, "delta": 0.5}),
        (MAN, {"alpha": 0.6, "delta": 0}),
        (AUTO, {"alpha": 0.3, "beta": 0.2, "gamma": 0.5}),
        (AUTO, {"alpha": 1, "beta": 0.2}),
        (CUTOFF, {"alpha": 0.3, "beta": 0.95, "gamma": 0.8}),
    ],
    ids=named,
)
def test_the_engine_gives_the_same_bytes_however_it_works(files, tmp_path, monkeypatch, chosen, params):
    results = {}
    ways = [(2**18, 1, True), (2**16, 4, True), (2**18, 4, False), (2**16, 1, False), (2**17, 3, False)]
    for tile, threads, keep in ways:
        with monkeypatch.context() as patch:
            if not keep:
                patch.setattr(tiles_module, "KEEP_BYTES", 0)
            out = tmp_path / f"{tile}-{threads}-{keep}.safetensors"
            inputs = (files / "A.safetensors", files / "B.safetensors")
            lib_merge.merge(*inputs, out=out, method=chosen.id, params=params, tile=tile, threads=threads, fsync=False)
            results[tile, threads, keep] = out.read_bytes()
    assert len(set(results.values())) == 1
    merged, base = load_file(out), load_file(files / "A.safetensors")
    donor = load_file(files / "B.safetensors")
    for key, tensor in merged.items():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        whole = apply(chosen, [base[key].to(wide), donor[key].to(wide)], params, name=key)
        assert same_bits(tensor, whole.to(tensor.dtype)), key


def test_a_result_without_meaning_fails_the_run_and_names_the_tensor(tmp_path):
    save_file({"x.weight": torch.full((4, 4), 3e38)}, tmp_path / "a.safetensors")
    save_file({"x.weight": torch.full((4, 4), -3e38)}, tmp_path / "b.safetensors")
    inputs = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(NumberError, match="not finite") as failed:
        lib_merge.merge(*inputs, out=tmp_path / "out.safetensors", method=COMPARATIVE.id, params={"gamma": 0.0})
    assert failed.value.tensor == "x.weight"


# Sums and memory.


def test_column_sums_do_not_depend_on_grouping_or_order():
    generator = torch.Generator().manual_seed(2)
    scale = torch.logspace(-40, 35, 60, dtype=torch.float64)[torch.randperm(60, generator=generator)]
    blocks = torch.rand(60, 17, generator=generator, dtype=torch.float64) * scale[:, None]
    blocks[7] = 0
    exact = torch.tensor([math.fsum(column) for column in blocks.T.tolist()], dtype=torch.float64)
    found = set()
    for seed in range(40):
        order = random.Random(seed)
        rows = list(range(60))
        order.shuffle(rows)
        at = [0, *sorted(order.sample(range(1, 60), order.randrange(0, 20))), 60]
        groups = [blocks[rows[low:high]] for low, high in itertools.pairwise(at)]
        parts = [column_sums(group.clone(), float(group.max())) for group in groups]
        while len(parts) > 1:
            one = parts.pop(order.randrange(len(parts)))
            other = parts.pop(order.randrange(len(parts)))
            parts.append(one.add(other))
        total = parts[0].total()
        assert bool(((total - exact).abs() <= 60 * 2**-55 * float(blocks.max())).all())
        found.add(total.numpy().tobytes())
    assert len(found) == 1


def test_column_sums_of_numbers_with_16_bits_are_exact():
    blocks = (torch.rand(64, 33, generator=torch.Generator().manual_seed(1)) * 0.03).half().double()
    sums = column_sums(blocks.clone(), float(blocks.max()))
    assert sums.total().tolist() == [math.fsum(column) for column in blocks.T.tolist()]
    assert len(sums.multiples) == 1


def test_column_sums_of_nothing_are_0():
    sums = column_sums(torch.zeros(3, 5, dtype=torch.float64), 0.0)
    blocks = torch.rand(2, 5, dtype=torch.float64)
    assert sums.total().tolist() == [0] * 5
    both = column_sums(blocks.clone(), 1.0).add(sums)
    assert torch.allclose(both.total(), blocks.sum(0), rtol=1e-15)


def test_rooms_belong_to_one_thread_and_one_purpose():
    like = torch.empty(10, 3)
    here = room("test", like).fill_(1)
    there: list[Tensor] = []
    thread = threading.Thread(target=lambda: there.append(room("test", like).fill_(2)))
    thread.start()
    thread.join()
    other = room("other test", like, torch.float64).fill_(3)
    assert (here.unique().tolist(), there[0].unique().tolist(), other.unique().tolist()) == ([1], [2], [3])
    again = room("test", torch.empty(30))
    assert again.data_ptr() == here.data_ptr()
    assert (again.shape, other.dtype) == ((30,), torch.float64)
    large = room("test", torch.empty(2**20, 2))
    assert large.shape == (2**20, 2)


@each
def test_results_stay_what_they_were_when_the_next_is_made(chosen):
    tensors = generic(chosen, (24, 18))
    first = apply(chosen, tensors, {"alpha": 0.3})
    before = first.clone()
    apply(chosen, generic(chosen, (24, 18), seed=3), {"alpha": 0.8})
    assert same_bits(first, before)
