"""Draws: the golden stream, the key recomputed by hand, any tile a slice of the whole, thresholds by brute force."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels.random import STEPS, raw_draws, stream_key, threshold

portable = pytest.mark.portable
# Of the mode document: seed 42, tensor a.weight.
GOLDEN = [58363, 62866, 16753, 17542, 56445, 62269, 18319, 54616]
KEY = stream_key(42, "a.weight")


@portable
def test_the_golden_stream():
    assert raw_draws(KEY, 0, 8).tolist() == GOLDEN


@portable
@pytest.mark.parametrize("seed", [0, 1, 42, 2**64 - 1])
@pytest.mark.parametrize("names", [("a.weight",), ("ключ.вес",), ("",), ("x", "C"), ("x", "B.C"), ("x", "D", "B")])
def test_the_key_is_the_head_of_a_sha256_over_seed_and_names(seed, names):
    text = b"lib_merge/1\0" + str(seed).encode() + b"".join(b"\0" + name.encode() for name in names)
    digest = hashlib.sha256(text).hexdigest()[:32]
    assert stream_key(seed, *names) == sum(int(digest[2 * i : 2 * i + 2], 16) << (8 * i) for i in range(16))


@portable
def test_draws_are_the_words_of_numpys_philox_lowest_bits_first():
    words = np.random.Philox(key=KEY).random_raw(3).tolist()
    assert raw_draws(KEY, 0, 12).tolist() == [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]


def test_the_fast_way_to_the_words_gives_the_same_here():
    from lib_merge.kernels import random

    assert random._words() is random._unlocked


@portable
def test_where_it_does_not_the_sure_one_is_taken(monkeypatch):
    from lib_merge.kernels import random

    monkeypatch.setattr(random, "_unlocked", lambda generator, count: generator.random_raw(count) + 1)
    random._words.cache_clear()
    try:
        assert raw_draws(KEY, 0, 8).tolist() == GOLDEN
    finally:
        random._words.cache_clear()


WHOLE = raw_draws(KEY, 0, 5000)


@portable
@given(start=st.integers(0, 5000), count=st.integers(0, 5000))
def test_any_tile_has_the_bits_of_the_whole(start, count):
    count = min(count, 5000 - start)
    tile = raw_draws(KEY, start, count)
    assert tile.dtype == np.uint16
    assert np.array_equal(tile, WHOLE[start : start + count])


@portable
def test_tiles_far_into_a_large_tensor_follow_each_other():
    start = 3 * 2**33 + 7
    both = raw_draws(KEY, start, 100)
    assert np.array_equal(both[60:], raw_draws(KEY, start + 60, 40))
    assert not np.array_equal(both, raw_draws(KEY, 7, 100))


@portable
def test_seeds_names_slots_and_paths_have_streams_of_their_own():
    keys = {
        stream_key(seed, name, *more)
        for seed in (0, 1, 2**63)
        for name in ("a.weight", "a.bias")
        for more in ((), ("C",), ("D",), ("B",), ("B.C",), ("B", "C"))
    }
    assert len(keys) == 3 * 2 * 6
    assert stream_key(1, "2") != stream_key(12, "")
    firsts = {tuple(raw_draws(key, 0, 8)) for key in keys}
    assert len(firsts) == len(keys)


@portable
def test_draws_are_uniform_and_independent_of_each_other_and_of_other_streams():
    count = 1 << 18
    drawn = raw_draws(KEY, 0, count).astype(float)
    other = raw_draws(stream_key(43, "a.weight"), 0, count).astype(float)
    error = math.sqrt((STEPS**2 - 1) / 12 / count)
    assert abs(drawn.mean() - (STEPS - 1) / 2) < 4 * error
    bins = np.bincount((drawn // 1024).astype(int), minlength=64)
    squares = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert abs(squares - 63) < 4 * math.sqrt(2 * 63)
    for one, two in ((drawn[1:], drawn[:-1]), (drawn, other)):
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(count)


@portable
@pytest.mark.parametrize(
    ("probability", "limit"),
    [
        (0, 0),
        (1, 65536),
        (0.5, 32768),
        (0.25, 16384),
        (1 / 65536, 1),
        (0.5 / 65536, 0),  # u of draw 0 is exactly that probability, not below it
        (0.51 / 65536, 1),
        (1e-9, 0),
        (1 - 1e-9, 65536),
        (1 - 0.5 / 65536, 65535),
        (0.15, 9830),
        (-0.1, 0),
        (1.5, 65536),
    ],
)
def test_thresholds_worked_by_hand(probability, limit):
    assert threshold(probability) == limit


@portable
def test_a_threshold_chooses_the_draws_whose_middle_lies_below_the_probability():
    middles = (np.arange(STEPS) + 0.5) / STEPS  # exact in float64
    grid = [Fraction(n, 4 * STEPS) for n in (1, 2, 3, 4, 5, 6, 7, 4 * STEPS - 1, 4 * STEPS - 2, 4 * STEPS - 3)]
    rng = np.random.default_rng(5)
    for probability in (*map(float, grid), *np.linspace(0, 1, 201), *rng.random(200)):
        chosen = middles < probability
        limit = threshold(float(probability))
        assert chosen[:limit].all()
        assert not chosen[limit:].any()


def test_draws_for_torch_are_the_same_numbers_in_a_new_or_a_given_buffer():
    import torch

    from lib_merge.kernels.random import draws, widened

    fresh = draws(KEY, 37, 1000)
    assert fresh.dtype == torch.int32
    assert np.array_equal(fresh.numpy(), raw_draws(KEY, 37, 1000))
    room = torch.full((1000,), -1, dtype=torch.int32)
    assert widened(raw_draws(KEY, 37, 1000), room) is room
    assert torch.equal(room, fresh)
    assert draws(KEY, 37, 0).shape == (0,)
