"""Draws in compiled code are those of numpy's generator."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")
from lib_merge.compiled.philox import Draws


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 2**64, 2**128 - 1, 0x0123456789ABCDEF_FEDCBA9876543210])
@pytest.mark.parametrize("first", [0, 1, 15, 16, 37, 2**40 + 5])
def test_draws_are_the_generators_words_cut_in_four(key, first):
    for low, high in ((0, 1), (0, 16), (3, 35), (0, 5000)):
        block, skip = divmod(first + low, 16)
        generator = np.random.Philox(key=key)
        generator.advance(block)
        words = generator.random_raw((skip + high - low + 3) // 4)
        wanted = np.asarray(words, "<u8").view("<u2")[skip : skip + high - low]
        assert np.array_equal(Draws(key, first).of(slice(low, high)), wanted)
