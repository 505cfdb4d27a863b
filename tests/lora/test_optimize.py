"""`lora merge --method auto` and its strategies, end to end, against the oracle on dense matrices."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge import verify
from lib_merge.errors import MergeError
from lib_merge.kernels.random import STEPS, draws, stream_key, threshold
from lib_merge.lora import merge_loras
from tests.data.oracles import optimizer_ref as ref
from tests.lora.files import CONV, LINEAR, SIZES, TEXT, deltas, generator, make, relative

STRENGTHS = (0.7, -0.4, 1.0)


@pytest.fixture
def three(tmp_path):
    return [make(tmp_path / f"{n}.safetensors", rank, alpha, n) for n, (rank, alpha) in
            enumerate([(4, 2.0), (8, None), (3, 7.0)])]  # fmt: skip


def dense(paths) -> dict[str, list[np.ndarray]]:
    found = [deltas(path) for path in paths]
    return {stem: [one[stem].numpy() for one in found] for stem in found[0]}


def merged(paths, strengths, tmp_path, **wishes):
    out = tmp_path / "out.safetensors"
    made = merge_loras(*zip(paths, strengths, strict=True), out=out, overwrite=True, **wishes)
    return made, deltas(out)


def off(got: torch.Tensor, want: np.ndarray) -> float:
    return relative(got, torch.from_numpy(want))


ORACLE = {
    "weighted_sum": ref.weighted_sum,
    "weighted_average": ref.weighted_average,
    "slerp": ref.slerp,
    "ties": lambda xs, s: ref.ties(xs, s, 0.5, vote_of(xs, s)),
    "consensus": ref.consensus,
}


def vote_of(xs, strengths) -> str:
    return "total" if ref.group_metrics(xs, strengths)["ratio"] > 2 else "frequency"


@pytest.mark.parametrize("method", ["weighted_sum", "weighted_average", "slerp"])
@pytest.mark.parametrize("strengths", [STRENGTHS, (1.0, 1.0, 1.0), (-2.0, 0.3, 0.3)])
def test_linear_ways_are_exact_at_the_added_ranks(three, tmp_path, method, strengths):
    made, got = merged(three, strengths, tmp_path, method=method)
    for stem, xs in dense(three).items():
        assert off(got[stem], ORACLE[method](xs, strengths)) <= 1e-6
        assert load_file(tmp_path / "out.safetensors")[f"{stem}.lora_down.weight"].shape[0] == 15
    assert made.error == 0


@pytest.mark.parametrize("method", ["ties", "consensus"])
@pytest.mark.parametrize("strengths", [STRENGTHS, (1.0, 1.0, 1.0)])
def test_what_is_no_product_is_stored_whole_where_that_is_asked_for(three, tmp_path, method, strengths):
    _, got = merged(three, strengths, tmp_path, method=method, lossless=True)
    for stem, xs in dense(three).items():
        stored = got[f"{stem}.diff"]
        assert stored.shape == SIZES[stem]
        assert off(stored.reshape(xs[0].shape), ORACLE[method](xs, strengths)) <= 2e-5


@pytest.mark.parametrize("method", ["ties", "consensus"])
def test_what_is_no_product_is_cut_and_its_error_told(three, tmp_path, method):
    made, got = merged(three, (1.0, 1.0, 1.0), tmp_path, method=method)
    rows = {row["key"]: row for row in made.rows}
    for stem, xs in dense(three).items():
        want = ORACLE[method](xs, (1.0, 1.0, 1.0))
        row = rows[stem]
        assert off(got[stem], want) == pytest.approx(row["svd_error"], abs=1e-5)
        best = ref.svd_lora(want, int(row["rank"]))[2]
        assert row["svd_error"] == pytest.approx(best, abs=1e-4)
        assert row["svd_error"] <= 0.05 or row["rank"] == 15
    over = [stem for stem, row in rows.items() if row["svd_error"] > 0.05]
    told = [text for text in made.warnings if "--refinement maximum" in text and "--lossless" in text]
    assert bool(told) == bool(over)
    assert all(stem in told[0] for stem in over)


def test_an_error_that_is_allowed_gives_the_smallest_rank(three, tmp_path):
    made, _ = merged(three, (1.0, 1.0, 1.0), tmp_path, method="ties", max_error=0.3)
    for row in made.rows:
        xs = dense(three)[row["key"]]
        want = ORACLE["ties"](xs, (1.0, 1.0, 1.0))
        assert row["rank"] == min(ref.rank_for(want, 0.3), 15)
    assert merged(three, (1.0, 1.0, 1.0), tmp_path, method="ties", max_rank=2)[0].ranks == {2: 3}
    assert merged(three, (1.0, 1.0, 1.0), tmp_path, method="ties", rank=7)[0].ranks == {7: 3}


def refined(xs, strengths, kernel, orthogonal=True):
    """Split, orthogonalise by strength-scaled norm, merge, add what was split off."""
    rests, selfish, _ = ref.tall_split(xs, strengths, lam=3.0 if len(xs) == 2 else 1.0)
    if orthogonal:
        order = sorted(range(len(xs)), key=lambda k: -abs(strengths[k]) * ref.norm(rests[k]))
        made = ref.do_orthogonalize([rests[k] for k in order], order="given", max_gain=2.0)
        rests = [made[order.index(k)] for k in range(len(xs))]
    return kernel(rests, strengths) + selfish


@pytest.mark.parametrize("method", ["weighted_sum", "weighted_average", "slerp", "ties", "consensus"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_common_basis_holds_every_strategy_exactly(three, tmp_path, method, count):
    """Also TIES, whose dense result has full rank."""
    paths, strengths = three[:count], STRENGTHS[:count]
    made, got = merged(paths, strengths, tmp_path, method=method, refinement="maximum", auto_strength=False)
    assert made.error == 0
    assert not [text for text in made.warnings if "--lossless" in text]
    for stem, xs in dense(paths).items():
        vote = vote_of(xs, strengths)
        kernel = (lambda cs, s, vote=vote: ref.ties(cs, s, 0.5, vote)) if method == "ties" else ORACLE[method]
        chain = partial(refined, kernel=kernel, orthogonal=method != "consensus")
        want, *_ = ref.knots_merge(xs, strengths, chain)
        rank = load_file(tmp_path / "out.safetensors")[f"{stem}.lora_down.weight"].shape[0]
        assert rank <= (12 if count == 2 else 15)
        # The basis is unique up to signs, which turn all LoRAs alike.
        assert off(got[stem], want) <= 5e-5


@pytest.mark.parametrize("method", ["weighted_average", "slerp", "consensus"])
@pytest.mark.parametrize("count", [2, 3])
def test_enhanced_keeps_what_is_one_lora_s_own(three, tmp_path, method, count):
    paths, strengths = three[:count], STRENGTHS[:count]
    made, got = merged(paths, strengths, tmp_path, method=method, refinement="enhanced", lossless=True)
    rows = {row["key"]: row for row in made.rows}
    for stem, xs in dense(paths).items():
        want = refined(xs, strengths, ORACLE[method], method != "consensus")
        assert off(got[f"{stem}.diff"].reshape(want.shape), want) <= 5e-5
        _, _, owner = ref.tall_split(xs, strengths, lam=3.0 if count == 2 else 1.0)
        assert rows[f"{stem}"]["selfish_share"] == pytest.approx((owner >= 0).mean(), abs=1e-3)


def test_enhanced_ties_votes_by_rows(three, tmp_path):
    _, got = merged(three, STRENGTHS, tmp_path, method="ties", refinement="enhanced", lossless=True)
    for stem, xs in dense(three).items():
        vote = vote_of(xs, STRENGTHS)
        want = refined(xs, STRENGTHS, lambda r, s, v=vote: ref.ties(r, s, 0.5, v, columnwise=True))
        assert off(got[f"{stem}.diff"].reshape(want.shape), want) <= 5e-5


def test_a_weight_that_one_lora_alone_changes_takes_it_as_it_is(tmp_path):
    a = make(tmp_path / "a.safetensors", stems=(LINEAR,))
    b = make(tmp_path / "b.safetensors", seed=1, stems=(LINEAR, CONV))
    for method in ("auto", "ties", "consensus", "weighted_average", "slerp"):
        made, got = merged([a, b], (0.5, 0.25), tmp_path, method=method)
        assert relative(got[CONV], 0.25 * deltas(b)[CONV]) <= 1e-7
        row = next(row for row in made.rows if row["key"] == CONV)
        assert (row["strategy"], row["n"]) == ("weighted_sum", 1)


@pytest.mark.parametrize("method", ["auto", "weighted_average", "slerp", "consensus", "ties"])
def test_equal_loras_give_the_lora(tmp_path, method):
    a = make(tmp_path / "a.safetensors", 4, 2.0, 1)
    wishes = {"density": 1.0} if method == "ties" else {}
    _, got = merged([a, a, a], (1.0, 1.0, 1.0), tmp_path, method=method, **wishes)
    if method != "consensus":  # which leaves small directions out
        assert all(relative(got[stem], delta) <= 1e-5 for stem, delta in deltas(a).items())
    assert all(float(got[s].norm() / d.norm()) == pytest.approx(1, abs=1e-4) for s, d in deltas(a).items())


@pytest.mark.parametrize("refinement", ["enhanced", "maximum"])
@pytest.mark.parametrize("method", ["weighted_average", "slerp", "ties"])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_near_duplicates_are_not_halved_by_a_refinement(tmp_path, refinement, method, noise):
    a = make(tmp_path / "a.safetensors", 4, 2.0, 1)
    tensors = load_file(a)
    mix = generator(9)
    moved = {key: x * (1 + noise * torch.randn(x.shape, generator=mix)) if x.dim() else x for key, x in tensors.items()}
    save_file(moved, tmp_path / "b.safetensors")
    paths = [a, tmp_path / "b.safetensors"]
    wishes = {"density": 1.0} if method == "ties" else {}
    _, got = merged(paths, (1.0, 1.0), tmp_path, method=method, refinement=refinement, **wishes)
    assert all(relative(got[stem], delta) <= 1e-5 + 20 * noise for stem, delta in deltas(a).items())


def test_auto_strength_keeps_equal_loras_at_the_size_of_one(tmp_path):
    """By default of the sums that the optimizer makes; opposite strengths cancel and are not made smaller."""
    a = make(tmp_path / "a.safetensors", 4, 2.0, 1)
    for strengths in ((1.0, 1.0), (0.5, 1.0)):
        _, got = merged([a, a], strengths, tmp_path, method="auto", scope="additive")
        assert all(relative(got[stem], delta) <= 1e-6 for stem, delta in deltas(a).items())
        _, got = merged([a, a], strengths, tmp_path, method="auto", scope="additive", auto_strength=False)
        assert all(relative(got[stem], sum(strengths) * delta) <= 1e-6 for stem, delta in deltas(a).items())
    _, got = merged([a, a], (1.0, -0.5), tmp_path, method="auto", scope="additive")
    assert all(relative(got[stem], 0.5 * delta) <= 1e-5 for stem, delta in deltas(a).items())


def test_auto_strength_is_the_oracle_s(three, tmp_path):
    _, got = merged(three, STRENGTHS, tmp_path, method="weighted_sum", auto_strength=True)
    for stem, xs in dense(three).items():
        gram = np.array([[ref.dot(x, y) for y in xs] for x in xs])
        want = ref.weighted_sum(xs, STRENGTHS) * ref.auto_strength(gram, STRENGTHS)
        assert off(got[stem], want) <= 1e-6


def test_without_normalize_a_common_strength_counts(three, tmp_path):
    _, got = merged(three, (0.5, 0.5, 0.5), tmp_path, method="weighted_average", normalize=False)
    _, same = merged(three, (1.0, 1.0, 1.0), tmp_path, method="weighted_average", normalize=False)
    for stem, xs in dense(three).items():
        assert off(got[stem], 0.5 * ref.weighted_average(xs, (1, 1, 1))) <= 1e-6  # Σs²/Σ|s| = 0.5
        assert off(same[stem], ref.weighted_average(xs, (1, 1, 1))) <= 1e-6
    made, _ = merged(three, (0.5, 0.5, 0.5), tmp_path, method="slerp")
    assert any("changes nothing" in note for note in made.notes)
    made, _ = merged(three, (1.0, 1.0, 1.0), tmp_path, method="slerp")
    assert not any("changes nothing" in note for note in made.notes)


def related(tmp_path, share: float, name: str, seed: int = 0):
    """Two large LoRAs of rank 16 of that cosine, about normally distributed."""
    random = generator(seed)
    stem = LINEAR
    up, other = (torch.randn(200, 16, generator=random) for _ in range(2))
    down, other_down = (torch.randn(16, 300, generator=random) for _ in range(2))
    a, b = tmp_path / f"{name}a.safetensors", tmp_path / f"{name}b.safetensors"
    save_file({f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}, a)
    mixed_up = torch.cat([share * up, math.sqrt(1 - share * share) * other], 1)
    mixed = {f"{stem}.lora_up.weight": mixed_up, f"{stem}.lora_down.weight": torch.cat([down, other_down], 0)}
    save_file(mixed, b)
    return [a, b]


@pytest.mark.parametrize(("cosine", "strategy"), [(-0.6, "ties"), (0.0, "slerp"), (0.5, "ties"), (0.97, "consensus")])
def test_auto_takes_what_the_numbers_call_for(tmp_path, cosine, strategy):
    paths = related(tmp_path, cosine, "x")
    made, got = merged(paths, (1.0, 1.0), tmp_path, method="auto", lossless=True)
    assert made.strategies == {strategy: 1}
    (row,) = made.rows
    assert row["cosine"] == pytest.approx(cosine, abs=0.03)
    assert row["sign_conflict"] == pytest.approx(math.acos(row["cosine"]) / math.pi, abs=0.02)
    assert row["conflict_expected"] == pytest.approx(math.acos(row["cosine"]) / math.pi, abs=1e-9)
    assert row["reason"]
    xs = dense(paths)[LINEAR]
    (change,) = got.values()
    assert off(change.reshape(xs[0].shape), ORACLE[strategy](xs, (1.0, 1.0))) <= 5e-4


@pytest.mark.parametrize("method", ["auto", "ties"])
def test_global_carries_its_decision_out(tmp_path, method):
    """Of a conflicting and an unrelated weight, by the one decision that both get."""
    random = generator(4)
    a, b = make(tmp_path / "a.safetensors", 8, None, 1), tmp_path / "b.safetensors"
    tensors = load_file(a)
    changed = {
        key: torch.randn(tensor.shape, generator=random) if key.startswith(CONV) else tensor
        for key, tensor in tensors.items()
    }
    save_file(changed, b)
    each, _ = merged([a, b], (1.0, 1.0), tmp_path, method="auto")
    assert len(each.strategies) > 1
    made, got = merged([a, b], (1.0, 1.0), tmp_path, method=method, scope="global", lossless=True)
    rows = {row["key"]: row["strategy"] for row in made.rows}
    assert rows[CONV] == rows[LINEAR]
    if method != "auto":
        assert rows[CONV] == method
    for stem, xs in dense([a, b]).items():
        if rows[stem] in ("ties", "weighted_average", "slerp"):
            change = got.get(stem, got.get(f"{stem}.diff"))
            assert off(change.reshape(xs[0].shape), ORACLE[rows[stem]](xs, (1.0, 1.0))) <= 2e-5


def test_additive_makes_sums_of_all(three, tmp_path):
    made, got = merged(three, STRENGTHS, tmp_path, method="auto", scope="additive", auto_strength=False)
    assert made.strategies == {"weighted_sum": 3}
    for stem, xs in dense(three).items():
        assert off(got[stem], ref.weighted_sum(xs, STRENGTHS)) <= 1e-6


def test_text_encoders_alone_still_count(three, tmp_path):
    """A LoRA of strength 0 on the denoiser and more on the text encoder takes part there."""
    out = tmp_path / "out.safetensors"
    merge_loras((three[0], 1.0), (three[1], 0.0, 0.5), out=out, method="weighted_average")
    got, changes = deltas(out), dense(three[:2])
    assert off(got[LINEAR], changes[LINEAR][0]) <= 1e-6
    assert off(got[TEXT], ref.weighted_average(changes[TEXT], (1.0, 0.5))) <= 1e-6


def test_dare_draws_by_seed_name_number_and_element_alone(three, tmp_path):
    _, got = merged(three, STRENGTHS, tmp_path, method="weighted_sum", sparsify="dare", density=0.6, seed=9,
                       lossless=True)  # fmt: skip
    limit = threshold(0.6)
    names = {LINEAR: "unet.down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.weight"}
    for stem, xs in dense(three).items():
        if stem not in names:
            continue
        thin = []
        for number, x in enumerate(xs, 1):
            more = () if number == 1 else (str(number),)
            raw = draws(stream_key(9, names[stem], *more), 0, x.size).numpy().reshape(x.shape)
            thin.append(ref.dare(x, raw < limit, limit / STEPS))
        assert off(got[f"{stem}.diff"].reshape(xs[0].shape), ref.weighted_sum(thin, STRENGTHS)) <= 1e-5
    same, other = (
        merged(three, STRENGTHS, tmp_path, method="slerp", sparsify="dare", seed=seed)[1] for seed in (9, 10)
    )
    again = merged(three, STRENGTHS, tmp_path, method="slerp", sparsify="dare", seed=9, threads=1)[1]
    assert all(torch.equal(same[stem], again[stem]) for stem in same)
    assert not torch.equal(same[LINEAR], other[LINEAR])


def test_dropping_where_unrelated_loras_disagree_is_left_out_and_said(tmp_path):
    paths = related(tmp_path, 0.0, "x")
    made, got = merged(paths, (1.0, 1.0), tmp_path, method="weighted_average", sparsify="della_conflict", lossless=True)
    assert "nothing dropped" in made.rows[0]["note"]
    xs = dense(paths)[LINEAR]
    (change,) = got.values()
    assert off(change.reshape(xs[0].shape), ref.weighted_average(xs, (1.0, 1.0))) <= 1e-5


def test_conflict_modes_leave_entries_out(three, tmp_path):
    _, got = merged(three, (1.0, 1.0, 1.0), tmp_path, method="weighted_sum", lossless=True,
                    conflict_modes=["all", "low_conflict", "high_conflict"])  # fmt: skip
    for stem, xs in dense(three).items():
        elected = ref.ties_elect(xs, [1.0] * 3)
        agree = [np.sign(x) == elected for x in xs]
        want = xs[0] + np.where(agree[1], xs[1], 0) + np.where(agree[2], 0, xs[2])
        assert off(got[f"{stem}.diff"].reshape(want.shape), want) <= 1e-5


def test_key_filters_leave_weights_out(tmp_path):
    a = make(tmp_path / "a.safetensors", seed=1, stems=(LINEAR, CONV))
    b = make(tmp_path / "b.safetensors", seed=2, stems=(CONV, TEXT))
    for method in ("concat", "auto"):
        _, got = merged([a, b], (1.0, 1.0), tmp_path, method=method, key_filters=["shared_only", "all"])
        assert got.keys() == {CONV, TEXT}
        made, got = merged([a, b], (1.0, 1.0), tmp_path, method=method, key_filters=["unique_only", "all"])
        assert got.keys() == {LINEAR, CONV, TEXT}
        assert relative(got[CONV], deltas(b)[CONV]) <= 1e-6
    made, got = merged([a, b], (1.0, 1.0), tmp_path, method="auto", key_filters=["unique_only", "unique_only"])
    assert got.keys() == {LINEAR, TEXT}
    assert any("1 weights" in note for note in made.notes)
    with pytest.raises(MergeError, match="1 values of key_filter for 2 LoRAs"):
        merged([a, b], (1.0, 1.0), tmp_path, key_filters=["all"])


@pytest.mark.parametrize(
    "wishes",
    [{"method": "auto"}, {"method": "ties"}, {"method": "ties", "refinement": "maximum", "sparsify": "della"},
     {"method": "consensus", "refinement": "enhanced"}, {"method": "auto", "output_strength": "auto"}],
)  # fmt: skip
def test_the_bytes_do_not_depend_on_threads_and_the_recipe_gives_them_again(three, tmp_path, wishes):
    outs = [tmp_path / f"{threads} threads.safetensors" for threads in (1, 3)]
    for out, threads in zip(outs, (1, 3), strict=True):
        merge_loras(*zip(three, STRENGTHS, strict=True), out=out, threads=threads, **wishes)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert verify(outs[0]).ok


@pytest.mark.parametrize("method", ["auto", "weighted_average", "ties", "consensus"])
def test_the_order_of_the_stack_changes_nothing_but_rounding(three, tmp_path, method):
    """Random and ordered ways excepted: SLERP of three and more that have equal strengths, sparsification."""
    wishes = {"profile": "classic"} if method == "auto" else {}
    strengths = (1.0, -0.5, 0.7)
    made, got = merged(three, strengths, tmp_path, method=method, lossless=True, **wishes)
    turned, back = merged(three[::-1], strengths[::-1], tmp_path, method=method, lossless=True, **wishes)
    assert made.strategies == turned.strategies
    assert all(relative(back[stem], change) <= 1e-5 for stem, change in got.items())


def test_halves_are_cast_once_at_the_end(tmp_path):
    """Changes of 1e-5, whose products are below what fp16 holds."""
    paths = [make(tmp_path / f"{n}.safetensors", 4, 2.0, n) for n in range(2)]
    small = []
    for path in paths:
        tensors = {key: t if key.endswith("alpha") else (t * 3e-4).half() for key, t in load_file(path).items()}
        save_file(tensors, path)
        small.append(path)
    _, got = merged(small, (1.0, 1.0), tmp_path, method="ties", refinement="maximum")
    _, wide = merged(small, (1.0, 1.0), tmp_path, method="ties", refinement="maximum", save_dtype="fp32")
    assert float(wide[LINEAR].abs().max()) < 6e-7
    assert all(relative(got[stem], change) <= 2e-3 for stem, change in wide.items())


def test_output_strength_multiplies_everything(three, tmp_path):
    _, plain = merged(three, STRENGTHS, tmp_path, method="auto")
    for strength in (0.5, -2.0):
        _, got = merged(three, STRENGTHS, tmp_path, method="auto", output_strength=strength)
        assert all(relative(got[stem], strength * change) <= 1e-6 for stem, change in plain.items())


def test_the_advised_output_strength_gives_an_average_of_unrelated_loras_its_size_back(tmp_path):
    paths = related(tmp_path, 0.0, "x")
    _, plain = merged(paths, (1.0, 1.0), tmp_path, method="weighted_average")
    made, got = merged(paths, (1.0, 1.0), tmp_path, method="weighted_average", output_strength="auto")
    sizes = [float(delta[LINEAR].norm()) for delta in map(deltas, paths)]
    want = sum(sizes) / 2 / float(plain[LINEAR].norm())
    assert 1.2 < want < 1.6
    assert float(got[LINEAR].norm() / plain[LINEAR].norm()) == pytest.approx(want, rel=1e-5)
    assert any("output strength" in note for note in made.notes)


def test_warnings_about_opposing_unlike_and_distilled_loras(tmp_path):
    a = make(tmp_path / "ink.safetensors", seed=1)
    c = make(tmp_path / "sdxl_lightning_4step.safetensors", seed=2)
    made, _ = merged([a, a], (1.0, -0.5), tmp_path, method="auto")
    assert any("work against each other: cosine -1.00" in text for text in made.warnings)
    made, _ = merged([a, c], (1.0, 0.1), tmp_path, method="auto")
    assert any("times as strong" in text for text in made.warnings)
    assert any("sdxl_lightning_4step.safetensors seems to be a distillation LoRA" in text for text in made.warnings)
    made, _ = merged([a, make(tmp_path / "lcmoon.safetensors", seed=3)], (1.0, 1.0), tmp_path, method="auto")
    assert not [text for text in made.warnings if "times as strong" in text or "distillation" in text]
    with pytest.raises(MergeError, match="work against each other"):
        merged([a, a], (1.0, -0.5), tmp_path, method="auto", strict=True)


def test_a_module_that_was_never_trained_is_not_there(tmp_path):
    a = make(tmp_path / "a.safetensors", seed=1)
    tensors = load_file(a)
    zero = {key: torch.zeros_like(t) if key.endswith("lora_up.weight") else t for key, t in tensors.items()}
    save_file(zero, tmp_path / "zero.safetensors")
    made, got = merged([a, tmp_path / "zero.safetensors"], (0.5, 1.0), tmp_path, method="weighted_average")
    assert all(relative(got[stem], 0.5 * change) <= 1e-6 for stem, change in deltas(a).items())
    assert {row["n"] for row in made.rows} == {1}


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"method": "auto", "scope": "globally"}, "no scope 'globally'"),
        ({"method": "auto", "density": 1.5}, "density must be 0 … 1"),
        ({"method": "auto", "smoothing": -0.1}, "smoothing must be"),
        ({"method": "concat", "density": 0.5}, "density takes effect only with method ties"),
        (
            {"method": "concat", "scope": "global"},
            "scope takes effect only with method auto",
        ),
        ({"method": "peft_ties", "refinement": "maximum"}, "refinement takes effect only with method auto"),
        ({"method": "peft_ties", "key_filters": ["all", "shared_only", "all"]}, "key_filters take effect only"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(three, tmp_path, wishes, said):
    with pytest.raises(MergeError, match=said):
        merged(three, STRENGTHS, tmp_path, **wishes)
    assert not (tmp_path / "out.safetensors").exists()


def test_the_recipe_holds_words_and_numbers(three, tmp_path):
    merged(three, STRENGTHS, tmp_path, method="auto", profile="basic", refinement="full", density="auto",
           output_strength=0.8, smoothing=0.0, normalize=False)  # fmt: skip
    from safetensors import safe_open

    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        recipe = json.loads(file.metadata()["lib_merge.recipe"])
    assert (recipe["optimizer"]["profile"], recipe["optimizer"]["refinement"]) == ("classic", "maximum")
    assert recipe["params"] == {"auto_density": True, "output_strength": 0.8, "smoothing": 0.0, "normalize": False}


def test_whole_changes_are_put_together_too(tmp_path):
    random = generator(7)
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"{number}.safetensors")
        tensors = {f"{LINEAR}.diff": torch.randn(24, 36, generator=random)}
        tensors[f"{LINEAR}.diff_b"] = torch.randn(24, generator=random)
        save_file(tensors, paths[-1])
    for method in ("slerp", "ties", "consensus"):
        for refinement in ("standard", "maximum"):
            made, got = merged(paths, (1.0, 0.5), tmp_path, method=method, refinement=refinement)
            assert all(("no common basis" in row["note"]) == (refinement == "maximum") for row in made.rows)
            assert {key: tuple(t.shape) for key, t in got.items()} == {
                f"{LINEAR}.diff": (24, 36), f"{LINEAR}.diff_b": (24,),
            }  # fmt: skip
            if refinement == "standard":
                for key in got:
                    xs = [load_file(path)[key].double().numpy() for path in paths]
                    assert off(got[key], ORACLE[method](xs, (1.0, 0.5))) <= 2e-5
