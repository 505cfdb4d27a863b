"""Whole runs of every method through files: dtypes, shapes, exact ends, bad numbers, the same bytes however it runs."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lib_merge
from lib_merge import fused
from lib_merge.errors import NumberError
from lib_merge.files import calls
from lib_merge.files.dtypes import BY_OPTION, BY_TORCH
from lib_merge.kernels.registry import method
from tests.kernels.applying import EXACT_B, METHODS, apply, generic, raw, same_bits, settings
from tests.support import write_raw

STORED = {
    "fp32": (torch.float32,),
    "fp16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "fp64": (torch.float64,),
    "fp16+bf16": (torch.float16, torch.bfloat16),
    "bf16+fp16": (torch.bfloat16, torch.float16),
    "fp16+fp32": (torch.float16, torch.float32),
    "fp64+bf16": (torch.float64, torch.bfloat16),
    "fp8_e4m3": (torch.float8_e4m3fn,),
    "fp8_e4m3+fp16": (torch.float8_e4m3fn, torch.float16),
}
SHAPES = {
    "blocks.0.norm.bias": (7,),
    "blocks.0.proj.weight": (6, 5),
    "blocks.0.conv.weight": (4, 3, 3, 3),
    "blocks.0.scale": (),
    "blocks.0.none.weight": (0,),
    "blocks.0.marker.weight": (3, 0),
    "blocks.0.gate": (1,),
}
QUICK = {"fsync": False, "keep_recipe": False}
RANKS = {torch.float64: 4, torch.float32: 3, torch.bfloat16: 2, torch.float16: 2, torch.float8_e4m3fn: 1}


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def way(request, monkeypatch):
    """Both ways to a result: by torch, and by compiled loops however small the run is, where numba is there."""
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(fused, "WORTH_BYTES", 0)
    return request.param


each_method = pytest.mark.parametrize("chosen", METHODS, ids=lambda chosen: chosen.id)


def save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A model file with the tensors in the order given."""
    names = {key: BY_TORCH[str(tensor.dtype).removeprefix("torch.")].name for key, tensor in tensors.items()}
    return write_raw(path, {key: (names[key], tuple(t.shape), raw(t)) for key, t in tensors.items()})


def save_all(folder: Path, models: Mapping[str, Mapping[str, Tensor]]) -> list[Path]:
    """One file for each slot."""
    folder.mkdir(exist_ok=True)
    return [save(folder / f"{slot}.safetensors", tensors) for slot, tensors in models.items()]


def models_of(
    chosen, shapes: Mapping[str, tuple[int, ...]], stored: tuple[torch.dtype, ...]
) -> dict[str, dict[str, Tensor]]:
    """Slot -> tensors; the dtypes go round the slots."""
    models: dict[str, dict[str, Tensor]] = {slot: {} for slot in chosen.inputs}
    for number, (key, shape) in enumerate(shapes.items()):
        for slot, tensor, dtype in zip(
            chosen.inputs, generic(chosen, shape, torch.float64, number), itertools.cycle(stored), strict=False
        ):
            models[slot][key] = tensor.to(dtype)
    return models


def widened(tensors: list[Tensor]) -> list[Tensor]:
    wide = torch.float64 if torch.float64 in [tensor.dtype for tensor in tensors] else torch.float32
    return [tensor.to(wide) for tensor in tensors]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-448, 448)
    return values.to(dtype)


@each_method
@pytest.mark.parametrize("name", STORED)
def test_a_run_gives_the_kernels_values_rounded_once(tmp_path, chosen, name):
    stored = STORED[name]
    models = models_of(chosen, SHAPES, stored)
    values = settings(chosen)[list(STORED).index(name) % 3]
    out = tmp_path / "out.safetensors"
    paths = save_all(tmp_path / "in", models)
    done = lib_merge.merge(*paths, out=out, method=chosen.id, params=values, seed=11, **QUICK)
    found = load_file(out)
    highest = max((stored * 3)[: len(chosen.inputs)], key=lambda dtype: RANKS[dtype])  # the first of equals
    assert set(found) == set(SHAPES)
    assert (done.merged, done.copied, done.saturated) == (len(SHAPES) - 2, 2, 0)
    for key, shape in SHAPES.items():
        operands = [models[slot][key] for slot in chosen.inputs]
        if 0 in shape:
            assert same_bits(found[key], operands[0])
        else:
            wanted = apply(chosen, widened(operands), values, seed=11, name=key)
            assert same_bits(found[key], rounded(wanted, highest)), key


@pytest.mark.parametrize("option", ["fp64", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"])
def test_a_dtype_that_is_forced_gets_the_same_values_rounded_once(tmp_path, option):
    chosen = method("power_up_dare")
    models = models_of(chosen, SHAPES, (torch.float32,))
    paths, out = save_all(tmp_path / "in", models), tmp_path / "out.safetensors"
    lib_merge.merge(*paths, out=out, method=chosen.id, save_dtype=option, override_dtype=True, **QUICK)
    found = load_file(out)
    for key, shape in SHAPES.items():
        if 0 in shape:
            assert same_bits(found[key], models["A"][key])
        else:
            wanted = apply(chosen, [models[slot][key] for slot in chosen.inputs], name=key)
            assert same_bits(found[key], wanted.to(getattr(torch, BY_OPTION[option].torch))), key


@pytest.mark.parametrize("option", ["fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"])
def test_float64_is_rounded_once_on_its_way_to_a_narrow_dtype(tmp_path, option):
    """1 + half a step + a little: by way of float32 the little is lost and the tie goes down."""
    dtype = getattr(torch, BY_OPTION[option].torch)
    step = torch.finfo(dtype).eps
    a = {"x.weight": torch.full((50,), 1 + step / 2 + 2.0**-40, dtype=torch.float64)}
    out = tmp_path / "out.safetensors"
    lib_merge.merge(*save_all(tmp_path, {"A": a, "B": a}), out=out, save_dtype=option, override_dtype=True, **QUICK)
    assert load_file(out)["x.weight"].double().tolist() == [1 + step] * 50


# Exact ends.


@lru_cache(maxsize=32)
def finite_patterns(dtype: torch.dtype, seed: int) -> Tensor:
    """Every finite number of a small format, or 4000 of a large one, −0.0 and subnormals among them, in some order."""
    rng = np.random.default_rng(seed)
    size = dtype.itemsize
    if size <= 2:
        patterns = rng.permutation(256**size).astype(f"u{size}")
    else:
        patterns = rng.integers(0, 256**size, 5000, dtype=f"u{size}")
        patterns[:4] = [0, 1 << (8 * size - 1), 1, (1 << (8 * size - 1)) + 1]
    found = torch.from_numpy(patterns.view(f"i{size}")).view(dtype)
    finite = found[torch.isfinite(found.double())]
    return finite if size <= 2 else finite[:4000].clone()


ENDS = [(chosen.id, {chosen.strength: 0}, "A") for chosen in METHODS]
ENDS += [(id, params, "B") for id, corners in EXACT_B.items() for params in corners]
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(("id", "params", "winner"), ENDS)
def test_share_0_gives_the_bits_of_a_and_share_1_those_of_b(tmp_path, id, params, winner):
    models = {
        slot: {f"{str(dtype).removeprefix('torch.')}.weight": finite_patterns(dtype, seed) for dtype in FORMATS}
        for seed, slot in enumerate(method(id).inputs)
    }
    out = tmp_path / "out.safetensors"
    done = lib_merge.merge(*save_all(tmp_path / "in", models), out=out, method=id, params=params, **QUICK)
    assert done.merged == len(FORMATS)
    found = load_file(out)
    for key, tensor in models[winner].items():
        assert same_bits(found[key], tensor), key


@each_method
def test_strength_0_follows_the_dtype_of_a(tmp_path, chosen):
    models = models_of(chosen, SHAPES, (torch.bfloat16, torch.float32))
    out = tmp_path / "out.safetensors"
    lib_merge.merge(*save_all(tmp_path / "in", models), out=out, method=chosen.id, params={chosen.strength: 0}, **QUICK)
    found = load_file(out)
    assert all(same_bits(found[key], tensor) for key, tensor in models["A"].items())


# What is no number to merge.


@each_method
@pytest.mark.parametrize("forced", [{}, {"save_dtype": "fp16", "override_dtype": True}], ids=["auto", "forced"])
def test_integers_bools_and_markers_are_copied_bit_for_bit(tmp_path, chosen, forced):
    """At strength 0.1 an average of whole numbers that is cut back would be off in many places; at 0.5 in none."""
    root = "cond_stage_model.transformer.text_model.embeddings"
    models = models_of(chosen, SHAPES, (torch.float16,))
    for number, tensors in enumerate(models.values()):
        tensors |= {
            f"{root}.position_ids": torch.arange(77).reshape(1, 77) + number,
            "blocks.0.mask": torch.tensor([True, False, number == 0]),
            "blocks.0.counts": torch.tensor([number, 255], dtype=torch.uint8),
            "num_batches_tracked": torch.tensor(100 + number),
            "v_pred": torch.empty(0),
            "ztsnr": torch.empty(0, dtype=torch.float16),
        }
    out = tmp_path / "out.safetensors"
    paths = save_all(tmp_path / "in", models)
    done = lib_merge.merge(*paths, out=out, method=chosen.id, params={chosen.strength: 0.1}, **forced, **QUICK)
    found = load_file(out)
    assert list(found[f"{root}.position_ids"].flatten()) == list(range(77))
    for key, tensor in models["A"].items():
        if not tensor.is_floating_point() or not tensor.numel():
            assert same_bits(found[key], tensor), key
    assert done.copied == 6 + 2


def test_positions_survive_generations(tmp_path):
    key = "text_model.embeddings.position_ids"
    model = {"w.weight": torch.ones(4, 4), key: torch.arange(77)}
    path = save(tmp_path / "0.safetensors", model)
    other = save(tmp_path / "other.safetensors", {"w.weight": torch.zeros(4, 4), key: torch.arange(77)})
    for generation in range(1, 4):
        out = tmp_path / f"{generation}.safetensors"
        lib_merge.merge(path, other, out=out, alpha=0.1, **QUICK)
        path = out
    found = load_file(path)
    assert same_bits(found[key], torch.arange(77))
    assert torch.allclose(found["w.weight"], torch.full((4, 4), 0.9**3))


# Bad numbers.


def assert_fails(folder: Path, paths: list[Path], out: Path, **options) -> NumberError:
    """The run ends with a NumberError and leaves nothing behind."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(NumberError) as caught:
        lib_merge.merge(*paths, out=out, **options, **QUICK)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return caught.value


def check_damage(folder: Path, chosen, stored: torch.dtype, bad_values: tuple[float, ...]) -> None:
    """Damage each model in turn, with each bad value, at the ends of tiles and tensors."""
    models = models_of(chosen, {"x.weight": (9,), "y.weight": (30, 50), "z.weight": (2, 2)}, (stored,))
    paths = dict(zip(chosen.inputs, save_all(folder, models), strict=True))
    places = (("y.weight", 0), ("y.weight", 1023), ("y.weight", 1499), ("x.weight", 4))
    cases = zip(places, itertools.cycle(bad_values), itertools.cycle(settings(chosen)), strict=False)
    for slot, ((key, at), bad, values) in itertools.product(chosen.inputs, cases):
        damaged = models[slot][key].clone()
        damaged.view(-1)[at] = bad
        save(paths[slot], models[slot] | {key: damaged})
        options = {"method": chosen.id, "params": values, "tile": 1024}
        error = assert_fails(folder, list(paths.values()), folder / "out.safetensors", **options)
        assert (error.tensor, error.file) == (key, str(paths[slot]))
        assert f"model {slot} " in error.what
        save(paths[slot], models[slot])


@each_method
def test_a_value_that_is_not_finite_fails_the_run_naming_tensor_and_file(tmp_path, chosen):
    check_damage(tmp_path, chosen, torch.float16, (math.nan, math.inf, -math.inf))


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_a_value_that_is_not_finite_is_seen_in_every_dtype(tmp_path, stored):
    values = (math.nan,) if stored == torch.float8_e4m3fn else (math.inf, math.nan, -math.inf)
    check_damage(tmp_path, method("weighted_sum"), stored, values)


@each_method
def test_a_bad_value_fails_the_run_at_strength_0_too_and_passes_where_the_tensor_is_excluded(tmp_path, chosen):
    models = models_of(chosen, {"x.weight": (6, 5), "y.weight": (4,)}, (torch.float32,))
    models["B"]["x.weight"][3, 3] = math.inf
    models["A"]["x.weight"][0, 0] = math.nan
    paths = save_all(tmp_path, models)
    out = tmp_path / "out.safetensors"
    assert assert_fails(tmp_path, paths, out, method=chosen.id, params={chosen.strength: 0}).tensor == "x.weight"
    lib_merge.merge(*paths, out=out, method=chosen.id, exclude=[r"^x\."], **QUICK)
    assert same_bits(load_file(out)["x.weight"], models["A"]["x.weight"])


@each_method
@pytest.mark.parametrize("option", ["fp16", "bf16"])
def test_a_value_that_the_output_dtype_cannot_hold_fails_the_run(tmp_path, chosen, option):
    models = models_of(chosen, {"x.weight": (6, 5)}, (torch.float64,))
    models = {slot: {key: tensor * 1e45 for key, tensor in tensors.items()} for slot, tensors in models.items()}
    paths, out = save_all(tmp_path, models), tmp_path / "out.safetensors"
    error = assert_fails(tmp_path, paths, out, method=chosen.id, save_dtype=option, override_dtype=True)
    assert error.tensor == "x.weight"
    assert option in error.what
    assert error.hint


@pytest.mark.parametrize(
    ("option", "fits", "beyond"),
    [("fp16", 65519, 65520), ("bf16", 3.396e38, 3.397e38), ("fp32", 3.4028235e38, 3.41e38)],
)
def test_the_first_value_that_rounds_to_infinity_fails_and_the_last_before_it_is_kept(tmp_path, option, fits, beyond):
    for value in (fits, beyond, -beyond):
        tensors = {"x.weight": torch.full((10,), float(value), dtype=torch.float64)}
        paths, out = save_all(tmp_path, {"A": tensors, "B": tensors}), tmp_path / "out.safetensors"
        options = {"save_dtype": option, "override_dtype": True}
        if value == fits:
            lib_merge.merge(*paths, out=out, overwrite=True, **options, **QUICK)
            assert float(load_file(out)["x.weight"].max()) == BY_OPTION[option].largest
        else:
            assert option in assert_fails(tmp_path, paths, out, overwrite=True, **options).what


def test_a_result_that_outgrows_its_own_dtype_fails_the_run(tmp_path):
    a, b = {"x.weight": torch.full((64,), -60000.0).half()}, {"x.weight": torch.full((64,), 60000.0).half()}
    paths = save_all(tmp_path, {"A": a, "B": b})
    error = assert_fails(tmp_path, paths, tmp_path / "out.safetensors", method="power_up_dare", alpha=0.5)
    assert error.tensor == "x.weight"
    assert "180000" in error.what
    assert "fp16" in error.what


def test_a_result_that_outgrows_float32_fails_the_run(tmp_path):
    a, b = {"x.weight": torch.full((64,), -3e38)}, {"x.weight": torch.full((64,), 3e38)}
    paths = save_all(tmp_path, {"A": a, "B": b})
    assert assert_fails(tmp_path, paths, tmp_path / "out.safetensors", alpha=0.5).tensor == "x.weight"


@each_method
@pytest.mark.parametrize("option", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_saturates_and_counts(tmp_path, chosen, option):
    dtype = BY_OPTION[option]
    models = models_of(chosen, {"x.weight": (40, 30), "y.weight": (7,)}, (torch.float32,))
    models = {slot: {key: t * dtype.largest for key, t in tensors.items()} for slot, tensors in models.items()}
    out = tmp_path / "out.safetensors"
    paths = save_all(tmp_path, models)
    done = lib_merge.merge(*paths, out=out, method=chosen.id, save_dtype=option, override_dtype=True, **QUICK)
    found, beyond = load_file(out), 0
    for key in models["A"]:
        wanted = apply(chosen, [models[slot][key] for slot in chosen.inputs], name=key)
        beyond += int((wanted.abs() > dtype.largest).sum())
        clamped = wanted.clamp(-dtype.largest, dtype.largest).to(getattr(torch, dtype.torch))
        assert same_bits(found[key], clamped)
    assert done.saturated == beyond > 0
    assert any(str(beyond) in warning and "fp8" in warning for warning in done.warnings)


# The same bytes however a run is carried out.


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Method id -> its models in fp16: one tensor of more than a tile of 2**18 elements, and small ones."""
    made: dict[str, list[Path]] = {}

    def give(chosen) -> list[Path]:
        if chosen.id not in made:
            folder = tmp_path_factory.mktemp(chosen.id)
            shapes = SHAPES | {"blocks.1.proj.weight": (331, 1009), "blocks.2.proj.weight": (70, 1009)}
            made[chosen.id] = save_all(folder, models_of(chosen, shapes, (torch.float16,)))
        return made[chosen.id]

    return give


def content(folder: Path, paths: list[Path], chosen, values, **running) -> bytes:
    folder.mkdir()
    out = folder / "out.safetensors"
    lib_merge.merge(*paths, out=out, method=chosen.id, params=values, seed=3, fsync=False, **running)
    return out.read_bytes()


@each_method
def test_threads_and_tile_size_change_no_byte_of_the_file(tmp_path, chosen, large):
    for number, values in enumerate(settings(chosen)):
        one = content(tmp_path / f"{number}-one", large(chosen), chosen, values, threads=1, tile=2**18)
        four = content(tmp_path / f"{number}-four", large(chosen), chosen, values, threads=4, tile=2**16)
        assert one == four


@each_method
def test_file_calls_of_other_systems_change_no_byte_of_the_file(tmp_path, chosen, large, monkeypatch):
    fast = content(tmp_path / "fast", large(chosen), chosen, {})
    for name in ("preadv", "pwrite", "copy_file_range"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(calls, "CALLS", calls.choose())
    assert content(tmp_path / "slow", large(chosen), chosen, {}) == fast


@each_method
def test_the_order_of_the_inputs_keys_changes_no_byte_of_a_tensor(tmp_path, chosen):
    shapes = {f"blocks.{n}.weight": (n + 1, 70 - n) for n in range(12)} | {"z.bias": (300,)}
    models = models_of(chosen, shapes, (torch.float16, torch.float32))
    shuffled = {}
    for number, (slot, tensors) in enumerate(models.items()):
        keys = np.random.default_rng(number).permutation(list(tensors))
        shuffled[slot] = {str(key): tensors[str(key)] for key in keys}
        assert list(shuffled[slot]) != list(tensors)
    for values in settings(chosen)[1:]:
        found = []
        for name, arranged in (("sorted", models), ("shuffled", shuffled)):
            paths, out = save_all(tmp_path / name, arranged), tmp_path / "out.safetensors"
            lib_merge.merge(*paths, out=out, method=chosen.id, params=values, overwrite=True, **QUICK)
            found.append({key: raw(tensor) for key, tensor in load_file(out).items()})
        assert found[0] == found[1]


@each_method
def test_a_seed_matters_to_methods_with_chance_alone(tmp_path, chosen):
    paths = save_all(
        tmp_path / "in", models_of(chosen, {f"blocks.{n}.weight": (20, 30) for n in range(8)}, (torch.float16,))
    )
    tensors = []
    for number, seed in enumerate((0, 0, 1, 2**64 - 1)):
        out = tmp_path / f"{number}.safetensors"
        lib_merge.merge(*paths, out=out, method=chosen.id, params=settings(chosen)[1], seed=seed, **QUICK)
        tensors.append(tuple(raw(tensor) for tensor in load_file(out).values()))
    assert tensors[0] == tensors[1]
    assert len(set(tensors)) == (3 if chosen.random else 1)
