"""Differences and sums of two and three models, and whole tensors by chance: by hand and by loops from the formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lib_merge
from lib_merge.kernels.random import raw_draws, stream_key
from lib_merge.kernels.registry import method
from tests.kernels.applying import apply, generic, same_bits, tiles

TRAIN = method("train_difference")
FEATURES = method("extract_features")
DISSIMILAR = method("add_dissimilarities")
MULTIPLY = method("multiply_difference")
SUBTRACT = method("subtract_weights")
TRIPLE = method("triple_sum")
TWICE = method("sum_twice")
SELECT = method("tensor_select")

SHAPES = [(7,), (6, 5), (4, 3, 3, 3), (), (1,), (5, 1), (5, 1, 1, 1), (129, 65)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
stored = pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
# −0.0, 0.0 and numbers at the ends of the range, which must come through where nothing is added.
EDGES = torch.tensor([[0.0, -0.0, 1e-45], [-1e-45, 3e38, -3e38]])


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# The formulas, one weight (or one row) at a time, in Python's float64.


def loop_train(a, b, c, alpha):
    below = abs(b - c) + abs(b - a)
    return a + alpha * 1.8 * (b - c) * abs(b - a) / below if below else a


def loop_features(a, b, c, alpha, beta, gamma, delta):
    first, second = [y - x for x, y in zip(a, b, strict=True)], [z - x for x, z in zip(a, c, strict=True)]
    lengths = math.sqrt(math.fsum(x * x for x in first)) * math.sqrt(math.fsum(x * x for x in second))
    cosine = math.fsum(x * y for x, y in zip(first, second, strict=True)) / lengths if lengths else 0.0
    alike = ((min(max(cosine, -1.0), 1.0) + 1) / 2) ** (15 * gamma)
    weight = (1 - beta) * alike + beta * (1 - alike)
    change = [(1 - alpha) * x + alpha * y for x, y in zip(first, second, strict=True)]
    return [x + delta * weight * y for x, y in zip(a, change, strict=True)]


def loop_dissimilar(a, b, c, alpha, beta, gamma):
    return loop_features(a, b, c, alpha, 1, gamma, beta)


LOOPS = {
    "train_difference": (loop_train, {"alpha": (-0.8, 0.3, 1, 1.9)}),
    "multiply_difference": (lambda a, b, alpha: a * (1 + alpha * (b - a)), {"alpha": (-1, 0.4, 1, 2.5)}),
    "subtract_weights": (
        lambda a, b, alpha, beta, gamma: a + alpha * (gamma * (a - beta * b) - a),
        {"alpha": (0.3, 1), "beta": (-0.5, 0.5, 1), "gamma": (-1, 0.7, 1)},
    ),
    "triple_sum": (
        lambda a, b, c, alpha, beta: a * (1 - alpha) + alpha * ((1 - beta) * b + beta * c),
        {"alpha": (0.3, 1), "beta": (0, 0.4, 1)},
    ),
    "sum_twice": (
        lambda a, b, c, alpha, beta, gamma: a + gamma * ((1 - beta) * ((1 - alpha) * a + alpha * b) + beta * c - a),
        {"alpha": (0, 0.3, 1), "beta": (0, 0.6, 1), "gamma": (0.3, 1)},
    ),
    "extract_features": (
        loop_features,
        {"alpha": (0, 0.3, 1), "beta": (0, 0.6, 1), "gamma": (0, 0.05, 1.3), "delta": (-1, 0.5, 1)},
    ),
    "add_dissimilarities": (loop_dissimilar, {"alpha": (0, 0.3, 1), "beta": (-1, 0.5, 1), "gamma": (0, 0.05, 1.3)}),
}


@pytest.mark.parametrize("id", LOOPS)
@shapes
@stored
def test_it_is_its_formula(id, shape, stored):
    chosen, (loop, choices) = method(id), LOOPS[id]
    tensors = [
        x.to(stored).to(torch.promote_types(stored, torch.float32)) for x in generic(chosen, shape, torch.float64)
    ]
    scale = float(torch.stack([x.abs().max() for x in tensors]).max().clamp(min=1))
    tolerance = (1e-14 if stored == torch.float64 else 4e-6) * scale**2
    for values in itertools.product(*choices.values()):
        params = dict(zip(choices, values, strict=True))
        if chosen.rows:
            rows = zip(*[x.double().reshape(len(x) if x.dim() else 1, -1).tolist() for x in tensors], strict=True)
            wanted = [x for row in rows for x in loop(*row, **params)]
        else:
            wanted = [loop(*x, **params) for x in zip(*[x.double().flatten().tolist() for x in tensors], strict=True)]
        result = apply(chosen, tensors, params).double().flatten()
        assert float((result - torch.tensor(wanted, dtype=torch.float64)).abs().max()) <= tolerance, params


# Train difference.


def test_train_difference_by_hand():
    """|B − C| and |B − A| are 4 and 2, then 2 and 6: 1.8·4·2/6 and −1.8·2·6/8."""
    result = apply(TRAIN, [t(1, 0), t(3, -6), t(-1, -4)], {"alpha": 1})
    assert torch.allclose(result, t(1 + 2.4, -2.7), rtol=1e-6)


def test_train_difference_of_c_that_is_a_goes_nine_tenths_of_the_way():
    a, b, _ = generic(TRAIN, (50, 40))
    for alpha in (0.5, 1, -1):
        assert torch.allclose(apply(TRAIN, [a, b, a], {"alpha": alpha}), a + 0.9 * alpha * (b - a), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [-1.5, 1, 0.3])
def test_train_difference_keeps_the_bits_of_a_where_b_is_a_or_c(alpha):
    a, b, c = generic(TRAIN, (20, 3))
    for x in (a, b, c):
        x[:2] = EDGES
    assert same_bits(apply(TRAIN, [a, a, c], {"alpha": alpha}), a)
    assert same_bits(apply(TRAIN, [a, b, b], {"alpha": alpha}), a)
    assert same_bits(apply(TRAIN, [a, a, a], {"alpha": alpha}), a)


def test_train_difference_keeps_changes_of_any_size():
    """The existing tool drops differences below 1e-8, and a product of two small ones underflows."""
    for size in (1e-9, 1e-25, 2.0**-140, 1e30):
        b = t(size, -size)
        assert torch.allclose(apply(TRAIN, [0 * b, b, 0 * b], {"alpha": 1}) / size, t(0.9, -0.9), rtol=3e-3), size


# Extract features, add dissimilarities.

PARALLEL = torch.tensor([[1.0, 0], [0, 2], [3, 4], [1, 1], [0, 0]])
OTHER = torch.tensor([[2.0, 0], [0, -1], [4, -3], [0, 0], [1, 5]])  # cos 1, −1, 0, and 0 for rows without change


@pytest.mark.parametrize(("beta", "weights"), [(0, (1, 0, 1 / 8, 1 / 8, 1 / 8)), (1, (0, 1, 7 / 8, 7 / 8, 7 / 8))])
@pytest.mark.parametrize("alpha", [0, 0.25, 1])
def test_extract_features_weighs_rows_by_their_cosine(alpha, beta, weights):
    """(cos + 1)/2 is 1, 0 and ½; gamma 0.2 makes the exponent 3."""
    a = torch.full((5, 2), 10.0)
    params = {"alpha": alpha, "beta": beta, "gamma": 0.2, "delta": 2}
    result = apply(FEATURES, [a, a + PARALLEL, a + OTHER], params)
    wanted = a + 2 * torch.tensor(weights)[:, None] * ((1 - alpha) * PARALLEL + alpha * OTHER)
    assert torch.allclose(result, wanted, rtol=1e-6)


def test_a_convolution_is_the_matrix_of_its_outputs_and_the_rest():
    tensors = generic(FEATURES, (6, 4, 3, 3))
    flat = apply(FEATURES, [x.reshape(6, 36) for x in tensors])
    assert same_bits(apply(FEATURES, tensors), flat.reshape(6, 4, 3, 3))


def test_an_element_of_a_vector_is_a_row_of_its_own():
    a, b, c = t(0, 0, 0, 0), t(1, 2, 3, 4), t(1, -5, 0, 9)
    assert torch.allclose(apply(FEATURES, [a, b, c], {"alpha": 0, "gamma": 0.2}), t(1, 0, 3 / 8, 4), rtol=1e-6)


def test_extract_features_without_bias_takes_every_row():
    a, b, c = generic(FEATURES, (20, 30))
    whole = {"alpha": 0, "beta": 0, "gamma": 0, "delta": 1}
    assert same_bits(apply(FEATURES, [a, b, c], whole), b)
    assert same_bits(apply(FEATURES, [a, b, c], whole | {"alpha": 1}), c)
    assert same_bits(apply(FEATURES, [a, b, c], whole | {"beta": 1, "alpha": 0.4}), a)


@pytest.mark.parametrize("gamma", [0, 0.5, 2])
@pytest.mark.parametrize("strength", [1, -0.7])
def test_rows_that_nothing_changes_keep_the_bits_of_a(gamma, strength):
    a, b, c = generic(FEATURES, (20, 3))
    a[:2] = EDGES
    b[:2] = c[:2] = EDGES
    for chosen in (FEATURES, DISSIMILAR):
        params = {"alpha": 0.3, "gamma": gamma, chosen.strength: strength}
        assert same_bits(apply(chosen, [a, b, c], params)[:2], a[:2])
        assert same_bits(apply(chosen, [a, a, a], params), a)
        assert same_bits(apply(chosen, [a, b, c], params | {chosen.strength: 0}), a)


def test_donors_that_are_the_same_share_every_feature_and_differ_in_none():
    a, b, _ = generic(FEATURES, (20, 30))
    assert torch.allclose(apply(FEATURES, [a, b, b], {"alpha": 0.4, "gamma": 2}), b, rtol=0, atol=1e-6)
    assert torch.allclose(apply(DISSIMILAR, [a, b, b], {"alpha": 0.4, "gamma": 2}), a, rtol=0, atol=1e-6)


def test_add_dissimilarities_is_extract_features_of_the_other_rows():
    tensors = generic(FEATURES, (20, 30))
    for alpha, strength, gamma in ((0.3, 0.8, 1), (0, -1, 0.1), (1, 2, 0)):
        features = {"alpha": alpha, "beta": 1, "gamma": gamma, "delta": strength}
        params = {"alpha": alpha, "beta": strength, "gamma": gamma}
        assert same_bits(apply(DISSIMILAR, tensors, params), apply(FEATURES, tensors, features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 9, 31, 64, 100, 1009])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(columns, dtype):
    rows = 40000 // columns
    tensors = generic(FEATURES, (rows, columns), dtype)
    whole = apply(FEATURES, tensors)
    for low, high in ((0, 1), (1, 3), (rows // 2, rows // 2 + 7), (rows - 1, rows)):
        assert same_bits(apply(FEATURES, [x[low:high] for x in tensors]), whole[low:high])


# Two models.


def test_multiply_difference_by_hand():
    assert apply(MULTIPLY, [t(2, 1, -3), t(4, 0, -3)], {"alpha": 0.5}).tolist() == [4, 0.5, -3]


def test_subtract_weights_by_hand():
    a, b = t(2, 1, -3), t(4, 0, -2)
    assert apply(SUBTRACT, [a, b], {"alpha": 1, "beta": 0.5, "gamma": 3}).tolist() == [0, 3, -6]
    assert apply(SUBTRACT, [a, b], {"alpha": 0.5, "beta": 0.5, "gamma": 3}).tolist() == [1, 2, -4.5]
    assert same_bits(apply(SUBTRACT, [a, b], {"alpha": 0}), a)


# Sums.


def test_triple_sum_by_hand():
    a, b, c = t(0, 8), t(4, 0), t(8, -8)
    assert apply(TRIPLE, [a, b, c], {"alpha": 0.5, "beta": 0.25}).tolist() == [2.5, 3]


def test_sum_twice_by_hand():
    a, b, c = t(0, 8), t(4, 0), t(8, -8)
    assert apply(TWICE, [a, b, c], {"alpha": 0.25, "beta": 0.5}).tolist() == [4.5, -1]
    assert apply(TWICE, [a, b, c], {"alpha": 0.25, "beta": 0.5, "gamma": 0.5}).tolist() == [2.25, 3.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_at_their_ends_have_the_bits_of_one_model(dtype):
    a, b, c = (torch.cat((x, EDGES.to(dtype).roll(n))) for n, x in enumerate(generic(TRIPLE, (20, 3), dtype)))
    for chosen, params, wanted in (
        (TRIPLE, {"alpha": 0, "beta": 0.4}, a),
        (TRIPLE, {"alpha": 1, "beta": 0}, b),
        (TRIPLE, {"alpha": 1, "beta": 1}, c),
        (TWICE, {"alpha": 0, "beta": 0}, a),
        (TWICE, {"gamma": 0}, a),
        (TWICE, {"alpha": 1, "beta": 0}, b),
        (TWICE, {"alpha": 0.3, "beta": 1}, c),
    ):
        assert same_bits(apply(chosen, [a, b, c], params), wanted), (chosen.id, params)


# Whole tensors by chance.


def test_tensor_select_takes_b_where_the_first_draw_is_below_alpha():
    a, b = generic(SELECT, (30, 20))
    taken = 0
    for seed, name in itertools.product(range(40), ("x", "blocks.1.weight")):
        first = (int(raw_draws(stream_key(seed, name), 0, 1)[0]) + 0.5) / 65536
        wanted = b if first < 0.3 else a
        taken += wanted is b
        assert same_bits(apply(SELECT, [a, b], {"alpha": 0.3}, seed=seed, name=name), wanted)
    assert 10 <= taken <= 40
    assert same_bits(apply(SELECT, [a, b], {"alpha": 0}), a)
    assert same_bits(apply(SELECT, [a, b], {"alpha": 1}), b)


def test_tensor_select_in_a_file_takes_about_that_share_of_the_tensors(tmp_path):
    models = {
        name: {f"t{n}.weight": torch.full((3, 4), float(value)) for n in range(400)} for value, name in enumerate("ab")
    }
    paths = [tmp_path / f"{name}.safetensors" for name in models]
    for path, tensors in zip(paths, models.values(), strict=True):
        save_file(tensors, path)
    out = tmp_path / "out.safetensors"
    lib_merge.merge(*paths, out=out, method="tensor_select", alpha=0.7, seed=3, fsync=False)
    found = [x.unique().tolist() for x in load_file(out).values()]
    assert all(values in ([0.0], [1.0]) for values in found)
    share = sum(values == [1.0] for values in found) / 400
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / 400)


# The same bytes however a run is carried out.


@pytest.mark.parametrize(
    "chosen", [TRAIN, FEATURES, DISSIMILAR, MULTIPLY, SUBTRACT, TRIPLE, TWICE, SELECT], ids=lambda m: m.id
)
def test_tile_size_and_number_of_threads_change_no_byte(tmp_path, chosen):
    made = {"x.weight": (331, 1709), "y.weight": (40, 3, 3, 3), "z.bias": (77,)}
    made = {key: generic(chosen, shape, torch.float16, 3) for key, shape in made.items()}
    paths = [tmp_path / f"{slot}.safetensors" for slot in chosen.inputs]
    for number, path in enumerate(paths):
        save_file({key: tensors[number] for key, tensors in made.items()}, path)
    files = set()
    for threads, tile in itertools.product((1, 4), (2**16, 2**18)):
        out = tmp_path / f"{threads}-{tile}.safetensors"
        lib_merge.merge(*paths, out=out, method=chosen.id, seed=5, threads=threads, tile=tile, fsync=False)
        files.add(out.read_bytes())
    assert len(files) == 1
    found = load_file(out)
    for key, tensors in made.items():
        wide = [x.float() for x in tensors]
        wanted = apply(chosen, wide, seed=5, name=key, cuts=tiles(chosen, tuple(wide[0].shape), 2**17))
        assert same_bits(found[key], wanted.half()), key
        assert np.isfinite(found[key].float().numpy()).all()
