"""Which part of a module a key is."""

from __future__ import annotations

import pytest

from lib_merge.adapters import split

pytestmark = pytest.mark.portable

# (key, stem, role), as trainers write them.
KEYS = [
    ("lora_unet_mid_block_conv.lora_down.weight", "lora_unet_mid_block_conv", "down"),
    ("lora_unet_mid_block_conv.lora_up.weight", "lora_unet_mid_block_conv", "up"),
    ("lora_unet_mid_block_conv.lora_mid.weight", "lora_unet_mid_block_conv", "mid"),
    ("lora_unet_mid_block_conv.alpha", "lora_unet_mid_block_conv", "alpha"),
    ("a.q_proj.lora_A.weight", "a.q_proj", "down"),
    ("a.q_proj.lora_B.weight", "a.q_proj", "up"),
    ("a.q_proj.lora_A.default.weight", "a.q_proj", "down"),
    ("a.q_proj.lora_A", "a.q_proj", "down"),
    ("a.q_proj.lora_B.my-name", "a.q_proj", "up"),
    ("a.q_proj.lora_B.bias", "a.q_proj", "up_bias"),
    ("a.q_proj.lora_B.default.bias", "a.q_proj", "up_bias"),
    ("x.attn1.processor.to_q_lora.down.weight", "x.attn1.processor.to_q", "down"),
    ("x.q_proj.lora_linear_layer.up.weight", "x.q_proj", "up"),
    ("x.to_k.lora.up.weight", "x.to_k", "up"),
    ("double_blocks.0.processor.qkv_lora1.down.weight", "double_blocks.0.processor.qkv_lora1", "down"),
    ("m.scale", "m", "scale"),
    ("m.dora_scale", "m", "magnitude"),
    ("m.lora_magnitude_vector", "m", "peft_magnitude"),
    ("m.lora_magnitude_vector.default.weight", "m", "peft_magnitude"),
    ("m.hada_w1_a", "m", "hada_w1_a"),
    ("m.hada_t2", "m", "hada_t2"),
    ("m.lokr_w1", "m", "lokr_w1"),
    ("m.lokr_w2_b", "m", "lokr_w2_b"),
    ("m.oft_blocks", "m", "oft_blocks"),
    ("m.oft_diag", "m", "oft_diag"),
    ("m.rescale", "m", "rescale"),
    ("m.oft_R.default.weight", "m", "oft_r"),
    ("m.boft_R", "m", "boft_r"),
    ("m.boft_s.default", "m", "boft_s"),
    ("m.hra_u", "m", "hra_u"),
    ("m.on_input", "m", "on_input"),
    ("m.ia3_l", "m", "ia3_l"),
    ("m.diff", "m", "diff"),
    ("m.diff_b", "m", "diff_b"),
    ("diffusion_model.blocks.3.diff_m", "diffusion_model.blocks.3", "diff_m"),
    ("m.set_weight", "m", "set"),
    ("m.w_norm", "m", "w_norm"),
    ("m.b_norm", "m", "b_norm"),
    ("m.reshape_weight", "m", "reshape"),
    ("m.a1.weight", "m", "glora_a1"),
    ("m.bm.weight", "m", "glora_bm"),
    ("m.bias_indices", "m", "bias_indices"),
    ("m.bias_values", "m", "bias_values"),
    ("m.bias_size", "m", "bias_size"),
    ("e.lora_embedding_A", "e", "embedding_down"),
    ("e.lora_embedding_B.default", "e", "embedding_up"),
    ("base_model.model.lm_head.weight", "base_model.model.lm_head", "weight"),
    ("base_model.model.lm_head.modules_to_save.default.weight", "base_model.model.lm_head", "weight"),
    ("base_model.model.fc.base_layer.bias", "base_model.model.fc", "bias"),
    ("something.else", "something.else", ""),
    # An end must stand at the end, after a dot.
    ("xlora_down.weight", "xlora_down", "weight"),
    ("m.diffx", "m.diffx", ""),
    ("lora_A.b", "lora_A.b", ""),
]


@pytest.mark.parametrize(("key", "stem", "role"), KEYS, ids=[key for key, _, _ in KEYS])
def test_split(key, stem, role):
    assert split(key) == (stem, role)
