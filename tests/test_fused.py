"""Which runs go through compiled loops, and that they do."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import lib_merge
from lib_merge import compiled, fused, tiles
from lib_merge.errors import NumberError
from lib_merge.kernels.registry import method
from tests.kernels.applying import generic, settings
from tests.test_methods import QUICK, save_all

FUSED = (
    *("add_difference", "comparative_interpolation", "enhanced_auto_interp", "enhanced_man_interp"),
    *("multiply_difference", "power_up_dare", "power_up_dare_enhanced", "power_up_dare_ties"),
    *("power_up_dare_ties_enhanced", "subtract_weights", "sum_twice", "train_difference", "triple_sum"),
    *("weight_sum_cutoff", "weighted_sum"),
)


@pytest.fixture
def small(monkeypatch):
    """Runs of any size are worth it."""
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


@pytest.fixture
def counted(monkeypatch):
    """Methods of the tiles that loops were asked for, and whether they gave a result."""
    pytest.importorskip("numba")
    loops, done = compiled.available(), []
    plain = loops.Loop.compute
    names = {id(formula): name for name, formula in loops.FORMULAS.items()}

    def compute(self, *rest):
        made = plain(self, *rest)
        done.append((names[id(self.formula)], made))
        return made

    monkeypatch.setattr(loops.Loop, "compute", compute)
    return done


def models(tmp_path, chosen, dtype=torch.float16, shape=(301, 97)):
    tensors = generic(chosen, shape)
    found = {slot: {"x.weight": tensor.to(dtype)} for slot, tensor in zip(chosen.inputs, tensors, strict=True)}
    return save_all(tmp_path / "in", found)


# Parameters beside those of `settings`: the ends of ranges, and powers that are whole numbers or need float64.
MORE = {
    "comparative_interpolation": [
        *({"alpha": alpha, "beta": beta, "gamma": 0.5} for alpha in (0.25, 0.3, 0.5, 0.7) for beta in (0, 1)),
        {"alpha": 1 / 3, "gamma": 0},
    ],
    "enhanced_auto_interp": [{"alpha": 1, "beta": 0.6, "gamma": 0}, {"alpha": 0.8, "beta": 1}],
    "enhanced_man_interp": [{"alpha": 0.3}, {"alpha": 0.8, "beta": 0.2, "gamma": 0.9, "delta": 0.5}],
    "power_up_dare_enhanced": [{"alpha": 1, "gamma": 1}, {"alpha": 0.3, "gamma": 0.5, "delta": -2, "rescale": True}],
    "power_up_dare_ties": [{"beta": 0}, {"alpha": 0, "beta": 0.3}, {"gamma": -1.5}],
    "power_up_dare_ties_enhanced": [{"beta": 0}, {"delta": 0.3, "zeta": 0.5}, {"delta": 1, "zeta": 1, "gamma": -0.5}],
    "weight_sum_cutoff": [{"alpha": 0.3}, {"alpha": 1, "beta": 0.8, "gamma": 0.3}, {"alpha": 0.3, "beta": 0.7}],
}
SHAPES = {"conv": (64, 40, 3, 3), "matrix": (301, 97), "row": (1, 700), "vector": (613,), "one": (1,)}


@pytest.mark.parametrize("way", [{}, {"tile": 20_011, "threads": 1}], ids=["kept", "in tiles"])
@pytest.mark.parametrize("id", FUSED)
def test_a_method_is_fused_and_gives_the_bytes_of_torch(tmp_path, monkeypatch, counted, id, way):
    chosen = method(id)
    if way:  # nothing stays in memory between two passes
        monkeypatch.setattr(tiles, "KEEP_BYTES", 0)
    models = {slot: {} for slot in chosen.inputs}
    for number, (key, shape) in enumerate(SHAPES.items()):
        for slot, tensor in zip(chosen.inputs, generic(chosen, shape, seed=number), strict=True):
            models[slot][key] = tensor.half()
    paths = save_all(tmp_path / "in", models)
    for number, params in enumerate([*settings(chosen), *map(chosen.check, MORE.get(id, []))]):
        if not chosen.needs_whole(params):
            written = []
            for limit in (0, 1 << 60):
                monkeypatch.setattr(fused, "WORTH_BYTES", limit)
                out = tmp_path / f"{number}_{limit}.safetensors"
                lib_merge.merge(*paths, out=out, method=id, params=params, **QUICK, **way)
                written.append(load_file(out))
            for key in SHAPES:
                assert torch.equal(written[0][key].view(torch.int16), written[1][key].view(torch.int16)), (params, key)
    assert (id, True) in counted
    assert {name for name, _ in counted} == {id}


def test_the_formulas_are_those_that_are_tried_here(counted):
    assert set(compiled.available().FORMULAS) == set(FUSED)


def test_a_report_needs_the_numbers_in_between(tmp_path, small, counted):
    paths = models(tmp_path, method("weighted_sum"))
    lib_merge.merge(*paths, out=tmp_path / "out.safetensors", report=True, **QUICK)
    assert counted == []


def test_a_small_run_does_not_look_for_numba(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "compiler", lambda: pytest.fail("it is not worth it"))
    lib_merge.merge(*models(tmp_path, method("weighted_sum")), out=tmp_path / "out.safetensors", **QUICK)


def test_a_large_run_without_numba_is_one_by_torch(tmp_path, small, monkeypatch):
    paths, out = models(tmp_path, method("weighted_sum")), tmp_path / "out.safetensors"
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    lib_merge.merge(*paths, out=out, **QUICK)
    wanted = out.read_bytes()
    monkeypatch.setattr(fused, "WORTH_BYTES", 1 << 60)
    lib_merge.merge(*paths, out=out, overwrite=True, **QUICK)
    assert out.read_bytes() == wanted


@pytest.mark.parametrize("place", ["A", "B"])
def test_damage_is_told_in_the_same_words(tmp_path, monkeypatch, counted, place):
    chosen = method("weighted_sum")
    tensors = dict(zip(chosen.inputs, (tensor.half() for tensor in generic(chosen, (301, 97))), strict=True))
    tensors[place][200, 3] = float("nan")
    paths = save_all(tmp_path / "in", {slot: {"x.weight": tensor} for slot, tensor in tensors.items()})
    told = []
    for limit in (0, 1 << 60):
        monkeypatch.setattr(fused, "WORTH_BYTES", limit)
        with pytest.raises(NumberError) as caught:
            lib_merge.merge(*paths, out=tmp_path / "out.safetensors", **QUICK)
        told.append(str(caught.value))
    assert counted == [("weighted_sum", False)]
    assert told[0] == told[1]
    assert f"model {place}" in told[0]
