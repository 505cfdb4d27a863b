"""What every method promises: exact ends, the bits of A where nothing differs, one result however it is cut or drawn.

All tests loop over the registry. Only corners of exactness, which metadata states in words, are spelled out in tables.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lib_merge.kernels.random import raw_draws, stream_key
from lib_merge.kernels.registry import method
from tests.kernels import numpy_formulas
from tests.kernels.applying import (
    EXACT_B,
    FLOATS,
    METHODS,
    NAME,
    apply,
    digests,
    edges,
    generic,
    inner,
    named,
    raw,
    same_bits,
    settings,
    tiles,
)

ROOT = Path(__file__).parents[2]
SHAPES = [(24, 18), (50,), (8, 4, 3, 3), (1,), ()]
RANDOM = [chosen for chosen in METHODS if chosen.random]
ELEMENTWISE = [chosen for chosen in METHODS if chosen.kind == "elementwise"]
EXACT = [chosen for chosen in METHODS if chosen.exact_arithmetic]

# Methods whose formula changes A even where all models are the same.
MOVES_EQUALS = {"subtract_weights"}


def each(methods):
    return pytest.mark.parametrize("chosen", methods, ids=lambda chosen: chosen.id)


dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


# Exact ends.


@each(METHODS)
@dtypes
def test_strength_0_gives_the_bits_of_a(chosen, dtype):
    for values in settings(chosen):
        for zero in (0, -0.0):
            params = values | {chosen.strength: zero}
            for tensors in (edges(chosen, dtype), *(generic(chosen, shape, dtype) for shape in SHAPES)):
                assert same_bits(apply(chosen, tensors, params), tensors[0])


@each([chosen for chosen in METHODS if chosen.shows is not None])
@dtypes
def test_damage_in_any_operand_shows_in_the_result_where_a_method_says_so(chosen, dtype):
    """Operands of such methods are not examined themselves."""
    bad = [float("nan"), float("inf"), float("-inf")]
    good = [0.0, -0.0, 1.5, -2.0, 1e-30, 6e4, *bad]
    combinations = torch.cartesian_prod(*(torch.tensor(good, dtype=dtype) for _ in chosen.inputs))
    damaged = ~combinations.isfinite().all(1)
    for values in settings(chosen):
        if chosen.shows_damage(values):
            result = apply(chosen, [column.clone() for column in combinations.T], values)
            assert not result[damaged].isfinite().any(), values
    assert any(chosen.shows_damage(values) for values in settings(chosen))


def test_the_table_of_exact_b_covers_every_method_that_declares_it():
    assert set(EXACT_B) == {chosen.id for chosen in METHODS if chosen.exact_b}


@pytest.mark.parametrize(("id", "params"), [(id, params) for id, corners in EXACT_B.items() for params in corners])
@dtypes
def test_where_a_method_says_so_it_gives_the_bits_of_b(id, params, dtype):
    chosen = method(id)
    for tensors in (edges(chosen, dtype), *(generic(chosen, shape, dtype) for shape in SHAPES)):
        assert same_bits(apply(chosen, tensors, params), tensors[1])


@each([chosen for chosen in METHODS if chosen.id not in MOVES_EQUALS])
@dtypes
def test_models_that_are_the_same_give_the_bits_of_a(chosen, dtype):
    special = edges(chosen, dtype)[0]
    for values in settings(chosen):
        for a in (special, *(generic(chosen, shape, dtype)[0] for shape in SHAPES)):
            assert same_bits(apply(chosen, [a] * len(chosen.inputs), values), a), values


# Shapes, dtypes and parameters.


@each(METHODS)
@dtypes
def test_the_result_has_the_dtype_and_shape_of_the_inputs_and_finite_values(chosen, dtype):
    for values in settings(chosen):
        for shape in SHAPES:
            result = apply(chosen, generic(chosen, shape, dtype), values)
            assert (result.dtype, result.shape) == (dtype, shape)
            assert bool(result.isfinite().all())


def outcomes(chosen, tensors, values) -> list[bytes]:
    """Results under a few seeds: chance may hide an effect under one of them."""
    return [raw(apply(chosen, tensors, values, seed=seed)) for seed in range(8 if chosen.random else 1)]


@each(METHODS)
def test_every_parameter_has_an_effect(chosen):
    tensors = generic(chosen, (24, 18))
    for param in chosen.params:
        low, high = inner(param, 0.3), inner(param, 0.7)
        assert any(
            outcomes(chosen, tensors, values | {param.name: low})
            != outcomes(chosen, tensors, values | {param.name: high})
            for values in settings(chosen)
        ), param.name


@each(METHODS)
def test_every_model_has_an_effect(chosen):
    tensors = generic(chosen, (24, 18))
    before = [outcomes(chosen, tensors, values) for values in settings(chosen)]
    for slot in range(len(tensors)):
        moved = [tensor * 1.25 if at == slot else tensor for at, tensor in enumerate(tensors)]
        assert before != [outcomes(chosen, moved, values) for values in settings(chosen)]


@each(METHODS)
def test_float64_inputs_are_worked_on_in_float64(chosen):
    for values in settings(chosen):
        wide = generic(chosen, (24, 18), torch.float64)
        result = apply(chosen, wide, values)
        narrow = apply(chosen, [tensor.float() for tensor in wide], values)
        assert not torch.equal(result, result.float().double())
        assert torch.allclose(result, narrow.double(), rtol=1e-3, atol=1e-4)


# Cutting.

LARGE = (1201, 251)  # 301 451 elements: more than a tile of 2**18, in no whole number of anything


@each(ELEMENTWISE)
def test_tiles_of_any_size_give_the_bits_of_the_whole(chosen):
    small = 2**16 if chosen.measures else 2**16 + 64
    default, one, other = settings(chosen)
    for values, dtype, sizes in (
        (default, torch.float32, (small,)),
        (one, torch.float32, (small, 2**18)),
        (one, torch.float64, (small,)),
        (other, torch.float32, (small,)),
    ):
        if not chosen.needs_whole(values):
            tensors = generic(chosen, LARGE, dtype)
            whole = apply(chosen, tensors, values)
            for size in sizes:
                assert same_bits(apply(chosen, tensors, values, cuts=tiles(chosen, LARGE, size)), whole)


@each([chosen for chosen in ELEMENTWISE if not chosen.measures and not chosen.rows])
@hypothesis_settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, 4999 // 64).map(lambda n: 64 * n), max_size=12).map(sorted))
def test_cuts_at_any_multiples_of_64_give_the_bits_of_the_whole(chosen, cuts):
    tensors = generic(chosen, (4999,))
    for values in settings(chosen):
        if not chosen.needs_whole(values):
            assert same_bits(apply(chosen, tensors, values, cuts=cuts), apply(chosen, tensors, values))


@each([chosen for chosen in METHODS if chosen.measures])
def test_measuring_leaves_the_tensors_as_they_are(chosen):
    tensors = generic(chosen, (24, 18))
    before = [tensor.clone() for tensor in tensors]
    columns = [tensor.reshape(24, 18) if chosen.rows else tensor.reshape(-1) for tensor in tensors]
    for values in settings(chosen):
        measures: list[object] = []
        for measure in chosen.measures:
            part = measure.tile(*columns, **named(chosen, columns, values, 1, 0, measures))
            measures.append(measure.combine([part]))
        assert all(same_bits(one, two) for one, two in zip(before, tensors, strict=True))


# Chance.


@each(RANDOM)
def test_the_same_seed_and_name_give_the_same_bytes_and_others_give_others(chosen):
    tensors = generic(chosen, (24, 18))
    by_seed, by_name = set(), set()
    for values in settings(chosen):
        assert outcomes(chosen, tensors, values) == outcomes(chosen, tensors, values)
        by_seed.add(len({raw(apply(chosen, tensors, values, seed=seed, name="x")) for seed in range(8)}))
        by_name.add(len({raw(apply(chosen, tensors, values, seed=5, name=f"blocks.{n}")) for n in range(8)}))
    expected = 8 if chosen.random == "element" else 2
    assert expected in by_seed
    assert expected in by_name


@each([chosen for chosen in METHODS if not chosen.random])
def test_methods_without_chance_do_not_depend_on_the_seed(chosen):
    tensors = generic(chosen, (24, 18))
    for values in settings(chosen):
        assert same_bits(apply(chosen, tensors, values, seed=1, name="x"), apply(chosen, tensors, values, seed=2))


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 1.0), (0.85, 1.0), (0.9, -1.3), (0.1, 0.4)])
def test_dare_keeps_the_difference_on_average(alpha, beta):
    """A mean over seeds lies within 4 standard errors of A + beta·(B − A), element by element."""
    chosen = method("power_up_dare")
    seeds, size = 1500, 64
    a, b = generic(chosen, (size,), torch.float64)
    key_of = [stream_key(seed, NAME) for seed in range(seeds)]
    draws = torch.from_numpy(np.stack([raw_draws(key, 0, size) for key in key_of]).astype(np.int32))
    many = chosen.function(
        a.expand(seeds, size).clone(), b.expand(seeds, size).clone(), alpha=alpha, beta=beta, draws=draws
    )
    error = (b - a).abs() * abs(beta) * math.sqrt(alpha / (1 - alpha) / seeds)
    assert bool(((many.mean(0) - (a + beta * (b - a))).abs() <= 4 * error + 1e-12).all())
    assert same_bits(many[7], apply(chosen, [a, b], {"alpha": alpha, "beta": beta}, seed=7))


# The same bytes on every CPU: what is made of IEEE operations is compared with NumPy's, which fuses nothing.


def test_every_method_of_exact_arithmetic_has_a_numpy_formula():
    assert [chosen.id for chosen in EXACT if not hasattr(numpy_formulas, chosen.id)] == []


@each(EXACT)
@pytest.mark.parametrize("shape", [(1009,), (37, 51), (16, 4, 3, 3)], ids=str)
@dtypes
def test_exact_arithmetic_gives_the_bits_of_plain_operations(chosen, shape, dtype):
    formula = getattr(numpy_formulas, chosen.id)
    tensors = generic(chosen, shape, dtype)
    for values in settings(chosen):
        wanted = torch.from_numpy(formula(*[tensor.numpy() for tensor in tensors], **values))
        assert same_bits(apply(chosen, tensors, values), wanted), values


def test_exact_arithmetic_gives_the_same_bytes_without_vector_instructions():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.applying"],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    capability, *lines = done.stdout.splitlines()
    assert capability == "DEFAULT"
    assert dict(line.split() for line in lines) == digests()
    assert len(lines) == len(EXACT)
