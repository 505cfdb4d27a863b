"""What LoRAs are found to do to a base: their stored alphas, and what the user hears before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lib_merge
from lib_merge import NumberError, PlanError, RecipeError
from tests.support import bf16, raw, read, values, write, write_raw

UNET = "model.diffusion_model."
BLOCK = "input_blocks.1.1.transformer_blocks.0.attn1"
Q, V = (f"{UNET}{BLOCK}.to_{name}.weight" for name in "qv")
CROSS = f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
STEM = {key: f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_{key[-8]}" for key in (Q, V)}


def base(path: Path) -> Path:
    sizes = {Q: (16, 16), V: (16, 16), CROSS: (16, 768), f"{UNET}input_blocks.0.0.weight": (8, 4, 3, 3)}
    return write_raw(path, {key: raw("F32", values(size, n)) for n, (key, size) in enumerate(sizes.items())})


def lora(path: Path, **alphas: Any) -> Path:
    """Rank 4 on q and v; `q`, `v`: (dtype, bytes) of their alphas."""
    tensors: dict[str, Any] = {}
    for number, stem in enumerate(STEM.values()):
        tensors[f"{stem}.lora_down.weight"] = raw("F32", values((4, 16), 30 + number))
        tensors[f"{stem}.lora_up.weight"] = raw("F32", values((16, 4), 40 + number))
        if (alpha := alphas.get("qv"[number])) is not None:
            dtype, data = alpha
            tensors[f"{stem}.alpha"] = (dtype, (), data)
    return write_raw(path, tensors)


def product(path: Path, key: str) -> np.ndarray:
    parts = read(path)
    up, down = (parts[f"{STEM[key]}.lora_{name}.weight"].astype(np.float64) for name in ("up", "down"))
    return up @ down


def bake(tmp_path: Path, *loras: Any, **how: Any) -> Any:
    return lib_merge.bake(tmp_path / "a.safetensors", *loras, out=tmp_path / "out.safetensors", fsync=False, **how)


@pytest.mark.parametrize(
    ("dtype", "data"), [("F16", np.float16(0).tobytes()), ("F32", np.float32(-0.0).tobytes()), ("BF16", bytes(2))]
)
def test_an_alpha_of_0_counts_as_the_rank_and_is_told_before_the_work(dtype, data, tmp_path):
    a = base(tmp_path / "a.safetensors")
    one = lora(tmp_path / "one.safetensors", q=(dtype, data), v=("F32", np.float32(2).tobytes()))
    planned = bake(tmp_path, (one, 0.5), dry_run=True)
    (text,) = planned.warnings
    assert "one.safetensors: 1 modules have alpha 0" in text
    with pytest.raises(PlanError, match="alpha 0"):
        bake(tmp_path, (one, 0.5), strict=True)
    assert bake(tmp_path, (one, 0.5)).warnings == planned.warnings
    before, after = read(a), read(tmp_path / "out.safetensors")
    for key, scale in ((Q, 1.0), (V, 2 / 4)):
        want = before[key] + 0.5 * scale * product(one, key)
        np.testing.assert_allclose(after[key], want, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "data", "alpha"),
    [
        ("F16", np.float16(1.5).tobytes(), 1.5),
        ("BF16", bf16(np.float32([3])), 3.0),
        ("F64", np.float64(0.1).tobytes(), 0.1),
        ("I64", np.int64(8).tobytes(), 8.0),
    ],
)
def test_alphas_of_every_dtype_scale_what_is_added(dtype, data, alpha, tmp_path):
    a = base(tmp_path / "a.safetensors")
    one = lora(tmp_path / "one.safetensors", q=(dtype, data), v=(dtype, data))
    assert not bake(tmp_path, one).warnings
    before, after = read(a), read(tmp_path / "out.safetensors")
    np.testing.assert_allclose(after[V], before[V] + alpha / 4 * product(one, V), rtol=0, atol=1e-7)


def test_an_alpha_that_is_no_number_is_refused_by_the_plan(tmp_path):
    base(tmp_path / "a.safetensors")
    one = lora(tmp_path / "one.safetensors", v=("F32", np.float32(np.nan).tobytes()))
    with pytest.raises(NumberError) as caught:
        bake(tmp_path, one, dry_run=True)
    assert caught.value.tensor == f"{STEM[V]}.alpha"


def test_a_checkpoint_in_the_place_of_a_lora_is_told_by_what_it_is(tmp_path):
    a, other = base(tmp_path / "a.safetensors"), base(tmp_path / "other.safetensors")
    one = lora(tmp_path / "one.safetensors")
    for work in (
        lambda: bake(tmp_path, one, other),
        lambda: lib_merge.merge_loras(one, other, out=tmp_path / "out.safetensors"),
        lambda: lib_merge.merge_loras(a, other, out=tmp_path / "out.safetensors"),
    ):
        with pytest.raises(RecipeError) as caught:
            work()
        assert caught.value.file in (str(a), str(other))
        assert "is none: it holds" in caught.value.what
        assert "lib-merge merge" in (caught.value.hint or "")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("prefix", ["lora_zzz_unet_", "zzz_lora_unet_"])
def test_names_with_words_in_front_that_nobody_knows_are_listed(prefix, tmp_path):
    base(tmp_path / "a.safetensors")
    stem = STEM[Q].replace("lora_unet_", prefix)
    parts = {f"{stem}.lora_down.weight": values((4, 16), 1), f"{stem}.lora_up.weight": values((16, 4), 2)}
    plain = bake(tmp_path, lora(tmp_path / "plain.safetensors"), dry_run=True).plan.problems
    assert not any("ends of their names" in problem.what for problem in plain)
    made = bake(tmp_path, write(tmp_path / "odd.safetensors", parts), dry_run=True)
    (told,) = [problem for problem in made.plan.problems if "ends of their names" in problem.what]
    assert (told.level, stem in told.what, made.merged) == ("note", True, 1)


def test_a_part_without_its_other_half_is_told_as_such(tmp_path):
    base(tmp_path / "a.safetensors")
    lone = f"{STEM[V]}.lora_up.weight"
    whole = {f"{STEM[Q]}.lora_down.weight": values((4, 16), 1), f"{STEM[Q]}.lora_up.weight": values((16, 4), 2)}
    stray = "lora_unet_up_blocks_9_nowhere"
    lost = {f"{stray}.lora_down.weight": values((4, 16), 3), f"{stray}.lora_up.weight": values((16, 4), 4)}
    half = write(tmp_path / "half.safetensors", {**whole, **lost, lone: values((16, 4), 5)})
    made = bake(tmp_path, half, dry_run=True)
    unknown, alone = (problem for problem in made.plan.problems if problem.level == "warning")
    assert (stray in unknown.what, lone in unknown.what, unknown.tensor) == (True, False, stray)
    assert "1 tensors of half.safetensors lack what belongs to them" in alone.what
    assert (alone.tensor, made.merged) == (lone, 1)
    with pytest.raises(PlanError, match="and 1 more problems"):
        bake(tmp_path, half, strict=True)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"hada_w1_a": (16, 4), "hada_w1_b": (4, 16), "hada_w2_a": (16, 4)},
            "no module of odd.safetensors has all of its",
        ),
        (
            {"a1.weight": (16, 4), "a2.weight": (4, 16), "b1.weight": (16, 4), "b2.weight": (5, 16)},
            "do not fit together",
        ),
        ({"oft_blocks": (4, 4, 4, 4)}, "4 stages of 4 blocks of 4 rows cannot be paired"),
    ],
)
def test_parts_that_contradict_each_other_are_told_by_the_plan(parts, said, tmp_path):
    base(tmp_path / "a.safetensors")
    odd = {f"{STEM[Q]}.{role}": values(shape, n) for n, (role, shape) in enumerate(parts.items())}
    with pytest.raises(PlanError, match=said):
        bake(tmp_path, write(tmp_path / "odd.safetensors", odd))


def test_as_many_stages_as_the_rows_can_be_paired_in(tmp_path):
    base(tmp_path / "a.safetensors")
    fine = {f"{STEM[Q]}.oft_blocks": values((3, 4, 4, 4), 1)}
    assert bake(tmp_path, write(tmp_path / "fine.safetensors", fine)).merged == 1
