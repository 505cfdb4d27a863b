"""Both namings of whole families against each other, and families apart from one another."""

from __future__ import annotations

import re

import pytest

from lib_merge.families import Names, Place, detect
from lib_merge.families._paths import split_param
from tests.families.test_names import TOPOLOGIES, names, stems, topology

pytestmark = pytest.mark.portable

# Two key lists of one model each; both halves of every pair have the same numbers in them.
TWINS = {
    "flux2": ("flux2_dev_diffusers", "flux2_dev_bfl"),
    "lumina2": ("lumina2_diffusers", "lumina2_native"),
    "z_image": ("z_image_diffusers", "z_image_native"),
    "hunyuan_video": ("hunyuan_video_diffusers", "hunyuan_video_native"),
    "qwen_image": ("qwen_image_diffusers", "qwen_image_comfy"),
    "sd3": ("sd3_medium_diffusers", "sd3_medium_mmdit"),
    "flux": ("flux1_dev_diffusers", "flux1_dev_bfl"),
    "chroma": ("chroma1_diffusers", "chroma1_bfl"),
    "wan": ("wan21_t2v_14b_diffusers", "wan21_t2v_14b_native"),
}
# A norm that the converter leaves out.
ALONE = {("lumina2_native", "norm_final.weight")}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", TWINS)
def test_every_row_is_met_once_with_its_shape(family, turned):
    asked, base = reversed(TWINS[family]) if turned else TWINS[family]
    prefix = detect(topology(asked)).prefix
    met = {}
    for key, (_, shape) in topology(asked).items():
        path, param = split_param(key.removeprefix(prefix))
        places = names(base).find(path.lstrip("="), param)
        assert places or (asked, key) in ALONE, key
        edge = 0
        for place in places:
            stored = topology(base)[place.key][1]
            start, count = place.rows or (0, stored[0])
            first, rows = place.part or (0, shape[0])
            assert (first, count, stored[1:]) == (edge, rows, shape[1:]), (key, place)
            edge += rows
            met.setdefault(place.key, []).append((start, start + count))
        assert not places or edge == shape[0]
    for key, (_, shape) in topology(base).items():
        edges = sorted(met.pop(key, []))
        if (base, key) in ALONE:
            assert edges == []
            continue
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])], key
        assert edges[-1][1] == shape[0], key
    assert not met


BY_HAND = {
    "flux2_dev_bfl": {
        "transformer.transformer_blocks.3.attn.to_k": Place("double_blocks.3.img_attn.qkv.weight", (6144, 6144)),
        "transformer.transformer_blocks.3.attn.add_v_proj": Place("double_blocks.3.txt_attn.qkv.weight", (12288, 6144)),
        "transformer.transformer_blocks.3.ff.linear_in": Place("double_blocks.3.img_mlp.0.weight"),
        "transformer.transformer_blocks.3.ff_context.linear_out": Place("double_blocks.3.txt_mlp.2.weight"),
        "transformer.single_transformer_blocks.9.attn.to_qkv_mlp_proj": Place("single_blocks.9.linear1.weight"),
        "transformer.single_transformer_blocks.9.attn.to_out": Place("single_blocks.9.linear2.weight"),
        "transformer.double_stream_modulation_txt.linear": Place("double_stream_modulation_txt.lin.weight"),
        "transformer.single_stream_modulation.linear": Place("single_stream_modulation.lin.weight"),
        "transformer.norm_out.linear": Place("final_layer.adaLN_modulation.1.weight", post="swap"),
        "sformer_blocks.3.attn.to_out.0": Place("double_blocks.3.img_attn.proj.weight"),
        "lora_unet_single_blocks_9_linear2": Place("single_blocks.9.linear2.weight"),
        "transformer.time_guidance_embed.guidance_embedder.linear_2": Place("guidance_in.out_layer.weight"),
    },
    "lumina2_native": {
        "transformer.layers.4.attn.to_q": Place("layers.4.attention.qkv.weight", (0, 2304)),
        "transformer.layers.4.attn.to_k": Place("layers.4.attention.qkv.weight", (2304, 768)),
        "transformer.layers.4.attn.to_v": Place("layers.4.attention.qkv.weight", (3072, 768)),
        "transformer.noise_refiner.1.attn.to_out.0": Place("noise_refiner.1.attention.out.weight"),
        "transformer.context_refiner.0.feed_forward.linear_1": Place("context_refiner.0.feed_forward.w1.weight"),
        "transformer.layers.4.feed_forward.linear_2": Place("layers.4.feed_forward.w2.weight"),
        "transformer.layers.4.feed_forward.linear_3": Place("layers.4.feed_forward.w3.weight"),
        "transformer.layers.4.norm1.linear": Place("layers.4.adaLN_modulation.1.weight"),
        "transformer.context_refiner.0.norm1": Place("context_refiner.0.attention_norm1.weight"),
        "lora_unet_layers_4_attention_qkv": Place("layers.4.attention.qkv.weight"),
    },
    "z_image_native": {
        "diffusion_model.layers.7.attention.to_q": Place("layers.7.attention.qkv.weight", (0, 3840)),
        "lora_unet_layers_7_attention_to_k": Place("layers.7.attention.qkv.weight", (3840, 3840)),
        "diffusion_model.layers.7.attention.to.v": Place("layers.7.attention.qkv.weight", (7680, 3840)),
        "diffusion_model.layers.7.attention.to_out.0": Place("layers.7.attention.out.weight"),
        "diffusion_model.layers.7.attention.to_out": Place("layers.7.attention.out.weight"),
        "transformer.context_refiner.1.attention.norm_q": Place("context_refiner.1.attention.q_norm.weight"),
        "transformer.noise_refiner.0.feed_forward.w2": Place("noise_refiner.0.feed_forward.w2.weight"),
        "transformer.all_x_embedder.2-1": Place("x_embedder.weight"),
        "transformer.all_final_layer.2-1.linear": Place("final_layer.linear.weight"),
        "diffusion_model.layers.7.adaLN_modulation.0": Place("layers.7.adaLN_modulation.0.weight"),
    },
    "hunyuan_video_native": {
        "lora_unet_double_blocks_5_img_attn_qkv": Place("double_blocks.5.img_attn.qkv.weight"),
        "diffusion_model.double_blocks.5.img_attn_qkv": Place("double_blocks.5.img_attn.qkv.weight"),
        "lora_unet_double_blocks_5_txt_mlp_fc1": Place("double_blocks.5.txt_mlp.0.weight"),
        "lora_unet_double_blocks_5_img_mlp_fc2": Place("double_blocks.5.img_mlp.2.weight"),
        "lora_unet_double_blocks_5_img_mod_linear": Place("double_blocks.5.img_mod.lin.weight"),
        "lora_unet_single_blocks_5_modulation_linear": Place("single_blocks.5.modulation.lin.weight"),
        "transformer.transformer_blocks.5.attn.add_k_proj": Place("double_blocks.5.txt_attn.qkv.weight", (3072, 3072)),
        "transformer.context_embedder.token_refiner.refiner_blocks.1.attn.to_v": Place(
            "txt_in.individual_token_refiner.blocks.1.self_attn.qkv.weight", (6144, 3072)
        ),
        "transformer.context_embedder.token_refiner.refiner_blocks.1.ff.net.2": Place(
            "txt_in.individual_token_refiner.blocks.1.mlp.2.weight"
        ),
        "transformer.x_embedder.proj": Place("img_in.proj.weight"),
        "transformer.norm_out.linear": Place("final_layer.adaLN_modulation.1.weight", post="swap"),
    },
    "qwen_image_comfy": {
        "transformer_blocks.3.attn.to_q": Place("transformer_blocks.3.attn.to_q.weight"),
        "transformer.transformer_blocks.3.attn.to_out.0": Place("transformer_blocks.3.attn.to_out.0.weight"),
        "diffusion_model.transformer_blocks.3.img_mod.1": Place("transformer_blocks.3.img_mod.1.weight"),
        "lora_unet_transformer_blocks_3_txt_mlp_net_0_proj": Place("transformer_blocks.3.txt_mlp.net.0.proj.weight"),
        "lycoris_transformer_blocks_3_attn_add_k_proj": Place("transformer_blocks.3.attn.add_k_proj.weight"),
    },
    "wan21_t2v_14b_native": {
        "lora_unet_blocks_0_self_attn_q": Place("blocks.0.self_attn.q.weight"),
        "lora_unet__blocks_0_cross_attn_k": Place("blocks.0.cross_attn.k.weight"),
        "diffusion_model.blocks.0.ffn.0": Place("blocks.0.ffn.0.weight"),
        "transformer.blocks.0.ffn.net.2": Place("blocks.0.ffn.2.weight"),
        "transformer.condition_embedder.time_proj": Place("time_projection.1.weight"),
    },
    "auraflow_diffusers": {
        "diffusion_model.double_layers.2.attn.w2q": Place("joint_transformer_blocks.2.attn.to_q.weight"),
        "diffusion_model.double_layers.2.attn.w2o": Place("joint_transformer_blocks.2.attn.to_out.0.weight"),
        "diffusion_model.double_layers.2.attn.w1k": Place("joint_transformer_blocks.2.attn.add_k_proj.weight"),
        "diffusion_model.double_layers.2.attn.w1o": Place("joint_transformer_blocks.2.attn.to_add_out.weight"),
        "diffusion_model.double_layers.2.mlpX.c_fc1": Place("joint_transformer_blocks.2.ff.linear_1.weight"),
        "diffusion_model.double_layers.2.mlpC.c_proj": Place(
            "joint_transformer_blocks.2.ff_context.out_projection.weight"
        ),
        "diffusion_model.double_layers.2.modC.1": Place("joint_transformer_blocks.2.norm1_context.linear.weight"),
        "diffusion_model.single_layers.30.attn.w1v": Place("single_transformer_blocks.30.attn.to_v.weight"),
        "diffusion_model.single_layers.30.mlp.c_fc2": Place("single_transformer_blocks.30.ff.linear_2.weight"),
        "lora_unet_single_layers_30_modCX_1": Place("single_transformer_blocks.30.norm1.linear.weight"),
        "diffusion_model.modF.1": Place("norm_out.linear.weight", post="swap"),
        "diffusion_model.init_x_linear": Place("pos_embed.proj.weight"),
    },
    "ltx_video_diffusers": {
        "diffusion_model.patchify_proj": Place("proj_in.weight"),
        "diffusion_model.adaln_single.linear": Place("time_embed.linear.weight"),
        "diffusion_model.adaln_single.emb.timestep_embedder.linear_1": Place(
            "time_embed.emb.timestep_embedder.linear_1.weight"
        ),
        "diffusion_model.transformer_blocks.9.attn1.q_norm": Place("transformer_blocks.9.attn1.norm_q.weight"),
        "diffusion_model.transformer_blocks.9.attn2.k_norm": Place("transformer_blocks.9.attn2.norm_k.weight"),
        "diffusion_model.transformer_blocks.9.attn2.to_out.0": Place("transformer_blocks.9.attn2.to_out.0.weight"),
        "transformer.transformer_blocks.9.ff.net.0.proj": Place("transformer_blocks.9.ff.net.0.proj.weight"),
        "lora_unet_transformer_blocks_9_ff_net_2": Place("transformer_blocks.9.ff.net.2.weight"),
        "diffusion_model.caption_projection.linear_2": Place("caption_projection.linear_2.weight"),
        "diffusion_model.proj_out": Place("proj_out.weight"),
    },
}


@pytest.mark.parametrize(("base", "stem"), [(base, stem) for base, rows in BY_HAND.items() for stem in rows])
def test_modules_by_hand(base, stem):
    assert names(base).find(stem) == (BY_HAND[base][stem],)


# Families whose key lists are not at hand: a few tensors of each.

PIXART = {
    "t_block.1.weight": (6912, 1152),
    "blocks.0.attn.qkv.weight": (3456, 1152),
    "blocks.0.attn.qkv.bias": (3456,),
    "blocks.0.attn.proj.weight": (1152, 1152),
    "blocks.0.cross_attn.q_linear.weight": (1152, 1152),
    "blocks.0.cross_attn.kv_linear.weight": (2304, 1152),
    "blocks.0.mlp.fc1.weight": (4608, 1152),
    "blocks.0.mlp.fc2.weight": (1152, 4608),
    "x_embedder.proj.weight": (1152, 4, 2, 2),
    "final_layer.linear.weight": (32, 1152),
    "final_layer.scale_shift_table": (2, 1152),
    "y_embedder.y_proj.fc1.weight": (1152, 4096),
    "t_embedder.mlp.2.weight": (1152, 1152),
    "csize_embedder.mlp.0.weight": (384, 256),
}
ANIMA = {
    "net.blocks.0.self_attn.q_proj.weight": (2048, 2048),
    "net.blocks.0.self_attn.output_proj.weight": (2048, 2048),
    "net.blocks.0.cross_attn.k_proj.weight": (2048, 1024),
    "net.blocks.0.mlp.layer1.weight": (8192, 2048),
    "net.blocks.0.mlp.layer2.weight": (2048, 8192),
    "net.blocks.0.adaln_modulation_self_attn.1.weight": (256, 2048),
    "net.blocks.0.adaln_modulation_cross_attn.2.weight": (6144, 256),
    "net.blocks.0.adaln_modulation_mlp.2.weight": (6144, 256),
    "net.llm_adapter.blocks.0.self_attn.q_proj.weight": (1024, 1024),
    "net.llm_adapter.blocks.0.mlp.2.weight": (1024, 4096),
    "net.x_embedder.proj.1.weight": (2048, 68),
    "net.t_embedder.1.linear_1.weight": (2048, 2048),
    "net.final_layer.linear.weight": (64, 2048),
    "net.final_layer.adaln_modulation.1.weight": (256, 2048),
}
KREA = {
    "blocks.0.attn.wq.weight": (6144, 6144),
    "blocks.0.attn.wk.weight": (1536, 6144),
    "blocks.0.attn.wo.weight": (6144, 6144),
    "blocks.0.attn.gate.weight": (6144, 6144),
    "blocks.0.mlp.down.weight": (6144, 16384),
    "blocks.0.attn.qknorm.qnorm.scale": (128,),
    "txtfusion.projector.weight": (1, 12),
    "txtfusion.refiner_blocks.0.attn.wv.weight": (2560, 2560),
    "first.weight": (6144, 64),
    "last.linear.weight": (64, 6144),
    "tproj.1.weight": (36864, 6144),
}
SMALL = {
    "pixart": (
        PIXART,
        {
            "transformer.transformer_blocks.0.attn1.to_q": Place("blocks.0.attn.qkv.weight", (0, 1152)),
            "transformer.transformer_blocks.0.attn1.to_v": Place("blocks.0.attn.qkv.weight", (2304, 1152)),
            "base_model.model.transformer_blocks.0.attn1.to_out.0": Place("blocks.0.attn.proj.weight"),
            "transformer.transformer_blocks.0.attn2.to_q": Place("blocks.0.cross_attn.q_linear.weight"),
            "transformer.transformer_blocks.0.attn2.to_k": Place("blocks.0.cross_attn.kv_linear.weight", (0, 1152)),
            "transformer.transformer_blocks.0.attn2.to_v": Place("blocks.0.cross_attn.kv_linear.weight", (1152, 1152)),
            "transformer.transformer_blocks.0.ff.net.0.proj": Place("blocks.0.mlp.fc1.weight"),
            "transformer.transformer_blocks.0.ff.net.2": Place("blocks.0.mlp.fc2.weight"),
            "lora_unet_blocks_0_attn_qkv": Place("blocks.0.attn.qkv.weight"),
            "transformer.adaln_single.linear": Place("t_block.1.weight"),
            "transformer.adaln_single.emb.timestep_embedder.linear_2": Place("t_embedder.mlp.2.weight"),
            "transformer.adaln_single.emb.resolution_embedder.linear_1": Place("csize_embedder.mlp.0.weight"),
            "transformer.caption_projection.linear_1": Place("y_embedder.y_proj.fc1.weight"),
            "transformer.proj_out": Place("final_layer.linear.weight"),
        },
    ),
    "cosmos2": (
        ANIMA,
        {
            "transformer.transformer_blocks.0.attn1.to_q": Place("net.blocks.0.self_attn.q_proj.weight"),
            "transformer.transformer_blocks.0.attn1.to_out.0": Place("net.blocks.0.self_attn.output_proj.weight"),
            "transformer.transformer_blocks.0.attn2.to_k": Place("net.blocks.0.cross_attn.k_proj.weight"),
            "transformer.transformer_blocks.0.ff.net.0.proj": Place("net.blocks.0.mlp.layer1.weight"),
            "diffusion_model.blocks.0.mlp.layer2": Place("net.blocks.0.mlp.layer2.weight"),
            "transformer.transformer_blocks.0.norm1.linear_1": Place(
                "net.blocks.0.adaln_modulation_self_attn.1.weight"
            ),
            "transformer.transformer_blocks.0.norm2.linear_2": Place(
                "net.blocks.0.adaln_modulation_cross_attn.2.weight"
            ),
            "lora_unet_blocks_0_adaln_modulation_mlp_2": Place("net.blocks.0.adaln_modulation_mlp.2.weight"),
            "text_conditioner.blocks.0.self_attn.q_proj": Place("net.llm_adapter.blocks.0.self_attn.q_proj.weight"),
            "lora_unet_llm_adapter_blocks_0_mlp_2": Place("net.llm_adapter.blocks.0.mlp.2.weight"),
            "transformer.patch_embed.proj": Place("net.x_embedder.proj.1.weight"),
            "transformer.norm_out.linear_1": Place("net.final_layer.adaln_modulation.1.weight"),
        },
    ),
    "krea2": (
        KREA,
        {
            "transformer.transformer_blocks.0.attn.to_q": Place("blocks.0.attn.wq.weight"),
            "diffusion_model.blocks.0.attn.wk": Place("blocks.0.attn.wk.weight"),
            "transformer.transformer_blocks.0.attn.to_out.0": Place("blocks.0.attn.wo.weight"),
            "transformer.transformer_blocks.0.attn.to_gate": Place("blocks.0.attn.gate.weight"),
            "transformer.transformer_blocks.0.ff.down": Place("blocks.0.mlp.down.weight"),
            "transformer.transformer_blocks.0.attn.norm_q": Place("blocks.0.attn.qknorm.qnorm.scale"),
            "transformer.text_fusion.refiner_blocks.0.attn.to_v": Place("txtfusion.refiner_blocks.0.attn.wv.weight"),
            "transformer.img_in": Place("first.weight"),
            "lora_unet_last_linear": Place("last.linear.weight"),
            "transformer.time_mod_proj": Place("tproj.1.weight"),
        },
    ),
    "hidream": (
        {
            "caption_projection.0.linear.weight": (2560, 4096),
            "double_stream_blocks.0.block.attn1.to_q.weight": (2560, 2560),
        },
        {
            "transformer.double_stream_blocks.0.block.attn1.to_q": Place(
                "double_stream_blocks.0.block.attn1.to_q.weight"
            ),
            "lycoris_caption_projection_0_linear": Place("caption_projection.0.linear.weight"),
        },
    ),
}


@pytest.mark.parametrize("family", SMALL)
def test_families_by_a_few_tensors(family):
    shapes, expected = SMALL[family]
    tensors = {key: ("BF16", shape) for key, shape in shapes.items()}
    found = detect(tensors)
    assert found.id == family
    base = Names(tensors, found)
    assert {stem: base.find(stem) for stem in expected} == {stem: (place,) for stem, place in expected.items()}
    for style in ("kohya", "diffusers", "peft"):
        for key in tensors:
            param = split_param(key)[1] or "weight"
            for item in base.write(key, style):
                assert Place(key, item.rows, item.part, item.post) in base.find(item.name, param)


@pytest.mark.parametrize("family", ["pixart", "cosmos2", "krea2"])
def test_their_models_in_diffusers_words(family):
    """A model made of the names written for a native one finds the native names."""
    shapes, _ = SMALL[family]
    tensors = {key: ("BF16", shape) for key, shape in shapes.items()}
    native, turned = Names(tensors, detect(tensors)), {}
    for key, shape in shapes.items():
        for item in native.write(key, "diffusers"):
            name = item.name.removeprefix("transformer.")
            end = ".weight" if split_param(key)[1] in ("weight", "scale") else key[key.rindex(".") :]
            bare = not split_param(key)[1]
            turned[name if bare else name + end] = ("BF16", (item.rows or (0, shape[0]))[1:] + shape[1:])
    extra = {"pixart": {"pos_embed.proj.weight": (1152, 4, 2, 2), "adaln_single.linear.weight": (6912, 1152),
                        "transformer_blocks.0.scale_shift_table": (6, 1152)}}.get(family, {})  # fmt: skip
    turned |= {key: ("BF16", shape) for key, shape in extra.items()}
    found = detect(turned)
    assert (found.id, found.naming) == (family, "diffusers")
    base = Names(turned, found)
    prefix = detect(tensors).prefix
    for key, shape in shapes.items():
        path, param = split_param(key.removeprefix(prefix))
        places = base.find(path.lstrip("="), param)
        rows = sum(turned[place.key][1][0] for place in places)
        assert rows == shape[0], key


# Copies, and strangers.


@pytest.mark.parametrize("base", ["z_image_native", "z_image_diffusers"])
def test_only_one_of_two_copies_counts(base):
    fused = [f"diffusion_model.layers.{n}.attention.qkv" for n in range(30)]
    split = [f"diffusion_model.layers.{n}.attention.to.{part}" for n in range(30) for part in "qkv"]
    others = ["diffusion_model.layers.0.attention.out", "diffusion_model.layers.0.feed_forward.w1"]
    left_out = names(base).doubles([*split, *fused, *others])
    assert set(left_out) == set(split)
    assert left_out["diffusion_model.layers.3.attention.to.k"] == "diffusion_model.layers.3.attention.qkv"
    assert names(base).doubles([*split, *others]) == {}
    assert names(base).doubles(fused) == {}


def test_one_module_under_two_names_counts_once():
    pair = ["lora_unet_single_blocks_0_linear2", "transformer.single_transformer_blocks.0.proj_out"]
    assert names("flux1_dev_bfl").doubles(pair) == {pair[1]: pair[0]}
    assert names("flux1_dev_bfl").doubles(["nothing", "nowhere"]) == {}


UNETS = ("sd1", "sd2", "sdxl", "sdxl_refiner")
# Names of families whose other key list is not at hand, or has no norms in its attention as SD 3.5 has.
MORE = {
    "auraflow": {"t_embedder_mlp_#"},
    "sd3": {f"transformer_blocks_#_attn_norm_{part}" for part in ("q", "k", "added_q", "added_k")},
}


def form(path):
    """A path without its numbers; a list of one output layer is often named without its place."""
    return re.sub(r"\d+", "#", path.lstrip("=").replace(".", "_")).replace("to_out_#", "to_out")


def words(name):
    """The forms of all the module paths of a family's models, in every naming that is at hand."""
    own = detect(topology(name)).id
    found = {form(path) for path in MORE.get(own, ())}
    for other in TOPOLOGIES:
        told = detect(topology(other))
        if told.id == own or (told.id in UNETS and own in UNETS):
            found.update(form(split_param(key.removeprefix(told.prefix))[0]) for key in topology(other))
    return found


@pytest.mark.parametrize("base", [name for name in TOPOLOGIES if not name.startswith(("lora_", "vae"))])
def test_strangers_find_only_what_has_their_name(base):
    own = words(base)
    for other in TOPOLOGIES:
        if other.startswith(("lora_", "vae")):
            continue
        prefix = detect(topology(other)).prefix
        for key in list(topology(other))[::23]:
            path, param = split_param(key.removeprefix(prefix))
            if param == "weight" and not path.startswith(("cond", "first_stage")) and form(path) not in own:
                assert names(base).find(f"lora_unet_{path.replace('.', '_')}") == (), (other, path)
                assert names(base).find(f"diffusion_model.{path}") == (), (other, path)


@pytest.mark.parametrize(
    ("adapter", "strangers"),
    [
        ("lora_kohya_sd15_r16", ["flux1_dev_bfl", "wan21_t2v_14b_native", "qwen_image_comfy", "qwen3_4b_hf"]),
        ("lora_kohya_sdxl_r16", ["flux1_dev_bfl", "z_image_native", "hunyuan_video_native", "llama31_8b_hf"]),
        ("lora_peft_qwen3_4b_r16", ["sd15_ldm", "sdxl_base_sgm", "flux1_dev_bfl", "z_image_native", "lumina2_native"]),
        ("lora_diffusers_flux1_r16", ["sd15_ldm", "sdxl_base_sgm", "wan21_t2v_14b_native", "z_image_native"]),
    ],
)
def test_whole_adapters_find_nothing_in_strangers(adapter, strangers):
    for base in strangers:
        assert [stem for stem in stems(adapter) if names(base).find(stem)] == [], base
