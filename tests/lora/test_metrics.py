"""The numbers of a group of LoRAs, against dense matrices and the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from lib_merge.choose import choose, expected_conflict
from lib_merge.files.open import open_model
from lib_merge.lora._groups import grouped
from lib_merge.lora._inputs import open_inputs
from lib_merge.lora._members import members_of
from lib_merge.lora._metrics import name_of, relate
from lib_merge.recipe import Lora, Recipe
from tests.data.oracles import optimizer_ref
from tests.lora.files import CONV, LINEAR, TEXT, deltas, generator, make


def groups_of(paths, strengths, te_strengths=None):
    """Module -> its group, of opened files."""
    te_strengths = te_strengths or [None] * len(paths)
    loras = tuple(
        Lora(file=path.name, strength=s, te_strength=t)
        for path, s, t in zip(paths, strengths, te_strengths, strict=True)
    )
    sources = {f"lora{number}": open_model(path) for number, path in enumerate(paths, 1)}
    return {group.stem: group for group in grouped(open_inputs(Recipe(task="lora_merge", loras=loras), sources))}


@pytest.fixture
def three(tmp_path):
    return [make(tmp_path / f"{n}.safetensors", rank, alpha, n) for n, (rank, alpha) in
            enumerate([(4, 2.0), (8, None), (3, 7.0)])]  # fmt: skip


@pytest.mark.parametrize("strengths", [(1.0, 1.0, 1.0), (0.7, -0.4, 2.0), (-1.0, -0.5, -0.1)])
def test_numbers_are_those_of_the_oracle(three, strengths):
    """Small weights: signs are compared at every entry, so nothing is an estimate."""
    dense = [deltas(path) for path in three]
    for stem, group in groups_of(three, strengths).items():
        numbers = relate(group, members_of(group)).numbers()
        changes = [found[stem].numpy() for found in dense]
        want = optimizer_ref.group_metrics(changes, strengths)
        assert numbers.n == want["n"] == 3
        for name in ("cos", "conflict", "ratio", "overlap"):
            assert getattr(numbers, name) == pytest.approx(want[name], abs=2e-6), name
        assert numbers.norms == pytest.approx([float(found[stem].norm()) for found in dense], rel=1e-6)
        for profile in ("v1.2", "no_slerp", "classic"):
            assert choose(numbers, profile=profile).strategy == optimizer_ref.choose(want, profile)


def test_a_lora_of_strength_0_is_not_there_and_text_encoders_count_by_their_own(three):
    """A LoRA whose strength is 0 on the denoiser still counts on the text encoder."""
    groups = groups_of(three, (1.0, 0.0, 1.0), (None, 0.5, 0.0))
    assert [member.number for member in members_of(groups[LINEAR])] == [1, 3]
    assert [(member.number, member.strength) for member in members_of(groups[TEXT])] == [(1, 1.0), (2, 0.5)]


def test_equal_and_opposite_changes(tmp_path):
    a = make(tmp_path / "a.safetensors", seed=1)
    for strengths, cos, conflict in (((1.0, 0.5), 1.0, 0.0), ((1.0, -0.5), -1.0, 1.0)):
        group = groups_of([a, a], strengths)[CONV]
        numbers = relate(group, members_of(group)).numbers()
        assert (numbers.cos, numbers.conflict, numbers.ratio) == pytest.approx((cos, conflict, 2.0))
        assert numbers.expected == pytest.approx(conflict, abs=1e-3)
        assert numbers.overlap == pytest.approx(1.0)


def test_large_weights_are_sampled_by_the_weight_s_own_name(tmp_path):
    """kohya's and PEFT's names of a weight draw the same positions; another weight draws others."""
    native = ("lora_unet_single_blocks_0_linear2", "lora_unet_double_blocks_0_img_attn_proj")
    peft = ("transformer.single_transformer_blocks.0.proj_out", "transformer.transformer_blocks.0.attn.to_out.0")
    random = generator(5)
    up, down = torch.randn(400, 8, generator=random), torch.randn(8, 300, generator=random)
    other_up = torch.randn(400, 8, generator=random)
    shares = []
    for names, ends in ((native, ("lora_up", "lora_down")), (peft, ("lora_B", "lora_A"))):
        paths = [tmp_path / f"{ends[0]}{number}.safetensors" for number in range(2)]
        for path, factor in zip(paths, (up, 0.6 * up + 0.8 * other_up), strict=True):
            tensors = {}
            for name in names:
                tensors |= {f"{name}.{ends[0]}.weight": factor.clone(), f"{name}.{ends[1]}.weight": down.clone()}
            save_file(tensors, path)
        found = []
        for name, group in groups_of(paths, (1, 1)).items():
            relations = relate(group, members_of(group))
            assert name in names
            assert float(relations.both[0, 1]) == 16 * 79 * 79
            found.append((name_of(group), relations.numbers().conflict))
        shares.append(sorted(found))
    assert shares[0] == shares[1]
    assert shares[0][0][1] != shares[0][1][1]
    a, b = up @ down, (0.6 * up + 0.8 * other_up) @ down
    want = float(((a > 0) != (b > 0)).double().mean())
    assert shares[0][0][1] == pytest.approx(want, abs=4 * 0.0016)
    assert relations.numbers().cos == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), abs=1e-6)


def test_what_is_stored_whole_is_measured_too(tmp_path):
    random = generator(1)
    dense = [torch.randn(24, 36, generator=random) for _ in range(2)]
    for number, change in enumerate(dense):
        save_file({f"{LINEAR}.diff": change}, tmp_path / f"{number}.safetensors")
    group = groups_of([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], (1.0, -2.0))[LINEAR]
    numbers = relate(group, members_of(group)).numbers()
    want = optimizer_ref.group_metrics([change.double().numpy() for change in dense], (1.0, -2.0))
    assert (numbers.cos, numbers.conflict) == pytest.approx((want["cos"], want["conflict"]), abs=1e-6)
    assert math.isnan(numbers.overlap)


def test_density_is_the_share_above_the_noise(tmp_path):
    """Half of the entries are 1, half are 0.05: below a tenth of the largest ones."""
    change = torch.full((24, 36), 0.05)
    change[:12] = 1.0
    save_file({f"{LINEAR}.diff": change}, tmp_path / "a.safetensors")
    group = groups_of([tmp_path / "a.safetensors"] * 2, (1.0, 1.0))[LINEAR]
    assert relate(group, members_of(group), with_density=True).density == pytest.approx(0.5)
    one_sided = groups_of([tmp_path / "a.safetensors"] * 2, (1.0, 0.01))[LINEAR]
    assert relate(one_sided, members_of(one_sided), with_density=True).density == pytest.approx(0.25)


@pytest.mark.parametrize(("cosine", "share"), [(1, 0), (0, 0.5), (-1, 1), (0.5, 1 / 3), (1.5, 0)])
def test_expected_conflict(cosine, share):
    assert expected_conflict(cosine) == pytest.approx(share)
