"""Narrowing float64 in two steps rounds once: against NumPy for fp16, the nearest of all numbers for the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib_merge.kernels.rounding import to_odd

FORMATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def numbers(dtype: torch.dtype) -> np.ndarray:
    """All finite numbers of a format in order, 0 once."""
    kind = np.uint16 if dtype.itemsize == 2 else np.uint8
    patterns = torch.from_numpy(np.arange(256**dtype.itemsize).astype(kind).view(f"i{dtype.itemsize}"))
    found = patterns.view(dtype).double().numpy()
    return np.unique(found[np.isfinite(found)])


def near_ties(grid: np.ndarray) -> np.ndarray:
    """Half way between neighbours, and as little beside it as float64 and float32 can tell."""
    middle = (grid[1:] + grid[:-1]) / 2
    beside = [np.nextafter(middle, side) for side in (np.inf, -np.inf)]
    beside += [middle * (1 + change) for change in (2.0**-24, -(2.0**-25), 2.0**-40, -(2.0**-40))]
    return np.concatenate([grid, middle, *beside])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_result_is_the_nearest_number_ties_to_even(dtype):
    grid = numbers(dtype)
    values = near_ties(grid)
    values = values[(values > grid[0]) & (values < grid[-1])]
    after = np.searchsorted(grid, values)
    low, high = grid[after - 1], grid[after]
    even = torch.from_numpy(high).to(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.int8).numpy() % 2 == 0
    middle = (low + high) / 2
    wanted = np.where((values > middle) | ((values == middle) & even), high, low)
    found = to_odd(torch.from_numpy(values)).to(dtype).double().numpy()
    assert np.array_equal(found, wanted)


def test_fp16_is_as_numpy_rounds_it():
    random = np.random.default_rng(1).standard_normal(100_000) * np.logspace(-9, 5, 100_000)
    edges = [0.0, -0.0, 65519.999999999, 65520.0, 1e300, -1e300, 1e-320, -1e-320, np.inf, -np.inf, 2.0**-25, 2.0**-24]
    values = np.concatenate([random, edges])
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    found = to_odd(torch.from_numpy(values)).half().numpy()
    assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16))
    assert to_odd(torch.tensor([np.nan], dtype=torch.float64)).isnan().all()


def test_what_float32_can_hold_stays_and_the_input_too():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    wide = values.double()
    assert torch.equal(to_odd(wide), values)
    assert torch.equal(wide, values.double())
