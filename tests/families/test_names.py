"""Every trainer's module names against real key lists: tensors, rows, parts and what is done to them."""

from __future__ import annotations

import gzip
import json
import time
from functools import cache
from pathlib import Path

import pytest

from lib_merge.families import Detected, Names, Place, detect

pytestmark = pytest.mark.portable

DATA = Path(__file__).resolve().parent.parent / "data"
LDM = "model.diffusion_model."
TOPOLOGIES = sorted(path.name.removesuffix(".json.gz") for path in DATA.joinpath("topologies").iterdir())


def load(path):
    return json.loads(gzip.decompress(DATA.joinpath(path).read_bytes()))


@cache
def topology(name):
    return {key: (dtype, tuple(shape)) for key, (dtype, shape) in load(f"topologies/{name}.json.gz").items()}


@cache
def names(name):
    return Names(topology(name), detect(topology(name)))


@cache
def maps():
    return load("maps_diffusers_to_native.json.gz")


def stems(name):
    """Modules of an adapter file, without their roles."""
    return dict.fromkeys(key.split(".lora_")[0].removesuffix(".alpha") for key in topology(name))


# Converted by the authors of both namings: diffusers' module -> native module, first row, number of rows.

PAIRS = {
    "sd15_unet_diffusers": "sd15_ldm",
    "sdxl_unet_diffusers": "sdxl_base_sgm",
    "flux1_dev_diffusers": "flux1_dev_bfl",
    "chroma1_diffusers": "chroma1_bfl",
    "sd3_medium_diffusers": "sd3_medium_mmdit",
    "wan21_t2v_14b_diffusers": "wan21_t2v_14b_native",
    "wan21_t2v_1.3b_diffusers": "wan21_t2v_1.3b_native",
}


def mapped(name):
    """(diffusers' module, native module, (first row, rows) or None, operation)."""
    last = max(int(path.split(".")[1]) for path in maps()[name] if path.startswith("transformer_blocks."))\
        if name.startswith("sd3") else None  # fmt: skip
    for path, row in maps()[name].items():
        native, *rest = [row] if isinstance(row, str) else row
        rows = tuple(rest) if len(rest) == 2 else None
        swapped = rest == ["swap"] or (rest == ["swap-if-last"] and f".{last}." in path)
        yield path, native, rows, "swap" if swapped else ""


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("prefix", ["", "transformer.", "unet.", "base_model.model.", "lora_unet_", "lycoris_"])
def test_diffusers_names_on_a_native_model(name, prefix):
    base = PAIRS[name]
    head = detect(topology(base)).prefix
    for path, native, rows, post in mapped(name):
        stem = prefix + (path.replace(".", "_") if prefix.endswith("_") else path)
        (place,) = names(base).find(stem)
        assert (place.key.rsplit(".", 1)[0], place.rows, place.part, place.post) == (head + native, rows, None, post)
        assert place.key in topology(base)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
def test_native_names_on_a_diffusers_model(name, prefix):
    wanted = {}
    for path, native, rows, post in mapped(name):
        wanted.setdefault(native, []).append((rows or (0, 0), path, rows, post))
    for native, targets in wanted.items():
        stem = prefix + (native.replace(".", "_") if prefix.endswith("_") else native)
        found = [(p.key.rsplit(".", 1)[0], p.rows, p.part, p.post) for p in names(name).find(stem)]
        assert found == [(path, None, rows, post) for _, path, rows, post in sorted(targets)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_model_knows_its_own_names(name):
    for base in (name, PAIRS[name]):
        head = detect(topology(base)).prefix
        for key in topology(base):
            if key.endswith(".weight") and key.startswith(head):
                stem = key.removesuffix(".weight")
                for written in (stem, "lora_unet_" + stem[len(head) :].replace(".", "_")):
                    if not head or key.startswith(LDM):
                        assert names(base).find(written) == (Place(key),), written


# Whole adapter files.


@pytest.mark.parametrize(
    ("adapter", "base", "count"),
    [
        ("lora_kohya_sd15_r16", "sd15_ldm", 264),
        ("lora_kohya_sd15_locon_r16", "sd15_ldm", 350),
        ("lora_kohya_sdxl_r16", "sdxl_base_sgm", 986),
        ("lora_diffusers_flux1_r16", "flux1_dev_bfl", 494),
        ("lora_diffusers_flux1_r16", "flux1_dev_diffusers", 494),
        ("lora_peft_qwen3_4b_r16", "qwen3_4b_hf", 252),
    ],
)
def test_every_module_of_an_adapter_has_a_place(adapter, base, count):
    modules = stems(adapter)
    assert len(modules) == count
    for stem in modules:
        down = next(topology(adapter)[key] for key in (f"{stem}.lora_down.weight", f"{stem}.lora_A.weight")
                    if key in topology(adapter))  # fmt: skip
        up = next(topology(adapter)[key] for key in (f"{stem}.lora_up.weight", f"{stem}.lora_B.weight")
                  if key in topology(adapter))  # fmt: skip
        (place,) = names(base).find(stem)
        shape = topology(base)[place.key][1]
        assert (place.rows[1] if place.rows else shape[0], shape[1]) == (up[1][0], down[1][1]), stem


@pytest.mark.parametrize("base", ["flux1_dev_bfl", "flux1_dev_diffusers"])
def test_kohya_flux_with_its_text_encoder(base):
    unet = [stem for stem in stems("lora_kohya_flux1_r16") if stem.startswith("lora_unet_")]
    assert len(unet) == 304
    assert all(names(base).find(stem) for stem in unet)
    assert not any(names(base).find(stem) for stem in stems("lora_kohya_flux1_r16") if stem.startswith("lora_te"))
    clip = {key.replace("cond_stage_model.", "text_encoders.clip_l."): value
            for key, value in topology("sd15_ldm").items() if key.startswith("cond_stage_model.")}  # fmt: skip
    whole = topology(base) | clip
    both = Names(whole, detect(whole))
    assert all(both.find(stem) for stem in stems("lora_kohya_flux1_r16"))


# Single spellings, by hand.

CLIP_L = "conditioner.embedders.0.transformer.text_model.encoder.layers.5."
CLIP_G = "conditioner.embedders.1.model.transformer.resblocks.5."
ATTENTION = f"{LDM}input_blocks.4.1.transformer_blocks.0.attn1."


@pytest.mark.parametrize(
    ("stem", "param", "place"),
    [
        ("lora_te1_text_model_encoder_layers_5_self_attn_q_proj", "weight", Place(f"{CLIP_L}self_attn.q_proj.weight")),
        ("lora_te2_text_model_encoder_layers_5_self_attn_q_proj", "weight",
         Place(f"{CLIP_G}attn.in_proj_weight", (0, 1280))),
        ("lora_te2_text_model_encoder_layers_5_self_attn_k_proj", "bias",
         Place(f"{CLIP_G}attn.in_proj_bias", (1280, 1280))),
        ("text_encoder_2.text_model.encoder.layers.5.self_attn.v_proj", "weight",
         Place(f"{CLIP_G}attn.in_proj_weight", (2560, 1280))),
        ("lora_te2_text_model_encoder_layers_5_self_attn_out_proj", "weight", Place(f"{CLIP_G}attn.out_proj.weight")),
        ("lora_te2_text_model_encoder_layers_5_mlp_fc1", "weight", Place(f"{CLIP_G}mlp.c_fc.weight")),
        ("lora_te2_text_model_encoder_layers_5_mlp_fc2", "bias", Place(f"{CLIP_G}mlp.c_proj.bias")),
        ("lora_te2_text_model_encoder_layers_5_layer_norm2", "weight", Place(f"{CLIP_G}ln_2.weight")),
        ("text_encoders.clip_g.transformer.text_model.final_layer_norm", "weight",
         Place("conditioner.embedders.1.model.ln_final.weight")),
        ("lora_te2_text_projection", "weight",
         Place("conditioner.embedders.1.model.text_projection", post="transpose")),
        ("conditioner.embedders.1.model.text_projection", "", Place("conditioner.embedders.1.model.text_projection")),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora", "weight",
         Place(f"{ATTENTION}to_q.weight")),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_q", "weight",
         Place(f"{ATTENTION}to_q.weight")),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_out", "weight",
         Place(f"{ATTENTION}to_out.0.weight")),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora", "weight",
         Place(f"{ATTENTION}to_out.0.weight")),
        ("text_encoder.text_model.encoder.layers.5.self_attn.to_q", "weight",
         Place(f"{CLIP_L}self_attn.q_proj.weight")),
        ("text_encoder.text_model.encoder.layers.5.self_attn.to_out_lora", "weight",
         Place(f"{CLIP_L}self_attn.out_proj.weight")),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "weight", Place(f"{ATTENTION}to_q.weight")),
        ("lora_unet_output_blocks_2_2_conv", "weight", Place(f"{LDM}output_blocks.2.2.conv.weight")),
        ("lora_unet_up_blocks_0_upsamplers_0_conv", "weight", Place(f"{LDM}output_blocks.2.2.conv.weight")),
        ("lora_unet_time_embedding_linear_2", "bias", Place(f"{LDM}time_embed.2.bias")),
        ("unet.add_embedding.linear_2", "weight", Place(f"{LDM}label_emb.0.2.weight")),
        (f"{LDM}out.0.weight", "", Place(f"{LDM}out.0.weight")),
        ("lora_unet_conv_out", "weight", Place(f"{LDM}out.2.weight")),
    ],
)  # fmt: skip
def test_sdxl_spellings(stem, param, place):
    assert names("sdxl_base_sgm").find(stem, param) == (place,)


def test_sd1_spellings():
    base = names("sd15_ldm")
    attention = f"{LDM}output_blocks.11.1.transformer_blocks.0.attn2."
    text = "cond_stage_model.transformer.text_model."
    expected = {
        "lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_attn2_to_out_0": f"{attention}to_out.0.weight",
        "lora_unet_up_blocks_0_upsamplers_0_conv": f"{LDM}output_blocks.2.1.conv.weight",
        "lora_unet_down_blocks_2_downsamplers_0_conv": f"{LDM}input_blocks.9.0.op.weight",
        "lora_te_text_model_encoder_layers_11_mlp_fc2": f"{text}encoder.layers.11.mlp.fc2.weight",
        "lora_te1_text_model_embeddings_token_embedding": f"{text}embeddings.token_embedding.weight",
        "text_encoder.text_model.encoder.layers.0.mlp.fc1": f"{text}encoder.layers.0.mlp.fc1.weight",
    }
    for stem, key in expected.items():
        assert base.find(stem) == (Place(key),)


def test_old_sd1_files_leave_out_text_model():
    short = {
        key.replace("transformer.text_model.", "transformer."): value for key, value in topology("sd15_ldm").items()
    }
    base = Names(short, detect(short))
    for stem in stems("lora_kohya_sd15_r16"):
        (place,) = base.find(stem)
        assert place.key in short
    (place,) = base.find("lora_te_text_model_encoder_layers_3_mlp_fc1")
    assert place == Place("cond_stage_model.transformer.encoder.layers.3.mlp.fc1.weight")
    # … and old adapters do too
    assert base.find("lora_te_encoder_layers_3_mlp_fc1") == (place,)
    (place,) = names("sd15_ldm").find("lora_te_encoder_layers_3_mlp_fc1")
    assert place == Place("cond_stage_model.transformer.text_model.encoder.layers.3.mlp.fc1.weight")


def test_sd2_and_the_refiner_have_open_clip():
    (place,) = names("sd21_ldm").find("lora_te_text_model_encoder_layers_22_self_attn_v_proj")
    assert place == Place("cond_stage_model.model.transformer.resblocks.22.attn.in_proj_weight", (2048, 1024))
    for prefix in ("lora_te_", "lora_te1_", "lora_te2_"):
        (place,) = names("sdxl_refiner_sgm").find(f"{prefix}text_model_encoder_layers_31_self_attn_k_proj")
        assert place == Place(
            "conditioner.embedders.0.model.transformer.resblocks.31.attn.in_proj_weight", (1280, 1280)
        )


@pytest.mark.parametrize(
    ("stem", "param", "place"),
    [
        ("double_blocks.7.processor.qkv_lora1", "weight", Place("double_blocks.7.img_attn.qkv.weight")),
        ("double_blocks.7.processor.qkv_lora2", "weight", Place("double_blocks.7.txt_attn.qkv.weight")),
        ("double_blocks.7.processor.proj_lora1", "weight", Place("double_blocks.7.img_attn.proj.weight")),
        ("double_blocks.7.processor.proj_lora2", "weight", Place("double_blocks.7.txt_attn.proj.weight")),
        ("single_blocks.3.processor.qkv", "weight", Place("single_blocks.3.linear1.weight", (0, 9216))),
        ("single_blocks.3.processor.qkv_lora", "weight", Place("single_blocks.3.linear1.weight", (0, 9216))),
        ("single_blocks.3.processor.proj_lora", "weight", Place("single_blocks.3.linear2.weight")),
        ("transformer.single_transformer_blocks.3.proj_mlp", "weight",
         Place("single_blocks.3.linear1.weight", (9216, 12288))),
        ("transformer.single_transformer_blocks.3.attn.to_v", "bias",
         Place("single_blocks.3.linear1.bias", (6144, 3072))),
        ("lora_transformer_transformer_blocks_0_ff_context_net_0_proj", "weight",
         Place("double_blocks.0.txt_mlp.0.weight")),
        ("transformer.norm_out.linear", "weight", Place("final_layer.adaLN_modulation.1.weight", post="swap")),
        ("lora_unet_final_layer_adaLN_modulation_1", "weight", Place("final_layer.adaLN_modulation.1.weight")),
        ("transformer.transformer_blocks.2.attn.norm_added_k", "weight",
         Place("double_blocks.2.txt_attn.norm.key_norm.scale")),
        ("double_blocks.2.txt_attn.norm.key_norm", "scale", Place("double_blocks.2.txt_attn.norm.key_norm.scale")),
        ("base_model.model.double_blocks.0.img_mod.lin", "weight", Place("double_blocks.0.img_mod.lin.weight")),
        ("diffusion_model.double_blocks.0.img_mlp.2", "weight", Place("double_blocks.0.img_mlp.2.weight")),
        ("model.diffusion_model.guidance_in.in_layer", "weight", Place("guidance_in.in_layer.weight")),
        ("pipe.dit.double_blocks.0.img_mlp.2", "weight", Place("double_blocks.0.img_mlp.2.weight")),
        ("some.wrapper.single_transformer_blocks.0.attn.to_q", "weight",
         Place("single_blocks.0.linear1.weight", (0, 3072))),
    ],
)  # fmt: skip
def test_flux_spellings(stem, param, place):
    assert names("flux1_dev_bfl").find(stem, param) == (place,)


def test_second_text_encoder_of_an_adapter_is_told_by_its_names():
    clip = {f"text_encoders.clip_l.transformer.text_model.encoder.layers.{n}.mlp.fc1.weight": ("F16", (3072, 768))
            for n in range(12)}  # fmt: skip
    t5 = {f"text_encoders.t5xxl.transformer.encoder.block.{n}.layer.0.SelfAttention.q.weight": ("F16", (4096, 4096))
          for n in range(24)}  # fmt: skip
    whole = topology("flux1_dev_bfl") | clip | t5
    base = Names(whole, detect(whole))
    wanted = Place("text_encoders.t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q.weight")
    for stem in (
        *("lora_te2_encoder_block_3_layer_0_SelfAttention_q", "lora_te3_encoder_block_3_layer_0_SelfAttention_q"),
        *("text_encoder_2.encoder.block.3.layer.0.SelfAttention.q",
          "text_encoders.t5xxl.transformer.encoder.block.3.layer.0.SelfAttention.q"),
    ):  # fmt: skip
        assert base.find(stem) == (wanted,)
        assert base.component(stem) == "te3"
    assert base.find("lora_te1_text_model_encoder_layers_3_mlp_fc1")
    assert base.component("lora_te2_text_model_encoder_layers_3_mlp_fc1") == "te2"
    assert base.find("lora_te2_text_model_encoder_layers_3_mlp_fc1") == ()


@pytest.mark.parametrize(
    ("stem", "key"),
    [
        ("base_model.model.model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj.weight"),
        ("base_model.model.model.language_model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj.weight"),
        ("base_model.model.language_model.model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj.weight"),
        ("layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj.weight"),
        ("base_model.model.lm_head", "lm_head.weight"),
        ("base_model.model.model.embed_tokens", "model.embed_tokens.weight"),
    ],
)
def test_language_models_with_and_without_their_wrapper(stem, key):
    assert names("llama31_8b_hf").find(stem) == (Place(key),)
    wrapped = {
        key.replace("model.", "model.language_model.", 1): value for key, value in topology("llama31_8b_hf").items()
    }
    base = Names(wrapped, detect(wrapped))
    assert base.find(stem) == (Place(key.replace("model.", "model.language_model.", 1)),)


def test_folders_have_the_component_in_front():
    unet = {f"unet/{key}": value for key, value in topology("sdxl_unet_diffusers").items()}
    text = {key.replace("cond_stage_model.transformer.", "text_encoder/"): value
            for key, value in topology("sd15_ldm").items() if key.startswith("cond_stage_model.")}  # fmt: skip
    whole = unet | text
    base = Names(whole, detect(whole))
    (place,) = base.find("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q")
    assert place == Place("unet/down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight")
    (place,) = base.find("lora_te1_text_model_encoder_layers_0_mlp_fc1")
    assert place == Place("text_encoder/text_model.encoder.layers.0.mlp.fc1.weight")


def test_two_experts_are_kept_apart():
    plain = topology("wan21_t2v_1.3b_diffusers")
    both = {f"{root}/{key}": value for root in ("transformer", "transformer_2") for key, value in plain.items()}
    base = Names(both, detect(both))
    assert base.find("transformer.blocks.0.attn1.to_q") == (Place("transformer/blocks.0.attn1.to_q.weight"),)
    assert base.find("transformer_2.blocks.0.attn1.to_q") == (Place("transformer_2/blocks.0.attn1.to_q.weight"),)
    assert base.component("transformer_2.blocks.0.attn1.to_q") == "unet"


def test_a_lone_text_encoder_takes_its_own_names_only():
    clip = {key.removeprefix("cond_stage_model.transformer."): value
            for key, value in topology("sd15_ldm").items() if key.startswith("cond_stage_model.")}  # fmt: skip
    base = Names(clip, detect(clip))
    assert base.find("lora_te1_text_model_encoder_layers_0_mlp_fc1")
    assert base.find("lora_te2_text_model_encoder_layers_0_mlp_fc1") == ()
    assert base.find("lora_unet_input_blocks_4_1_proj_in") == ()


# Limits.


def test_modules_that_are_not_there():
    base = names("sd15_ldm")
    for stem in ("lora_unet_double_blocks_0_img_attn_qkv", "proj_out", "lora_unet_proj_out", "lora_te_text_model", "",
                 "lora_unet_", "weight", "unet.down_blocks.9.resnets.0.conv1"):  # fmt: skip
        assert base.find(stem) == ()


def test_rows_that_do_not_divide_have_no_place():
    odd = {"double_blocks.0.img_attn.qkv.weight": ("F16", (100, 32)),
           "double_blocks.0.img_attn.norm.key_norm.scale": ("F16", (4,))}  # fmt: skip
    base = Names(odd, detect(odd))
    assert base.find("transformer.transformer_blocks.0.attn.to_q") == ()
    assert base.find("lora_unet_double_blocks_0_img_attn_qkv")


def test_a_fused_module_needs_all_of_its_rows():
    tensors = {key: value for key, value in topology("flux1_dev_diffusers").items()
               if key != "single_transformer_blocks.0.proj_mlp.weight"}  # fmt: skip
    base = Names(tensors, detect(tensors))
    assert base.find("lora_unet_single_blocks_0_linear1") == ()
    assert len(base.find("lora_unet_single_blocks_1_linear1")) == 4


def test_an_unknown_model_finds_its_own_modules():
    tensors = {"wrapper.stack.3.mix.weight": ("F16", (4, 4)), "wrapper.stack.4.mix.weight": ("F16", (4, 4))}
    base = Names(tensors, Detected())
    assert base.find("lora_unet_wrapper_stack_3_mix") == (Place("wrapper.stack.3.mix.weight"),)
    assert base.find("stack.4.mix") == (Place("wrapper.stack.4.mix.weight"),)
    assert base.find("mix") == ()


def test_the_index_is_quick():
    tensors = topology("sdxl_base_sgm")
    found = detect(tensors)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Names(tensors, found)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5  # measured: 0.02; a machine may be busy
