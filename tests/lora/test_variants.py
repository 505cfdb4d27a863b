"""Variants of the steps that put LoRAs together, which are off by default, against the oracle on dense matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lib_merge.kernels.random import STEPS, draws, stream_key, threshold
from lib_merge.kernels.sparsify import conflict_aware
from lib_merge.lora import VARIANTS, merge_loras
from tests.data.oracles import optimizer_ref as ref
from tests.lora.files import LINEAR, deltas, make
from tests.lora.test_optimize import STRENGTHS, dense, off, refined, vote_of

WEIGHT = "unet.down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.weight"


@pytest.fixture
def three(tmp_path):
    return [make(tmp_path / f"{n}.safetensors", rank, alpha, n) for n, (rank, alpha) in
            enumerate([(4, 2.0), (8, None), (3, 7.0)])]  # fmt: skip


def merged(paths, tmp_path, *variants, **wishes):
    out = tmp_path / "out.safetensors"
    params = dict.fromkeys(variants, True)
    made = merge_loras(*zip(paths, STRENGTHS, strict=True), out=out, params=params, lossless=True, overwrite=True,
                       **wishes)  # fmt: skip
    return made, deltas(out)


def difference(got, stem, want) -> float:
    return off(got[f"{stem}.diff"].reshape(want.shape), want)


def uniforms(shape, number, seed) -> np.ndarray:
    more = () if number == 1 else (str(number),)
    raw = draws(stream_key(seed, WEIGHT, *more), 0, int(np.prod(shape))).numpy().reshape(shape)
    return (raw + 0.5) / STEPS


def test_ties_divides_by_how_many_agree(three, tmp_path):
    made, got = merged(three, tmp_path, "count_divisor", method="ties")
    for stem, xs in dense(three).items():
        want = ref.ties(xs, STRENGTHS, 0.5, vote_of(xs, STRENGTHS), denom="count")
        assert difference(got, stem, want) <= 2e-5
        assert difference(got, stem, ref.ties(xs, STRENGTHS, 0.5, vote_of(xs, STRENGTHS))) > 0.1
    assert not [text for text in made.warnings if "changes nothing there" in text]


def test_rows_vote_by_their_product_with_all_rows(three, tmp_path):
    _, got = merged(three, tmp_path, "projection_vote", method="ties", refinement="enhanced")
    for stem, xs in dense(three).items():
        vote = vote_of(xs, STRENGTHS)

        def kernel(rests, strengths, vote=vote):
            gs, ws = ref.prepare(rests, strengths)
            return ref.columnwise_merge([ref.ties_trim(g, 0.5) for g in gs], ws, vote, score="projection")

        assert difference(got, stem, refined(xs, STRENGTHS, kernel)) <= 5e-5


def test_what_one_lora_alone_uses_is_taken_away(three, tmp_path):
    made, got = merged(three, tmp_path, "drop_selfish", method="weighted_average", refinement="enhanced")
    rows = {row["key"]: row for row in made.rows}
    for stem, xs in dense(three).items():
        mask = ref.tall_consensus_mask(xs, STRENGTHS)
        order = sorted(range(3), key=lambda k: -abs(STRENGTHS[k]) * ref.norm(xs[k]))
        apart = ref.do_orthogonalize([xs[k] for k in order], order="given", max_gain=2.0)
        before = ref.weighted_average(apart, [STRENGTHS[k] for k in order])
        assert difference(got, stem, before * mask) <= 5e-5
        assert rows[stem]["selfish_share"] == pytest.approx(1 - mask.mean(), abs=1e-3)
        told = f"norm {ref.norm(before):.3g} before, {ref.norm(before * mask):.3g} after"
        assert told in rows[stem]["note"]


def test_dampening_is_linear_on_request(three, tmp_path):
    _, got = merged(three, tmp_path, "linear_dampening", method="weighted_sum", sparsify="dare", density=0.6,
                    dampening=0.5, seed=9)  # fmt: skip
    xs, density = dense(three)[LINEAR], threshold(0.6) / STEPS
    thin = [ref.dare(x, uniforms(x.shape, n, 9) < density, density, 0.5, "linear") for n, x in enumerate(xs, 1)]
    assert difference(got, LINEAR, ref.weighted_sum(thin, STRENGTHS)) <= 1e-5


def test_della_drops_as_the_document_has_it_on_request(three, tmp_path):
    _, got = merged(three, tmp_path, "document_della", method="weighted_sum", sparsify="della", density=0.6, seed=9)
    thin = [ref.della(x, uniforms(x.shape, n, 9), 0.6, mode="document") for n, x in enumerate(dense(three)[LINEAR], 1)]
    assert difference(got, LINEAR, ref.weighted_sum(thin, STRENGTHS)) <= 1e-3  # chances are rounded to 1/65536


@pytest.mark.parametrize(("kind", "words"), [("dare", ("linear", "window")), ("della", ("power", "document"))])
def test_variants_hold_where_loras_conflict_too(kind, words):
    x = torch.randn(40, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draws(stream_key(3, "w"), 0, x.numel())
    mask = torch.arange(60).expand(40, 60) < 30
    made = conflict_aware(kind, [x], mask, 0.5, 0.5, [drawn], 0.5, *words)
    u = ((drawn.numpy() + 0.5) / STEPS).reshape(x.shape)
    sparse = ref.dare(x.numpy(), u < 0.5, 0.5, 0.5, "linear") if kind == "dare" else ref.della(
        x.numpy(), u, 0.5, mode="document")  # fmt: skip
    want = ref.only_where(mask.numpy(), sparse, x.numpy())
    assert off(made.tensors[0], want) <= (1e-12 if kind == "dare" else 1e-3)
    assert not made.skipped


def test_the_page_on_auto_names_every_variant():
    page = Path(__file__).parents[2] / "docs" / "optimizer.md"
    assert all(f"| `{name}` | {meaning} |" in page.read_text("utf-8") for name, meaning in VARIANTS.items())
