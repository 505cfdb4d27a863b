"""Where tensors are cut, and how often they are read."""

from __future__ import annotations

from collections import Counter

import pytest

import lib_merge
from lib_merge import tiles
from lib_merge.files.source import Source
from lib_merge.kernels.registry import all_methods
from lib_merge.steps import Merged, Stored
from tests.support import values, write

MEASURED = [item.id for item in all_methods().values() if item.measures]


def node(method, shape, **more):
    inputs = tuple(Stored(slot, "x", "F32", shape) for slot in all_methods()[method].inputs)
    return Merged(method, {}, inputs, "F32", shape, 0, **more)


@pytest.mark.parametrize(("tile", "size"), [(1, 1 << 16), (100_000, 1 << 16), (131_072, 1 << 17), (1 << 18, 1 << 18)])
def test_what_is_summed_in_blocks_is_cut_at_blocks(tile, size):
    assert tiles.cut(node("enhanced_auto_interp", (999, 1001), measured=True), tile) == size
    assert tiles.cut(node("enhanced_man_interp", (999, 1001), measured=True, rows=True), tile) % (65 * 1001) == 0
    assert tiles.cut(node("weighted_sum", (999, 1001)), tile) == tile


@pytest.mark.parametrize("method", MEASURED)
def test_odd_tiles_change_no_byte(tmp_path, monkeypatch, method):
    monkeypatch.setattr(tiles, "KEEP_BYTES", 0)  # every tensor is read once for each measure
    paths = [
        write(tmp_path / f"{slot}.safetensors", {"x": values((400, 401), n)})
        for n, slot in enumerate(all_methods()[method].inputs)
    ]
    made = [
        lib_merge.merge(*paths, out=tmp_path / f"{tile}.safetensors", method=method, tile=tile, threads=2).output
        for tile in (1 << 18, 70_001, 65_537)
    ]
    assert len({path.read_bytes() for path in made}) == 1


@pytest.mark.parametrize(
    ("method", "params", "passes"),
    [
        ("comparative_interpolation", {"alpha": 0.5}, 2),
        ("comparative_interpolation", {"alpha": 1}, 1),
        ("enhanced_man_interp", {"alpha": 0.5}, 2),
        ("enhanced_man_interp", {"alpha": 1}, 1),
        ("enhanced_man_interp", {"alpha": 1, "beta": 0.2}, 2),
        ("enhanced_man_interp", {"beta": 0.7, "gamma": 0.6}, 1),
        ("enhanced_auto_interp", {"beta": 0.5}, 2),
        ("enhanced_auto_interp", {"beta": 0}, 1),
        ("weight_sum_cutoff", {}, 1),
        ("weight_sum_cutoff", {"gamma": 0.2}, 2),
        ("weight_sum_cutoff", {"gamma": 0.9, "beta": 0.1}, 1),
        ("power_up_dare_enhanced", {}, 2),
        ("power_up_dare_enhanced", {"beta": 1}, 1),
        ("power_up_dare_ties", {}, 3),
        ("power_up_dare_ties", {"beta": 0}, 1),
        ("power_up_dare_ties", {"alpha": 1}, 1),
        ("power_up_dare_ties_enhanced", {}, 4),
        ("power_up_dare_ties_enhanced", {"beta": 0}, 2),
        ("power_up_dare_ties_enhanced", {"beta": 0, "epsilon": 1}, 1),
    ],
)
def test_no_tensor_is_read_for_a_measure_that_no_one_needs(tmp_path, monkeypatch, method, params, passes):
    monkeypatch.setattr(tiles, "KEEP_BYTES", 0)
    read = Counter()
    read_into = Source.read_into

    def counted(source, key, start, view):
        read[source.name] += len(view)
        read_into(source, key, start, view)

    monkeypatch.setattr(Source, "read_into", counted)
    paths = [write(tmp_path / f"{slot}.safetensors", {"x": values((300, 301), n)}) for n, slot in enumerate("AB")]
    lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method=method, params=params, keep_recipe=False)
    assert read == {path.name: passes * 4 * 300 * 301 for path in paths}
