"""Which runs go through compiled loops, and that they do."""

from __future__ import annotations

import pytest
import torch

import lib_merge
from lib_merge import compiled, fused
from lib_merge.errors import NumberError
from lib_merge.kernels.registry import method
from tests.kernels.applying import generic, settings
from tests.test_methods import QUICK, save_all

FUSED = (
    *("add_difference", "multiply_difference", "power_up_dare", "subtract_weights", "sum_twice"),
    *("train_difference", "triple_sum", "weighted_sum"),
)


@pytest.fixture
def small(monkeypatch):
    """Runs of any size are worth it."""
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


@pytest.fixture
def counted(monkeypatch):
    """Which methods' loops have computed how many tiles."""
    pytest.importorskip("numba")
    loops, done = compiled.available(), []
    plain = loops.loop

    def loop(name, *rest):
        found = plain(name, *rest)
        return found and (lambda *operands: done.append(name) or found(*operands))

    monkeypatch.setattr(loops, "loop", loop)
    return done


def models(tmp_path, chosen, dtype=torch.float16, shape=(301, 97)):
    tensors = generic(chosen, shape)
    found = {slot: {"x.weight": tensor.to(dtype)} for slot, tensor in zip(chosen.inputs, tensors, strict=True)}
    return save_all(tmp_path / "in", found)


@pytest.mark.parametrize("id", FUSED)
def test_a_method_is_fused_and_gives_the_bytes_of_torch(tmp_path, monkeypatch, counted, id):
    chosen = method(id)
    paths = models(tmp_path, chosen)
    for number, params in enumerate(settings(chosen)):
        if not chosen.needs_whole(params):
            written = []
            for limit in (0, 1 << 60):
                monkeypatch.setattr(fused, "WORTH_BYTES", limit)
                out = tmp_path / f"{number}_{limit}.safetensors"
                lib_merge.merge(*paths, out=out, method=id, params=params, tile=10_007, threads=2, **QUICK)
                written.append(out.read_bytes())
            assert written[0] == written[1]
    assert counted
    assert set(counted) == {id}


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
    assert counted
    assert told[0] == told[1]
    assert f"model {place}" in told[0]
