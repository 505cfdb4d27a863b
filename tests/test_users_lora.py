"""What users of comparable tools reported about LoRAs: each report as a trial through the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib_merge.cli import main
from tests.support import bf16, read, read_raw, values, write, write_raw

UNET = "model.diffusion_model."
LAYER = "input_blocks.1.1.transformer_blocks.0"
Q = f"{UNET}{LAYER}.attn1.to_q.weight"
K2 = f"{UNET}{LAYER}.attn2.to_k.weight"
TEXT = "cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"
# Names of the modules above, as kohya's trainers write them.
KOHYA = {
    Q: "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
    K2: "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k",
    TEXT: "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
}


def sd1(path: Path, **more: Any) -> Path:
    """A few tensors with SD1.5's names; the text width is what tells the family."""
    tensors = {
        f"{UNET}input_blocks.0.0.weight": values((8, 4, 3, 3), 1),
        Q: values((8, 8), 2),
        K2: values((8, 768), 3),
        TEXT: values((12, 12), 4),
    }
    return write(path, {**tensors, **more})


def sdxl(path: Path) -> Path:
    names = [f"input_blocks.{i}.1.transformer_blocks.0.attn1.to_q.weight" for i in (4, 5, 7, 8)]
    names += ["middle_block.1.transformer_blocks.0.attn1.to_q.weight"]
    names += [f"output_blocks.{i}.1.transformer_blocks.0.attn1.to_q.weight" for i in range(6)]
    tensors = {UNET + name: values((8, 8), 10 + number) for number, name in enumerate(names)}
    tensors[f"{UNET}input_blocks.0.0.weight"] = values((8, 4, 3, 3), 1)
    tensors[f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"] = values((8, 2048), 2)
    tensors[f"{UNET}label_emb.0.0.weight"] = values((8, 2816), 3)
    return write(path, tensors)


def flux(path: Path) -> Path:
    return write(
        path,
        {
            "double_blocks.0.img_attn.norm.key_norm.scale": values((4,), 1),
            "double_blocks.0.img_attn.qkv.weight": values((24, 8), 2),
            "guidance_in.in_layer.weight": values((8, 8), 3),
            "img_in.weight": values((8, 64), 4),
        },
    )


def lora(path: Path, *stems: str, out: int = 8, into: int = 8, rank: int = 2, seed: int = 50, **more: Any) -> Path:
    """A kohya LoRA without alpha: scale 1."""
    tensors: dict[str, Any] = {}
    for number, stem in enumerate(stems):
        tensors[f"{stem}.lora_down.weight"] = values((rank, into), seed + 2 * number)
        tensors[f"{stem}.lora_up.weight"] = values((out, rank), seed + 2 * number + 1)
    return write(path, {**tensors, **more})


def delta(path: Path, stem: str) -> np.ndarray:
    """up·down of a module in float64, scale 1."""
    tensors = read(path)
    up, down = tensors[f"{stem}.lora_up.weight"], tensors[f"{stem}.lora_down.weight"]
    return up.astype(np.float64) @ down.astype(np.float64)


def bake(tmp_path: Path, *words: object, code: int = 0) -> Path:
    out = tmp_path / "out.safetensors"
    arguments = ["bake", *map(str, words), "-o", str(out), "--overwrite", "--no-fsync"]
    assert main(arguments) == code
    return out


def exact(base: np.ndarray, change: np.ndarray) -> np.ndarray:
    return (base.astype(np.float64) + change).astype(np.float32)


def test_02_eight_small_loras_are_summed_before_the_one_rounding(tmp_path):
    base = write_raw(
        tmp_path / "base.safetensors",
        {
            Q: ("BF16", (8, 8), bf16(np.ones((8, 8), "f4"))),
            K2: ("BF16", (8, 768), bf16(values((8, 768), 3))),
            f"{UNET}input_blocks.0.0.weight": ("BF16", (8, 4, 3, 3), bf16(values((8, 4, 3, 3), 1))),
        },
    )
    down, up = np.zeros((1, 8), "f4"), np.full((8, 1), 0.001, "f4")
    down[:] = 1.0
    one = write(tmp_path / "one.safetensors", {f"{KOHYA[Q]}.lora_down.weight": down, f"{KOHYA[Q]}.lora_up.weight": up})
    out = bake(tmp_path, base, *[one] * 8)
    assert (read(out)[Q] == 1.0078125).all()
    assert read_raw(out)[1][Q][0] == "BF16"


def test_08_a_lora_that_matches_nothing_is_an_error(tmp_path, capsys):
    base, stranger = sd1(tmp_path / "base.safetensors"), lora(tmp_path / "x.safetensors", "lora_unet_no_such_module")
    out = bake(tmp_path, base, stranger, code=1)
    assert "no module of x.safetensors is found" in capsys.readouterr().err
    assert not out.exists()


def test_08_a_lora_in_the_place_of_a_checkpoint_is_told_by_name(tmp_path, capsys):
    base, ink = sd1(tmp_path / "base.safetensors"), lora(tmp_path / "ink.safetensors", KOHYA[Q])
    assert main(["merge", str(base), str(ink), "-o", str(tmp_path / "out.safetensors")]) == 1
    said = capsys.readouterr().err
    assert "model B is a LoRA" in said
    assert "ink.safetensors" in said
    assert "lib-merge bake" in said
    assert not (tmp_path / "out.safetensors").exists()


def test_08_a_lora_without_effect_is_told_and_changes_no_byte(tmp_path):
    weights = values((8, 8), 2)
    weights[0] = -0.0
    base = sd1(tmp_path / "base.safetensors", **{Q: weights})
    stem = KOHYA[Q]
    empty = write(
        tmp_path / "empty.safetensors",
        {f"{stem}.lora_down.weight": values((2, 8), 1), f"{stem}.lora_up.weight": np.zeros((8, 2), "f4")},
    )
    report = tmp_path / "report.json"
    out = bake(tmp_path, base, empty, "--report", report)
    assert read_raw(out)[1] == read_raw(base)[1]
    row = next(row for row in json.loads(report.read_text())["rows"] if row["key"] == Q)
    assert (row["action"], row["n"], row["rank"], row["max_change"]) == ("merged", 1, 2, 0)
    assert "no change" in row["note"]


def test_09_a_partial_match_names_what_is_missing(tmp_path, capsys):
    base = sd1(tmp_path / "base.safetensors")
    unknown = "lora_unet_down_blocks_9_attentions_0_proj_in"
    some = lora(tmp_path / "some.safetensors", KOHYA[Q], unknown)
    out = bake(tmp_path, base, some, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["unused"] == [f"{unknown}.lora_down.weight", f"{unknown}.lora_up.weight"]
    assert any(unknown in warning for warning in told["warnings"])
    assert told["merged"] == 1
    out.unlink()
    bake(tmp_path, base, some, "--strict", code=1)
    assert unknown in capsys.readouterr().err
    assert not out.exists()


def llama(folder: Path, *, head: bool) -> Path:
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": values((10, 4), 1),
        "model.layers.0.self_attn.q_proj.weight": values((4, 4), 2),
        "model.norm.weight": values((4,), 3),
    }
    write(folder / "model.safetensors", {**tensors, **({"lm_head.weight": values((10, 4), 5)} if head else {})})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": not head}))
    return folder


def peft(folder: Path, *stems: str, out: int = 4, into: int = 4, config: dict[str, Any] | None) -> Path:
    folder.mkdir()
    tensors = {}
    for stem in stems:
        tensors[f"base_model.model.{stem}.lora_A.weight"] = values((8, into), 60)
        tensors[f"base_model.model.{stem}.lora_B.weight"] = values((out, 8), 61)
    write(folder / "adapter_model.safetensors", tensors)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return folder


def test_12_a_head_that_is_the_embedding_gets_no_change_of_its_own(tmp_path, capsys):
    base, config = llama(tmp_path / "tied", head=False), {"r": 8, "lora_alpha": 8}
    on_head = peft(tmp_path / "head", "lm_head", out=10, config=config)
    out = tmp_path / "out"
    assert main(["bake", str(base), str(on_head), "-o", str(out), "--no-fsync"]) == 1
    assert "tied" in capsys.readouterr().err
    inside = peft(tmp_path / "inside", "model.layers.0.self_attn.q_proj", config=config)
    assert main(["bake", str(base), str(inside), "-o", str(out), "--no-fsync"]) == 0
    assert "lm_head.weight" not in read(out / "model.safetensors")
    capsys.readouterr()
    on_embedding = tmp_path / "embedding"
    on_embedding.mkdir()
    stem = "base_model.model.model.embed_tokens"
    parts = {f"{stem}.lora_embedding_A": values((2, 10), 70), f"{stem}.lora_embedding_B": values((4, 2), 71)}
    write(on_embedding / "adapter_model.safetensors", parts)
    (on_embedding / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    change = (parts[f"{stem}.lora_embedding_B"].astype(np.float64) @ parts[f"{stem}.lora_embedding_A"]).T
    assert main(["bake", str(base), str(on_embedding), "-o", str(tmp_path / "e"), "--no-fsync"]) == 0
    assert "tied to model.embed_tokens.weight" in capsys.readouterr().out
    np.testing.assert_array_equal(
        read(tmp_path / "e" / "model.safetensors")["model.embed_tokens.weight"], exact(values((10, 4), 1), change)
    )
    stored_twice = llama(tmp_path / "twice", head=True)
    (stored_twice / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert main(["bake", str(stored_twice), str(on_embedding), "-o", str(tmp_path / "t"), "--no-fsync"]) == 0
    twice = read(tmp_path / "t" / "model.safetensors")
    np.testing.assert_array_equal(twice["lm_head.weight"], exact(values((10, 4), 5), change))
    assert main(["bake", str(stored_twice), str(on_head), "-o", str(tmp_path / "h"), "--no-fsync"]) == 1
    untied = llama(tmp_path / "untied", head=True)
    assert main(["bake", str(untied), str(on_head), "-o", str(tmp_path / "b"), "--no-fsync"]) == 0


@pytest.mark.parametrize(
    ("make_base", "stem", "size", "said"),
    [
        (sdxl, KOHYA[K2], (8, 768), ("SD 1.x", "SDXL")),
        (sd1, "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", (8, 2048), ("SDXL", "SD 1.x")),
        (sd1, "lora_unet_double_blocks_0_img_attn_qkv", (24, 8), ("Flux", "SD 1.x")),
        (flux, KOHYA[K2], (8, 768), ("SD 1.x", "Flux")),
    ],
)
def test_15_a_lora_of_another_family_is_refused_by_name(make_base, stem, size, said, tmp_path, capsys):
    base = make_base(tmp_path / "base.safetensors")
    wrong = lora(tmp_path / "wrong.safetensors", stem, out=size[0], into=size[1])
    start = time.perf_counter()
    out = bake(tmp_path, base, wrong, code=1)
    assert time.perf_counter() - start < 1
    error = capsys.readouterr().err
    assert f"wrong.safetensors is for {said[0]}" in error
    assert f"the checkpoint is {said[1]}" in error
    assert not out.exists()


def test_17_a_strength_counts_once(tmp_path):
    base = sd1(tmp_path / "base.safetensors")
    a, b = lora(tmp_path / "a.safetensors", KOHYA[Q]), lora(tmp_path / "b.safetensors", KOHYA[Q], seed=70, rank=4)
    one, other = delta(a, KOHYA[Q]), delta(b, KOHYA[Q])
    before = read(base)[Q]
    for first, second in ((0.5, 0.5), (0.7, 0.4), (1.0, -0.3)):
        got = read(bake(tmp_path, base, f"{a}@{first}", f"{b}@{second}"))[Q]
        np.testing.assert_array_equal(got, exact(before, first * one + second * other))
    alone = read_raw(bake(tmp_path, base, a))[1]
    assert read_raw(bake(tmp_path, base, a, f"{b}@0"))[1] == alone
    assert read_raw(bake(tmp_path, base, f"{a}@0"))[1] == read_raw(base)[1]


def test_17_text_encoders_have_a_strength_of_their_own(tmp_path):
    base = sd1(tmp_path / "base.safetensors")
    stem = KOHYA[TEXT]
    more = {f"{stem}.lora_down.weight": values((2, 12), 80), f"{stem}.lora_up.weight": values((12, 2), 81)}
    both = lora(tmp_path / "both.safetensors", KOHYA[Q], **more)
    before, got = read(base), read(bake(tmp_path, base, f"{both}@0.8@0.25"))
    np.testing.assert_array_equal(got[Q], exact(before[Q], 0.8 * delta(both, KOHYA[Q])))
    np.testing.assert_array_equal(got[TEXT], exact(before[TEXT], 0.25 * delta(both, stem)))


def test_18_a_negative_strength_takes_the_lora_out_again(tmp_path):
    base, one = sd1(tmp_path / "base.safetensors"), lora(tmp_path / "one.safetensors", KOHYA[Q], KOHYA[Q] + "_x")
    there = bake(tmp_path, base, f"{one}@0.8").rename(tmp_path / "there.safetensors")
    back = read(bake(tmp_path, there, f"{one}@-0.8"))
    assert np.abs(read(there)[Q] - read(base)[Q]).max() > 0.01
    for key, value in read(base).items():
        assert np.abs(back[key] - value).max() <= 1e-6


def test_20_a_convolution_is_the_composed_convolution(tmp_path):
    key = f"{UNET}input_blocks.1.0.in_layers.2.weight"
    base = sd1(tmp_path / "base.safetensors", **{key: values((16, 8, 3, 3), 5)})
    stem = "lora_unet_down_blocks_0_resnets_0_conv1"
    down, up = values((4, 8, 3, 3), 6), values((16, 4, 1, 1), 7)
    conv = write(tmp_path / "conv.safetensors", {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up})
    change = np.einsum("or,rikl->oikl", up[:, :, 0, 0].astype(np.float64), down.astype(np.float64))
    np.testing.assert_array_equal(read(bake(tmp_path, base, conv))[key], exact(read(base)[key], change))


def test_21_block_weights_of_an_sdxl_lora(tmp_path, capsys):
    base = sdxl(tmp_path / "base.safetensors")
    names = {key: key[len(UNET) : -len(".weight")] for key in read(base) if "attn1" in key}
    stems = {key: "lora_unet_" + name.replace(".", "_") for key, name in names.items()}
    one = lora(tmp_path / "one.safetensors", *stems.values())
    before = read(base)
    numbers = [number / 10 for number in range(20)]  # BASE, IN00 … IN08, M00, OUT00 … OUT08
    expected = {"input_blocks.4": 0.5, "input_blocks.5": 0.6, "input_blocks.7": 0.8, "input_blocks.8": 0.9}
    expected |= {"middle_block": 1.0} | {f"output_blocks.{n}": 1.1 + n / 10 for n in range(6)}
    weights = ",".join(map(str, numbers))
    for words in ([one, "--blocks", weights], [f"{one}@1:{weights}"]):
        got = read(bake(tmp_path, base, *words))
        for key, stem in stems.items():
            factor = next(value for start, value in expected.items() if names[key].startswith(start))
            np.testing.assert_array_equal(got[key], exact(before[key], numbers_of(factor) * delta(one, stem)))
    capsys.readouterr()
    bake(tmp_path, base, one, "--blocks", ",".join(["1"] * 26))
    assert "IN09" in capsys.readouterr().out
    bake(tmp_path, base, one, "--blocks", ",".join(["1"] * 19), code=1)
    error = capsys.readouterr().err
    assert "19 numbers" in error
    assert "20 (SDXL)" in error


def numbers_of(factor: float) -> float:
    """The number as it is read from the text of a list."""
    return float(f"{factor:.1f}")


def test_21_other_blocks_keep_the_strength(tmp_path):
    base = sd1(tmp_path / "base.safetensors")
    one = lora(tmp_path / "one.safetensors", KOHYA[Q])
    before, change = read(base)[Q], delta(one, KOHYA[Q])
    got = read(bake(tmp_path, base, f"{one}@0.5", "--blocks", "OUT=0, IN02=3"))[Q]
    np.testing.assert_array_equal(got, exact(before, 0.5 * change))
    got = read(bake(tmp_path, base, f"{one}@0.5", "--blocks", "IN01=-2"))[Q]
    np.testing.assert_array_equal(got, exact(before, -1.0 * change))


@pytest.mark.parametrize("axis", ["output", "input"])
def test_24_dora_is_normalised_along_its_axis(axis, tmp_path):
    base, stem = sd1(tmp_path / "base.safetensors"), KOHYA[Q]
    shape = (8, 1) if axis == "output" else (1, 8)
    magnitude = np.abs(values(shape, 90)) + 1
    one = lora(tmp_path / "dora.safetensors", stem, **{f"{stem}.dora_scale": magnitude})
    before = read(base)[Q].astype(np.float64)
    summed = before + delta(one, stem)
    norm = np.sqrt((summed**2).sum(1 if axis == "output" else 0, keepdims=True))
    want = magnitude * summed / norm
    np.testing.assert_allclose(read(bake(tmp_path, base, one))[Q], want, rtol=2e-7)
    half = before + 0.5 * (want - before)
    np.testing.assert_allclose(read(bake(tmp_path, base, f"{one}@0.5"))[Q], half, rtol=1e-6, atol=1e-7)


def test_25_loha_is_composed_exactly(tmp_path):
    base, stem = sd1(tmp_path / "base.safetensors"), KOHYA[Q]
    shapes = {"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 2), "hada_w2_b": (2, 8)}
    parts = {name: values(shape, 30 + number) for number, (name, shape) in enumerate(shapes.items())}
    tensors = {f"{stem}.{name}": value for name, value in parts.items()}
    one = write(tmp_path / "loha.safetensors", {**tensors, f"{stem}.alpha": np.float32(1.0)})
    wide = {name: value.astype(np.float64) for name, value in parts.items()}
    change = (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"]) * (1.0 / 2)
    np.testing.assert_array_equal(read(bake(tmp_path, base, one))[Q], exact(read(base)[Q], change))


def test_33_the_scale_comes_from_the_adapters_own_configuration(tmp_path, capsys):
    base, stem = llama(tmp_path / "base", head=True), "model.layers.0.self_attn.q_proj"
    key = f"{stem}.weight"
    with_config = peft(tmp_path / "with", stem, config={"r": 8, "lora_alpha": 32})
    bare = peft(tmp_path / "bare", stem, config=None)
    parts = read(bare / "adapter_model.safetensors")
    up, down = (parts[f"base_model.model.{stem}.lora_{part}.weight"].astype(np.float64) for part in "BA")
    before = read(base / "model.safetensors")[key]
    out = tmp_path / "out"

    def run(*words: object) -> np.ndarray:
        assert main(["bake", str(base), *map(str, words), "-o", str(out), "--overwrite", "--no-fsync"]) == 0
        return read(out / "model.safetensors")[key]

    want = exact(before, 4.0 * up @ down)
    np.testing.assert_array_equal(run(with_config), want)
    np.testing.assert_array_equal(run(with_config / "adapter_model.safetensors"), want)
    np.testing.assert_array_equal(run(bare, "--lora-alpha", 32), want)
    capsys.readouterr()
    assert main(["bake", str(base), str(bare), "-o", str(tmp_path / "no"), "--no-fsync"]) == 1
    error = capsys.readouterr().err
    assert "alpha" in error
    assert "--lora-alpha" in error


def test_33_another_file_without_alpha_has_scale_1_and_says_so(tmp_path, capsys):
    base, one = sd1(tmp_path / "base.safetensors"), lora(tmp_path / "one.safetensors", KOHYA[Q])
    report = tmp_path / "report.json"
    got = read(bake(tmp_path, base, one, "--report", report))[Q]
    np.testing.assert_array_equal(got, exact(read(base)[Q], delta(one, KOHYA[Q])))
    assert "scale is 1" in capsys.readouterr().out
    row = next(row for row in json.loads(report.read_text())["rows"] if row["key"] == Q)
    assert "scale 1" in row["note"]
