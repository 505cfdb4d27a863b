"""DARE + TIES: golden values, the independent reference, exact order statistics, the same bytes however it is cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lib_merge
from lib_merge import tiles, worker
from lib_merge.kernels.random import draws, raw_draws, stream_key, threshold
from lib_merge.kernels.registry import method
from tests.data import modes_ref
from tests.kernels.applying import NAME, apply, generic, same_bits

TIES = method("power_up_dare_ties")
ENHANCED = method("power_up_dare_ties_enhanced")
BOTH = pytest.mark.parametrize("chosen", [TIES, ENHANCED], ids=lambda chosen: chosen.id)
SHAPES = [(7,), (6, 5), (4, 3, 3, 3), (), (1,), (129, 65)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
stored = pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)

A = torch.zeros(2, 4)
B = torch.tensor([[0.0, 1, 2, 4], [4, 2, 1, 0]])


# Worked by hand.


def test_the_golden_trim_removes_the_two_smallest_and_keeps_ties_at_the_limit():
    result = apply(TIES, [A, B], {"alpha": 0, "beta": 0.5, "gamma": 1})
    assert result.tolist() == [[0, 0, 2, 4], [4, 2, 0, 0]]


@pytest.mark.parametrize("gamma", [1, 0.5, -2])
def test_the_two_smallest_of_ten_go_and_signs_stay(gamma):
    b = torch.tensor([5.0, -1, 2, -9, 3, 8, -4, 7, 6, -10])
    wanted = gamma * torch.tensor([5.0, 0, 0, -9, 3, 8, -4, 7, 6, -10])
    assert torch.equal(apply(TIES, [0 * b, b], {"alpha": 0, "beta": 0.2, "gamma": gamma}), wanted)


@pytest.mark.parametrize(
    ("beta", "wanted"),
    [
        (0, [0, 0, 4, 8, 0, 0, 2, 0]),
        (0.3, [0, 0, 4, 8, 0, 0, 2, 0]),
        (0.4, [0, 0, 4, 8, 0, 0, 0, 0]),
        (0.7, [0, 0, 0, 8, 0, 0, 0, 0]),
        (0.99, [0, 0, 0, 8, 0, 0, 0, 0]),
        (1, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_golden_draws_leave_three_changes_of_which_a_share_is_trimmed(beta, wanted):
    result = apply(TIES, [A, B], {"alpha": 0.5, "beta": beta, "gamma": 1}, seed=42, name="a.weight")
    assert result.flatten().tolist() == wanted


def test_a_quantile_written_in_decimals_counts_as_written():
    """0.29 of 100 is 29, although 0.29 * 100 is a little less in binary."""
    b = torch.arange(1, 101).float()
    result = apply(TIES, [torch.zeros(100), b], {"alpha": 0, "beta": 0.29, "gamma": 1})
    assert int((result == 0).sum()) == 29


@pytest.mark.parametrize(
    "params", [{"alpha": 1}, {"alpha": 1 - 1e-7}, {"beta": 1}, {"gamma": 0}, {"alpha": 0, "beta": 1}], ids=str
)
def test_what_keeps_nothing_is_a(params):
    a, b = generic(TIES, (50,))
    assert same_bits(apply(TIES, [a, b], params), a)


def test_without_drops_every_survivor_has_the_bits_of_b():
    a, b = generic(TIES, (40, 30))
    assert same_bits(apply(TIES, [a, b], {"alpha": 0, "beta": 0, "gamma": 1}), b)
    result = apply(TIES, [a, b], {"alpha": 0, "beta": 0.4, "gamma": 1})
    assert same_bits(result, torch.where(modes_ref.ties_trim(b - a, b != a, 0.4), b, a))


@BOTH
def test_models_that_differ_nowhere_or_in_one_place(chosen):
    a = torch.tensor([0.0, -0.0, 1, -1, 1e-45])
    assert same_bits(apply(chosen, [a, a]), a)
    b = a.clone()
    b[2] = 3
    alone = {"alpha": 0} if chosen is TIES else {"epsilon": 0}
    assert apply(chosen, [a, b], {"beta": 0.99, "gamma": 1, **alone}).tolist() == b.tolist()


# Against the independent reference.


@shapes
@stored
def test_it_is_the_reference_within_a_few_units_in_the_last_place(shape, stored):
    a, b = [t.to(stored).to(torch.promote_types(stored, torch.float32)) for t in generic(TIES, shape, torch.float64)]
    kind = np.float64 if stored == torch.float64 else np.float32
    for alpha, beta, gamma in itertools.product((0, 0.5, 0.7, 0.9), (0, 0.2, 0.5, 0.95), (1, -0.7)):
        result = apply(TIES, [a, b], {"alpha": alpha, "beta": beta, "gamma": gamma}, seed=7, name="w")
        kept = modes_ref.ties_trim(b - a, modes_ref.dare_keep(shape, alpha, 7, "w"), beta)
        share = gamma * 65536 / threshold(1 - alpha)
        wanted = torch.where(kept, a.double() + share * (b.double() - a.double()), a.double())
        assert torch.allclose(wanted, modes_ref.dare_ties(a, b, alpha, beta, gamma, 7, "w").double(), atol=1e-5)
        scale = torch.maximum(torch.maximum(a.abs(), b.abs()), wanted.abs()).numpy().astype(kind)
        error = (result.double() - wanted).abs().numpy()
        assert (error <= (2 + 2 / (1 - alpha)) * np.spacing(scale)).all()
        assert same_bits(result[~kept], a[~kept])


@pytest.mark.parametrize("beta", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("alpha", [0, 0.5, 0.9])
def test_exactly_that_share_of_the_survivors_goes_whatever_the_drop_rate(alpha, beta):
    """The existing tool trims nothing while beta is at most alpha."""
    size = 20011
    order = torch.from_numpy(np.random.default_rng(5).permutation(size))
    delta = (order + 1).float() * torch.where(order % 2 == 0, 1, -1)
    delta[::7] = 0
    for seed in range(3):
        survivors = int(
            ((raw_draws(stream_key(seed, NAME), 0, size) < threshold(1 - alpha)) & (delta != 0).numpy()).sum()
        )
        result = apply(TIES, [torch.zeros(size), delta], {"alpha": alpha, "beta": beta, "gamma": 1}, seed=seed)
        kept = result != 0
        assert int(kept.sum()) == survivors - math.floor(beta * survivors)
        wanted = delta[kept].double() * 65536 / threshold(1 - alpha)
        assert torch.allclose(result[kept].double(), wanted, rtol=3e-7)


# The limit is an exact order statistic.


def limit_bits(data: np.ndarray, quantile: float, cuts: tuple[int, ...] = (), alpha: float = 0.0, key: int = 1):
    """Bits of the limit that the method's two measures find for the changes `data`, in tiles."""
    delta = torch.from_numpy(data)
    settings = {"alpha": alpha, "beta": quantile, "gamma": 1.0}
    measures: list[object] = []
    for measure in TIES.measures:
        parts = [
            measure.tile(
                torch.zeros(high - low, dtype=delta.dtype),
                delta[low:high],
                **settings,
                draws=draws(key, low, high - low),
                measures=measures,
            )
            for low, high in itertools.pairwise((0, *cuts, len(data)))
        ]
        measures.append(measure.combine(parts))
    return measures[1]


def sorted_limit(data: np.ndarray, quantile: float, kept: np.ndarray | None = None):
    """The same by sorting all of them."""
    magnitudes = np.abs(data if kept is None else data[kept])
    magnitudes = np.sort(magnitudes[magnitudes > 0])
    if magnitudes.size == 0:
        return None
    return int(magnitudes[math.floor(quantile * magnitudes.size)].view(f"i{data.itemsize}"))


def adversaries(size: int, kind: str) -> dict[str, np.ndarray]:
    """Data that defeats samples, brackets and coarse bins."""
    rng = np.random.default_rng(size)
    found = np.finfo(kind)
    normal = rng.standard_normal(size)
    with np.errstate(over="ignore", under="ignore"):
        return {
            "normal": normal.astype(kind),
            "all equal": np.full(size, -0.3, kind),
            "all zero": np.zeros(size, kind),
            "one not zero": np.where(np.arange(size) == size // 2, 2.5, 0).astype(kind),
            "subnormal": (rng.integers(0, 5000, size) * found.smallest_subnormal).astype(kind),
            "huge range": np.clip(np.exp2(rng.uniform(found.minexp, found.maxexp - 1, size)), 0, found.max).astype(
                kind
            ),
            "few values": rng.choice([0, 0.5, -0.5, 0.25, 1e-3], size).astype(kind),
            "half precision": (normal * 1e-3).astype("f2").astype(kind),
            "one bin": (1 + rng.random(size) / 256).astype(kind),
            "ascending": np.arange(size).astype(kind),
            "two scales": np.where(np.arange(size) < size / 2, 1e-6 * normal, 1e6 * normal).astype(kind),
            "largest": np.full(size, found.max, kind),
        }


@pytest.mark.parametrize("kind", ["f4", "f8"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 2**18 - 1, 2**18 + 1])
def test_the_limit_is_what_sorting_gives(size, kind):
    for name, data in adversaries(size, kind).items():
        for quantile in (1e-6, 0.2, 0.5, 0.9999) if size < 2**17 else (0.2, 0.9999):
            cuts = () if size < 2**18 else (2**16, 2**17 + 64)
            assert limit_bits(data, quantile, cuts) == sorted_limit(data, quantile), (name, quantile)


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_the_limit_of_three_million_is_what_sorting_gives(alpha):
    size = 3_000_001
    kept = raw_draws(9, 0, size) < threshold(1 - alpha)
    made = adversaries(size, "f4")
    for name in ("normal", "half precision", "two scales"):
        found = {limit_bits(made[name], 0.2, tuple(range(tile, size, tile)), alpha, 9) for tile in (2**16, 2**18, size)}
        assert found == {sorted_limit(made[name], 0.2, kept)}, name


def test_what_a_tile_reports_is_small_whatever_it_holds():
    for name, data in adversaries(2**18, "f4").items():
        delta = torch.from_numpy(data)
        settings = {"alpha": 0.0, "beta": 0.4, "gamma": 1.0, "draws": draws(1, 0, 2**18)}
        first = TIES.measures[0].tile(torch.zeros(2**18), delta, **settings, measures=[])
        assert first.counts.nbytes <= 2**17, name
        found = TIES.measures[0].combine([first])
        second = TIES.measures[1].tile(torch.zeros(2**18), delta, **settings, measures=[found])
        assert second is None or second.bits.nbytes + second.counts.nbytes <= 2**19, name


# Chance.


def many(chosen, a: torch.Tensor, b: torch.Tensor, seeds: int, **params) -> torch.Tensor:
    """Results under so many seeds, for settings that need no measure but the largest change."""
    keys = [stream_key(seed, NAME) for seed in range(seeds)]
    drawn = torch.from_numpy(np.stack([raw_draws(key, 0, a.numel()) for key in keys]).astype(np.int32))
    pair = [tensor.expand(seeds, -1).clone() for tensor in (a, b)]
    measures = [float((b - a).abs().max()), None, None]
    return chosen.function(*pair, **chosen.check(params), draws=drawn, measures=measures)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 1.0), (0.7, -0.6), (0.9, 1.3)])
def test_without_trim_the_change_has_its_size_on_average(alpha, gamma):
    a, b = generic(TIES, (64,), torch.float64)
    mean = many(TIES, a, b, 1500, alpha=alpha, beta=0, gamma=gamma).mean(0)
    error = (b - a).abs() * abs(gamma) * math.sqrt(alpha / (1 - alpha) / 1500)
    assert bool(((mean - (a + gamma * (b - a))).abs() <= 4.2 * error + 1e-12).all())


@pytest.mark.parametrize("zeta", [0.0, 0.4])
def test_without_trim_the_enhanced_change_has_its_probability_on_average(zeta):
    a, b = generic(ENHANCED, (64,), torch.float64)
    mean = many(ENHANCED, a, b, 2000, beta=0, gamma=0.8, delta=1.5, epsilon=0.1, zeta=zeta).mean(0)
    chance = ((b - a).abs() / (b - a).abs().max()).pow(1.5).clamp(min=0.1)
    error = 0.8 * (b - a).abs() * (1 - zeta) * (chance * (1 - chance) / 2000).sqrt()
    assert bool(((mean - (a + 0.8 * chance * (b - a))).abs() <= 4.2 * error + 1e-4).all())


# The enhanced form against its formula in float64.


def enhanced_formula(a, b, raw, beta, gamma, delta, epsilon, zeta):
    """Result, and how far every decision was from the other one (a draw from p, a product from the limit)."""
    difference = b - a
    largest = max(abs(x) for x in difference)
    chance = [min(max((abs(x) / largest) ** max(delta, 0.001), epsilon), 1.0) for x in difference]
    uniform = [(int(r) + 0.5) / 65536 for r in raw]
    keep = [float(u < p) for u, p in zip(uniform, chance, strict=True)]
    product = [(k + zeta * (p - k)) * x for k, p, x in zip(keep, chance, difference, strict=True)]
    alive = sorted(abs(x) for x in product if x != 0)
    limit = alive[math.floor(beta * len(alive))]
    margin = min(abs(u - p) for u, p in zip(uniform, chance, strict=True))
    gap = min((abs(abs(x) - limit) for x in product if abs(x) != limit and x), default=1.0)
    out = [x + gamma * y if y != 0 and abs(y) >= limit else x for x, y in zip(a, product, strict=True)]
    return np.array(out), min(margin, gap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0, 2.0, 3.7])
def test_the_enhanced_form_is_its_formula(delta, zeta, dtype):
    compared = 0
    for seed, beta, epsilon in itertools.product(range(4), (0.2, 0.6), (0.0, 0.05)):
        a, b = generic(ENHANCED, (15, 20), dtype, seed=seed)
        params = {"beta": beta, "gamma": 0.9, "delta": delta, "epsilon": epsilon, "zeta": zeta}
        raw = raw_draws(stream_key(seed, NAME), 0, 300)
        wanted, margin = enhanced_formula(*[t.double().flatten().numpy() for t in (a, b)], raw, **params)
        if margin > 1e-7 or (zeta == 1 and beta == 0.2):
            compared += 1
            result = apply(ENHANCED, [a, b], params, seed=seed).double().flatten().numpy()
            assert np.abs(result - wanted).max() <= (2e-6 if dtype == torch.float32 else 1e-13)
    assert compared > 2


@pytest.mark.parametrize("zeta", [0.0, 0.5, 1.0])
def test_the_enhanced_form_trims_exactly_its_share_of_what_is_not_zero(zeta):
    size = 30011
    order = torch.from_numpy(np.random.default_rng(5).permutation(size))
    delta = (order.double() + 1) * torch.where(order % 2 == 0, 1, -1)
    for seed in range(3):
        params = {"gamma": 1, "delta": 1, "epsilon": 0.01, "zeta": zeta}
        before, after = (
            int((apply(ENHANCED, [0 * delta, delta], {**params, "beta": beta}, seed=seed) != 0).sum())
            for beta in (0, 0.3)
        )
        assert after == before - math.floor(0.3 * before)


def test_the_enhanced_form_gives_b_where_a_change_stays_whole_and_a_where_it_goes():
    a, b = generic(ENHANCED, (200, 60))
    a[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    b[0, :3] = torch.tensor([-0.0, -0.0, 0.0])
    result = apply(ENHANCED, [a, b], {"beta": 0.2, "gamma": 1, "zeta": 0})
    is_a, is_b = (result.view(torch.int32) == t.view(torch.int32) for t in (a, b))
    assert bool((is_a | is_b).all())
    assert 0 < int((is_b & ~is_a).sum()) < 6000
    largest = (b - a).abs().argmax()
    assert bool(is_b.flatten()[largest])
    assert same_bits(apply(ENHANCED, [a, b], {"beta": 0, "gamma": 1, "epsilon": 1, "zeta": 0.3}), b)


# The same bytes however a run is carried out.


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_streaming_gives_the_same_bytes_for_any_tile_size_and_number_of_threads(tmp_path, monkeypatch, chosen, dtype):
    made = {key: generic(chosen, shape, dtype, 3) for key, shape in {"x.weight": (331, 1709), "y.bias": (77,)}.items()}
    for slot, name in enumerate("ab"):
        save_file({key: pair[slot] for key, pair in made.items()}, tmp_path / f"{name}.safetensors")
    files = []

    def run(threads: int, tile: int) -> None:
        out = tmp_path / f"{len(files)}.safetensors"
        paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
        lib_merge.merge(*paths, out=out, method=chosen.id, seed=5, threads=threads, tile=tile, fsync=False)
        files.append(out.read_bytes())

    run(2, 2**18)
    monkeypatch.setattr(tiles, "KEEP_BYTES", 0)
    monkeypatch.setattr(worker.Worker, "_two_passes", None)
    for threads, tile in itertools.product((1, 4), (2**16, 2**18)):
        run(threads, tile)
    assert len(files) == 5
    assert len(set(files)) == 1
    found = load_file(tmp_path / "0.safetensors")
    for key, pair in made.items():
        wide = [tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in pair]
        assert same_bits(found[key], apply(chosen, wide, seed=5, name=key).to(dtype)), key
