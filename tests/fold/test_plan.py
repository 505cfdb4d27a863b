"""What stands against a fold is found from headers and configurations, named, and told all at once."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest

import lib_merge
from lib_merge.errors import PlanError
from lib_merge.fold.adapter import open_adapter
from lib_merge.fold.plan import make_fold_plan
from tests.data.mlx_ref import quantized, widened
from tests.fold.making import DOWN, HEAD, NORM, ROUTER, Pair, Q, entry, write_adapter, write_folder, write_mlx

EXPERTS = "model.layers.0.mlp.switch_mlp.up_proj"


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def plan(pair, adapter=None, **options):
    return make_fold_plan(pair.dense, pair.root / "adapter" if adapter is None else adapter, pair.shipped, **options)


def refused(pair, adapter=None, **options):
    """The first problem of the plan; nothing was written."""
    with pytest.raises(PlanError) as caught:
        plan(pair, adapter, **options)
    with pytest.raises(PlanError):
        lib_merge.fold(pair.dense, adapter or pair.root / "adapter", pair.root / "out", quantize=pair.shipped)
    assert not (pair.root / "out").exists()
    return caught.value.problems[0]


def factors(module, out, inner, rank=2, dtype=np.float32):
    return {
        f"base_model.model.{module}.lora_A.weight": entry(np.ones((rank, inner), dtype)),
        f"base_model.model.{module}.lora_B.weight": entry(np.ones((out, rank), dtype)),
    }


def adapter_of(pair, tensors, **config):
    return write_adapter(pair.root / "adapter", tensors, {"r": 2, "lora_alpha": 2, **config})


# Which modules can be folded.


def test_modules_come_from_the_checkpoints_and_not_from_a_list_of_names(tmp_path):
    names = ("model.layers.0.linear_attn.in_proj_qkv", "backbone.layers.2.mixer.out_proj", "anything")
    pair = Pair(tmp_path, shapes=dict.fromkeys(names, (32, 64)), group=32)
    found = plan(pair, pair.adapter(modules=names))
    assert {module.name for module in found.modules} == set(names)


@pytest.mark.parametrize("module", [ROUTER])
def test_a_module_that_is_not_quantized_is_refused_with_the_reason(pair, module):
    adapter_of(pair, factors(module, 16, 128))
    problem = refused(pair)
    assert "not quantized" in problem.what
    assert "BF16" in problem.what
    assert module in problem.what
    assert problem.tensor == f"{module}.weight"


def test_a_norm_is_refused(pair):
    adapter_of(pair, factors(NORM, 1, 128))
    assert "[128]" in refused(pair).what


def test_stacked_experts_are_refused(pair):
    stack = np.zeros((4, 32, 128), np.uint16)
    words, scales, biases = (np.stack([each] * 4) for each in quantized(widened(stack[0]), 4, 64, "even", "bf16"))
    shapes = {"weight": words, "scales": scales, "biases": biases}
    pair.write_shipped(**{f"{EXPERTS}.{leaf}": entry(array) for leaf, array in shapes.items()})
    pair.write_dense(**{f"{EXPERTS}.weight": entry(stack)})
    adapter_of(pair, factors(EXPERTS, 32, 128))
    problem = refused(pair)
    assert "[4, 32, 128]" in problem.what
    assert problem.tensor == f"{EXPERTS}.weight"
    pair.write_dense(**{f"{EXPERTS}.weight": entry(stack[0])})
    assert "stack of weights" in refused(pair).what


def test_a_module_that_the_dense_checkpoint_lacks_is_refused(pair):
    del pair.weights[DOWN]
    pair.write_dense()
    pair.adapter(modules=[Q, HEAD])
    adapter_of(pair, factors(DOWN, 48, 256))
    assert "the dense one lacks it" in refused(pair).what


def test_all_problems_are_told_at_once(pair):
    adapter_of(pair, factors(ROUTER, 16, 128) | factors("nowhere", 4, 4) | factors(Q, 3, 128))
    with pytest.raises(PlanError) as caught:
        plan(pair)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("shape", [(80, 64), (40, 128)])
def test_a_dense_weight_of_another_shape_is_refused(pair, shape):
    pair.weights[Q] = np.zeros(shape, np.uint16)
    pair.write_dense()
    adapter_of(pair, factors(Q, *shape))
    assert Q in refused(pair).what


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_a_dense_weight_of_another_dtype_is_refused(pair, dtype):
    size = {"F64": 8, "I8": 1, "F8_E4M3": 1}[dtype]
    pair.adapter()
    pair.write_dense(**{f"{Q}.weight": (dtype, (80, 128), bytes(80 * 128 * size))})
    problem = refused(pair)
    assert dtype in problem.what
    assert problem.tensor == f"{Q}.weight"


# How they are stored.


def with_module(pair, words, scales, biases, config=None):
    """The quantized checkpoint with other leaves of one module."""
    tensors = {f"{Q}.weight": entry(words), f"{Q}.scales": entry(scales)}
    tensors |= {} if biases is None else {f"{Q}.biases": entry(biases)}
    for path in pair.shipped.iterdir():
        path.unlink()
    write_folder(pair.shipped, [tensors], config or {})
    pair.adapter(modules=[Q])


@pytest.mark.parametrize(
    ("bits", "group", "said"), [(1, 64, "1-bit"), (4, 16, "groups of 16"), (4, 256, "groups of 0.5")]
)
def test_other_bits_and_groups_are_refused(pair, bits, group, said):
    words = np.zeros((80, 128 * bits // 32), np.uint32)
    scales = np.zeros((80, max(1, 128 // group) if group != 256 else 256), np.uint16)
    with_module(pair, words, scales, scales)
    assert said in refused(pair).what


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_other_modes_are_refused_by_name(pair, mode):
    words, scales = np.zeros((80, 16), np.uint32), np.zeros((80, 4), np.uint16)
    with_module(pair, words, scales, None, {"quantization": {"bits": 4, "group_size": 32, "mode": mode}})
    assert mode in refused(pair).what
    with_module(pair, words, scales, None)
    assert "without biases" in refused(pair).what


@pytest.mark.parametrize(
    ("entry_of_config", "said"),
    [
        ({"bits": 8, "group_size": 64}, "bits 4 by its shapes, 8 by config.json"),
        ({"bits": 4, "group_size": 32}, "group_size 64 by its shapes, 32 by config.json"),
        ({"bits": 4, "group_size": 64, Q: {"bits": 6, "group_size": 64}}, "bits 4 by its shapes, 6 by config.json"),
        ({"bits": 4, "group_size": 64, Q: False}, "config.json says that it is not quantized"),
        ({"bits": 4, "group_size": 64, Q: {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "mxfp4"),
    ],
)
def test_shapes_and_configuration_must_agree(pair, entry_of_config, said):
    pair.adapter(modules=[Q])
    pair.write_shipped({"quantization": entry_of_config})
    problem = refused(pair)
    assert said in problem.what
    assert Q in problem.what


def test_without_a_configuration_the_shapes_are_enough(pair):
    pair.adapter()
    (pair.shipped / "config.json").unlink()
    assert {module.storage.label for module in plan(pair).modules} == {"MLX 4-bit, groups of 64"}


@pytest.mark.parametrize(
    ("scales", "biases"), [(np.uint16, np.float16), (np.uint32, np.uint32)], ids=["two dtypes", "no floats"]
)
def test_scales_of_other_dtypes_are_refused(pair, scales, biases):
    with_module(pair, np.zeros((80, 16), np.uint32), np.zeros((80, 2), scales), np.zeros((80, 2), biases))
    assert "BF16, F16 or F32" in refused(pair).what


@pytest.mark.parametrize("rows", [(79, 80, 80), (80, 79, 79), (80, 80, 79)])
def test_leaves_that_do_not_fit_each_other_are_refused(pair, rows):
    words, scales, biases = rows
    with_module(
        pair, np.zeros((words, 16), np.uint32), np.zeros((scales, 2), np.uint16), np.zeros((biases, 2), np.uint16)
    )
    assert "does not fit the dense weight" in refused(pair).what


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"qweight": ("I32", (16, 80)), "qzeros": ("I32", (2, 10)), "scales": ("F16", (2, 80))}, "not in both"),
        ({"weight": ("U8", (5120, 1)), "weight.absmax": ("F32", (160,)), "weight.quant_map": ("F32", (16,))}, "NF4"),
        ({"weight": ("I8", (80, 128)), "SCB": ("F32", (80,))}, "int8"),
    ],
)
def test_other_quantizations_are_recognised_and_refused(pair, tensors, name):
    size = {"I32": 4, "F16": 2, "U8": 1, "F32": 4, "I8": 1}
    made = {
        f"{Q}.{leaf}": (dtype, shape, bytes(size[dtype] * int(np.prod(shape))))
        for leaf, (dtype, shape) in tensors.items()
    }
    for path in pair.shipped.iterdir():
        path.unlink()
    write_folder(pair.shipped, [made])
    pair.adapter(modules=[Q])
    problem = refused(pair)
    assert name in problem.what
    assert problem.hint


# The adapter.


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 1]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"alora_invocation_tokens": [1, 2]},
        {"arrow_config": {"top_k": 3}},
        {"monteclora_config": {"x": 1}},
        {"velora_config": {"x": 1}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"peft_type": "VERA"},
    ],
    ids=lambda config: "-".join(map(str, config)),
)
def test_adapters_that_do_more_than_add_low_rank_products_are_refused(pair, config):
    pair.adapter(**config)
    problem = refused(pair)
    assert problem.hint
    assert str(pair.root / "adapter") in problem.file


def test_settings_that_change_nothing_are_accepted(pair):
    off = dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), False)
    none = dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"))
    empty = {"loftq_config": {}, "rank_pattern": {}, "alpha_pattern": {}}
    pair.adapter(**off, **none, **empty, bias="none", qalora_group_size=16, init_lora_weights="gaussian")
    assert len(plan(pair).modules) == 2


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{Q}.lora_magnitude_vector",
        f"base_model.model.{Q}.lora_B.bias",
        f"base_model.model.{HEAD}.weight",
        f"base_model.model.{HEAD}.lora_embedding_A",
        f"base_model.model.{Q}.something",
    ],
)
def test_tensors_that_are_no_factors_are_never_ignored(pair, key):
    adapter_of(pair, {**factors(Q, 80, 128), key: entry(np.ones(80, np.float32))})
    problem = refused(pair)
    assert key in (problem.tensor, problem.what) or key.rpartition(".")[0] in f"{problem.what} {problem.tensor}"


def test_a_factor_that_stands_twice_in_the_file_is_refused(pair):
    again = f"base_model.model.{Q}.lora_A.default.weight"
    adapter_of(pair, {**factors(Q, 80, 128), again: entry(np.ones((2, 128), np.float32))})
    assert "same part of one module" in refused(pair).what


def test_a_module_that_is_named_in_both_ways_is_refused(tmp_path):
    one, other = "model.language_model.layers.0.q", "language_model.model.layers.0.q"
    pair = Pair(tmp_path, shapes={one: (32, 64)}, group=32, rename={one: other})
    adapter_of(pair, factors(one, 32, 64) | factors(other, 32, 64))
    assert "twice" in refused(pair).what


@pytest.mark.parametrize("side", "AB")
def test_a_factor_without_the_other_is_refused(pair, side):
    tensors = factors(Q, 80, 128) | factors(DOWN, 48, 256)
    del tensors[f"base_model.model.{Q}.lora_{side}.weight"]
    adapter_of(pair, tensors)
    assert Q in str(vars(refused(pair)))


@pytest.mark.parametrize(
    ("down", "up"),
    [((2, 127), (80, 2)), ((2, 128), (79, 2)), ((3, 128), (80, 2)), ((2, 128, 1), (80, 2)), ((0, 128), (80, 0))],
)
def test_factors_of_other_shapes_are_refused(pair, down, up):
    keys = (f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight")
    adapter_of(pair, dict(zip(keys, (entry(np.ones(down, np.float32)), entry(np.ones(up, np.float32))), strict=True)))
    assert Q in str(vars(refused(pair)))


@pytest.mark.parametrize("rank", [0, -1, 3, 2.5, "2", True])
def test_a_rank_that_is_not_that_of_the_factors_is_refused(pair, rank):
    adapter_of(pair, factors(Q, 80, 128), r=rank)
    refused(pair)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "16"])
def test_an_alpha_that_is_no_finite_number_is_refused(pair, alpha):
    adapter_of(pair, factors(Q, 80, 128), lora_alpha=alpha)
    assert "alpha" in refused(pair).what


def test_integer_factors_are_refused(pair):
    adapter_of(pair, {**factors(Q, 80, 128), f"base_model.model.{Q}.lora_A.weight": ("I8", (2, 128), bytes(256))})
    assert "I8" in refused(pair).what


def test_an_adapter_that_was_trained_on_codes_is_noted(pair):
    for base, noted in (("unsloth/qwen3-4b-bnb-4bit", True), ("Qwen/Qwen3-4B", False), ("x-AWQ", True)):
        found = open_adapter(pair.adapter(base_model_name_or_path=base))
        assert [base in note for note in found.notes] == ([True] if noted else [])


def test_a_full_fine_tune_of_mlx_lm_is_refused(pair):
    root = pair.root / "mlx"
    root.mkdir()
    write_mlx(root / "adapters.safetensors", {f"{Q}.lora_a": entry(np.ones((128, 2), np.float32)),
                                              f"{Q}.lora_b": entry(np.ones((2, 80), np.float32)),
                                              f"{Q}.m": entry(np.ones(80, np.float32))})  # fmt: skip
    (root / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "dora", "lora_parameters": {"scale": 1.0}}))
    problem = refused(pair, root)
    assert "DoRA" in problem.what
    assert problem.tensor == f"{Q}.m"


def test_a_scale_that_versions_of_mlx_lm_read_differently_is_refused(pair):
    root = pair.root / "mlx"
    root.mkdir()
    tensors = {f"{Q}.lora_a": entry(np.ones((128, 2), np.float32)), f"{Q}.lora_b": entry(np.ones((2, 80), np.float32))}
    write_mlx(root / "adapters.safetensors", tensors)
    parameters = {"scale": 10.0, "alpha": 16.0, "rank": 2}
    (root / "adapter_config.json").write_text(json.dumps({"lora_parameters": parameters}))
    assert "two ways" in refused(pair, root).what
    assert plan(pair, root, lora_alpha=4.0).modules[0].change.scale == 2.0


# Files.


@pytest.mark.parametrize("what", ["pipe", "broken link", "folder"])
def test_anything_but_plain_files_in_the_quantized_folder_is_refused(pair, what):
    pair.adapter()
    path = pair.shipped / "extra"
    {"pipe": os.mkfifo, "broken link": lambda path: path.symlink_to("nowhere"), "folder": os.mkdir}[what](path)
    problem = refused(pair)
    assert "extra" in problem.what + problem.file


def test_links_to_plain_files_are_followed(pair):
    pair.adapter()
    real = pair.root / "blob"
    (pair.shipped / "tokenizer.json").rename(real)
    (pair.shipped / "tokenizer.json").symlink_to(real)
    lib_merge.fold(pair.dense, pair.root / "adapter", pair.root / "out", quantize=pair.shipped)
    made = pair.root / "out" / "tokenizer.json"
    assert made.read_bytes() == real.read_bytes()
    assert not made.is_symlink()


def test_hidden_folders_of_download_tools_are_left_out_and_noted(pair):
    pair.adapter()
    (pair.shipped / ".cache").mkdir()
    made = lib_merge.fold(pair.dense, pair.root / "adapter", pair.root / "out", quantize=pair.shipped)
    assert any(".cache" in note for note in made.notes)
    assert not (pair.root / "out" / ".cache").exists()
    assert (pair.root / "out" / ".gitattributes").is_file()
    assert lib_merge.fold_check(pair.dense, pair.root / "adapter", pair.root / "out", pair.shipped).ok


@pytest.mark.parametrize("which", ["config", "weights", "dense shard"])
def test_a_broken_link_among_the_other_inputs_is_refused(pair, which):
    pair.adapter()
    path = {
        "config": pair.root / "adapter" / "adapter_config.json",
        "weights": pair.root / "adapter" / "adapter_model.safetensors",
        "dense shard": pair.dense / "model-00001-of-00002.safetensors",
    }[which]
    path.unlink()
    path.symlink_to("nowhere")
    assert refused(pair).file == str(path)


def test_a_shard_outside_of_its_folder_is_refused(pair):
    pair.adapter()
    for folder in (pair.dense, pair.shipped):
        index = folder / "model.safetensors.index.json"
        text = index.read_text()
        document = json.loads(text)
        document["weight_map"][f"{Q}.weight"] = "../elsewhere.safetensors"
        index.write_text(json.dumps(document))
        assert "outside its folder" in refused(pair).what
        index.write_text(text)


@pytest.mark.parametrize("which", ["dense", "shipped"])
def test_a_shard_that_is_cut_off_is_refused_before_any_work(pair, which):
    pair.adapter()
    path = {"dense": pair.dense, "shipped": pair.shipped}[which] / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    problem = refused(pair)
    assert path.name in f"{problem.file} {problem.what}"


def test_tensors_that_overlap_are_refused(pair):
    pair.adapter()
    path = pair.shipped / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    size = header[f"{DOWN}.weight"]["data_offsets"][1] - header[f"{DOWN}.weight"]["data_offsets"][0]
    header[f"{DOWN}.weight"]["data_offsets"] = [header[f"{Q}.weight"]["data_offsets"][0] + at for at in (0, size)]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    assert "overlap" in refused(pair).what


def test_a_folder_without_an_adapter_is_refused(pair):
    (pair.root / "adapter").mkdir()
    assert "holds no adapter" in refused(pair).what


def test_swapped_checkpoints_are_told_once(pair):
    pair.adapter()
    with pytest.raises(PlanError, match="seem to be swapped") as caught:
        make_fold_plan(pair.shipped, pair.root / "adapter", pair.dense)
    assert len(caught.value.problems) == 1
    assert "DENSE ADAPTER OUT --quantize SHIPPED" in caught.value.hint


def test_a_checkpoint_without_codes_is_nothing_to_fold_into(pair):
    pair.adapter()
    with pytest.raises(PlanError, match="holds no coded weights") as caught:
        make_fold_plan(pair.dense, pair.root / "adapter", pair.dense)
    assert len(caught.value.problems) == 1
    assert caught.value.file == str(pair.dense)
    assert "lib-merge bake" in caught.value.hint


def test_of_very_many_modules_that_do_not_fit_the_first_are_told_and_the_rest_counted(pair):
    adapter_of(pair, {key: each for number in range(30) for key, each in factors(f"other.{number}", 4, 4).items()})
    with pytest.raises(PlanError) as caught:
        plan(pair)
    assert len(caught.value.problems) == 9
    assert all(re.fullmatch(r"other\.\d+", problem.tensor) for problem in caught.value.problems[:-1])
    assert "22 more modules" in caught.value.problems[-1].what


def test_a_quantized_checkpoint_as_dense_one_is_refused(pair):
    pair.adapter()
    with pytest.raises(PlanError, match="U32"):
        make_fold_plan(pair.shipped, pair.root / "adapter", pair.shipped)


def test_a_dry_run_plans_and_writes_nothing(pair):
    pair.adapter()
    made = lib_merge.fold(pair.dense, pair.root / "adapter", pair.root / "out", quantize=pair.shipped, dry_run=True)
    assert (made.folded, made.rounding, made.problems) == (2, None, ())
    assert made.output_bytes == sum(path.stat().st_size for path in pair.shipped.iterdir())
    assert not (pair.root / "out").exists()
    (pair.root / "full").mkdir()
    (pair.root / "full" / "x").touch()
    made = lib_merge.fold(pair.dense, pair.root / "adapter", pair.root / "full", quantize=pair.shipped, dry_run=True)
    assert "the output exists" in made.problems[0].what


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "model.model.layers.0.self_attn.q_proj", "q_proj"])
def test_names_of_language_models_are_never_guessed(pair, name):
    adapter_of(pair, factors(name, 80, 128))
    assert "tried" in refused(pair).what
