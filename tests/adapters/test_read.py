"""An adapter's header to its pieces, settings and refusals."""

from __future__ import annotations

import json

import pytest

from lib_merge.adapters import FORMATS, read
from lib_merge.errors import MergeError

pytestmark = pytest.mark.portable

PEFT = "base_model.model."


def lora(*stems: str, rank: int = 4, alpha: bool = False) -> dict:
    """Shapes of LoRAs in PEFT's names on weights [6, 8]."""
    tensors = {}
    for stem in stems:
        tensors[f"{stem}.lora_A.weight"] = ("F32", (rank, 8))
        tensors[f"{stem}.lora_B.weight"] = ("F32", (6, rank))
        if alpha:
            tensors[f"{stem}.alpha"] = ("F32", ())
    return tensors


def only(adapter):
    (piece,) = adapter.pieces
    return piece


def test_a_piece_tells_its_module_parameter_format_keys_and_rank():
    piece = only(read(lora("unet.m", alpha=True), {}))
    assert (piece.stem, piece.param, piece.format, piece.rank) == ("unet.m", "weight", "lora", 4)
    assert piece.keys == {"down": "unet.m.lora_A.weight", "up": "unet.m.lora_B.weight", "alpha": "unet.m.alpha"}
    assert piece.settings == {}


def test_every_key_is_used_ignored_or_left_over():
    tensors = {
        **lora("a"),
        "b.lora_A.weight": ("F32", (4, 8)),
        "c.alpha": ("F32", ()),
        "bundle_emb.x.string_to_param.*": ("F32", (1, 8)),
        f"{PEFT}e.base_layer.weight": ("F32", (6, 8)),
    }
    adapter = read(tensors, {})
    used = {key for piece in adapter.pieces for key in piece.keys.values()}
    assert used == {"a.lora_A.weight", "a.lora_B.weight"}
    assert set(adapter.leftover) == {"b.lora_A.weight", "c.alpha"}
    assert {key for key, why in adapter.ignored if why} == tensors.keys() - used - set(adapter.leftover)


def test_missing_alpha_is_told_and_only_peft_names_need_one():
    plain = read(lora("transformer.a", "transformer.b"), {})
    assert plain.notes == ("2 modules have no alpha: their scale is 1 (alpha = rank)",)
    assert not plain.needs_alpha
    assert read(lora(f"{PEFT}a"), {}).needs_alpha
    assert not read(lora(f"{PEFT}a"), {}, {"lora_alpha": 32}).needs_alpha
    assert not read(lora(f"{PEFT}a", alpha=True), {}).needs_alpha
    assert read(lora("a", alpha=True), {}).notes == ()


def test_patterns_are_the_ends_of_module_names_and_the_first_that_fits_counts():
    config = {
        "peft_type": "LORA",
        "lora_alpha": 8,
        "r": 4,
        "alpha_pattern": {"layers.1.q": 3, "q": 5, r"^deep\..*k": 7},
        "rank_pattern": {"v": 2},
        "use_rslora": True,
    }
    names = ["layers.1.q", "layers.0.q", "layers.0.xq", "deep.a.k", "a.k", "a.v"]
    adapter = read(lora(*(PEFT + name for name in names)), {}, config)
    alphas = {piece.stem.removeprefix(PEFT): piece.settings["alpha"] for piece in adapter.pieces}
    assert alphas == dict(zip(names, [3, 5, 8, 7, 8, 8], strict=True))
    assert all(piece.settings["rslora"] is True for piece in adapter.pieces)
    assert [piece.settings["rank"] for piece in adapter.pieces] == [4, 4, 4, 4, 4, 2]


def test_the_header_may_carry_the_configuration_of_each_component():
    header = {
        "transformer.lora_alpha": 16,
        "transformer.r": 4,
        "transformer.alpha_pattern": {"b": 2},
        "text_encoder.lora_alpha": 1,
        "text_encoder.r": 4,
    }
    stems = ("transformer.a", "transformer.b", "text_encoder.a", "vae.a")
    adapter = read(lora(*stems), {"lora_adapter_metadata": json.dumps(header)})
    assert [piece.settings.get("alpha") for piece in adapter.pieces] == [16, 2, 1, None]
    with pytest.raises(MergeError, match="lora_adapter_metadata is not JSON"):
        read(lora("a"), {"lora_adapter_metadata": "{"})


def test_a_folder_s_configuration_goes_before_the_header_s():
    metadata = {"lora_adapter_metadata": json.dumps({"lora_alpha": 16})}
    assert only(read(lora("a"), metadata, {"lora_alpha": 2})).settings["alpha"] == 2


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"m.diff": (6, 8)}, [("weight", "diff")]),
        ({"m.diff_b": (6,)}, [("bias", "diff")]),
        ({"m.diff_m": (1, 6, 8)}, [("modulation", "diff")]),
        ({"m.w_norm": (6,), "m.b_norm": (6,)}, [("weight", "norm"), ("bias", "norm")]),
        ({"m.set_weight": (6,)}, [("weight", "set")]),
        ({"m.on_input": (), "m.weight": (8,)}, [("weight", "ia3")]),
        ({"m.ia3_l": (1, 8)}, [("weight", "peft_ia3")]),
        ({"m.ia3_l": (6, 1)}, [("weight", "peft_ia3"), ("bias", "peft_ia3")]),
        (
            {"m.lora_A.weight": (2, 8), "m.lora_B.weight": (6, 2), "m.lora_B.bias": (6,)},
            [("weight", "lora"), ("bias", "up_bias")],
        ),
        ({"m.lora_A.weight": (2, 8), "m.lora_B.weight": (6, 2), "m.dora_scale": (6, 1)}, [("weight", "dora")]),
        ({"m.oft_blocks": (3, 2, 2), "m.alpha": ()}, [("weight", "oft")]),
        ({"m.oft_blocks": (2, 3, 2, 2), "m.alpha": ()}, [("weight", "boft")]),
        ({"m.oft_R.weight": (4, 1)}, [("weight", "peft_oft")]),
        ({"m.boft_R": (1, 4, 2, 2), "m.boft_s": (6, 1)}, [("weight", "peft_boft")]),
        ({"m.hra_u": (8, 2)}, [("weight", "hra")]),
        ({"m.lokr_w1": (2, 2), "m.lokr_w2_a": (3, 1), "m.lokr_w2_b": (1, 4)}, [("weight", "lokr")]),
        ({"m.lora_embedding_A": (2, 9), "m.lora_embedding_B": (8, 2)}, [("weight", "embedding")]),
        (
            {"m.lora_A.weight": (2, 8), "m.lora_B.weight": (6, 2), "m.bias_indices": (2, 3), "m.bias_values": (3,)},
            [("weight", "sparse")],
        ),
        ({"m.set_weight": (2,), "n.scale": (4,)}, [("weight", "set"), ("scale", "set")]),
        (
            {"m.diff": (6, 8), "n.weight": (6, 8), "n.bias": (6,)},
            [("weight", "diff"), ("weight", "full"), ("bias", "full")],
        ),
        ({"m.diff": (6, 8), "loose": (3,)}, [("weight", "diff"), ("", "full")]),
    ],
)  # fmt: skip
def test_formats_by_their_parts(keys, found):
    adapter = read({key: ("F32", shape) for key, shape in keys.items()}, {})
    assert [(piece.param, piece.format) for piece in adapter.pieces] == found
    assert adapter.leftover == ()
    assert adapter.formats == tuple(sorted({format for _, format in found}))


@pytest.mark.parametrize(
    ("role", "shape", "config", "axis"),
    [
        ("dora_scale", (6, 1), {}, 0),
        ("dora_scale", (1, 8), {}, 1),
        ("dora_scale", (6, 1, 1, 1), {}, 0),
        ("dora_scale", (1, 8, 1, 1), {}, 1),
        ("dora_scale", (6,), {}, 0),
        ("lora_magnitude_vector", (6,), {}, 0),
        ("lora_magnitude_vector", (1, 6, 1, 1), {}, 0),
        ("lora_magnitude_vector", (6,), {"fan_in_fan_out": True}, 1),
    ],
)
def test_the_axis_of_a_magnitude(role, shape, config, axis):
    piece = only(read({**lora("m"), f"m.{role}": ("F32", shape)}, {}, {"lora_alpha": 4, **config}))
    assert piece.format == "dora"
    assert piece.settings["inner"] == "lora"
    assert piece.settings["axis"] == axis


def test_a_magnitude_on_an_embedding_belongs_to_its_width():
    tensors = {"e.lora_embedding_A": ("F32", (2, 9)), "e.lora_embedding_B": ("F32", (8, 2))}
    piece = only(read({**tensors, "e.lora_magnitude_vector": ("F32", (8,))}, {}, {"lora_alpha": 4}))
    assert (piece.settings["inner"], piece.settings["axis"]) == ("embedding", 1)


def test_expert_parameters_are_told_by_how_deep_they_are_nested():
    config = {"lora_alpha": 4, "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    stem = f"{PEFT}layers.0.mlp.experts"
    adapter = read(lora(stem, f"{stem}.base_layer", f"{PEFT}layers.0.q"), {}, config)
    assert [(piece.stem, piece.param, piece.format) for piece in adapter.pieces] == [
        (stem, "down_proj", "moe"),
        (stem, "gate_up_proj", "moe"),
        (f"{PEFT}layers.0.q", "weight", "lora"),
    ]


REFUSED_KEYS = {
    "T-LoRA": "m.q_layer.weight",
    "DyLoRA": "m.lora_A.0",
    "VeRA": f"{PEFT}m.vera_lambda_b",
    "FourierFT": f"{PEFT}m.fourierft_spectrum",
    "C3A": f"{PEFT}m.c3a_kernel",
    "VB-LoRA": f"{PEFT}m.vblora_logits_A",
    "RandLoRA": f"{PEFT}m.randlora_lambda",
    "LoRA-XS": f"{PEFT}m.default_lora_latent_mapping.weight",
    "AdaLoRA": f"{PEFT}m.lora_E",
    "prompt tuning": "prompt_embeddings",
    "SVDQuant": "transformer_blocks.0.qkv_proj.smooth_factor",
    "OFT of an old PEFT": f"{PEFT}m.oft_r",
    "a textual inversion": "emb_params",
    "textual inversion": "clip_g",
    "ControlNet-LoRA": "lora_controlnet",
    "ControlNet": "control_model.zero_convs.0.0.weight",
    "IP-Adapter": "ip_adapter.1.to_k_ip.weight",
}


@pytest.mark.parametrize(("name", "key"), REFUSED_KEYS.items(), ids=REFUSED_KEYS)
def test_what_no_weight_can_hold_is_refused_by_name(name, key):
    with pytest.raises(MergeError, match=name) as caught:
        read({**lora("a"), key: ("F32", (4, 4))}, {})
    assert caught.value.tensor == key
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "VERA"}, "VERA"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"init_lora_weights": "pissa"}, "PiSSA"),
        ({"init_lora_weights": "pissa_niter_16"}, "PiSSA"),
        ({"init_lora_weights": "olora"}, "OLoRA"),
        ({"init_lora_weights": "corda"}, "CorDA"),
        ({"init_lora_weights": "lora_ga"}, "LoRA-GA"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
    ],
)
def test_configurations_that_make_it_something_else_are_refused(config, said):
    with pytest.raises(MergeError, match=said) as caught:
        read(lora("a"), {}, {"lora_alpha": 4, **config})
    assert caught.value.hint


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_alone_are_fine(start):
    assert read(lora("a"), {}, {"lora_alpha": 4, "init_lora_weights": start}).pieces


def test_a_checkpoint_is_no_adapter():
    with pytest.raises(MergeError, match="no part of an adapter"):
        read({"model.layers.0.q.weight": ("F32", (4, 4)), "model.norm.bias": ("F32", (4,))}, {})


def test_two_adapters_in_one_file_are_refused():
    tensors = {**lora("a"), "a.lora_A.other.weight": ("F32", (4, 8))}
    with pytest.raises(MergeError, match="same part of one module") as caught:
        read(tensors, {})
    assert caught.value.tensor == "a.lora_A.other.weight"


def test_a_magnitude_on_a_rotation_is_refused():
    with pytest.raises(MergeError, match="magnitude on oft"):
        read({"m.oft_blocks": ("F32", (3, 2, 2)), "m.dora_scale": ("F32", (6, 1))}, {})


def test_an_alpha_that_is_no_number_is_refused():
    with pytest.raises(MergeError, match="lora_alpha"):
        read(lora("a"), {}, {"lora_alpha": "8"})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"alpha_pattern": {"[a": 4}}, r"'\[a' in alpha_pattern, which is no pattern"),
        ({"alpha_pattern": {"a": "four"}}, "alpha_pattern of 'a' as 'four'"),
        ({"alpha_pattern": {"a": float("inf")}}, "alpha_pattern of 'a' as inf"),
        ({"alpha_pattern": [4]}, r"alpha_pattern as \[4\]"),
        ({"rank_pattern": {"a": None}}, "rank_pattern of 'a' as None"),
        ({"lora_alpha": float("nan")}, "lora_alpha as nan"),
        ({"lora_alpha": True}, "lora_alpha as True"),
        ({"r": "4"}, "r as '4'"),
        ({"use_rslora": "false"}, "use_rslora as 'false'"),
        ({"fan_in_fan_out": [1]}, "fan_in_fan_out as"),
    ],
)
def test_configurations_that_cannot_be_read_are_refused_with_the_field(config, said):
    with pytest.raises(MergeError, match=said) as caught:
        read(lora("a"), {}, {"lora_alpha": 4, "r": 4, **config})
    assert "adapter_config.json" in caught.value.hint


def test_empty_patterns_are_none():
    config = {"lora_alpha": 8, "r": 4, "alpha_pattern": {}, "rank_pattern": None, "use_rslora": None}
    assert only(read(lora("a"), {}, config)).settings == {"alpha": 8.0, "rank": 4}


@pytest.mark.parametrize(
    ("key", "dtype", "shape", "said"),
    [
        ("a.lora_A.weight", "I8", (4, 8), "stored as I8"),
        ("a.lora_B.weight", "BOOL", (6, 4), "stored as BOOL"),
        ("a.alpha", "F32", (4,), r"the alpha of a module has shape \[4\]"),
        ("a.alpha", "F32", (0,), r"shape \[0\]"),
        ("a.scale", "F32", (2, 1), r"the scale of a module has shape \[2, 1\]"),
    ],
)
def test_parts_that_cannot_be_computed_with_are_refused(key, dtype, shape, said):
    with pytest.raises(MergeError, match=said) as caught:
        read({**lora("a"), key: (dtype, shape)}, {})
    assert caught.value.tensor == key
    assert caught.value.hint


@pytest.mark.parametrize(("dtype", "shape"), [("I64", ()), ("BF16", (1,)), ("F16", (1, 1))])
def test_an_alpha_may_be_one_number_of_any_kind(dtype, shape):
    assert only(read({**lora("a"), "a.alpha": (dtype, shape)}, {})).keys["alpha"] == "a.alpha"


def test_every_format_names_its_stage_s_function_and_its_parts():
    for format in FORMATS.values():
        assert (format.delta if format.stage == "add" else format.apply) is not None
        assert format.label
        assert set(format.needs).isdisjoint(format.takes)
