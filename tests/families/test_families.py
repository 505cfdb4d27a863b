"""Families, components and blocks against real key lists; counts are those of the models' descriptions, not ours."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib_merge import families
from lib_merge.errors import RecipeError
from lib_merge.families import (
    FAMILIES,
    PREFIXES,
    Detected,
    block_names,
    block_of,
    blocks_of,
    component_of,
    detect,
    kind_of,
    never_merged,
)
from lib_merge.families._adapters import is_adapter

pytestmark = pytest.mark.portable

TOPOLOGIES = Path(__file__).resolve().parent.parent / "data" / "topologies"
LDM = "model.diffusion_model."

# file: id, kind, prefix, variant, naming, number of blocks
EXPECTED = {
    "auraflow_diffusers": ("auraflow", "denoiser", "", "", "diffusers", 1 + 4 + 32 + 1),
    "chroma1_bfl": ("chroma", "denoiser", "", "", "native", 1 + 19 + 38 + 1),
    "chroma1_diffusers": ("chroma", "denoiser", "", "", "diffusers", 1 + 19 + 38 + 1),
    "flux1_dev_bfl": ("flux", "denoiser", "", "dev", "native", 61),
    "flux1_dev_diffusers": ("flux", "denoiser", "", "dev", "diffusers", 61),
    "flux1_schnell_bfl": ("flux", "denoiser", "", "schnell", "native", 61),
    "flux2_dev_bfl": ("flux2", "denoiser", "", "", "native", 1 + 8 + 48 + 1),
    "flux2_dev_diffusers": ("flux2", "denoiser", "", "", "diffusers", 1 + 8 + 48 + 1),
    "hunyuan_video_diffusers": ("hunyuan_video", "denoiser", "", "", "diffusers", 1 + 20 + 40 + 1),
    "hunyuan_video_native": ("hunyuan_video", "denoiser", "", "", "native", 1 + 20 + 40 + 1),
    "llama31_8b_hf": ("llm", "llm", "", "", "native", 1 + 32 + 1 + 1),
    "lora_diffusers_flux1_r16": ("flux", "adapter", "", "", "", 61),
    "lora_kohya_flux1_r16": ("flux", "adapter", "", "", "", 61),
    "lora_kohya_sd15_locon_r16": ("sd1", "adapter", "", "", "", 26),
    "lora_kohya_sd15_r16": ("sd1", "adapter", "", "", "", 26),
    "lora_kohya_sdxl_r16": ("sdxl", "adapter", "", "", "", 20),
    "lora_peft_qwen3_4b_r16": ("llm", "adapter", "", "", "", 36),
    "ltx_video_diffusers": ("ltx", "denoiser", "", "", "diffusers", 1 + 28 + 1),
    "lumina2_diffusers": ("lumina2", "denoiser", "", "", "diffusers", 1 + 2 + 2 + 26 + 1),
    "lumina2_native": ("lumina2", "denoiser", "", "", "native", 1 + 2 + 2 + 26 + 1),
    "qwen3_4b_hf": ("qwen3", "llm", "", "", "native", 1 + 36 + 1),
    "qwen_image_comfy": ("qwen_image", "denoiser", "", "", "native", 1 + 60 + 1),
    "qwen_image_diffusers": ("qwen_image", "denoiser", "", "", "native", 1 + 60 + 1),
    "sd15_ldm": ("sd1", "checkpoint", LDM, "", "native", 26),
    "sd15_unet_diffusers": ("sd1", "denoiser", "", "", "diffusers", 26),
    "sd21_ldm": ("sd2", "checkpoint", LDM, "", "native", 26),
    "sd35_large_mmdit": ("sd3", "denoiser", LDM, "3.5-large", "native", 1 + 38 + 1),
    "sd3_medium_diffusers": ("sd3", "denoiser", "", "medium", "diffusers", 1 + 24 + 1),
    "sd3_medium_mmdit": ("sd3", "denoiser", LDM, "medium", "native", 1 + 24 + 1),
    "sdxl_base_sgm": ("sdxl", "checkpoint", LDM, "", "native", 20),
    "sdxl_refiner_sgm": ("sdxl_refiner", "checkpoint", LDM, "refiner", "native", 26),
    "sdxl_unet_diffusers": ("sdxl", "denoiser", "", "", "diffusers", 20),
    "vae_diffusers": ("vae", "vae", "", "", "diffusers", 1),
    "wan21_t2v_1.3b_diffusers": ("wan", "denoiser", "", "1.3b", "diffusers", 1 + 30 + 1),
    "wan21_t2v_1.3b_native": ("wan", "denoiser", "", "1.3b", "native", 1 + 30 + 1),
    "wan21_t2v_14b_diffusers": ("wan", "denoiser", "", "14b", "diffusers", 1 + 40 + 1),
    "wan21_t2v_14b_native": ("wan", "denoiser", "", "14b", "native", 1 + 40 + 1),
    "z_image_diffusers": ("z_image", "denoiser", "", "", "diffusers", 1 + 2 + 2 + 30 + 1),
    "z_image_native": ("z_image", "denoiser", "", "", "native", 1 + 2 + 2 + 30 + 1),
}

IN = [f"IN{n:02d}" for n in range(12)]
OUT = [f"OUT{n:02d}" for n in range(12)]
SD1_COUNTS = dict(zip(IN, (2, 36, 36, 2, 38, 36, 2, 38, 36, 2, 10, 10), strict=True)) | {"M00": 46}
SD1_COUNTS |= dict(zip(OUT, (12, 12, 14, 38, 38, 40, 38, 38, 40, 38, 38, 38), strict=True))
SDXL_COUNTS = dict(zip(IN, (2, 10, 10, 2, 58, 56, 2, 218, 216), strict=False)) | {"M00": 226}
SDXL_COUNTS |= dict(zip(OUT, (218, 218, 220, 58, 58, 60, 12, 12, 12), strict=False))


@cache
def topology(name):
    text = gzip.decompress(TOPOLOGIES.joinpath(f"{name}.json.gz").read_bytes())
    return {key: (dtype, tuple(shape)) for key, (dtype, shape) in json.loads(text).items()}


def made(*keys, dtype="F16", **shapes):
    """Tensors of one element each, but for the shapes given."""
    return dict.fromkeys(keys, (dtype, (1,))) | {key: (dtype, tuple(shape)) for key, shape in shapes.items()}


def counts(name):
    tensors = topology(name)
    found = detect(tensors)
    return Counter(block_of(key, found) for key in tensors)


def parameters(name):
    """Number of parameters in each block."""
    tensors = topology(name)
    found = detect(tensors)
    numels = Counter()
    for key, (_, shape) in tensors.items():
        numels[block_of(key, found)] += math.prod(shape)
    return numels


def modules(name):
    """Number of modules an adapter has in each block."""
    tensors = topology(name)
    found = detect(tensors)
    places = {(block_of(key, found), key.split(".lora_")[0].removesuffix(".alpha")) for key in tensors}
    return Counter(block for block, _ in places)


# Detection.


def test_every_topology_is_expected():
    assert {path.name.removesuffix(".json.gz") for path in TOPOLOGIES.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_topologies_are_told(name):
    found = detect(topology(name))
    seen = (found.id, found.kind, found.prefix, found.variant, found.naming, len(block_names(topology(name), found)))
    assert seen == EXPECTED[name]
    assert found.family is families.family(found.id)
    assert found.name == found.family.name


@pytest.mark.parametrize("name", [name for name, row in EXPECTED.items() if row[1] == "denoiser" and not row[2]])
@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "transformer/", "unet/", "net.", "diffusion_model."])
def test_a_prefix_changes_only_the_prefix(name, prefix):
    plain = topology(name)
    moved = {prefix + key: value for key, value in plain.items()}
    bare, found = detect(plain), detect(moved)
    assert (found.id, found.variant, found.kind, found.prefix) == (bare.id, bare.variant, bare.kind, prefix)
    assert [block_of(key, bare) for key in plain] == [block_of(key, found) for key in moved]
    assert block_names(plain) == block_names(moved)


def test_order_of_keys_does_not_matter():
    for name in ("sd15_ldm", "flux1_dev_bfl", "sd3_medium_diffusers", "wan21_t2v_14b_native", "lora_kohya_sd15_r16"):
        tensors = topology(name)
        turned = dict(reversed(list(tensors.items())))
        assert detect(turned) == detect(tensors)
        assert block_names(turned) == block_names(tensors)


TEXT = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
TEXT_XL = "input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"
D_TEXT = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({f"{LDM}input_blocks.0.0.weight": (320, 4, 3, 3), f"{LDM}{TEXT}": (320, 768)}, ("sd1", LDM, "")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 4, 3, 3), f"{LDM}{TEXT}": (320, 1024)}, ("sd2", LDM, "")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 4, 3, 3), f"{LDM}{TEXT_XL}": (640, 2048)}, ("sdxl", LDM, "")),
        ({f"{LDM}input_blocks.0.0.weight": (384, 4, 3, 3), f"{LDM}{TEXT_XL}": (768, 1280)},
         ("sdxl_refiner", LDM, "refiner")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 9, 3, 3), f"{LDM}{TEXT}": (320, 768)}, ("sd1", LDM, "inpaint")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 8, 3, 3), f"{LDM}{TEXT}": (320, 768)}, ("sd1", LDM, "ix2pix")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 5, 3, 3), f"{LDM}{TEXT}": (320, 1024)}, ("sd2", LDM, "depth")),
        ({f"{LDM}input_blocks.0.0.weight": (320, 9, 3, 3), f"{LDM}{TEXT_XL}": (640, 2048)}, ("sdxl", LDM, "inpaint")),
        ({"conv_in.weight": (320, 9, 3, 3), D_TEXT: (320, 768)}, ("sd1", "", "inpaint")),
        ({"unet/conv_in.weight": (320, 4, 3, 3), f"unet/{D_TEXT}": (320, 1024)}, ("sd2", "unet/", "")),
        ({"input_blocks.0.0.weight": (320, 4, 3, 3), "label_emb.0.0.weight": (1280, 2816)}, ("sdxl", "", "")),
        ({FLUX: (128,), "guidance_in.in_layer.weight": (3072, 256)}, ("flux", "", "dev")),
        ({f"model.{FLUX}": (128,)}, ("flux", "model.", "schnell")),
        ({FLUX: (128,), "guidance_in.in_layer.weight": (3072, 256), "img_in.weight": (3072, 384)},
         ("flux", "", "fill")),
        ({FLUX: (128,), "guidance_in.in_layer.weight": (3072, 256), "img_in.weight": (3072, 128)},
         ("flux", "", "control")),
        ({FLUX: (128,), "distilled_guidance_layer.in_proj.weight": (5120, 64)}, ("chroma", "", "")),
        ({"distilled_guidance_layer.in_proj.weight": (5120, 64), "nerf_blocks.0.norm.scale": (64,)},
         ("chroma", "", "radiance")),
        ({"joint_blocks.3.context_block.attn.qkv.weight": (4608, 1536), "x_embedder.proj.weight": (1536, 16, 2, 2),
          "joint_blocks.0.x_block.attn2.qkv.weight": (4608, 1536)}, ("sd3", "", "3.5-medium")),
        ({"head.modulation": (1, 2, 5120), "img_emb.proj.0.bias": (1280,)}, ("wan", "", "i2v")),
        ({"head.modulation": (1, 2, 5120), "patch_embedding.weight": (5120, 36, 1, 2, 2)}, ("wan", "", "i2v")),
        ({"head.modulation": (1, 2, 3072), "patch_embedding.weight": (3072, 48, 1, 2, 2)}, ("wan", "", "5b")),
        ({"head.modulation": (1, 2, 1536), "vace_blocks.0.modulation": (1, 6, 1536)}, ("wan", "", "vace")),
        ({"double_layers.0.attn.w1q.weight": (3072, 3072)}, ("auraflow", "", "")),
        ({"patchify_proj.weight": (2048, 128)}, ("ltx", "", "")),
        ({"net.blocks.0.mlp.layer1.weight": (8192, 2048)}, ("cosmos2", "net.", "")),
        ({"net.blocks.0.mlp.layer1.weight": (8192, 2048), "net.llm_adapter.norm.weight": (1024,)},
         ("cosmos2", "net.", "anima")),
        ({"caption_projection.0.linear.weight": (2560, 4096)}, ("hidream", "", "")),
        ({"t_block.1.weight": (6912, 1152)}, ("pixart", "", "")),
        ({"clf.1.weight": (64, 2048, 1, 1)}, ("cascade", "", "")),
    ],
)  # fmt: skip
def test_few_keys_suffice(tensors, expected):
    found = detect(made(**tensors))
    assert (found.id, found.prefix, found.variant) == expected
    assert found.kind == "denoiser"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([f"{LDM}{TEXT}", "cond_stage_model.transformer.text_model.final_layer_norm.weight"], "sd1"),
        ([f"{LDM}{TEXT}", "cond_stage_model.model.ln_final.weight"], "sd2"),
        ([f"{LDM}input_blocks.0.0.weight", f"{LDM}{TEXT_XL}", f"{LDM}label_emb.0.0.weight"], "sdxl"),
        ([f"{LDM}input_blocks.0.0.weight", f"{LDM}input_blocks.9.0.op.weight", f"{LDM}label_emb.0.0.weight"],
         "sdxl_refiner"),
        (["conv_in.weight", D_TEXT], "sd1"),
        (["conv_in.weight", "down_blocks.0.resnets.0.conv1.weight", "add_embedding.linear_1.weight"], "sdxl"),
        ([f"{LDM}input_blocks.0.0.weight"], "unet"),
    ],
)  # fmt: skip
def test_odd_widths_are_told_by_structure(keys, expected):
    assert detect(made(*keys)).id == expected


def test_a_narrow_copy_of_a_topology_is_the_same_family():
    for name in ("sd15_ldm", "sd21_ldm", "sdxl_base_sgm", "sdxl_refiner_sgm", "flux1_dev_bfl", "sdxl_unet_diffusers"):
        narrow = {key: (dtype, tuple(min(8, n) for n in shape)) for key, (dtype, shape) in topology(name).items()}
        assert detect(narrow).id == EXPECTED[name][0], name


def test_distilled_sdxl_is_a_variant():
    deep = f"{LDM}input_blocks.7.1.transformer_blocks."
    kept = {key: value for key, value in topology("sdxl_base_sgm").items()
            if not (key.startswith(deep) and int(key[len(deep):].split(".")[0]) > 3)}  # fmt: skip
    assert detect(kept).variant == "pruned"


@pytest.mark.parametrize("keys", [[], ["weight"], ["a.b.c", "encoder.foo"], ["model.something.weight"]])
def test_the_unknown_is_called_so(keys):
    found = detect(made(*keys))
    assert found == Detected("unknown", "unknown", "unknown")
    assert detect(made(f"{LDM}strange.weight")).prefix == LDM


def test_controlnets_are_no_unets():
    keys = ["input_blocks.0.0.weight", "zero_convs.0.0.weight"]
    assert detect(made(*keys, **{TEXT: (320, 768)})).id == "unknown"
    assert detect(made("controlnet_cond_embedding.conv_in.weight", **{D_TEXT: (320, 768)})).id == "unknown"


def test_text_encoders_and_vaes_in_files_of_their_own():
    ldm = topology("sdxl_base_sgm")
    for start, expected in {
        "conditioner.embedders.0.transformer.": ("clip", "l", "te1"),
        "conditioner.embedders.1.model.": ("clip", "g", "te1"),
        "first_stage_model.": ("vae", "", "vae"),
    }.items():
        for kept in (start, ""):
            part = {kept + key.removeprefix(start): value for key, value in ldm.items() if key.startswith(start)}
            found = detect(part)
            assert (found.id, found.variant, found.prefix) == (*expected[:2], kept)
            assert {component_of(key, found) for key in part} == {expected[2]}
            assert kept or {component_of(key) for key in part} == {expected[2]}
    t5 = made("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.11.layer.1.layer_norm.weight",
              "shared.weight", "encoder.final_layer_norm.weight")  # fmt: skip
    assert (detect(t5).id, detect(t5).kind) == ("t5", "text encoder")
    assert {component_of(key) for key in t5} == {"te1"}
    assert block_names(t5) == ["BASE", "L00", "L11"]


def test_a_folder_without_a_denoiser():
    tensors = {f"vae/{key}": value for key, value in topology("vae_diffusers").items()}
    tensors |= made("text_encoder/text_model.encoder.layers.0.self_attn.q_proj.weight")
    found = detect(tensors)
    assert (found.kind, found.prefix) == ("vae", "vae/")
    assert Counter(component_of(key, found) for key in tensors) == {"vae": 248, "te1": 1}


def test_language_models():
    layer = "model.layers.0."
    for keys, expected in (
        ([f"{layer}self_attn.q_proj.weight"], ("llm", "")),
        ([f"{layer}self_attn.q_proj.weight", f"{layer}self_attn.q_proj.bias"], ("qwen2", "")),
        ([f"{layer}self_attn.q_norm.weight", f"{layer}mlp.experts.0.up_proj.weight"], ("qwen3", "moe")),
        ([f"{layer}self_attn.q_proj.weight", f"{layer}block_sparse_moe.experts.7.w1.weight"], ("llm", "moe")),
        ([f"{layer}self_attn.q_norm.weight", f"{layer}pre_feedforward_layernorm.weight"], ("gemma", "")),
        (["transformer.h.0.attn.c_attn.weight"], ("llm", "")),
    ):
        found = detect(made(*keys))
        assert (found.id, found.variant, found.kind) == (*expected, "llm")
    gpt2 = made("transformer.wte.weight", "transformer.h.1.attn.c_attn.weight", "transformer.ln_f.weight")
    assert block_names(gpt2) == ["EMBED", "L01", "NORM"]
    assert {component_of(key) for key in gpt2} == {"llm"}
    assert {component_of(key) for key in topology("llama31_8b_hf")} == {"llm"}


@pytest.mark.parametrize(
    "key",
    [
        "lora_unet_down_blocks_0_attentions_0_proj_in.alpha",
        "unet.down_blocks.0.attentions.0.attn1.to_q.lora_A.default.weight",
        "double_blocks.0.processor.qkv_lora1.down.weight",
        "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight",
        "lycoris_blocks_0_ffn_0.lokr_w1",
        "diffusion_model.blocks.0.modulation.diff_m",
        "diffusion_model.blocks.0.norm3.diff_b",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.transformer.h.0.attn.c_attn.oft_R.weight",
        "x.lora_embedding_A",
        "oft_unet_x.oft_blocks",
        "x.hada_w1_a",
        "x.dora_scale",
    ],
)
def test_any_adapter_key_makes_an_adapter(key):
    whole = dict(topology("flux1_dev_bfl"), **made(key))
    assert detect(whole).kind == "adapter"


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith("lora")])
def test_no_model_key_looks_like_an_adapter(name):
    assert not is_adapter(topology(name))


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("transformer.transformer_blocks.0.attn.add_q_proj.lora_A.weight", (16, 1536), "sd3"),
        ("transformer.transformer_blocks.0.img_mlp.net.2.lora_A.default.weight", (16, 12288), "qwen_image"),
        ("diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight", (16, 5120), "wan"),
        ("lora_unet_double_blocks_0_img_mlp_fc1.lora_down.weight", (16, 3072), "hunyuan_video"),
        ("diffusion_model.layers.0.attention.to_q.lora_A.weight", (16, 3840), "z_image"),
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight", (8, 1024), "sd2"),
        ("double_blocks.0.processor.proj_lora2.down.weight", (16, 3072), "flux"),
        ("lora_unet_blocks_0_self_attn_output_proj.lora_down.weight", (16, 2048), "cosmos2"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", (8, 768), "unknown"),
    ],
)
def test_whom_an_adapter_is_for(key, shape, expected):
    found = detect({key: ("F16", shape)})
    assert (found.id, found.kind) == (expected, "adapter")


# The registry.


def test_families_are_sorted_and_unique():
    assert [item.priority for item in FAMILIES] == sorted(item.priority for item in FAMILIES)
    assert len({item.id for item in FAMILIES}) == len(FAMILIES) == len({item.priority for item in FAMILIES})
    told = {row[0] for row in EXPECTED.values()}
    assert told <= {item.id for item in FAMILIES}


def test_a_family_named_twice_is_refused():
    flux = families.family("flux")
    with pytest.raises(ValueError, match="the id flux"):
        families.collect([SimpleNamespace(FAMILY=flux), SimpleNamespace(FAMILIES=(flux,))])


def test_an_unknown_family_is_answered_with_the_nearest():
    with pytest.raises(RecipeError) as caught:
        families.family("qwen_imag")
    assert "qwen_image" in caught.value.hint


def test_prefixes_are_longest_first():
    assert list(PREFIXES) == sorted(PREFIXES, key=len, reverse=True)
    assert PREFIXES[-1] == ""


# Components.


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model.diffusion_model.out.0.weight", "unet"),
        ("unet/conv_in.weight", "unet"),
        ("transformer/x_embedder.weight", "unet"),
        ("transformer_2/blocks.0.modulation", "unet"),
        ("double_blocks.0.img_attn.qkv.weight", "unet"),
        ("cond_stage_model.transformer.embeddings.position_ids", "te1"),
        ("cond_stage_model.model.logit_scale", "te1"),
        ("conditioner.embedders.0.transformer.text_model.final_layer_norm.bias", "te1"),
        ("conditioner.embedders.0.model.ln_final.bias", "te1"),
        ("conditioner.embedders.1.model.text_projection", "te2"),
        ("text_encoders.clip_l.transformer.text_model.final_layer_norm.bias", "te1"),
        ("text_encoders.clip_g.transformer.text_projection.weight", "te2"),
        ("text_encoders.t5xxl.transformer.shared.weight", "te3"),
        ("text_encoders.qwen25_7b.transformer.model.layers.0.mlp.up_proj.weight", "te1"),
        ("text_encoder/text_model.final_layer_norm.bias", "te1"),
        ("text_encoder_2/encoder.block.0.layer.0.SelfAttention.q.weight", "te2"),
        ("text_encoder_3/shared.weight", "te3"),
        ("first_stage_model.decoder.conv_in.weight", "vae"),
        ("vae.decoder.conv_in.weight", "vae"),
        ("vae/decoder.conv_in.weight", "vae"),
        ("post_quant_conv.weight", "vae"),
        ("decoder.conv_in.weight", "vae"),
        ("model_ema.diffusion_modelinput_blocks00weight", "ema"),
        ("alphas_cumprod", "other"),
        ("v_pred", "other"),
        ("denoiser.sigmas", "other"),
        ("image_encoder/vision_model.post_layernorm.weight", "other"),
        ("lora_unet_mid_block_attentions_0_proj_in.alpha", "unet"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.alpha", "te1"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "te1"),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1.alpha", "te2"),
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q.alpha", "te3"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "llm"),
        ("base_model.model.double_blocks.0.img_attn.qkv.lora_A.weight", "unet"),
        ("model.embed_tokens.weight", "llm"),
    ],
)
def test_components(key, expected):
    assert component_of(key) == expected


def test_components_of_whole_files():
    for name, expected in {
        "sd15_ldm": {"unet": 686, "te1": 197, "vae": 248, "other": 12},
        "sd21_ldm": {"unet": 686, "te1": 294, "vae": 248, "other": 12},
        "sdxl_base_sgm": {"unet": 1680, "te1": 197, "te2": 390, "vae": 248},
        "sdxl_refiner_sgm": {"unet": 1220, "te1": 390, "vae": 248},
        "vae_diffusers": {"vae": 248},
        "lora_kohya_sdxl_r16": {"unet": 722 * 3, "te1": 72 * 3, "te2": 192 * 3},
    }.items():
        tensors = topology(name)
        found = detect(tensors)
        assert Counter(component_of(key, found) for key in tensors) == expected
        assert Counter(component_of(key) for key in tensors) == expected


def test_a_folder_of_components():
    tensors = {f"unet/{key}": value for key, value in topology("sdxl_unet_diffusers").items()}
    tensors |= {f"vae/{key}": value for key, value in topology("vae_diffusers").items()}
    start = "conditioner.embedders.0.transformer."
    ldm = topology("sdxl_base_sgm")
    text = {key.removeprefix(start): value for key, value in ldm.items() if key.startswith(start)}
    tensors |= {
        f"{folder}/{key}": value for folder in ("text_encoder", "text_encoder_2") for key, value in text.items()
    }
    found = detect(tensors)
    assert (found.id, found.kind, found.prefix, found.naming) == ("sdxl", "checkpoint", "unet/", "diffusers")
    assert Counter(component_of(key, found) for key in tensors) == {"unet": 1680, "vae": 248, "te1": 197, "te2": 197}
    assert len(block_names(tensors, found)) == 20
    assert block_of("vae/quant_conv.weight", found) == "VAE"
    both = {f"{folder}/{key}": value for folder in ("transformer", "transformer_2")
            for key, value in topology("wan21_t2v_14b_diffusers").items()}  # fmt: skip
    assert len(block_names(both)) == 42
    assert block_of("transformer_2/blocks.7.norm2.bias", detect(both)) == "B07"


def test_a_bare_denoiser_with_text_encoders_beside_it():
    tensors = dict(topology("flux1_dev_bfl"), **made(
        "text_encoders.clip_l.transformer.text_model.final_layer_norm.weight",
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight", "vae.decoder.conv_in.weight",
    ))  # fmt: skip
    found = detect(tensors)
    assert (found.id, found.kind, found.prefix) == ("flux", "checkpoint", "")
    assert Counter(component_of(key, found) for key in tensors) == {"unet": 780, "te1": 1, "te3": 1, "vae": 1}
    assert len(block_names(tensors, found)) == 61
    named = counts_of(tensors, found)
    assert (named["CLIP"], named["T5"], named["VAE"]) == (1, 1, 1)


def counts_of(tensors, found):
    return Counter(block_of(key, found) for key in tensors)


# Blocks.


@pytest.mark.parametrize(
    ("name", "expected", "base"),
    [
        ("sd15_ldm", dict(SD1_COUNTS, VAE=248), 4 + 197 + 12),
        ("sd15_unet_diffusers", SD1_COUNTS, 4),
        ("sd21_ldm", dict(SD1_COUNTS, VAE=248), 4 + 294 + 12),
        ("sdxl_base_sgm", dict(SDXL_COUNTS, VAE=248), 4 + 4 + 587),
        ("sdxl_unet_diffusers", SDXL_COUNTS, 4 + 4),
    ],
)
def test_tensors_per_block_of_unets(name, expected, base):
    # The description counts the four output tensors apart: they belong to the last OUT block.
    last = max(block for block in expected if block.startswith("OUT"))
    assert counts(name) == expected | {last: expected[last] + 4, "BASE": base}


def test_tensors_per_block_of_flux():
    expected = {f"D{n:02d}": 24 for n in range(19)} | {f"S{n:02d}": 8 for n in range(38)} | {"IN": 16, "OUT": 4}
    assert counts("flux1_dev_bfl") == expected
    numels = parameters("flux1_dev_bfl")
    assert {round(numels[f"D{n:02d}"] / 1e5) for n in range(19)} == {3398}
    assert {round(numels[f"S{n:02d}"] / 1e5) for n in range(38)} == {1416}


def test_parameters_of_the_deep_blocks_of_sdxl():
    numels = parameters("sdxl_base_sgm")
    assert round(sum(numels[block] for block in ("IN07", "IN08", "M00", "OUT00", "OUT01", "OUT02")) / 1e7) == 238


@pytest.mark.parametrize("pair", [("flux1_dev_bfl", "flux1_dev_diffusers"),
                                  ("sd3_medium_mmdit", "sd3_medium_diffusers"),
                                  ("chroma1_bfl", "chroma1_diffusers"), ("z_image_native", "z_image_diffusers"),
                                  ("hunyuan_video_native", "hunyuan_video_diffusers"),
                                  ("flux2_dev_bfl", "flux2_dev_diffusers"),
                                  ("wan21_t2v_14b_native", "wan21_t2v_14b_diffusers")])  # fmt: skip
def test_both_namings_put_the_same_parameters_into_a_block(pair):
    assert parameters(pair[0]) == parameters(pair[1])


def test_modules_per_block_of_adapters():
    sd1 = {f"IN{n:02d}": 12 for n in (1, 2, 4, 5, 7, 8)} | {"M00": 12} | {f"OUT{n:02d}": 12 for n in range(3, 12)}
    assert modules("lora_kohya_sd15_r16") == sd1 | {"BASE": 72}
    sdxl = {"IN04": 22, "IN05": 22, "IN07": 102, "IN08": 102, "M00": 102, "OUT00": 102, "OUT01": 102, "OUT02": 102,
            "OUT03": 22, "OUT04": 22, "OUT05": 22, "BASE": 264}  # fmt: skip
    assert modules("lora_kohya_sdxl_r16") == sdxl
    locon = modules("lora_kohya_sd15_locon_r16")
    assert [locon[block] for block in ("IN03", "IN06", "IN09")] == [1, 1, 1]
    assert {locon[block] - sd1[block] for block in sd1} <= {3, 4, 5, 6}
    flux = modules("lora_kohya_flux1_r16")
    assert flux == {f"D{n:02d}": 10 for n in range(19)} | {f"S{n:02d}": 3 for n in range(38)} | {"CLIP": 72}


def test_names_are_in_order():
    assert block_names(topology("sdxl_base_sgm")) == [
        *["BASE", "IN00", "IN01", "IN02", "IN03", "IN04", "IN05", "IN06", "IN07", "IN08", "M00"],
        *["OUT00", "OUT01", "OUT02", "OUT03", "OUT04", "OUT05", "OUT06", "OUT07", "OUT08"],
    ]
    flux = block_names(topology("flux1_dev_bfl"))
    assert flux[:4] == ["CLIP", "T5", "IN", "D00"]
    assert flux[21:24] == ["D18", "S00", "S01"]
    assert flux[-2:] == ["S37", "OUT"]
    assert block_names(topology("llama31_8b_hf"))[:2] == ["EMBED", "L00"]
    assert block_names(topology("llama31_8b_hf"))[-3:] == ["L31", "NORM", "HEAD"]
    z_image = block_names(topology("z_image_native"))
    assert z_image[:6] == ["IN", "NR00", "NR01", "CR00", "CR01", "L00"]
    assert z_image[-2:] == ["L29", "OUT"]


def test_overrides_are_listed_on_request():
    sdxl = block_names(topology("sdxl_base_sgm"), overrides=True)
    assert sdxl[:20] == block_names(topology("sdxl_base_sgm"))
    assert set(sdxl[20:]) == {"TIME", "LABEL", "VAE", "CLIP", "CLIPL", "CLIPG"}


def test_a_tensor_is_reached_by_several_names():
    found = detect(topology("sdxl_base_sgm"))
    for key, expected in {
        "model.diffusion_model.time_embed.0.weight": ("TIME", "BASE"),
        "model.diffusion_model.label_emb.0.0.weight": ("LABEL", "BASE"),
        "model.diffusion_model.out.2.bias": ("OUT08",),
        "model.diffusion_model.middle_block.1.norm.weight": ("M00",),
        "conditioner.embedders.0.transformer.text_model.final_layer_norm.bias": ("CLIPL", "CLIP", "BASE"),
        "conditioner.embedders.1.model.ln_final.bias": ("CLIPG", "CLIP", "BASE"),
        "first_stage_model.quant_conv.bias": ("VAE",),
        "v_pred": ("BASE",),
    }.items():
        assert blocks_of(key, found) == expected
        assert block_of(key, found) == expected[-1]


def test_blocks_without_knowing_the_model():
    for key, expected in {
        "model.diffusion_model.input_blocks.4.1.proj_in.weight": "IN04",
        "lora_unet_up_blocks_1_upsamplers_0_conv.lora_up.weight": "OUT05",
        "double_blocks.3.img_attn.qkv.weight": "D03",
        "joint_blocks.3.x_block.attn.qkv.weight": "J03",
        "blocks.3.self_attn.q.weight": "B03",
        "model.layers.3.mlp.up_proj.weight": "L03",
        "final_layer.linear.weight": "OUT",
        "some.strange_stack.7.linear.weight": "some.strange_stack.07",
        "some.linear.weight": "IN",
        "cond_stage_model.transformer.text_model.final_layer_norm.bias": "BASE",
    }.items():
        assert block_of(key) == expected
    strange = made("stem.weight", "stack.0.a.weight", "stack.10.a.weight", "stack.9.a.weight", "head.weight")
    assert block_names(strange) == ["IN", "stack.00", "stack.09", "stack.10", "OUT"]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_block_is_listed_and_every_listed_block_is_used(name):
    tensors = topology(name)
    found = detect(tensors)
    names = set(block_names(tensors, found))
    used = {block_of(key, found) for key in tensors if component_of(key, found) not in ("ema", "other")}
    assert used - names <= {"VAE"}
    assert names - used <= set(found.family.blocks)
    for key in tensors:
        chain = blocks_of(key, found)
        assert block_of(key, found) in chain
        assert len(set(chain)) == len(chain)


# Layer kinds.


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight", "attn1.to_q"),
        ("model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_out.0.bias", "attn1.to_out.0"),
        ("model.diffusion_model.middle_block.1.transformer_blocks.9.ff.net.0.proj.weight", "ff.net.0.proj"),
        ("model.diffusion_model.middle_block.1.transformer_blocks.9.norm2.weight", "norm"),
        ("model.diffusion_model.output_blocks.8.1.proj_out.weight", "proj_out"),
        ("model.diffusion_model.input_blocks.1.0.in_layers.0.weight", "norm"),
        ("model.diffusion_model.input_blocks.1.0.in_layers.2.weight", "in_layers.2"),
        ("model.diffusion_model.input_blocks.3.0.op.weight", "op"),
        ("model.diffusion_model.input_blocks.0.0.weight", "conv_in"),
        ("unet/down_blocks.0.resnets.1.conv1.bias", "conv1"),
        ("double_blocks.18.img_attn.qkv.weight", "img_attn.qkv"),
        ("double_blocks.18.img_attn.norm.key_norm.scale", "norm"),
        ("double_blocks.18.txt_mlp.2.bias", "txt_mlp.2"),
        ("single_blocks.0.linear1.weight", "linear1"),
        ("transformer_blocks.0.norm1.linear.weight", "norm1.linear"),
        ("blocks.0.modulation", "modulation"),
        ("blocks.0.cross_attn.norm_q.weight", "norm"),
        ("layers.0.attention.q_norm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_proj.weight", "self_attn.q_proj"),
        ("cond_stage_model.transformer.text_model.encoder.layers.11.mlp.fc1.bias", "mlp.fc1"),
        ("cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight", "attn.in_proj"),
        ("conditioner.embedders.1.model.ln_final.weight", "norm"),
        ("first_stage_model.decoder.up.3.block.0.conv1.weight", "conv1"),
        ("lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight", "attn2_to_k"),
        ("lora_te_text_model_encoder_layers_0_self_attn_q_proj.alpha", "self_attn_q_proj"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.default.weight", "attn.to_q"),
    ],
)
def test_kinds(key, expected):
    assert kind_of(key) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_kinds_are_few(name):
    tensors = topology(name)
    found = detect(tensors)
    kinds = {kind_of(key, found) for key in tensors if component_of(key, found) != "other"}
    assert "" not in kinds
    assert len(kinds) < 70


# Never averaged.

SCHEDULE = ["betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
            "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod",
            "posterior_variance", "posterior_log_variance_clipped",
            "posterior_mean_coef1", "posterior_mean_coef2"]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "why"),
    [
        *((key, "schedule") for key in SCHEDULE),
        ("denoiser.sigmas", "schedule"),
        ("model_ema.diffusion_modelinput_blocks00weight", "EMA"),
        ("model_ema.decay", "EMA"),
        ("cond_stage_model.model.logit_scale", "CLIP"),
        ("conditioner.embedders.1.model.logit_scale", "CLIP"),
        ("v_pred", "marker"),
        ("ztsnr", "marker"),
        ("edm_vpred.sigma_max", "marker"),
        ("edm_mean", "statistics"),
        ("edm_std", "statistics"),
        ("model.diffusion_model.pos_embed", "positions"),
        ("pos_embed.pos_embed", "positions"),
        ("transformer/pos_embed.pos_embed", "positions"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary"),
        ("cond_stage_model.transformer.text_model.embeddings.position_ids", "position"),
        ("latent_format", "latent"),
    ],
)
def test_constants_are_never_merged(key, why):
    assert why in never_merged(key, "F32", (1, 77))


@pytest.mark.parametrize(
    "key",
    [
        "conditioner.embedders.1.model.text_projection",
        "conditioner.embedders.1.model.positional_embedding",
        "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight",
        "model.diffusion_model.pos_embed.proj.weight",
        "visual.pos_embed.weight",
        "double_blocks.0.img_attn.norm.key_norm.scale",
        "scale_shift_table",
        "blocks.0.modulation",
    ],
)
def test_weights_may_be_merged(key):
    assert never_merged(key, "F16", (1280, 1280)) is None


def test_a_trained_table_of_positions_may_be_merged():
    found = detect(topology("auraflow_diffusers"))
    assert never_merged("pos_embed.pos_embed", "F16", (1, 1024, 3072), found) is None
    assert never_merged("pos_embed.pos_embed", "F16", (1, 1024, 3072)) is not None


def test_empty_tensors_are_markers():
    assert "marker" in never_merged("anything", "F32", (0,))


@pytest.mark.parametrize("name", EXPECTED)
def test_how_many_tensors_are_never_merged(name):
    tensors = topology(name)
    found = detect(tensors)
    expected = {"sd15_ldm": 12 + 1, "sd21_ldm": 12 + 1, "sdxl_base_sgm": 1 + 1, "sdxl_refiner_sgm": 1}
    expected |= {"sd3_medium_mmdit": 1, "sd3_medium_diffusers": 1, "sd35_large_mmdit": 1}
    kept = [key for key, (dtype, shape) in tensors.items() if never_merged(key, dtype, shape, found)]
    assert len(kept) == expected.get(name, 0)
