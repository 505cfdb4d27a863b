"""Module names for a model's weights, and the way back: every tensor of every real key list."""

from __future__ import annotations

import pytest

from lib_merge.families import Names, Place, Written, detect, rename
from lib_merge.families._paths import read_key, split_param
from tests.families.test_names import LDM, TOPOLOGIES, names, stems, topology

pytestmark = pytest.mark.portable

STYLES = ("kohya", "diffusers", "peft")
MODELS = [name for name in TOPOLOGIES if not name.startswith(("lora_", "vae_"))]
LLMS = ("llama31_8b_hf", "qwen3_4b_hf")


def named_tensors(name):
    found = detect(topology(name))
    for key in topology(name):
        slot, path = read_key(key, found)
        if slot not in ("vae", "ema", "other"):
            yield key, split_param(path)[1] or "weight"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MODELS)
def test_a_written_name_leads_back(name, style):
    base, seen = names(name), 0
    for key, param in named_tensors(name):
        shape = topology(name)[key][1]
        written = base.write(key, style)
        if name in LLMS and style != "peft":
            assert written == ()
            continue
        assert written, key
        edge = 0
        for item in written:
            assert Place(key, item.rows, item.part, item.post) in base.find(item.name, param), (key, item)
            start, count = item.rows or (0, shape[0] if shape else 1)
            assert start == edge
            edge = start + count
        assert edge == (shape[0] if shape else 1), key
        seen += 1
    assert seen or name in LLMS


@pytest.mark.parametrize("name", MODELS)
def test_no_name_is_given_twice(name):
    """But to the parts that one fused module has in the model."""
    for style in STYLES:
        given = {}
        for key, param in named_tensors(name):
            for item in names(name).write(key, style):
                assert given.setdefault((item.name, param, item.part), key) == key, item


ATTENTION = "transformer_blocks.0.attn1.to_q"
CLIP_G = "conditioner.embedders.1.model.transformer.resblocks.5.attn.in_proj_weight"


@pytest.mark.parametrize(
    ("name", "key", "style", "expected"),
    [
        ("sd15_ldm", f"{LDM}input_blocks.1.1.{ATTENTION}.weight", "kohya",
         [("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", None, None, "")]),
        ("sd15_ldm", f"{LDM}input_blocks.1.1.{ATTENTION}.weight", "diffusers",
         [(f"unet.down_blocks.0.attentions.0.{ATTENTION}", None, None, "")]),
        ("sd15_ldm", "cond_stage_model.transformer.text_model.encoder.layers.3.mlp.fc1.weight", "kohya",
         [("lora_te_text_model_encoder_layers_3_mlp_fc1", None, None, "")]),
        ("sdxl_base_sgm", f"{LDM}input_blocks.4.1.{ATTENTION}.weight", "kohya",
         [("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", None, None, "")]),
        ("sdxl_unet_diffusers", f"down_blocks.1.attentions.0.{ATTENTION}.weight", "kohya",
         [("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", None, None, "")]),
        ("sdxl_base_sgm", CLIP_G, "kohya",
         [(f"lora_te2_text_model_encoder_layers_5_self_attn_{part}_proj", (1280 * n, 1280), None, "")
          for n, part in enumerate("qkv")]),
        ("sdxl_base_sgm", CLIP_G, "diffusers",
         [(f"text_encoder_2.text_model.encoder.layers.5.self_attn.{part}_proj", (1280 * n, 1280), None, "")
          for n, part in enumerate("qkv")]),
        ("flux1_dev_bfl", "single_blocks.7.linear1.weight", "kohya",
         [("lora_unet_single_blocks_7_linear1", None, None, "")]),
        ("flux1_dev_bfl", "single_blocks.7.linear1.weight", "diffusers",
         [("transformer.single_transformer_blocks.7.attn.to_q", (0, 3072), None, ""),
          ("transformer.single_transformer_blocks.7.attn.to_k", (3072, 3072), None, ""),
          ("transformer.single_transformer_blocks.7.attn.to_v", (6144, 3072), None, ""),
          ("transformer.single_transformer_blocks.7.proj_mlp", (9216, 12288), None, "")]),
        ("flux1_dev_diffusers", "single_transformer_blocks.7.attn.to_k.weight", "kohya",
         [("lora_unet_single_blocks_7_linear1", None, (3072, 3072), "")]),
        ("flux1_dev_bfl", "final_layer.adaLN_modulation.1.weight", "diffusers",
         [("transformer.norm_out.linear", None, None, "swap")]),
        ("flux1_dev_bfl", "double_blocks.0.img_mod.lin.weight", "peft",
         [("base_model.model.transformer_blocks.0.norm1.linear", None, None, "")]),
        ("hunyuan_video_native", "double_blocks.0.img_mlp.0.weight", "kohya",
         [("lora_unet_double_blocks_0_img_mlp_fc1", None, None, "")]),
        ("wan21_t2v_14b_native", "blocks.0.self_attn.q.weight", "kohya",
         [("lora_unet_blocks_0_self_attn_q", None, None, "")]),
        ("wan21_t2v_14b_native", "blocks.0.self_attn.q.weight", "diffusers",
         [("transformer.blocks.0.attn1.to_q", None, None, "")]),
        ("qwen3_4b_hf", "model.layers.0.mlp.up_proj.weight", "peft",
         [("base_model.model.model.layers.0.mlp.up_proj", None, None, "")]),
        ("sd35_large_mmdit", f"{LDM}joint_blocks.37.context_block.adaLN_modulation.1.weight", "diffusers",
         [("transformer.transformer_blocks.37.norm1_context.linear", None, None, "swap")]),
        ("sd35_large_mmdit", f"{LDM}joint_blocks.36.context_block.adaLN_modulation.1.weight", "diffusers",
         [("transformer.transformer_blocks.36.norm1_context.linear", None, None, "")]),
    ],
)  # fmt: skip
def test_names_by_hand(name, key, style, expected):
    assert names(name).write(key, style) == tuple(Written(*row) for row in expected)


def test_parts_without_names():
    base = names("sd15_ldm")
    for style in STYLES:
        assert base.write("first_stage_model.encoder.conv_in.weight", style) == ()
        assert base.write("betas", style) == ()


def test_second_expert_has_a_name_with_diffusers_only():
    tensors = {f"{root}/{key}": value for root in ("transformer", "transformer_2")
               for key, value in topology("wan21_t2v_1.3b_diffusers").items()}  # fmt: skip
    base = Names(tensors, detect(tensors))
    key = "transformer_2/blocks.0.attn1.to_q.weight"
    assert base.write(key, "diffusers") == (Written("transformer_2.blocks.0.attn1.to_q"),)
    assert base.write(key, "kohya") == base.write(key, "peft") == ()


# Adapters renamed without a model: the new names mean what the old ones meant.


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("adapter", "base"),
    [
        ("lora_kohya_sd15_locon_r16", "sd15_ldm"),
        ("lora_kohya_sdxl_r16", "sdxl_base_sgm"),
        ("lora_kohya_flux1_r16", "flux1_dev_bfl"),
        ("lora_diffusers_flux1_r16", "flux1_dev_bfl"),
        ("lora_peft_qwen3_4b_r16", "qwen3_4b_hf"),
    ],
)
def test_renamed_modules_find_the_same_rows(adapter, base, style):
    found = detect(topology(adapter))
    for stem in stems(adapter):
        renamed = rename(stem, style, found)
        if found.id == "llm" and style != "peft":
            assert renamed == ()
            continue
        assert renamed, stem
        (old,) = names(base).find(stem) or (None,)
        if old is None:  # the text encoder of Flux is not in the model's key list
            assert stem.startswith("lora_te")
            continue
        whole = topology(base)[old.key][1][0]
        for item in renamed:
            (new,) = names(base).find(item.name)
            rows, count = new.rows or (0, whole)
            start, old_count = old.rows or (0, whole)
            assert (new.key, new.post) == (old.key, old.post)
            assert rows + item.place[0] * count == start + item.part[0] * old_count
            assert (item.place[1] - item.place[0]) * count == (item.part[1] - item.part[0]) * old_count


@pytest.mark.parametrize("name", MODELS)
def test_every_name_can_be_turned_into_every_other(name):
    """kohya's one word has dots again, and the way there and back gives the same name."""
    found = detect(topology(name))
    if name in LLMS:
        return
    for key, _ in list(named_tensors(name))[::5]:
        for item in names(name).write(key, "kohya"):
            for other in rename(item.name, "diffusers", found):
                if item.part is None and item.rows is None and other.place == other.part:
                    assert other.name in {w.name for w in names(name).write(key, "diffusers")}
                assert item.name in {back.name for back in rename(other.name, "kohya", found)}
