"""Stored bits to float32 and back in compiled code, against torch: every pattern of the 16-bit formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
from lib_merge.compiled.numbers import BEYOND, KEPT_IN, known, narrow, widen  # noqa: E402 - needs numba
from lib_merge.files.dtypes import DTYPES  # noqa: E402

each_format = pytest.mark.parametrize("name", sorted(KEPT_IN))


@numba.njit
def _widened(stored, out):
    for i in range(out.size):
        out[i] = widen(stored[i])


@numba.njit
def _narrowed(values, out):
    for i in range(out.size):
        out[i] = narrow(values[i], out[i])


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name].torch)


def float32s(patterns) -> np.ndarray:
    return np.asarray(patterns, dtype=np.uint32).view(np.float32)


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    out = np.empty(values.size, KEPT_IN[name])
    _narrowed(values, out)
    return out


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_every_16_bit_pattern_is_widened_as_torch_does(name):
    patterns = np.arange(65536, dtype=np.uint16)
    found = np.empty(patterns.size, np.float32)
    _widened(patterns.view(KEPT_IN[name]), found)
    wanted = torch.from_numpy(patterns.view(np.int16)).view(dtype_of(name)).float().numpy()
    real = ~np.isnan(wanted)
    assert np.array_equal(found.view(np.uint32)[real], wanted.view(np.uint32)[real])
    assert np.isnan(found[~real]).all()


@each_format
def test_narrowing_rounds_to_nearest_even_as_torch_does(name):
    """Random patterns; each 16-bit number, the ties above it, and their neighbours; the ends of the range."""
    rng = np.random.default_rng(5)
    grid = np.arange(65536, dtype=np.uint32) << 16
    halves = torch.arange(-32768, 32767, dtype=torch.int32).to(torch.int16).view(torch.float16).float().numpy()
    bits = np.concatenate(
        [
            rng.integers(0, 2**32, 1_000_000, dtype=np.uint32),
            *(grid + np.uint32(more) for more in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)),
            *(halves.view(np.uint32) + np.uint32(more) for more in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)),
        ]
    )
    values = float32s(bits)
    values = values[~np.isnan(values)]
    wanted = torch.from_numpy(values).to(dtype_of(name)).view(torch.int32 if name == "F32" else torch.int16).numpy()
    assert values.size > 1_500_000
    assert np.array_equal(narrowed(values, name).view(wanted.dtype), wanted)


@each_format
def test_what_rounds_to_infinity_starts_where_the_table_says(name):
    last = float32s([np.float32(BEYOND[name]).view(np.uint32) - 1])
    first = np.array([BEYOND[name]], np.float32)
    for values, finite in ((last, True), (first, False)):
        stored = torch.from_numpy(narrowed(values, name)).view(dtype_of(name))
        assert bool(torch.isfinite(stored.float()).item()) is finite


def test_formats_are_those_that_this_processor_converts():
    assert {"BF16", "F32"} <= known() <= set(KEPT_IN)
