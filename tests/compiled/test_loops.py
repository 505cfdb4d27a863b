"""Loops over stored bits against the functions of `kernels`: every pair of formats, special values, odd lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from lib_merge.compiled.loops import loop
from lib_merge.compiled.numbers import KEPT_IN, known
from lib_merge.files.dtypes import DTYPES
from lib_merge.kernels.random import draws
from lib_merge.kernels.registry import method

# Each with the ends of its range, where the bits of one model must come out, and a multiplier below 0 where it may be.
SETTINGS = {
    "weighted_sum": [{"alpha": 0}, {"alpha": 1}, {"alpha": 0.3}],
    "add_difference": [{"alpha": 0}, {"alpha": 1}, {"alpha": 0.7}, {"alpha": -0.4}],
    "train_difference": [{"alpha": 0}, {"alpha": 1}, {"alpha": -0.4}],
    "multiply_difference": [{"alpha": 0}, {"alpha": 0.7}, {"alpha": -0.4}],
    "subtract_weights": [{"alpha": 0}, {"alpha": 1}, {"alpha": 0.3, "beta": 0.7, "gamma": -1.1}],
    "triple_sum": [{"alpha": 0}, {"alpha": 1, "beta": 0}, {"alpha": 0.3, "beta": 0.6}, {"alpha": 1, "beta": 1}],
    "sum_twice": [{"alpha": 0, "beta": 0}, {"alpha": 1, "beta": 0, "gamma": 1}, {"alpha": 0.3, "beta": 0.6}],
    "power_up_dare": [{"alpha": 0, "beta": 1}, {"alpha": 1}, {"beta": 0}, {"alpha": 0.6, "beta": -0.5}],
}
NAMES = sorted(known())
# Formats of A, the others and the result: every two of them meet, without compiling for all three.
FORMATS = [(a, b, NAMES[2 * (i + j) % len(NAMES)]) for i, a in enumerate(NAMES) for j, b in enumerate(NAMES)]
KEY, FIRST = 0x0123456789ABCDEF_FEDCBA9876543210, 37
# Zeros of both signs, the ends of what is subnormal in float16, and some more.
SPECIAL = (0.0, -0.0, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, 1.0, -1.0, 1 + 2.0**-10, 100.0)


def stored(name: str, count: int, seed: int) -> torch.Tensor:
    """Every pair of special values stands at the same place in the first two models."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 2, count)
    pairs = [pair[seed % 2] for pair in itertools.product(SPECIAL, repeat=2)][:count]
    values[: len(pairs)] = pairs
    return torch.from_numpy(values).to(getattr(torch, DTYPES[name].torch))


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().copy()


@pytest.mark.parametrize("count", [1, 7, 1037])
@pytest.mark.parametrize("id", sorted(SETTINGS))
def test_the_bytes_are_those_of_the_kernel_in_every_pair_of_formats(id, count):
    chosen = method(id)
    for params, (first, others, result) in itertools.product(map(chosen.check, SETTINGS[id]), FORMATS):
        dtypes = [first, *[others] * (len(chosen.inputs) - 1)]
        tensors = [stored(name, count, seed) for seed, name in enumerate(dtypes)]
        drawn = {"draws": draws(KEY, FIRST, count)} if chosen.random else {}
        wanted = chosen.function(*(tensor.to(torch.float32, copy=True) for tensor in tensors), **params, **drawn)
        narrow = wanted.to(getattr(torch, DTYPES[result].torch))
        assert bool(torch.isfinite(narrow).all())  # else a loop gives nothing
        found = loop(id, params, dtypes, result, 1)
        out = np.empty(narrow.nbytes, np.uint8)
        of_stream = found.draws(KEY, FIRST) if chosen.random else None
        assert found.compute([raw(tensor) for tensor in tensors], of_stream, (), out)
        assert np.array_equal(out, raw(narrow)), (params, dtypes, result)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("id", sorted(SETTINGS))
def test_a_value_that_is_not_finite_gives_nothing_wherever_it_stands(id, name, bad):
    chosen = method(id)
    params = chosen.check(SETTINGS[id][-1])
    for slot in range(len(chosen.inputs)):
        tensors = [stored(name, 101, seed) for seed in range(len(chosen.inputs))]
        tensors[slot][100] = bad
        found = loop(id, params, [name] * len(tensors), name, 1)
        of_stream = found.draws(KEY, FIRST) if chosen.random else None
        assert not found.compute([raw(tensor) for tensor in tensors], of_stream, (), np.empty(tensors[0].nbytes, "u1"))


@pytest.mark.parametrize("result", ["F16", "BF16"])
def test_a_sum_that_the_result_cannot_hold_gives_nothing(result):
    largest = torch.finfo(getattr(torch, DTYPES[result].torch)).max
    a, b = torch.tensor([1.0, largest]), torch.tensor([1.0, -largest])
    for alpha, fits in ((0.0, True), (-0.5, False)):
        found = loop("multiply_difference", {"alpha": alpha}, ["F32", "F32"], result, 1)
        assert found.compute([raw(a), raw(b)], None, (), np.empty(4, np.uint8)) is fits


def test_formats_and_methods_without_a_loop():
    assert loop("weighted_sum", {"alpha": 0.3}, ["F16", "F64"], "F16", 1) is None
    assert loop("slerp", {"alpha": 0.3}, ["F16", "F16"], "F16", 1) is None
    assert set(NAMES) <= set(KEPT_IN)
