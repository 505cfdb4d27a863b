"""How LoRAs relate and which go together, without a merge."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge.cli import main
from lib_merge.lora import compare_loras
from lib_merge.lora._compare import compatibility
from tests.data.oracles import optimizer_ref as ref
from tests.lora.files import CONV, LINEAR, deltas, generator, make


def turned(path, out, share: float, seed: int):
    """A LoRA of about that cosine with another one."""
    random = generator(seed)
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith("lora_up.weight"):
            noise = torch.randn(tensor.shape, generator=random)
            tensors[key] = share * tensor + (1 - share * share) ** 0.5 * noise
    save_file(tensors, out)
    return out


def test_pairs_are_measured_over_all_shared_weights(tmp_path):
    a, b = make(tmp_path / "a.safetensors", 4, 2.0, 1), make(tmp_path / "b.safetensors", 8, None, 2)
    ((pair),) = compare_loras(a, b).pairs
    one, other = deltas(a), deltas(b)
    flat = [np.concatenate([found[stem].numpy().ravel() for stem in sorted(one)]) for found in (one, other)]
    want = ref.pair_metrics(*flat)
    assert pair["shared"] == 3
    assert pair["cosine"] == pytest.approx(want["cos"], abs=1e-6)
    assert pair["conflict"] == pytest.approx(want["conflict"], abs=1e-6)  # small weights: every entry counts
    assert pair["conflict_expected"] == pytest.approx(want["expected"], abs=1e-6)
    assert pair["overlap"] == pytest.approx(1.0)
    assert pair["strategy"] == "slerp"


@pytest.mark.parametrize(
    ("cosine", "conflict", "value"), [(1, 0, 1.1), (0, 0.5, 0.1), (-1, 1, -1.0), (-0.5, 0.6, -0.3), (0.5, 0.4, 0.4)]
)
def test_compatibility(cosine, conflict, value):
    assert compatibility(cosine, conflict) == pytest.approx(value)


def test_opposing_loras_are_kept_apart_and_related_ones_put_together(tmp_path):
    a = make(tmp_path / "a.safetensors", seed=1)
    like_a = turned(a, tmp_path / "like_a.safetensors", 0.8, 5)
    against_a = turned(a, tmp_path / "against_a.safetensors", -0.9, 6)
    alone = make(tmp_path / "alone.safetensors", seed=9)
    found = compare_loras(a, against_a, like_a, alone)
    groups = [set(group) for group in found.together]
    assert sorted(file for group in groups for file in group) == sorted(row["file"] for row in found.loras)
    assert {"a.safetensors", "like_a.safetensors"} <= next(group for group in groups if "a.safetensors" in group)
    assert "against_a.safetensors" not in next(group for group in groups if "a.safetensors" in group)
    turned_back = compare_loras(a, (against_a, -1.0), like_a, alone)
    assert len(turned_back.together) == 1


def test_loras_that_share_nothing_do_not_disturb_each_other(tmp_path):
    a = make(tmp_path / "a.safetensors", seed=1, stems=(LINEAR,))
    b = make(tmp_path / "b.safetensors", seed=2, stems=(CONV,))
    found = compare_loras(a, b)
    assert found.pairs[0]["shared"] == 0
    assert (found.pairs[0]["cosine"], found.pairs[0]["overlap"]) == (0, 0)
    assert found.together == [["a.safetensors", "b.safetensors"]]
    assert found.rows == []


def test_a_fused_module_and_its_parts_are_one_weight(tmp_path):
    random = generator(3)
    names = {"double_blocks.0.img_attn.qkv": (24, 8), "single_blocks.0.linear1": (56, 8)}
    native = {}
    for name, (out, in_) in names.items():
        stem = "lora_unet_" + name.replace(".", "_")
        native[f"{stem}.lora_up.weight"] = torch.randn(out, 2, generator=random)
        native[f"{stem}.lora_down.weight"] = torch.randn(2, in_, generator=random)
    save_file(native, tmp_path / "native.safetensors")
    part = "transformer.transformer_blocks.0.attn.to_k"
    other = {f"{part}.lora_A.weight": torch.randn(3, 8, generator=random),
             f"{part}.lora_B.weight": torch.randn(8, 3, generator=random)}  # fmt: skip
    last = "transformer.single_transformer_blocks.0.proj_mlp"
    other |= {f"{last}.lora_A.weight": torch.zeros(3, 8), f"{last}.lora_B.weight": torch.zeros(32, 3)}
    save_file(other, tmp_path / "diffusers.safetensors")
    found = compare_loras(tmp_path / "native.safetensors", tmp_path / "diffusers.safetensors")
    qkv = deltas(tmp_path / "native.safetensors")["lora_unet_double_blocks_0_img_attn_qkv"]
    k = deltas(tmp_path / "diffusers.safetensors")[part]
    row = next(row for row in found.rows if row["key"].endswith("qkv"))
    assert row["cosine"] == pytest.approx(float((qkv[8:16] * k).sum() / qkv.norm() / k.norm()), abs=1e-6)


def test_the_command_writes_a_table_and_tells_who_goes_with_whom(tmp_path, capsys):
    a, b = make(tmp_path / "a.safetensors", seed=1), make(tmp_path / "b.safetensors", seed=2)
    table = tmp_path / "report.json"
    assert main(["lora", "compare", str(a), f"{b}@-1", "--report", str(table)]) == 0
    out = capsys.readouterr().out
    assert "can be merged into one: a.safetensors + b.safetensors" in out
    assert "by chance" in out
    rows = json.loads(table.read_text())["rows"]
    assert {row["strategy"] for row in rows} == {"slerp"}
    assert len(rows) == 3
    assert main(["lora", "compare", str(a), str(b), "--report", str(table)]) == 1
    assert "exists" in capsys.readouterr().err
