"""The device that methods are computed on: refusal where it is missing, equality where it is there."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lib_merge
from lib_merge import RecipeError, devices
from lib_merge.cli import main
from lib_merge.kernels import scratch
from lib_merge.kernels.registry import all_methods
from lib_merge.verify import ulp_distance
from tests.kernels.applying import generic, named, settings
from tests.support import read_raw, values, write

METHODS = list(all_methods())


@pytest.fixture
def own_scratch():
    """Tensors made in the fake mode must not stay in the memory that methods keep: other tests would use them."""
    scratch._scalar.cache_clear()
    yield
    scratch._scalar.cache_clear()
    scratch._ROOMS.memory.clear()
    scratch._ROOMS.last.clear()


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def models(tmp_path, method, dtype="<f2"):
    return [
        write(tmp_path / f"{slot}.safetensors", {"w": values((300, 301), n, dtype), "v": values((70,), n + 9, dtype)})
        for n, slot in enumerate(all_methods()[method].inputs)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_before_any_work_where_it_is_not_there(tmp_path, capsys):
    paths = models(tmp_path, "weighted_sum")
    with pytest.raises(RecipeError, match="cuda is not there") as caught:
        lib_merge.merge(*paths, out=tmp_path / "out.safetensors", device="cuda")
    assert "--device" in caught.value.hint
    assert main(["merge", *map(str, paths), "-o", str(tmp_path / "out.safetensors"), "--device", "cuda"]) == 1
    assert "cuda is not there" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_an_unknown_device_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(RecipeError, match="no device 'gpu'") as caught:
        lib_merge.merge(*models(tmp_path, "weighted_sum"), out=tmp_path / "out.safetensors", device="gpu")
    assert caught.value.hint == "choose one of: cpu, cuda"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda = None\n", False),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", True),
        ("something else\n", True),
    ],
)
def test_torch_s_own_file_of_versions_tells_without_importing_it(tmp_path, monkeypatch, text, has):
    (tmp_path / "version.py").write_text(text)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert devices._torch_has_cuda() is has


def test_a_build_without_cuda_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(devices, "_torch_has_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    with pytest.raises(RecipeError, match="built without it"):
        devices.check_device("cuda")


def test_the_report_names_the_device(tmp_path):
    paths = [str(path) for path in models(tmp_path, "weighted_sum")]
    report = tmp_path / "report.html"
    assert (
        main(["merge", *paths, "-o", str(tmp_path / "out.safetensors"), "--report", str(report), "--device", "cpu"])
        == 0
    )
    text = report.read_text("utf-8")
    assert "device" in text
    assert "cpu" in text


# These read a number from a tensor or cut it, which a tensor without contents cannot do.
_NEED_CONTENTS = {
    "auto",
    *("comparative_interpolation", "enhanced_auto_interp", "enhanced_man_interp", "slerp", "tensor_select"),
    *("power_up_dare_enhanced", "power_up_dare_ties", "power_up_dare_ties_enhanced"),
}


@pytest.mark.parametrize("method", sorted(set(METHODS) - _NEED_CONTENTS))
def test_nothing_of_the_cpu_is_mixed_in_on_a_device(method, own_scratch):
    """Torch's tensors without contents know their device: an operation on those of two devices is an error."""
    chosen = all_methods()[method]
    for params in settings(chosen):
        flat = not (chosen.rows or chosen.needs_whole(params))
        tensors = [tensor.reshape(-1) if flat else tensor for tensor in generic(chosen, (12, 40))]
        measures = []
        for measure in chosen.needed_measures(params):
            values = named(chosen, tensors, params, 1, 0, measures)
            measures = [*measures, measure.combine([measure.tile(*(tensor.clone() for tensor in tensors), **values)])]
        values = named(chosen, tensors, params, 1, 0, measures)
        with FakeTensorMode(allow_non_fake_inputs=True):
            there = [torch.empty(tensor.shape, device="cuda") for tensor in tensors]
            if "draws" in values:
                values["draws"] = torch.empty(values["draws"].shape, dtype=torch.int32, device="cuda")
            assert chosen.function(*there, **values).device.type == "cuda"
            with pytest.raises(RuntimeError):  # what this test relies on
                there[0].add_(torch.empty(there[0].shape))


@cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
def test_the_gpu_gives_what_the_cpu_gives(tmp_path, method, dtype):
    paths = models(tmp_path, method, dtype)
    ways = {"cpu": {}, "cuda": {}, "small": {"device": "cuda", "tile": 1 << 12}}
    made = {
        name: lib_merge.merge(
            *paths, out=tmp_path / f"{name}.safetensors", method=method, **({"device": name} | how)
        ).output
        for name, how in ways.items()
    }
    cpu, gpu, small = (read_raw(path)[1] for path in made.values())
    for key, (stored, _, data) in cpu.items():
        for other in (gpu, small):
            near = ulp_distance(*(np.frombuffer(x, np.uint8) for x in (data, other[key][2])), stored)
            assert near <= (0 if all_methods()[method].exact_arithmetic else 2), key
