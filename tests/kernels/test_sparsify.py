"""DARE and DELLA: against the oracle with the same draws, and their means over all draws there are, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.kernels import sparsify, votes
from lib_merge.kernels.combinations import oriented
from lib_merge.kernels.random import draws, stream_key
from tests.data.oracles import optimizer_ref as oracle
from tests.kernels.deltas import FLOATS, SHAPES, arrays, close, low_rank, patient

STEPS = 65536
DENSITIES = (0.05, 0.3, 0.7, 0.9, 0.99)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
densities = pytest.mark.parametrize("density", DENSITIES)
RULES = ("window", "document")


def drawn(x, number=0):
    return draws(stream_key(7, "a.weight", str(number)), 0, x.numel()).reshape(x.shape)


def given_by_16_bits(probability):
    """Share of the 65536 middles (draw + ½)/65536 that lie below the probability."""
    middles = (np.arange(STEPS) + 0.5) / STEPS
    return np.searchsorted(middles, np.asarray(probability), side="left") / STEPS


# Against the oracle.


@shapes
@densities
@pytest.mark.parametrize("dampening", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("law", ["power", "linear"])
@dtypes
def test_dare_is_the_oracles(shape, density, dampening, law, dtype):
    x = low_rank(1, shape, dtype)[0]
    share = float(given_by_16_bits(density))
    kept = (drawn(x).numpy() + 0.5) / STEPS < density
    close(
        sparsify.dare(x, density, drawn(x), dampening, law),
        oracle.dare(arrays([x])[0], kept, share, dampening, law),
        [x],
    )


@shapes
@densities
@pytest.mark.parametrize("rule", RULES)
@dtypes
def test_della_keeps_what_the_oracle_keeps_divided_by_the_probability(shape, density, rule, dtype):
    x = low_rank(1, shape, dtype)[0]
    (wide,) = arrays([x])
    probability = oracle.della_keep_prob(wide, density, mode=rule)
    kept = (drawn(x).numpy() + 0.5) / STEPS < probability
    wanted = np.where(kept, wide / np.maximum(given_by_16_bits(probability), 1 / STEPS), 0)
    found = sparsify.della(x, density, drawn(x), rule)
    close(found, wanted, [x])
    assert np.array_equal(found.numpy() != 0, kept & (wide != 0))


@pytest.mark.parametrize("rule", RULES)
@dtypes
def test_of_equal_sizes_the_first_ranks_lower(rule, dtype):
    entries = np.random.default_rng(4).integers(-2, 3, (40, 50)) / 2  # zeros of both signs among them
    x = (torch.from_numpy(entries).to(dtype) * -1).T
    probability = oracle.della_keep_prob(arrays([x])[0], 0.4, mode=rule)
    kept = (drawn(x).numpy() + 0.5) / STEPS < probability
    assert np.array_equal(sparsify.della(x, 0.4, drawn(x), rule).numpy() != 0, kept & (x.numpy() != 0))


@shapes
@dtypes
@pytest.mark.parametrize("kind", ["dare", "della"])
def test_the_conflict_aware_forms_are_the_oracles(shape, dtype, kind):
    deltas = low_rank(3, shape, dtype)
    strengths = [1.0, -0.5, 0.3]
    gs, _ = oriented(deltas, strengths)
    mask = votes.conflict_mask(gs)
    found = sparsify.conflict_aware(kind, gs, mask, 0.3, 0.6, [drawn(g, k) for k, g in enumerate(gs)])
    assert not found.skipped
    assert found.share == pytest.approx(oracle.conflict_mask(arrays(deltas), strengths).mean())
    for k, (g, sparse) in enumerate(zip(gs, found.tensors, strict=True)):
        whole = {"dare": sparsify.dare, "della": sparsify.della}[kind](g, 0.6, drawn(g, k))
        close(sparse, oracle.only_where(mask.numpy(), arrays([whole])[0], arrays([g])[0]), [g])


# Over all draws.


@densities
def test_the_mean_of_dare_over_all_draws_is_the_delta(density):
    every = torch.arange(STEPS, dtype=torch.int32)
    for entry in (1.0, -0.37):
        x = torch.full((STEPS,), entry, dtype=torch.float64)
        assert float(sparsify.dare(x, density, every).mean()) == pytest.approx(entry, rel=1e-12)
        dampened = float(sparsify.dare(x, density, every, 0.5).mean())
        assert dampened == pytest.approx(entry * density**0.5, rel=1e-3)


@densities
@pytest.mark.parametrize("rule", RULES)
def test_the_mean_of_della_over_all_draws_is_the_delta(density, rule):
    row = torch.tensor([0.1, -3.0, 2.0, 0.5, -0.7], dtype=torch.float64)
    every = torch.arange(STEPS, dtype=torch.int32).repeat_interleave(5)
    found = sparsify.della(row.repeat(STEPS, 1), density, every, rule).mean(0)
    never = sparsify.keep_limits(5, density, rule)[row.abs().argsort().argsort()] == 0
    assert int(never.sum()) == (rule == "window" and density <= 0.15)  # the smallest, at density − e = 0
    torch.testing.assert_close(found, row * ~never, rtol=1e-12, atol=0)


def test_the_mean_of_dare_over_seeds_is_the_delta():
    x = low_rank(1, (24, 20))[0]
    seeds, density = 400, 0.5
    found = sum(sparsify.dare(x, density, draws(stream_key(s, "w", "0"), 0, x.numel())) for s in range(seeds)) / seeds
    error = x.abs() * ((1 - density) / density / seeds) ** 0.5
    assert float(((found - x) / error).abs().max()) < 5
    assert 0.8 < float(((found - x) / error).std()) < 1.2


# Rules of DELLA.


@patient
@given(count=st.integers(1, 300), density=st.floats(0, 1))
def test_the_window_keeps_the_density_on_average_and_larger_entries_rather(count, density):
    limits = sparsify.keep_limits(count, density).double()
    assert abs(float(limits.mean()) / STEPS - density) <= 0.5 / STEPS + 1e-9  # each is rounded to 1/65536
    assert (limits[1:] >= limits[:-1]).all()
    assert 0 <= float(limits.min()) <= float(limits.max()) <= STEPS


def test_rules_worked_by_hand():
    for rule, wanted in (("window", [0.35, 0.45, 0.55, 0.65]), ("document", [0.875, 0.75, 0.625, 0.5])):
        limits = sparsify.keep_limits(4, 0.5, rule)
        np.testing.assert_allclose(limits.numpy() / STEPS, wanted, atol=1 / STEPS)


@pytest.mark.parametrize("shape", [(1,), (8,), (1, 1), (3, 4), (2, 3, 2, 2)], ids=str)
def test_density_1_changes_nothing_and_density_0_keeps_nothing(shape):
    x = low_rank(1, shape)[0]
    for kind in (sparsify.dare, sparsify.della):
        assert torch.equal(kind(x, 1.0, drawn(x)), x)
        assert torch.equal(kind(x, 0.0, drawn(x)), torch.zeros_like(x))
        assert torch.equal(kind(torch.zeros_like(x), 0.5, drawn(x)), torch.zeros_like(x))


def test_blocks_of_rows_do_not_show():
    x = low_rank(1, (300, 700), torch.float32)[0]
    whole = sparsify.della(x, 0.6, drawn(x))
    for k in (0, 92, 93, 299):
        assert torch.equal(whole[k : k + 1], sparsify.della(x[k : k + 1], 0.6, drawn(x)[k : k + 1]))


def test_inputs_stay_as_they_are():
    x = low_rank(1, (9, 7))[0]
    before, chance = x.clone(), drawn(x)
    sparsify.dare(x, 0.5, chance)
    sparsify.della(x, 0.5, chance)
    sparsify.conflict_aware("dare", [x, x], x > 0, 1.0, 0.5, [chance, chance])
    assert torch.equal(x, before)
    assert torch.equal(chance, drawn(x))


# The guard.


@pytest.mark.parametrize(
    ("share", "cosine", "skipped"),
    [
        (0.41, 0.24, True),
        (0.41, -0.24, True),
        (0.4, 0.0, False),
        (0.41, 0.25, False),
        (0.41, -0.9, False),
        (1.0, 0.0, True),
    ],
)
@pytest.mark.parametrize("kind", ["dare", "della"])
def test_conflict_by_chance_is_left_alone_and_said_so(share, cosine, skipped, kind):
    xs = [torch.ones(1, 100), -torch.ones(1, 100)]
    mask = torch.arange(100)[None] < round(share * 100)
    found = sparsify.conflict_aware(kind, xs, mask, cosine, 0.5, [drawn(x, k) for k, x in enumerate(xs)])
    assert found.skipped == skipped
    assert found.share == pytest.approx(share)
    for x, sparse in zip(xs, found.tensors, strict=True):
        assert torch.equal(sparse, x) == skipped
        assert torch.equal(sparse[~mask], x[~mask])


def test_dare_and_della_are_not_the_same_where_they_conflict():
    xs = low_rank(2, (12, 9))
    mask = torch.ones(12, 9, dtype=torch.bool)
    made = [sparsify.conflict_aware(kind, xs, mask, 0.9, 0.5, [drawn(x) for x in xs]) for kind in ("dare", "della")]
    dare = made[0].tensors[0]
    assert torch.equal(dare[dare != 0], 2 * xs[0][dare != 0])  # one factor for all; DELLA has one for each rank
    assert not torch.equal(dare, made[1].tensors[0])


def test_dampening_reaches_the_conflict_aware_form():
    x, mask = torch.ones(1, 50), torch.ones(1, 50, dtype=torch.bool)
    made = sparsify.conflict_aware("dare", [x, x], mask, 1.0, 0.25, [drawn(x), drawn(x)], dampening=0.5)
    assert sorted(set(made.tensors[0].reshape(-1).tolist())) == [0, 2]  # 0.25^−½
