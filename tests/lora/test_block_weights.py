"""Block weights of LoRAs that are merged: numbers that multiply the strength, block by block."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge import run, verify
from lib_merge.cli import main
from lib_merge.errors import MergeError
from lib_merge.files.open import open_model
from lib_merge.lora import compare_loras, merge_loras
from lib_merge.verify import stored_recipe
from tests.lora.files import CONV, LINEAR, TEXT, deltas, generator, make, relative

# LINEAR and CONV are in IN01 and TEXT in BASE; this one is in OUT03.
UP = "lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"


def kohya(path, seed):
    make(path, 4, 2.0, seed)
    extra = {f"{UP}.lora_up.weight": torch.randn(24, 4, generator=generator(seed + 50)),
             f"{UP}.lora_down.weight": torch.randn(4, 36, generator=generator(seed + 60)),
             f"{UP}.alpha": torch.tensor(4.0)}  # fmt: skip
    save_file(load_file(path) | extra, path)
    return path


@pytest.fixture
def two(tmp_path):
    return kohya(tmp_path / "a.safetensors", 1), kohya(tmp_path / "b.safetensors", 2)


def test_each_module_takes_the_strength_times_its_blocks_number(two, tmp_path):
    made = merge_loras((two[0], 0.8, 0.4, "BASE=0.5, IN=0.25"), (two[1], -0.5, None, "OUT03=3"),
                       out=tmp_path / "out.safetensors")  # fmt: skip
    one, other, got = (deltas(path) for path in (*two, made.output))
    weights = {TEXT: (0.4 * 0.5, -0.5), LINEAR: (0.8 * 0.25, -0.5), CONV: (0.8 * 0.25, -0.5), UP: (0.8, -1.5)}
    assert got.keys() == weights.keys()
    for stem, (first, second) in weights.items():
        assert relative(got[stem], first * one[stem] + second * other[stem]) <= 1e-6
    assert made.warnings == ()


@pytest.mark.parametrize("method", ["weighted_average", "slerp", "consensus", "ties", "auto", "kohya_merge"])
def test_every_method_takes_them_as_it_takes_strengths(two, tmp_path, method):
    """One number for all blocks is a strength."""
    everywhere = "BASE=0.5, IN01=0.5, OUT=0.5"
    merge_loras((two[0], 0.8, None, everywhere), two[1], out=tmp_path / "by_block.safetensors", method=method)
    merge_loras((two[0], 0.4), two[1], out=tmp_path / "plain.safetensors", method=method)
    got, want = (load_file(tmp_path / f"{name}.safetensors") for name in ("by_block", "plain"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_weighted_average_divides_by_what_the_blocks_leave(two, tmp_path):
    out = tmp_path / "out.safetensors"
    merge_loras((two[0], 1.0, None, "IN01=3"), two[1], out=out, method="weighted_average")
    one, other, got = (deltas(path) for path in (*two, out))
    assert relative(got[LINEAR], 0.75 * one[LINEAR] + 0.25 * other[LINEAR]) <= 1e-6
    assert relative(got[UP], 0.5 * one[UP] + 0.5 * other[UP]) <= 1e-6


def test_a_block_of_0_leaves_its_modules_out(two, tmp_path):
    made = merge_loras((two[0], 1.0, None, "BASE=0"), out=tmp_path / "out.safetensors")
    assert deltas(made.output).keys() == {LINEAR, CONV, UP}
    assert any("1 weights" in note for note in made.notes)
    whole = deltas(two[0])
    assert all(torch.equal(delta, whole[stem]) for stem, delta in deltas(made.output).items())
    with pytest.raises(MergeError, match="change nothing"):
        merge_loras((two[0], 1.0, None, "BASE=0 IN01=0 OUT03=0"), out=tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("prefix", "modules"),
    [
        ("base_model.model.", {"model.layers.3.self_attn.q_proj": 0.5, "model.layers.4.self_attn.q_proj": 1.0}),
        ("transformer.", {"transformer_blocks.3.attn.to_q": 0.5, "single_transformer_blocks.3.attn.to_q": 1.0}),
    ],
)
def test_names_of_peft(tmp_path, prefix, modules):
    tensors = {}
    for number, module in enumerate(modules):
        for part, shape in (("A", (4, 16)), ("B", (16, 4))):
            key = f"{prefix}{module}.lora_{part}.weight"
            tensors[key] = torch.randn(shape, generator=generator(number))
    lora = tmp_path / "a.safetensors"
    save_file(tensors, lora)
    block = "L03" if "base" in prefix else "D03"
    made = merge_loras((lora, 1.0, None, f"{block}=0.5"), out=tmp_path / "out.safetensors", lora_alpha=4)
    got, before = deltas(made.output), deltas(lora)
    for module, factor in modules.items():
        assert relative(got[prefix + module], factor * before[prefix + module]) <= 1e-6
    assert made.warnings == ()


def test_blocks_that_match_nothing(two, tmp_path):
    made = merge_loras((two[0], 1.0, None, "M00=0.5, IN00-IN05=0.5"), two[1], out=tmp_path / "out.safetensors")
    (said,) = made.warnings
    assert "M00" in said
    assert "IN" not in said  # IN01 is in the range
    with pytest.raises(MergeError, match="M00"):
        merge_loras((two[0], 1.0, None, "M00=0.5"), out=tmp_path / "strict.safetensors", strict=True)
    listed = ",".join(["1", *["0.5"] * 16])  # 17 numbers: every block that LoRAs of SD1 have
    assert merge_loras((two[0], 1.0, None, listed), out=tmp_path / "listed.safetensors").warnings == ()
    with pytest.raises(MergeError, match="no known list"):
        merge_loras((two[0], 1.0, None, "1,2"), out=tmp_path / "wrong.safetensors")
    with pytest.raises(MergeError, match="strength alone"):
        merge_loras((two[0], 1.0, None, "IN01=alpha:2"), out=tmp_path / "wrong.safetensors")


def test_a_shape_runs_over_the_blocks_of_the_lora(two, tmp_path):
    made = merge_loras((two[0], 1.0, None, "gradient_down"), out=tmp_path / "out.safetensors")
    assert deltas(made.output).keys() == {TEXT, LINEAR, CONV}  # IN01 1, OUT03 0; the text encoder is no layer
    assert any("IN01, OUT03" in note for note in made.notes)


def test_the_recipe_keeps_them(two, tmp_path, capsys):
    out, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    words = [f"{two[0]}@0.8:BASE=0,IN01=0.5", f"{two[1]}:OUT=2"]
    assert main(["lora", "merge", *words, "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    recipe = stored_recipe(open_model(out))
    assert [lora.blocks for lora in recipe.loras] == ["BASE=0,IN01=0.5", "OUT=2"]
    assert verify(out, models=[tmp_path]).ok
    run(recipe, out=again, models=[tmp_path])
    assert again.read_bytes() == out.read_bytes()


def test_a_comparison_takes_them(two, capsys):
    """Cosine and norms by hand, of what the blocks leave at their size; strengths do not count."""
    blocks = {LINEAR: 0.5, CONV: 0.5, UP: 1.0}  # the text encoder is left out
    assert main(["lora", "compare", f"{two[0]}@0.3:BASE=0,IN01=0.5,M00=2", f"{two[1]}@-1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    one, other = (deltas(path) for path in two)
    weighted = {stem: size * one[stem] for stem, size in blocks.items()}
    want = sum(float(change.pow(2).sum()) for change in weighted.values()) ** 0.5
    assert [row["norm"] for row in told["loras"]] == pytest.approx(
        [want, sum(float(change.pow(2).sum()) for change in other.values()) ** 0.5], rel=1e-6
    )
    (pair,) = told["pairs"]
    dot = -sum(float((weighted[stem] * other[stem]).sum()) for stem in weighted)
    shared = sum(float(other[stem].pow(2).sum()) for stem in weighted) ** 0.5
    assert pair["shared"] == 3
    assert pair["cosine"] == pytest.approx(dot / want / shared, abs=1e-6)
    assert ["M00" in note for note in told["notes"]] == [True]


def test_without_block_weights_nothing_is_said(two):
    assert len(compare_loras(*two).pairs) == 1
