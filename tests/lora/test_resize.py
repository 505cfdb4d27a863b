"""LoRAs cut to a smaller rank."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge.errors import MergeError
from lib_merge.lora import resize_lora
from tests.adapters import golden
from tests.lora.files import LINEAR, deltas, make, relative


def best(delta: torch.Tensor, rank: int) -> float:
    s = torch.linalg.svdvals(delta)
    return float((s[rank:] ** 2).sum().sqrt() / s.norm())


@pytest.mark.parametrize("rank", [1, 5, 7])
def test_a_fixed_rank_is_the_best_of_that_rank(tmp_path, rank):
    path, out = make(tmp_path / "a.safetensors", 8, 3.0), tmp_path / "out.safetensors"
    made = resize_lora(path, out=out, rank=rank)
    before, after = deltas(path), deltas(out)
    assert made.ranks == {rank: 3}
    for stem in before:
        assert abs(relative(after[stem], before[stem]) - best(before[stem], rank)) <= 1e-5
        assert float(load_file(out)[f"{stem}.alpha"]) == rank


@pytest.mark.parametrize("rank", [8, 64])
def test_no_rank_grows_and_what_fits_stays_bit_for_bit(tmp_path, rank):
    path, out = make(tmp_path / "a.safetensors", 8, 3.0), tmp_path / "out.safetensors"
    resize_lora(path, out=out, rank=rank)
    before, after = load_file(path), load_file(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_rank_beyond_the_layer_is_cut_to_the_layer(tmp_path):
    random = torch.Generator().manual_seed(1)
    up, down = torch.randn(6, 12, generator=random), torch.randn(12, 8, generator=random)
    stem = "lora_unet_input_blocks_1_1_proj_in"
    save_file({f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}, tmp_path / "a.safetensors")
    made = resize_lora(tmp_path / "a.safetensors", out=tmp_path / "out.safetensors", rank=64)
    assert made.ranks == {6: 1}
    assert relative(deltas(tmp_path / "out.safetensors")[stem], up.double() @ down.double()) <= 1e-6


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("rule", ["ratio", "cumulative", "frobenius"])
def test_a_share_takes_the_smallest_rank_that_reaches_it(tmp_path, rule, keep):
    path, out = make(tmp_path / "a.safetensors", 12, 3.0), tmp_path / "out.safetensors"
    made = resize_lora(path, out=out, keep=keep, rule=rule)
    reached = {
        "ratio": lambda s, rank: rank == 12 or s[rank] <= keep * s[0],
        "cumulative": lambda s, rank: s[:rank].sum() >= keep * s.sum() * (1 - 1e-9),
        "frobenius": lambda s, rank: (s[:rank] ** 2).sum() >= keep**2 * (s**2).sum() * (1 - 1e-9),
    }[rule]
    for row in made.rows:
        s, rank = torch.linalg.svdvals(deltas(path)[row["key"]])[:12], int(row["rank"])
        assert reached(s, rank)
        assert rank == 1 or not reached(s, rank - 1)
        if rule == "frobenius":
            error = relative(deltas(out)[row["key"]], deltas(path)[row["key"]])
            assert error <= math.sqrt(1 - keep**2) + 1e-6


@pytest.mark.parametrize("name", ["locon_conv3x3", "loha_linear", "loha_conv", "lokr_factor_auto"])
def test_other_low_rank_formats_become_loras(tmp_path, name):
    case = golden.load(name)
    made = resize_lora(golden.ROOT / name / "adapter.safetensors", out=tmp_path / "out.safetensors", rank=2)
    after = deltas(tmp_path / "out.safetensors")
    assert made.ranks == {2: len(case.adapter.pieces)}
    for piece in case.adapter.pieces:
        up, down = golden.FORMATS[piece.format].factors(golden.parts_of(piece, case.tensors), piece.settings)
        assert abs(relative(after[piece.stem], up @ down) - best(up @ down, 2)) <= 1e-5


def test_what_has_no_rank_stays_as_it_is(tmp_path):
    path = make(tmp_path / "a.safetensors", 8, 3.0, dtype=torch.float16, stems=(LINEAR,))
    tensors = load_file(path) | {"lora_unet_x.diff_b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    save_file(tensors, path)
    made = resize_lora(path, out=tmp_path / "out.safetensors", rank=2)
    kept = load_file(tmp_path / "out.safetensors")["lora_unet_x.diff_b"]
    assert torch.equal(kept, tensors["lora_unet_x.diff_b"])
    assert kept.dtype == torch.bfloat16
    assert made.copied == 1
    assert any("stay as they are" in note for note in made.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({}, "rank is missing"), ({"keep": 1.5}, "keep must be"), ({"keep": 0.5, "rule": "half"}, "no rule 'half'")],
)
def test_wrong_wishes_are_refused(tmp_path, arguments, said):
    with pytest.raises(MergeError, match=said):
        resize_lora(make(tmp_path / "a.safetensors"), out=tmp_path / "out.safetensors", **arguments)
