"""The fold: the right bytes in the named modules, and not a byte elsewhere."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from safetensors import safe_open

import lib_merge
from lib_merge.errors import MergeError, NumberError, PlanError
from tests.data.mlx_ref import DATA, load, merged, widened
from tests.fold.making import (
    DOWN,
    HEAD,
    Pair,
    Q,
    bf16,
    contents,
    entry,
    leaves,
    places,
    raw_tensors,
    write_adapter,
    write_folder,
    write_mlx,
)

PAIR = DATA / "pair"


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def fold(pair, adapter, name="out", **options):
    return lib_merge.fold(pair.dense, adapter, pair.root / name, quantize=pair.shipped, **options)


def only_changed(out, shipped, allowed):
    """Every byte of every file is the same, but for the payloads of the tensors allowed."""
    assert {path.name for path in out.iterdir()} == {path.name for path in shipped.iterdir()}
    for path in shipped.iterdir():
        ours, theirs = bytearray((out / path.name).read_bytes()), bytearray(path.read_bytes())
        assert len(ours) == len(theirs)
        if path.suffix == ".safetensors":
            for key, (_, begin, end) in places(path).items():
                if key in allowed:
                    ours[begin:end] = theirs[begin:end] = bytes(end - begin)
        assert ours == theirs, path.name


def module_keys(*modules):
    return {f"{module}.{leaf}" for module in modules for leaf in ("weight", "scales", "biases")}


# Against MLX and PEFT themselves.


@pytest.mark.parametrize("adapter", ["adapter_random_f32", "adapter_random_bf16"])
@pytest.mark.parametrize(("route", "round_dense"), [("A_f32", False), ("B_bf16", True)])
def test_the_bytes_are_those_that_mlx_makes_of_the_sum(tmp_path, adapter, route, round_dense):
    """Route B was compared with PEFT's merge_and_unload and mlx_lm.convert: the same 42 tensors."""
    lib_merge.fold(
        PAIR / "dense", PAIR / adapter, tmp_path / "out", quantize=PAIR / "shipped_4bit_g64", round_dense=round_dense
    )
    ours, expected = load(tmp_path / "out"), load(PAIR / f"expected_{adapter}_route{route}.safetensors")
    assert len(expected) == 42
    for key, array in expected.items():
        assert ours[key].tobytes() == array.tobytes(), key
    only_changed(tmp_path / "out", PAIR / "shipped_4bit_g64", set(expected))


def test_an_adapter_without_effect_gives_back_every_byte_of_the_checkpoint(tmp_path):
    made = lib_merge.fold(PAIR / "dense", PAIR / "adapter_zero", tmp_path / "out", quantize=PAIR / "shipped_4bit_g64")
    assert contents(tmp_path / "out") == contents(PAIR / "shipped_4bit_g64")
    assert (made.folded, made.copied, made.warnings) == (14, 15, ())
    assert (made.rounding.rounding, made.rounding.share) == ("even", 1)


# Every way to store.


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_bits_and_groups_are_those_of_the_checkpoint(tmp_path, bits, group):
    pair = Pair(tmp_path, bits=bits, group=group)
    fold(pair, pair.adapter())
    out = raw_tensors(tmp_path / "out")
    for module in (Q, DOWN):
        for leaf, (_, _, data) in pair.expected(module, 6.0 / 4).items():
            assert out[f"{module}.{leaf}"] == data
    only_changed(tmp_path / "out", pair.shipped, module_keys(Q, DOWN))


@pytest.mark.parametrize("scales", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_scales_keep_their_dtype_and_dense_weights_are_cast_to_it_first(tmp_path, dtype, scales):
    pair = Pair(tmp_path, dtype=dtype, scales=scales, bits=8)
    for name, round_dense in (("plain", False), ("rounded", True)):
        fold(pair, pair.adapter(size=0.05), name, round_dense=round_dense)
        out = raw_tensors(tmp_path / name)
        for leaf, (_, _, data) in pair.expected(Q, 1.5, round_dense=round_dense).items():
            assert out[f"{Q}.{leaf}"] == data
    fold(pair, pair.adapter("none", alpha=0.0), "same")
    assert contents(tmp_path / "same") == contents(pair.shipped)


def test_leaves_of_one_module_may_lie_in_different_shards(pair):
    index = json.loads((pair.shipped / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[f"{Q}.weight"] != index[f"{Q}.scales"]
    fold(pair, pair.adapter(modules=[Q]))
    only_changed(pair.root / "out", pair.shipped, module_keys(Q))


def test_headers_need_no_padding_and_data_no_order(pair):
    for path in pair.shipped.glob("*.safetensors"):
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        begins = [begin for _, begin, _ in places(path).values()]
        assert start % 4 != 0
        assert begins != sorted(begins)
    fold(pair, pair.adapter())
    for path in (pair.root / "out").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) == set(places(path))


def test_bits_and_groups_may_differ_from_module_to_module(tmp_path):
    pair = Pair(tmp_path)
    made = leaves(pair.seen(DOWN), 8, 32, "even", "bf16")
    general = {"bits": 4, "group_size": 64, DOWN: {"bits": 8, "group_size": 32}, HEAD: True}
    shards = [{}, {}]
    for module in pair.weights:
        own = made if module == DOWN else leaves(pair.seen(module), 4, 64, "even", "bf16")
        shards[0] |= {f"{module}.{leaf}": each for leaf, each in own.items()}
    shards[1] = {f"{name}.weight": entry(array) for name, array in pair.plain.items()}
    shutil.rmtree(pair.shipped)
    write_folder(pair.shipped, shards, {"quantization": general})
    result = fold(pair, pair.adapter())
    assert {module.storage.label for module in result.modules} == {"MLX 4-bit, groups of 64", "MLX 8-bit, groups of 32"}
    down, up = pair.factors[DOWN]
    expected = leaves(merged(pair.seen(DOWN), down, up, 1.5), 8, 32, "even", "bf16")
    out = raw_tensors(tmp_path / "out")
    assert all(out[f"{DOWN}.{leaf}"] == data for leaf, (_, _, data) in expected.items())


def test_a_single_file_is_folded_into_a_single_file(pair):
    tensors = {key: value for shard in pair.shipped.glob("*.safetensors") for key, value in raw_entries(shard).items()}
    write_mlx(pair.root / "one.safetensors", tensors)
    out = pair.root / "folded.safetensors"
    lib_merge.fold(pair.dense, pair.adapter(), out, quantize=pair.root / "one.safetensors")
    found = {key: content[begin:end] for key, (content, begin, end) in places(out).items()}
    for leaf, (_, _, data) in pair.expected(Q, 1.5).items():
        assert found[f"{Q}.{leaf}"] == data
    assert lib_merge.fold_check(pair.dense, pair.root / "adapter", out, pair.root / "one.safetensors").ok


def raw_entries(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    found = {}
    for key, value in header.items():
        begin, end = value["data_offsets"]
        found[key] = (value["dtype"], tuple(value["shape"]), content[start + begin : start + end])
    return found


# The change.


def test_the_sum_over_the_rank_is_taken_in_order_in_float64_and_scaled_once(tmp_path):
    """Factors so large and of such signs that another order, or float32, gives other sums."""
    pair = Pair(tmp_path, dtype="f32", scales="f32", bits=8)
    adapter = pair.adapter(rank=5, alpha=7.0)
    rng = np.random.default_rng(3)
    tensors = {}
    for module in (Q, DOWN):
        out, inner = pair.shapes[module]
        down = (rng.standard_normal((5, inner)) * np.array([[1e8], [1], [-1e8], [1e-8], [3]])).astype(np.float32)
        up = np.tile(rng.standard_normal((out, 1)), 5).astype(np.float32)
        pair.factors[module] = down, up
        tensors |= {f"base_model.model.{module}.lora_A.weight": entry(down)}
        tensors |= {f"base_model.model.{module}.lora_B.weight": entry(up)}
    write_adapter(adapter, tensors, {"r": 5, "lora_alpha": 7.0})
    fold(pair, adapter)
    out = raw_tensors(tmp_path / "out")
    for module in (Q, DOWN):
        assert all(out[f"{module}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(module, 7.0 / 5).items())


def test_an_exact_zero_sum_leaves_the_weight_as_it_is(pair):
    down = np.ones((2, 128), np.float32)
    up = np.concatenate([np.ones((80, 1)), -np.ones((80, 1))], 1).astype(np.float32)
    keys = (f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight")
    adapter = write_adapter(
        pair.root / "cancels", dict(zip(keys, (entry(down), entry(up)), strict=True)), {"r": 2, "lora_alpha": 3}
    )
    fold(pair, adapter)
    assert contents(pair.root / "out") == contents(pair.shipped)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("side", "AB")
def test_a_factor_of_zeros_leaves_every_byte(pair, side, zero):
    adapter = pair.adapter()
    tensors = raw_entries(adapter / "adapter_model.safetensors")
    for key, (dtype, shape, _) in tensors.items():
        if f"lora_{side}" in key:
            tensors[key] = (dtype, shape, np.full(shape, zero, np.float32).tobytes())
    write_adapter(adapter, tensors, {"r": 4, "lora_alpha": 6})
    fold(pair, adapter)
    assert contents(pair.root / "out") == contents(pair.shipped)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(pair):
    fold(pair, pair.adapter(use_rslora=True))
    out = raw_tensors(pair.root / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 6.0 / math.sqrt(4)).items())


def test_alpha_and_rank_may_be_given_by_pattern(pair):
    fold(pair, pair.adapter(r=9, rank_pattern={".*_proj": 4}, alpha_pattern={"mlp.down_proj": 2.0, "q_proj": 3.0}))
    out = raw_tensors(pair.root / "out")
    for module, alpha in ((Q, 3.0), (DOWN, 2.0)):
        assert all(out[f"{module}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(module, alpha / 4).items())


def test_an_alpha_on_the_command_line_goes_before_the_adapters_own(pair):
    fold(pair, pair.adapter(alpha_pattern={"q_proj": 99.0}), lora_alpha=1.0)
    out = raw_tensors(pair.root / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 0.25).items())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_factors_may_be_stored_in_16_bits(pair, dtype):
    fold(pair, pair.adapter(dtype=dtype))
    out = raw_tensors(pair.root / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 1.5).items())


def mlx_adapter(pair, scale=20.0, **config):
    """As mlx-lm writes them: factors the other way round, one scale for all."""
    pair.adapter()
    tensors = {}
    for module, (down, up) in pair.factors.items():
        tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"] = entry(down.T), entry(up.T)
    root = pair.root / "mlx"
    root.mkdir()
    write_mlx(root / "adapters.safetensors", tensors)
    write_mlx(root / "0000100_adapters.safetensors", tensors)
    parameters = {"rank": 4, "dropout": 0.0} | ({} if scale is None else {"scale": scale})
    document = {"fine_tune_type": "lora", "lora_parameters": parameters, "model": "mlx-community/x-4bit", **config}
    (root / "adapter_config.json").write_text(json.dumps(document))
    return root


def test_adapters_of_mlx_lm_are_folded_with_their_scale(pair):
    made = fold(pair, mlx_adapter(pair))
    out = raw_tensors(pair.root / "out")
    for module in (Q, DOWN):
        assert all(out[f"{module}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(module, 20.0).items())
    assert any("trained on mlx-community/x-4bit" in note for note in made.notes)


def test_a_scale_that_is_not_stored_is_never_guessed(pair):
    with pytest.raises(PlanError, match="scale is not known") as caught:
        fold(pair, mlx_adapter(pair, scale=None))
    assert "--lora-alpha" in caught.value.hint
    fold(pair, pair.root / "mlx", lora_alpha=8.0)
    out = raw_tensors(pair.root / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 2.0).items())


def test_an_alpha_that_is_not_stored_is_never_guessed(pair):
    (pair.adapter() / "adapter_config.json").unlink()
    with pytest.raises(PlanError, match="alpha is not known") as caught:
        fold(pair, pair.root / "adapter")
    assert "--lora-alpha" in caught.value.hint
    fold(pair, pair.root / "adapter", lora_alpha=6.0)
    out = raw_tensors(pair.root / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 1.5).items())


# How codes are rounded.


@pytest.mark.parametrize("rounding", ["even", "away", "metal"])
def test_the_rounding_is_found_that_made_the_checkpoint(tmp_path, rounding):
    pair = Pair(tmp_path, rounding=rounding)
    pair.weights[Q][:8] = bf16(-0.02 - np.abs(widened(pair.weights[Q][:8])))  # groups that tell metal from away
    pair.write_dense()
    pair.write_shipped()
    made = fold(pair, pair.adapter())
    assert (made.rounding.rounding, made.rounding.share, made.warnings) == (rounding, 1, ())
    assert f"rounding {rounding}" in made.rounding.describe()
    out = raw_tensors(tmp_path / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(Q, 1.5).items())
    fold(pair, pair.adapter("none", alpha=0), "same")
    assert contents(tmp_path / "same") == contents(pair.shipped)


def test_a_rounding_that_is_asked_for_is_used_whatever_made_the_checkpoint(tmp_path):
    pair = Pair(tmp_path, rounding="even")
    pair.weights[Q] = bf16(np.round(widened(pair.weights[Q]) * 256) / 256)  # many ties
    pair.write_dense()
    pair.write_shipped()
    made = fold(pair, pair.adapter(alpha=0), rounding="away")
    assert made.rounding.rounding == "away"
    assert made.rounding.share < 1
    assert "do not come out" in made.warnings[0]
    expected = leaves(widened(pair.weights[Q]), 4, 64, "away", "bf16")
    out = raw_tensors(tmp_path / "out")
    assert all(out[f"{Q}.{leaf}"] == data for leaf, (_, _, data) in expected.items())


def test_another_dense_model_than_the_one_shipped_is_warned_of(pair):
    other = Pair(pair.root / "other", seed=1)
    made = lib_merge.fold(other.dense, pair.adapter(), pair.root / "out", quantize=pair.shipped)
    assert "may not be the one" in made.warnings[0]
    with pytest.raises(PlanError, match="may not be the one"):
        lib_merge.fold(other.dense, pair.adapter(), pair.root / "strict", quantize=pair.shipped, strict=True)
    assert not (pair.root / "strict").exists()


def test_an_unknown_rounding_is_refused(pair):
    with pytest.raises(MergeError, match="no rounding 'up'"):
        fold(pair, pair.adapter(), rounding="up")


# Numbers that cannot be folded.


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_dense_weight_that_is_not_finite_is_named(pair, value):
    pair.weights[Q][79, 100] = bf16([value])[0] if np.isinf(value) else 0x7FC0
    pair.write_dense()
    with pytest.raises(NumberError, match="dense weight") as caught:
        fold(pair, pair.adapter(), rounding="even")
    assert caught.value.tensor == f"{Q}.weight"
    assert not (pair.root / "out").exists()


def test_a_factor_that_is_not_finite_is_named(pair):
    adapter = pair.adapter()
    tensors = raw_entries(adapter / "adapter_model.safetensors")
    key = f"base_model.model.{DOWN}.lora_B.weight"
    values = np.frombuffer(tensors[key][2], np.float32).copy()
    values[7] = np.nan
    tensors[key] = (*tensors[key][:2], values.tobytes())
    write_adapter(adapter, tensors, {"r": 4, "lora_alpha": 6})
    with pytest.raises(NumberError, match="adapter holds a value") as caught:
        fold(pair, adapter)
    assert caught.value.tensor == key
    assert not (pair.root / "out").exists()


def test_a_sum_that_cannot_be_stored_names_module_and_group(pair):
    adapter = pair.adapter(alpha=1e38, size=10.0)
    with pytest.raises(NumberError, match=r"group \d+ of row \d+") as caught:
        fold(pair, adapter)
    assert caught.value.tensor in (f"{Q}.weight", f"{DOWN}.weight")
    assert not (pair.root / "out").exists()


def test_a_dense_weight_beyond_the_dtype_of_the_scales_is_named(tmp_path):
    pair = Pair(tmp_path, dtype="f32", scales="f16")
    pair.weights[Q][3, 3] = 1e6
    pair.write_dense()
    with pytest.raises(NumberError, match="beyond F16") as caught:
        fold(pair, pair.adapter())
    assert caught.value.tensor == f"{Q}.weight"


# The same bytes however it is run.


def test_threads_change_no_byte(pair):
    fold(pair, pair.adapter(), "one", threads=1)
    fold(pair, pair.root / "adapter", "four", threads=4)
    assert contents(pair.root / "one") == contents(pair.root / "four")


def test_tiles_change_no_byte(tmp_path):
    pair = Pair(tmp_path, shapes={Q: (300, 128), DOWN: (200, 256)})
    fold(pair, pair.adapter(), "large")
    fold(pair, pair.root / "adapter", "small", tile=500)
    assert contents(tmp_path / "large") == contents(tmp_path / "small")
