"""LoRAs under other names: the same bytes, or the same change of every weight."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lib_merge.cli import main
from lib_merge.errors import FileError, PlanError, RecipeError
from lib_merge.lora import convert_lora
from tests.support import bf16, read, read_raw, write, write_raw

RNG = np.random.default_rng(7)
UNET = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
D_UNET = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
TEXT = "lora_te_text_model_encoder_layers_3_mlp_fc1"
D_TEXT = "text_encoder.text_model.encoder.layers.3.mlp.fc1"
QKV = "lora_unet_double_blocks_4_img_attn_qkv"
PARTS = tuple(f"transformer.transformer_blocks.4.attn.to_{part}" for part in "qkv")
LINEAR1 = "lora_unet_single_blocks_2_linear1"
S = "transformer.single_transformer_blocks.2."
PARTS1 = (f"{S}attn.to_q", f"{S}attn.to_k", f"{S}attn.to_v", f"{S}proj_mlp")


def kohya(stem, out, in_, rank=4, alpha=2.0, dtype="<f2"):
    tensors = {f"{stem}.lora_down.weight": RNG.normal(size=(rank, in_)).astype(dtype),
               f"{stem}.lora_up.weight": RNG.normal(size=(out, rank)).astype(dtype)}  # fmt: skip
    return tensors if alpha is None else tensors | {f"{stem}.alpha": np.array(alpha, "<f4")}


def diffusers(stem, out, in_, rank=4, alpha=None, dtype="<f2"):
    tensors = {f"{stem}.lora_A.weight": RNG.normal(size=(rank, in_)).astype(dtype),
               f"{stem}.lora_B.weight": RNG.normal(size=(out, rank)).astype(dtype)}  # fmt: skip
    return tensors if alpha is None else tensors | {f"{stem}.alpha": np.array(alpha, "<f4")}


def delta(tensors, stem):
    """alpha / r · up · down in float64."""
    down = next(tensors[f"{stem}.{end}"] for end in ("lora_down.weight", "lora_A.weight") if f"{stem}.{end}" in tensors)
    up = next(tensors[f"{stem}.{end}"] for end in ("lora_up.weight", "lora_B.weight") if f"{stem}.{end}" in tensors)
    scale = tensors[f"{stem}.alpha"].item() / down.shape[0] if f"{stem}.alpha" in tensors else 1.0
    return scale * up.astype("f8").reshape(len(up), -1) @ down.astype("f8").reshape(len(down), -1)


def convert(folder, tensors, names, metadata=None, **options):
    source = write(folder / "in.safetensors", tensors, metadata)
    made = convert_lora(source, folder / "out.safetensors", names=names, **options)
    return made, read(made.output)


def test_only_names_change(tmp_path):
    tensors = kohya(UNET, 8, 768) | kohya(TEXT, 6, 768, alpha=None)
    metadata = {"ss_output_name": "cat", "sshs_model_hash": "00", "modelspec.hash_sha256": "11"}
    made, _ = convert(tmp_path, tensors, "diffusers", metadata)
    assert (made.renamed, made.split, made.joined, made.unused) == (2, 0, 0, ())
    _, before = read_raw(tmp_path / "in.safetensors")
    stored, after = read_raw(made.output)
    assert after == {
        f"{D_UNET}.lora_A.weight": before[f"{UNET}.lora_down.weight"],
        f"{D_UNET}.lora_B.weight": before[f"{UNET}.lora_up.weight"],
        f"{D_UNET}.alpha": before[f"{UNET}.alpha"],
        f"{D_TEXT}.lora_A.weight": before[f"{TEXT}.lora_down.weight"],
        f"{D_TEXT}.lora_B.weight": before[f"{TEXT}.lora_up.weight"],
    }
    assert stored == {"format": "pt", "ss_output_name": "cat"}
    back = convert_lora(made.output, tmp_path / "back.safetensors", names="kohya")
    assert read_raw(back.output)[1] == before
    peft = convert_lora(made.output, tmp_path / "peft.safetensors", names="peft")
    assert f"base_model.model.{D_UNET.removeprefix('unet.')}.lora_A.weight" in read(peft.output)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_a_fused_module_is_split_by_rows(tmp_path, dtype):
    encode = {"F16": lambda a: a.astype("<f2").tobytes(), "BF16": bf16, "F32": lambda a: a.astype("<f4").tobytes()}
    down, up = RNG.normal(size=(4, 16)), RNG.normal(size=(48, 4))
    raw = {f"{QKV}.lora_down.weight": (dtype, (4, 16), encode[dtype](down)),
           f"{QKV}.lora_up.weight": (dtype, (48, 4), encode[dtype](up)),
           f"{QKV}.alpha": ("F32", (), np.float32(2).tobytes())}  # fmt: skip
    source = write_raw(tmp_path / "in.safetensors", raw)
    made = convert_lora(source, tmp_path / "out.safetensors", names="diffusers")
    assert (made.renamed, made.split, made.joined) == (0, 3, 0)
    after = read_raw(made.output)[1]
    rows = raw[f"{QKV}.lora_up.weight"][2]
    for n, part in enumerate(PARTS):
        assert after[f"{part}.lora_A.weight"] == raw[f"{QKV}.lora_down.weight"]
        third = len(rows) // 3
        assert after[f"{part}.lora_B.weight"] == (dtype, (16, 4), rows[n * third : (n + 1) * third])
        assert after[f"{part}.alpha"] == raw[f"{QKV}.alpha"]
    # and joined again: the parts share one down, so the old file comes back
    back = convert_lora(made.output, tmp_path / "back.safetensors", names="kohya", family="flux")
    assert (back.renamed, back.split, back.joined) == (0, 0, 1)
    assert read_raw(back.output)[1] == raw


def test_parts_of_different_size(tmp_path):
    tensors = kohya(LINEAR1, 7 * 8, 8)
    made, after = convert(tmp_path, tensors, "diffusers")
    assert made.split == 4
    whole = delta(tensors, LINEAR1)
    for part, start, stop in zip(PARTS1, (0, 8, 16, 24), (8, 16, 24, 56), strict=True):
        assert np.array_equal(delta(after, part), whole[start:stop])


@pytest.mark.parametrize("alphas", [(None, None, None), (2.0, 2.0, 2.0), (4.0, 2.0, 1.0)])
def test_separate_factors_are_joined_exactly(tmp_path, alphas):
    ranks = (4, 4, 4) if alphas[0] != 4.0 else (8, 4, 2)  # one alpha / rank for all
    tensors = {}
    for part, rank, alpha in zip(PARTS, ranks, alphas, strict=True):
        tensors |= diffusers(part, 16, 16, rank, alpha)
    made, after = convert(tmp_path, tensors, "kohya", family="flux")
    assert made.joined == 1
    assert after[f"{QKV}.lora_down.weight"].shape == (sum(ranks), 16)
    assert after[f"{QKV}.lora_up.weight"].shape == (48, sum(ranks))
    assert after[f"{QKV}.lora_up.weight"].dtype == np.float16
    assert (f"{QKV}.alpha" in after) == (alphas[0] is not None)
    expected = np.concatenate([delta(tensors, part) for part in PARTS])
    assert np.allclose(delta(after, QKV), expected, rtol=1e-14, atol=0)


def test_joining_takes_an_alpha_of_0_as_the_rank(tmp_path):
    tensors = {}
    for part, alpha in zip(PARTS, (0.0, 4.0, 0.0), strict=True):  # rank 4: a scale of 1 each
        tensors |= diffusers(part, 16, 16, 4, alpha, "<f4")
    _, after = convert(tmp_path, tensors, "kohya", family="flux")
    plain = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
    expected = np.concatenate([delta(plain, part) for part in PARTS])
    assert np.allclose(delta(after, QKV), expected, rtol=1e-14, atol=0)


def test_joining_with_different_scales_rounds_once(tmp_path):
    tensors = {}
    for part, alpha in zip(PARTS, (1.0, 3.0, 5.0), strict=True):
        tensors |= diffusers(part, 16, 16, 4, alpha, "<f4")
    _, after = convert(tmp_path, tensors, "kohya", family="flux")
    expected = np.concatenate([delta(tensors, part) for part in PARTS])
    assert np.allclose(delta(after, QKV), expected, rtol=1e-6, atol=1e-6)


def test_missing_parts_are_empty_rows(tmp_path):
    tensors = diffusers(PARTS1[1], 8, 8) | diffusers(PARTS1[3], 32, 8)
    made, after = convert(tmp_path, tensors, "kohya")
    assert (made.joined, made.unused) == (1, ())
    whole = np.zeros((56, 8))
    whole[8:16], whole[24:] = delta(tensors, PARTS1[1]), delta(tensors, PARTS1[3])
    assert np.allclose(delta(after, LINEAR1), whole, rtol=1e-14, atol=0)


def test_xlabs_names(tmp_path):
    stem = "double_blocks.4.processor.qkv_lora1"
    tensors = {f"{stem}.down.weight": RNG.normal(size=(4, 16)).astype("<f2"),
               f"{stem}.up.weight": RNG.normal(size=(48, 4)).astype("<f2")}  # fmt: skip
    _, after = convert(tmp_path, tensors, "kohya")
    assert np.array_equal(after[f"{QKV}.lora_down.weight"], tensors[f"{stem}.down.weight"])
    assert np.array_equal(after[f"{QKV}.lora_up.weight"], tensors[f"{stem}.up.weight"])
    _, after = convert(tmp_path, tensors, "diffusers", overwrite=True)
    whole = tensors[f"{stem}.up.weight"].astype("f8") @ tensors[f"{stem}.down.weight"].astype("f8")
    assert np.array_equal(delta(after, PARTS[2]), whole[32:])


def test_halves_change_places(tmp_path):
    flux = "lora_unet_final_layer_adaLN_modulation_1"
    tensors = kohya(flux, 12, 6) | kohya(QKV, 18, 6)
    _, after = convert(tmp_path, tensors, "diffusers")
    whole = delta(tensors, flux)
    assert np.array_equal(delta(after, "transformer.norm_out.linear"), np.concatenate([whole[6:], whole[:6]]))
    assert np.array_equal(after["transformer.norm_out.linear.lora_A.weight"], tensors[f"{flux}.lora_down.weight"])


def test_the_alpha_of_a_configuration_becomes_a_tensor(tmp_path):
    folder, out = tmp_path / "peft", tmp_path / "out.safetensors"
    folder.mkdir()
    modules = ("transformer_blocks.4.attn.to_out.0", "single_transformer_blocks.0.proj_out")
    parts = {f"base_model.model.{name}.lora_{part}.default.weight": np.ones(shape, "<f4")
             for name in modules for part, shape in (("A", (4, 8)), ("B", (8, 4)))}  # fmt: skip
    file = write(folder / "adapter_model.safetensors", parts)
    with pytest.raises(RecipeError, match="no alpha"):
        convert_lora(file, out, names="kohya")
    made = convert_lora(file, out, names="kohya", lora_alpha=12)
    assert read(made.output)["lora_unet_double_blocks_4_img_attn_proj.alpha"] == 12
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    after = read(convert_lora(file, out, names="kohya", overwrite=True).output)
    assert after["lora_unet_double_blocks_4_img_attn_proj.alpha"] == 16  # 8 · √4, and 16 / 4 = 8 / √4
    names = ("double_blocks_4_img_attn_proj", "single_blocks_0_linear2")
    ends = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(after) == {f"lora_unet_{name}.{end}" for name in names for end in ends}


def test_what_has_no_name_is_listed(tmp_path):
    strange = "lora_unet_some_other_thing"
    made, after = convert(tmp_path, kohya(UNET, 8, 768) | kohya(strange, 8, 8), "diffusers")
    assert [name for name, _ in made.unused] == [strange]
    assert strange in made.warnings[0]
    assert all(key.startswith(D_UNET) for key in after)
    source = tmp_path / "in.safetensors"
    with pytest.raises(PlanError, match=strange):
        convert_lora(source, tmp_path / "b.safetensors", names="diffusers", strict=True)
    assert not (tmp_path / "b.safetensors").exists()


def test_what_cannot_be_divided_is_listed(tmp_path):
    loha = {f"{QKV}.hada_{end}": np.ones(shape, "<f2") for end, shape in
            (("w1_a", (48, 2)), ("w1_b", (2, 16)), ("w2_a", (48, 2)), ("w2_b", (2, 16)))}  # fmt: skip
    made, after = convert(tmp_path, loha | kohya("lora_unet_double_blocks_4_img_attn_proj", 16, 16), "diffusers")
    assert made.unused[0][0] == QKV
    assert "split" in made.unused[0][1]
    assert all(key.startswith("transformer.transformer_blocks.4.attn.to_out.0.") for key in after)
    write(tmp_path / "only.safetensors", loha)
    with pytest.raises(PlanError, match="nothing"):
        convert_lora(tmp_path / "only.safetensors", tmp_path / "b.safetensors", names="diffusers")
    made = convert_lora(tmp_path / "only.safetensors", tmp_path / "b.safetensors", names="kohya")
    assert read_raw(made.output)[1] == read_raw(tmp_path / "only.safetensors")[1]


def test_full_differences_are_divided_too(tmp_path):
    weight, bias = RNG.normal(size=(48, 16)).astype("<f4"), RNG.normal(size=48).astype("<f4")
    _, after = convert(tmp_path, {f"{QKV}.diff": weight, f"{QKV}.diff_b": bias}, "diffusers")
    for n, part in enumerate(PARTS):
        assert np.array_equal(after[f"{part}.diff"], weight[16 * n : 16 * n + 16])
        assert np.array_equal(after[f"{part}.diff_b"], bias[16 * n : 16 * n + 16])


def test_language_models_have_peft_names_only(tmp_path):
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = diffusers(stem, 8, 8, alpha=4.0)
    with pytest.raises(PlanError, match="kohya has no name"):
        convert(tmp_path, tensors, "kohya")
    _, after = convert(tmp_path, tensors, "peft")
    assert set(after) == set(tensors)


def test_refusals(tmp_path):
    source = write(tmp_path / "in.safetensors", kohya(UNET, 8, 768))
    with pytest.raises(RecipeError, match="diffuser"):
        convert_lora(source, tmp_path / "b.safetensors", names="diffuser")
    with pytest.raises(PlanError, match="exists"):
        convert_lora(source, write(tmp_path / "taken.safetensors", {"w": np.ones(2)}), names="diffusers")
    model = write(tmp_path / "model.safetensors", {"model.diffusion_model.out.2.weight": np.ones((4, 4), "<f2")})
    with pytest.raises(FileError, match="no LoRA"):
        convert_lora(model, tmp_path / "b.safetensors", names="diffusers")
    unknown = write(tmp_path / "unknown.safetensors", diffusers("strange.module", 8, 8))
    with pytest.raises(RecipeError, match="no model family that is known"):
        convert_lora(unknown, tmp_path / "b.safetensors", names="kohya")
    with pytest.raises(RecipeError, match="flax"):
        convert_lora(unknown, tmp_path / "b.safetensors", names="kohya", family="flax")
    with pytest.raises(PlanError, match="replace"):
        convert_lora(source, source, names="diffusers", overwrite=True)
    assert {path.stem for path in tmp_path.iterdir()} == {"in", "taken", "model", "unknown"}


CLIP = "text_model_encoder_layers_0_self_attn_q_proj"


def test_the_family_is_asked_for_only_where_it_changes_the_names(tmp_path):
    """A LoRA of text encoders alone: the first one is `te` to kohya in SD1.5, `te1` in SDXL, and one name elsewhere."""
    source = write(tmp_path / "in.safetensors", kohya(f"lora_te1_{CLIP}", 8, 768))
    convert_lora(source, tmp_path / "b.safetensors", names="diffusers")
    assert read(tmp_path / "b.safetensors").keys() == {
        f"text_encoder.text_model.encoder.layers.0.self_attn.q_proj.{end}"
        for end in ("lora_A.weight", "lora_B.weight", "alpha")
    }
    with pytest.raises(RecipeError, match="several model families") as caught:
        convert_lora(tmp_path / "b.safetensors", tmp_path / "c.safetensors", names="kohya")
    assert f"sd1 (lora_te_{CLIP} …)" in caught.value.hint
    assert f"(lora_te1_{CLIP} …)" in caught.value.hint
    assert "auraflow" not in caught.value.hint  # the many that call it the same are not all named
    convert_lora(tmp_path / "b.safetensors", tmp_path / "c.safetensors", names="kohya", family="sdxl")
    assert set(read(tmp_path / "c.safetensors")) == set(read(source))


def test_a_block_of_one_kind_of_model_needs_no_family(tmp_path):
    """Krea's and FLUX's `transformer_blocks`: names in diffusers are the same for all who have them."""
    source = write(tmp_path / "in.safetensors", kohya("lora_unet_transformer_blocks_0_attn_to_q", 8, 3072))
    convert_lora(source, tmp_path / "b.safetensors", names="diffusers")
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in read(tmp_path / "b.safetensors")


def test_the_command_line(tmp_path, capsys):
    source = write(tmp_path / "in.safetensors", kohya(UNET, 8, 768))
    out = tmp_path / "out.safetensors"
    words = ["lora", "convert", str(source), "-o", str(out), "--names", "diffusers"]
    assert main([*words, "--dry-run"]) == 0
    assert not out.exists()
    assert "would write" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"output", "sha256", "merged", "copied", "discarded", "unused", "warnings", "seconds", "peak_rss_mb"} <= set(
        told
    )
    assert (told["renamed"], told["copied"], len(told["sha256"])) == (1, 1, 64)
    assert main(words) == 1
    assert main([*words, "--number"]) == 0
    assert (tmp_path / "out_1.safetensors").exists()
    assert main(["lora", "convert", str(source), "-o", str(out)]) == 2
    assert main(["convert", "--help"]) == 0
    assert "checkpoint" in capsys.readouterr().out
