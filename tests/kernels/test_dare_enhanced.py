"""DARE whose chance grows with the change: its formula in float64, exact ends, averages over seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lib_merge
from lib_merge import tiles, worker
from lib_merge.kernels.random import raw_draws, stream_key
from lib_merge.kernels.registry import method
from tests.kernels.applying import NAME, apply, generic, same_bits

METHOD = method("power_up_dare_enhanced")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def formula(a, b, raw, alpha, beta, gamma, delta, rescale):
    """Result, and how near each draw (each possible one where it is rescaled) is to its probability."""
    difference = b - a
    largest = max(abs(x) for x in difference)
    chance = [min(max((abs(x) / largest) ** max(alpha, 0.001), beta), 1.0) for x in difference]
    uniform = [(int(r) + 0.5) / 65536 for r in raw]
    margin = [abs(u - p) for u, p in zip(uniform, chance, strict=True)]
    if rescale and gamma < 1:  # the probability in effect
        margin = [abs(65536 * p - 0.5 - round(65536 * p - 0.5)) / 65536 for p in chance]
        chance = [math.ceil(65536 * p - 0.5) / 65536 for p in chance]
    share = [float(u < p) + gamma * (p - float(u < p)) for u, p in zip(uniform, chance, strict=True)]
    if rescale:
        share = [k / p if p else 0.0 for k, p in zip(share, chance, strict=True)]
    out = [x + delta * k * y for x, k, y in zip(a, share, difference, strict=True)]
    return np.array(out), np.array(margin)


@DTYPES
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.0005, 0.5, 1.0, 2.0, 3.7, 40.0])
def test_it_is_its_formula(alpha, gamma, dtype):
    for seed, beta, rescale in itertools.product(range(3), (0.0, 0.05, 0.4), (False, True)):
        a, b = generic(METHOD, (15, 20), dtype, seed=seed)
        params = {"alpha": alpha, "beta": beta, "gamma": gamma, "delta": -0.9, "rescale": rescale}
        raw = raw_draws(stream_key(seed, NAME), 0, 300)
        wanted, margin = formula(*[t.double().flatten().numpy() for t in (a, b)], raw, **params)
        sure = (margin > 3e-7) | (gamma == 1) | (wanted == a.double().flatten().numpy())
        assert sure.mean() > 0.9
        result = apply(METHOD, [a, b], params, seed=seed).double().flatten().numpy()
        bound = (3e-6 if dtype == torch.float32 else 1e-12) * np.maximum(1, np.abs(wanted))
        assert (np.abs(result - wanted) <= bound)[sure].all(), params


def test_by_hand_at_full_smoothness():
    a, b = torch.ones(4), torch.tensor([1.0, 2, 3, 5])
    assert apply(METHOD, [a, b], {"alpha": 1, "beta": 0, "gamma": 1}).tolist() == [1, 1.25, 2, 5]
    assert apply(METHOD, [a, b], {"alpha": 2, "beta": 0.5, "gamma": 1, "delta": 2}).tolist() == [1, 2, 3, 9]
    assert apply(METHOD, [a, b], {"alpha": 2, "gamma": 1, "rescale": True}).tolist() == b.tolist()


def test_without_smoothness_every_weight_is_a_or_moves_all_the_way():
    a, b = generic(METHOD, (300, 70))
    a[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    b[0, :3] = torch.tensor([-0.0, -0.0, 0.0])
    result = apply(METHOD, [a, b], {"alpha": 1.3, "beta": 0.05})
    is_a, is_b = (result.view(torch.int32) == t.view(torch.int32) for t in (a, b))
    assert bool((is_a | is_b).all())
    assert 0 < int((is_b & ~is_a).sum()) < a.numel()


@DTYPES
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("gamma", [0, 0.4, 1])
def test_the_largest_change_stays_whole(gamma, rescale, dtype):
    a, b = generic(METHOD, (40, 30), dtype)
    at = (b - a).abs().argmax()
    result = apply(METHOD, [a, b], {"gamma": gamma, "rescale": rescale})
    assert same_bits(result.flatten()[at], b.flatten()[at])


@DTYPES
@pytest.mark.parametrize("params", [{}, {"gamma": 0.5}, {"rescale": True}, {"alpha": 0.7, "gamma": 1}], ids=str)
def test_exact_ends(params, dtype):
    a, b = generic(METHOD, (40, 30), dtype)
    assert same_bits(apply(METHOD, [a, b], {**params, "delta": 0}), a)
    assert same_bits(apply(METHOD, [a, b], {**params, "beta": 1, "delta": 1}), b)
    zeros = torch.tensor([0.0, -0.0, 1, -1], dtype=dtype).repeat(9)
    for delta in (1, -1.5):
        assert same_bits(apply(METHOD, [zeros, zeros], {**params, "delta": delta}), zeros)
        other = zeros.clone()
        other[3] = 7
        result = apply(METHOD, [zeros, other], {**params, "delta": delta})
        assert same_bits(result[4:], zeros[4:])


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e30, 1e37])
@pytest.mark.parametrize("alpha", [0.5, 1, 2, 5.5])
def test_changes_of_any_scale_give_finite_numbers_between_a_and_b(scale, alpha):
    b = (torch.randn(2000, generator=torch.Generator().manual_seed(1)) * scale).float()
    for gamma in (0, 0.5, 1):
        result = apply(METHOD, [torch.zeros(2000), b], {"alpha": alpha, "beta": 0, "gamma": gamma})
        assert bool((result.abs() <= b.abs()).all())
        assert bool((result * b >= 0).all())
        assert bool(result.any())


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "delta"), [(2.0, 0.01, 0.0, 1.0), (0.6, 0.2, 0.5, -1.3), (3.0, 0.3, 0.2, 0.7)]
)
@pytest.mark.parametrize("rescale", [False, True])
def test_averages_over_seeds(alpha, beta, gamma, delta, rescale):
    """A + delta·p·(B − A), and A + delta·(B − A) where it is rescaled."""
    seeds, size = 3000, 64
    a, b = generic(METHOD, (size,), torch.float64)
    raw = np.stack([raw_draws(stream_key(seed, NAME), 0, size) for seed in range(seeds)])
    result = METHOD.function(
        a.expand(seeds, size).clone(),
        b.expand(seeds, size).clone(),
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        delta=delta,
        rescale=rescale,
        draws=torch.from_numpy(raw.astype(np.int32)),
        measures=[float((b - a).abs().max())],
    )
    assert same_bits(
        result[11],
        apply(
            METHOD,
            [a, b],
            {"alpha": alpha, "beta": beta, "gamma": gamma, "delta": delta, "rescale": rescale},
            seed=11,
        ),
    )
    chance = ((b - a).abs() / (b - a).abs().max()).pow(alpha).clamp(beta, 1)
    expected = a + delta * (b - a) * (1 if rescale else chance)
    spread = (1 - gamma) * (chance * (1 - chance)).sqrt() / (chance if rescale else 1)
    error = abs(delta) * (b - a).abs() * spread / math.sqrt(seeds)
    assert bool(((result.mean(0) - expected).abs() <= 4.5 * error + 2e-5).all())


@pytest.mark.parametrize("params", [{}, {"gamma": 1, "alpha": 1.5}, {"gamma": 0.5, "rescale": True}], ids=str)
def test_streaming_gives_the_same_bytes_for_any_tile_size_and_number_of_threads(tmp_path, monkeypatch, params):
    pair = generic(METHOD, (331, 1709), torch.float16, 3)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, tensor in zip(paths, pair, strict=True):
        save_file({"x.weight": tensor}, path)
    files = []

    def run(threads: int, tile: int) -> None:
        out = tmp_path / f"{len(files)}.safetensors"
        lib_merge.merge(*paths, out=out, method=METHOD.id, params=params, threads=threads, tile=tile, fsync=False)
        files.append(out.read_bytes())

    run(2, 2**18)
    monkeypatch.setattr(tiles, "KEEP_BYTES", 0)
    monkeypatch.setattr(worker.Worker, "_two_passes", None)
    for threads, tile in itertools.product((1, 4), (2**16, 2**18)):
        run(threads, tile)
    assert len(set(files)) == 1
