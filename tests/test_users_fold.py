"""Faults that people reported of tools that fuse adapters into quantized models, as trials on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lib_merge.cli import main
from tests.data.mlx_ref import load, quantized, widened
from tests.fold.making import DOWN, Pair, Q, contents, entry, places, raw_tensors, write_adapter, write_mlx

LEAVES = ("weight", "scales", "biases")


def fold(pair, adapter, out, *more):
    return main(["fold", str(pair.dense), str(adapter), str(out), "--quantize", str(pair.shipped), *more])


def test_31_a_change_that_the_codes_cannot_show_is_told(tmp_path, capsys):
    """The fused model answered like the base, and nothing said so."""
    pair = Pair(tmp_path, shapes={Q: (256, 256)})
    rng = np.random.default_rng(7)
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 256), (256, 4)))
    step = np.abs(widened(load(pair.shipped)[f"{Q}.scales"])).mean()
    up *= np.float32(0.05 * step / np.sqrt(((up @ down) ** 2).mean()))
    tensors = {f"base_model.model.{Q}.lora_{side}.weight": entry(each) for side, each in (("A", down), ("B", up))}
    adapter = write_adapter(tmp_path / "adapter", tensors, {"r": 4, "lora_alpha": 4})
    report = tmp_path / "report.json"
    assert fold(pair, adapter, tmp_path / "out", "--report", str(report)) == 0
    assert "may be lost" in capsys.readouterr().out
    (row,) = [row for row in json.loads(report.read_text())["rows"] if row["key"] == f"{Q}.weight"]
    assert row["delta_step_ratio"] == pytest.approx(0.05, rel=0.01)
    assert 0 < row["codes_changed"] < 0.2
    assert row["correlation"] < 0.3
    total = np.zeros((256, 256))
    for number in range(4):
        total += np.outer(up[:, number].astype(np.float64), down[number].astype(np.float64))
    summed = (widened(pair.weights[Q]).astype(np.float64) + total).astype(np.float32)
    made = raw_tensors(tmp_path / "out")
    for leaf, expected in zip(LEAVES, quantized(summed, 4, 64, "even", "bf16"), strict=True):
        assert made[f"{Q}.{leaf}"] == expected.tobytes()


def nf4(path):
    """A weight as bitsandbytes stores it."""
    code = np.zeros((32, 1), np.uint8)
    tensors = {
        f"{Q}.weight": ("U8", code.shape, code.tobytes()),
        f"{Q}.weight.absmax": ("F32", (1,), np.ones(1, np.float32).tobytes()),
        f"{Q}.weight.quant_map": ("F32", (16,), np.ones(16, np.float32).tobytes()),
        f"{Q}.weight.quant_state.bitsandbytes__nf4": ("U8", (2,), b"{}"),
    }
    write_mlx(path, tensors)
    return path


@pytest.mark.parametrize("kind", ["nf4", "gguf"])
@pytest.mark.parametrize("command", ["merge", "bake", "convert", "fold"])
def test_32_packed_files_are_refused_with_what_can_be_done(tmp_path, kind, command, capsys):
    """Tools took them and wrote nothing useful."""
    pair = Pair(tmp_path)
    adapter, out = pair.adapter(), tmp_path / "result.safetensors"
    packed = nf4(tmp_path / "packed.safetensors") if kind == "nf4" else tmp_path / "packed.gguf"
    if kind == "gguf":
        packed.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    words = {
        "merge": ["merge", str(packed), str(packed), "-o", str(out)],
        "bake": ["bake", str(packed), str(adapter), "-o", str(out)],
        "convert": ["convert", str(packed), "-o", str(out), "--save-dtype", "fp16", "--override-dtype"],
        "fold": ["fold", str(packed), str(adapter), str(tmp_path / "result"), "--quantize", str(pair.shipped)],
    }[command]
    before = {path.name for path in tmp_path.iterdir()}
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "hint: " in said
    assert ("NF4" if kind == "nf4" else "gguf") in said or command == "fold"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_34_the_folder_is_the_one_that_was_shipped_but_for_the_named_payloads(tmp_path):
    """Fused folders did not load: config.json no longer said what the tensors were."""
    pair = Pair(tmp_path)
    assert fold(pair, pair.adapter(alpha=0), tmp_path / "same") == 0
    assert contents(tmp_path / "same") == contents(pair.shipped)
    assert fold(pair, pair.adapter(), tmp_path / "out") == 0
    folded = {f"{module}.{leaf}" for module in (Q, DOWN) for leaf in LEAVES}
    ours, theirs = contents(tmp_path / "out"), contents(pair.shipped)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if not name.endswith(".safetensors"):
            assert ours[name] == theirs[name]
            continue
        one, other = bytearray(ours[name]), bytearray(theirs[name])
        changed = 0
        for key, (_, begin, end) in places(pair.shipped / name).items():
            if key in folded:
                changed += one[begin:end] != other[begin:end]
                one[begin:end] = other[begin:end]
        assert one == other
        assert changed


def test_34_a_configuration_that_does_not_fit_the_tensors_is_refused(tmp_path, capsys):
    pair = Pair(tmp_path)
    pair.write_shipped({"quantization": {"bits": 8, "group_size": 64, "mode": "affine"}})
    assert fold(pair, pair.adapter(), tmp_path / "out") == 1
    assert "8 by config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
