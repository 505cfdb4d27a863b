"""Low-rank algebra against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch

from lib_merge.kernels import lowrank


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def falling(rows: int, columns: int, rate: float) -> torch.Tensor:
    """A matrix with singular values rate**i."""
    u, _ = torch.linalg.qr(random(rows, min(rows, columns), seed=1))
    v, _ = torch.linalg.qr(random(columns, min(rows, columns), seed=2))
    return u @ torch.diag(rate ** torch.arange(min(rows, columns), dtype=torch.float64)) @ v.T


@pytest.mark.parametrize("weights", [(0.7, 0.4), (0.7, -0.4), (-1.0, -2.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joined_is_the_sum_for_any_signs(weights, dtype):
    terms = [
        (random(9, r, seed=r, dtype=dtype), random(r, 7, seed=r + 9, dtype=dtype), w)
        for r, w in zip((4, 2), weights, strict=True)
    ]
    up, down = lowrank.joined(terms)
    want = sum(w * (u.double() @ d.double()) for u, d, w in terms)
    error = (up.double() @ down.double() - want).norm()
    assert error <= (1e-6 if dtype == torch.float32 else 1e-14) * max(float(want.norm()), 1)
    assert up.shape[1] == (sum(r for r, w in zip((4, 2), weights, strict=True) if w) or 4)


def test_a_weight_of_1_changes_no_bit():
    up, down = random(9, 4, dtype=torch.float32), random(4, 7, seed=1, dtype=torch.float32)
    left, right = lowrank.joined([(up, down, 1.0), (up * 3, down, 0.0)])
    assert torch.equal(left, up)
    assert torch.equal(right, down)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(30, 20, 8), (20, 30, 8), (10, 12, 25), (5, 5, 1)])
def test_factors_have_the_singular_values_of_their_product(rows, columns, rank):
    up, down = random(rows, rank), random(rank, columns, seed=1)
    dense = torch.linalg.svd(up @ down, full_matrices=False)
    found = lowrank.spectrum(up, down)
    torch.testing.assert_close(found.s, dense.S[: len(found.s)], rtol=1e-10, atol=1e-10)
    for keep in (1, 3, rank):
        left, right = lowrank.cut(found, keep)
        best = float((dense.S[keep:] ** 2).sum().sqrt() / dense.S.norm())
        assert abs(lowrank.residual(up @ down, left, right) - best) <= 1e-5
        assert abs(lowrank.cut_error(found, keep) - best) <= 1e-7
        assert left.shape[1] == min(keep, rows, columns, rank)


def test_factors_of_a_cut_are_balanced_and_their_signs_settled():
    left, right = lowrank.cut(lowrank.spectrum(random(30, 8), random(8, 20, seed=1)), 5)
    torch.testing.assert_close(left.norm(dim=0), right.norm(dim=1))
    assert (left.gather(0, left.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
def test_a_sample_is_nearly_as_good_as_the_best(rate):
    matrix = falling(120, 90, rate)
    best = lowrank.cut_error(lowrank.dense_spectrum(matrix), 10)
    found = lowrank.sampled_spectrum(matrix, 10, 0, "m")
    assert lowrank.residual(matrix, *lowrank.cut(found, 10)) <= best * 1.01
    assert lowrank.cut_error(found, 10) == pytest.approx(lowrank.residual(matrix, *lowrank.cut(found, 10)), rel=1e-6)


# Eight singular values of 1, then eight of equal size: an error of rank 8 is √(8·t²/(8 + 8·t²)) = t/√(1 + t²).
TAILS = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8]


def with_tail(rows: int, columns: int, tail: float) -> torch.Tensor:
    u, _ = torch.linalg.qr(random(rows, 16, seed=1))
    v, _ = torch.linalg.qr(random(columns, 16, seed=2))
    return (u[:, :8] @ v[:, :8].T) + tail * (u[:, 8:] @ v[:, 8:].T)


@pytest.mark.parametrize("shape", [(120, 90), (90, 300)])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("most", [8, 12])
def test_errors_are_right_at_any_size(shape, tail, most):
    matrix, want = with_tail(*shape, tail), tail / math.sqrt(1 + tail**2)
    for found in (lowrank.dense_spectrum(matrix), lowrank.sampled_spectrum(matrix, most, 0, "m")):
        assert lowrank.error_of(matrix, found, 8) == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("shape", [(120, 90), (90, 300)])
@pytest.mark.parametrize("tail", [tail for tail in TAILS if tail >= 1e-6])
@pytest.mark.parametrize("most", [8, 12])
def test_errors_of_float32_are_right_down_to_its_own_rounding(shape, tail, most):
    matrix, want = with_tail(*shape, tail).float(), tail / math.sqrt(1 + tail**2)
    for found in (lowrank.dense_spectrum(matrix), lowrank.sampled_spectrum(matrix, most, 0, "m")):
        # The matrix itself is rounded by up to 6e-8 of its entries, and so are U's columns.
        assert lowrank.error_of(matrix, found, 8) == pytest.approx(want, rel=5e-3, abs=2e-7)


@pytest.mark.parametrize("tail", [1e-2, 1e-3, 1e-4])
def test_a_small_error_is_reached_without_more_rank_than_it_takes(tail):
    matrix = with_tail(120, 90, tail).float()
    for found in (lowrank.dense_spectrum(matrix), lowrank.sampled_spectrum(matrix, 20, 0, "m")):
        for allowed, rank in ((1.1 * tail, 8), (0.2 * tail, 16)):  # (16 − 15)/16 of the tail's squares is 0.35 of it
            assert lowrank.RULES["frobenius"](found.s, math.sqrt(1 - allowed**2), found.total) == rank


def test_nothing_is_lost_at_full_rank_nor_of_nothing():
    matrix = random(20, 30, dtype=torch.float32)
    assert lowrank.error_of(matrix, lowrank.dense_spectrum(matrix), 20) == 0
    assert lowrank.error_of(matrix * 0, lowrank.dense_spectrum(matrix * 0), 5) == 0


@pytest.mark.parametrize("shape", [(320, 900), (900, 320), (300, 300)])
@pytest.mark.parametrize("kind", ["noise", "signal", "low rank"])
def test_a_sample_of_float32_is_within_6_parts_of_1000(shape, kind):
    rows, columns = shape
    matrix = falling(rows, columns, 0.97) + 0.02 * random(rows, columns, seed=3) / math.sqrt(rows)
    if kind == "noise":
        matrix = random(rows, columns, seed=3)
    elif kind == "low rank":
        matrix = random(rows, 4, seed=3) @ random(4, columns, seed=4)
    found = lowrank.sampled_spectrum(matrix.float(), 64, 0, "m")
    left, right = (factor.double() for factor in lowrank.cut(found, 64))
    best = float((torch.linalg.svdvals(matrix)[64:] ** 2).sum().sqrt() / matrix.norm())
    assert float((matrix - left @ right).norm() / matrix.norm()) <= max(1.006 * best, 3e-6)
    assert bool(left.isfinite().all() and right.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_the_norm_of_a_product_also_where_its_parts_cancel(dtype, sign, size):
    up, down = (size * random(300, 8)).to(dtype), random(8, 200, seed=1, dtype=dtype)
    both, shared = torch.cat([up, sign * up], 1), torch.cat([down, down])
    want = float((both.double() @ shared.double()).norm())
    scale = float((up.double() @ down.double()).norm())
    assert lowrank.product_norm(both, shared) == pytest.approx(want, rel=1e-6, abs=1e-6 * scale)


def test_a_sample_depends_on_seed_and_name_alone():
    matrix = falling(60, 50, 0.9)
    again = [lowrank.sampled_spectrum(matrix, 5, *key).u for key in ((0, "m"), (0, "m"), (1, "m"), (0, "n"))]
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])
    assert not torch.equal(again[0], again[3])


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 3)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4, 0.0])
def test_whole_is_exact(shape, size):
    matrix = random(*shape, dtype=torch.float32) * size
    up, down = lowrank.whole(matrix)
    assert up.shape[1] == min(shape)
    assert torch.equal(up @ down, matrix)


def test_clamping_keeps_the_share_of_the_smallest():
    matrix = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    assert torch.equal(lowrank.clamped(matrix, 1.0), matrix)
    assert lowrank.clamped(matrix, 0.75).tolist() == [[1, -2], [3, -3]]
    assert lowrank.clamped(matrix, 0.7).tolist() == [[1, -2], [3, -3]]
    assert lowrank.clamped(matrix, 0.5).tolist() == [[1, -2], [2, -2]]


S = torch.tensor([8.0, 4.0, 2.0, 2.0])  # Σ 16, Σσ² 88


@pytest.mark.parametrize(
    ("rule", "share", "rank"),
    [
        ("ratio", 0.2, 4),
        ("ratio", 0.25, 2),  # more than, not equal
        ("ratio", 0.6, 1),
        ("cumulative", 0.5, 1),
        ("cumulative", 0.51, 2),
        ("cumulative", 0.75, 2),
        ("cumulative", 1.0, 4),
        ("frobenius", math.sqrt(64 / 88), 1),
        ("frobenius", math.sqrt(65 / 88), 2),
        ("frobenius", math.sqrt(80 / 88), 2),
        ("frobenius", 1.0, 4),
        ("frobenius", 0.0, 1),
    ],
)
def test_shares(rule, share, rank):
    assert lowrank.RULES[rule](S, share, 88.0) == rank


def test_numerical_rank():
    assert lowrank.rank_of(lowrank.spectrum(random(20, 3), random(3, 15, seed=1))) == 3
    doubled = random(20, 2)
    assert lowrank.rank_of(lowrank.spectrum(torch.cat([doubled, doubled], 1), random(4, 15, seed=1))) == 2
    assert lowrank.rank_of(lowrank.spectrum(torch.zeros(5, 2), torch.zeros(2, 5))) == 0
