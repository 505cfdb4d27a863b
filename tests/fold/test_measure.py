"""The report of a fold: the wanted change against the achieved one, and the warning where most of it is lost."""

from __future__ import annotations

import numpy as np
import pytest

import lib_merge
from tests.data.mlx_ref import dequantized, load, unpacked, widened
from tests.fold.making import DOWN, Pair, Q, entry, write_adapter


def report(pair, adapter, **options):
    made = lib_merge.fold(pair.dense, adapter, pair.root / "out", quantize=pair.shipped, report=True, **options)
    return made, {row["key"]: row for row in made.rows}


def values(pair, folder, module):
    tensors = load(folder)
    words, scales, biases = (tensors[f"{module}.{leaf}"] for leaf in ("weight", "scales", "biases"))
    wide = dequantized(words, widened(scales), widened(biases), pair.bits, pair.group).astype(np.float64)
    return wide, unpacked(words, pair.bits), widened(scales).astype(np.float64)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_number_is_that_of_an_independent_computation(tmp_path, bits):
    pair = Pair(tmp_path, bits=bits)
    made, rows = report(pair, pair.adapter(), tile=700)
    for module in (Q, DOWN):
        down, up = (each.astype(np.float64) for each in pair.factors[module])
        base, wanted = widened(pair.weights[module]).astype(np.float64), 1.5 * (up @ down)
        out, codes, _ = values(pair, tmp_path / "out", module)
        before, old, scales = values(pair, pair.shipped, module)
        achieved = out - before
        expected = {
            "norm_a": np.linalg.norm(base),
            "norm_diff": np.linalg.norm(wanted),
            "rel_diff": np.linalg.norm(wanted) / np.linalg.norm(base),
            "norm_out": np.linalg.norm(out),
            "norm_change": np.linalg.norm(achieved),
            "step": np.abs(scales).mean(),
            "delta_step_ratio": np.sqrt((wanted**2).mean()) / np.abs(scales).mean(),
            "codes_changed": (codes != old).mean(),
            "correlation": (wanted * achieved).sum() / np.linalg.norm(wanted) / np.linalg.norm(achieved),
            "rms_ratio": np.linalg.norm(out - base - wanted) / np.linalg.norm(before - base),
        }
        row = rows[f"{module}.weight"]
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert (row["rank"], row["action"], row["method"]) == (4, "merged", "fold")
    assert {row["action"] for row in made.rows} == {"merged", "copied"}
    assert {key for key, row in rows.items() if row["action"] == "merged"} == {f"{Q}.weight", f"{DOWN}.weight"}


def weak(tmp_path, share, bits=4):
    """A module of 256 × 256 and an adapter whose change has an rms of this share of a step."""
    pair = Pair(tmp_path, shapes={Q: (256, 256)}, bits=bits)
    rng = np.random.default_rng(5)
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 256), (256, 8)))
    step = np.abs(widened(load(pair.shipped)[f"{Q}.scales"])).mean()
    up *= share * step / np.sqrt(((up @ down) ** 2).mean())
    keys = (f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight")
    tensors = dict(zip(keys, (entry(down), entry(up)), strict=True))
    return pair, write_adapter(tmp_path / "adapter", tensors, {"r": 8, "lora_alpha": 8})


def test_a_change_of_five_percent_of_a_step_is_warned_of_and_still_folded_exactly(tmp_path):
    pair, adapter = weak(tmp_path, 0.05)
    made, rows = report(pair, adapter)
    assert rows[f"{Q}.weight"]["delta_step_ratio"] == pytest.approx(0.05, rel=1e-3)
    assert rows[f"{Q}.weight"]["correlation"] < 0.3
    (warning,) = made.warnings
    assert "may be lost" in warning
    assert "5.0 % of a step" in warning
    assert lib_merge.fold_check(pair.dense, adapter, tmp_path / "out", pair.shipped).ok


def test_a_warning_needs_no_report(tmp_path):
    pair, adapter = weak(tmp_path, 0.05)
    made = lib_merge.fold(pair.dense, adapter, tmp_path / "out", quantize=pair.shipped)
    assert made.rows is None
    assert "may be lost" in made.warnings[0]


@pytest.mark.parametrize(("share", "bits"), [(0.5, 4), (0.8, 8)])
def test_a_change_that_the_codes_show_is_not_warned_of(tmp_path, share, bits):
    pair, adapter = weak(tmp_path, share, bits)
    made, rows = report(pair, adapter)
    assert rows[f"{Q}.weight"]["correlation"] > 0.5
    assert made.warnings == ()


def test_the_change_arrives_on_average_however_small_it_is(tmp_path):
    """The slope of achieved over wanted change is 1: rounding is noise, not a loss of all small changes."""
    pair, adapter = weak(tmp_path, 0.1)
    _, rows = report(pair, adapter)
    row = rows[f"{Q}.weight"]
    slope = row["correlation"] * row["norm_change"] / row["norm_diff"]
    assert slope == pytest.approx(1.0, abs=0.05)
    assert row["rms_ratio"] == pytest.approx(1.0, abs=0.02)


def test_modules_that_keep_all_codes_are_told_as_lost(tmp_path):
    pair, adapter = weak(tmp_path, 1e-7)
    made, rows = report(pair, adapter)
    assert rows[f"{Q}.weight"]["codes_changed"] == 0
    assert "keep all of their codes" in made.warnings[0]
