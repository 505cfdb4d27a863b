"""The check of a fold passes what a fold wrote and finds whatever else was done to it."""

from __future__ import annotations

import math
import os
import shutil

import numpy as np
import pytest
import torch

import lib_merge
from lib_merge.errors import FileError, MergeError
from lib_merge.fold.check import passes
from lib_merge.fold.measure import rms_ratio
from tests.data.mlx_ref import DATA, dequantized, load, widened
from tests.fold.making import DOWN, HEAD, ROUTER, Pair, Q, bf16, entry, places, write_adapter

PAIR = DATA / "pair"


@pytest.fixture
def folded(tmp_path):
    """A fold that is right; tests then do something to its output."""
    pair = Pair(tmp_path)
    lib_merge.fold(pair.dense, pair.adapter(), tmp_path / "out", quantize=pair.shipped)
    return pair


def check(pair, **options):
    return lib_merge.fold_check(pair.dense, pair.root / "adapter", pair.root / "out", pair.shipped, **options)


def failed(found):
    assert not found.ok
    assert found.describe().splitlines()[-1] == "merge check: FAILED"
    return [gate.name for gate in found.gates if not gate.ok]


def flip(pair, key, bit=0, byte=0, folder="out"):
    """Turn one bit of a tensor's first byte over."""
    for path in (pair.root / folder).glob("*.safetensors"):
        if key in places(path):
            content, begin, _ = places(path)[key]
            changed = bytearray(content)
            changed[begin + byte] ^= 1 << bit
            path.write_bytes(changed)
            return
    raise KeyError(key)


def test_what_a_fold_wrote_passes_every_gate(folded):
    found = check(folded)
    assert found.ok
    assert found.describe().splitlines()[-1] == "merge check: all gates pass"
    assert (found.groups, found.differing) == (80 * 2 + 48 * 4, 0)
    assert (found.identical, found.touched) == (4, 2)
    assert "4 files byte-identical, 2 touched" in found.describe()
    assert "0 of 352 groups differ" in found.describe()


def test_one_bit_of_a_scale_is_one_group_that_differs(folded):
    flip(folded, f"{Q}.scales")
    found = check(folded)
    assert failed(found) == ["groups"]
    assert (found.groups, found.differing) == (352, 1)
    assert "1 of 352 groups differ" in found.describe()
    assert Q in found.describe()


@pytest.mark.parametrize("leaf", ["weight", "biases"])
def test_one_bit_of_a_code_or_a_bias_is_found_too(folded, leaf):
    flip(folded, f"{DOWN}.{leaf}", byte=5)
    found = check(folded)
    assert (failed(found), found.differing) == (["groups"], 1)


@pytest.mark.parametrize("key", [f"{HEAD}.weight", f"{HEAD}.scales", f"{ROUTER}.weight"])
def test_a_byte_outside_of_the_folded_modules_is_found(folded, key):
    flip(folded, key)
    found = check(folded)
    assert failed(found) == ["bytes"]
    assert ".safetensors differs at byte" in found.describe()


def test_a_byte_of_another_file_is_found(folded):
    path = folded.root / "out" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"made", b"Made"))
    found = check(folded)
    assert failed(found) == ["bytes"]
    assert "tokenizer.json differs at byte 2" in found.describe()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: (out / "extra.txt").touch(), "extra.txt is one too many"),
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda out: (out / "config.json").write_bytes((out / "config.json").read_bytes() + b" "), "bytes instead of"),
        (lambda out: (out / "sub").mkdir(), "sub"),
    ],
)
def test_the_set_of_files_and_their_lengths_must_be_the_same(folded, change, said):
    change(folded.root / "out")
    found = check(folded)
    assert failed(found) == ["files"]
    assert said in found.describe()


def test_an_output_that_is_not_there_is_an_error(folded):
    shutil.rmtree(folded.root / "out")
    with pytest.raises(FileError):
        check(folded)


def test_a_checkpoint_into_which_nothing_was_folded_fails(folded):
    shutil.rmtree(folded.root / "out")
    shutil.copytree(folded.shipped, folded.root / "out")
    assert "groups" in failed(check(folded))


def test_a_fold_with_another_alpha_fails(folded):
    assert failed(check(folded, lora_alpha=3.0)) == ["groups"]


def test_a_fold_with_another_rounding_fails(tmp_path):
    pair = Pair(tmp_path)
    pair.weights[Q] = bf16(np.round(widened(pair.weights[Q]) * 256) / 256)
    pair.write_dense()
    pair.write_shipped()
    lib_merge.fold(pair.dense, pair.adapter(alpha=0), tmp_path / "out", quantize=pair.shipped, rounding="away")
    assert "groups" in failed(check(pair))
    assert "groups" not in failed(check(pair, rounding="away"))


def test_the_worst_column_is_shown_and_never_a_gate(tmp_path):
    """A change of one column widens its groups, whose steps become coarser: that is right, and nothing fails by it."""
    pair = Pair(tmp_path)
    down, up = np.zeros((1, 128), np.float32), np.ones((80, 1), np.float32)
    down[0, 0] = 0.5
    keys = (f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight")
    rest = {}
    for side, shape in (("A", (1, 256)), ("B", (48, 1))):
        rest[f"base_model.model.{DOWN}.lora_{side}.weight"] = entry(np.full(shape, 1e-4, np.float32))
    tensors = dict(zip(keys, (entry(down), entry(up)), strict=True)) | rest
    adapter = write_adapter(tmp_path / "adapter", tensors, {"r": 1, "lora_alpha": 1})
    lib_merge.fold(pair.dense, adapter, tmp_path / "out", quantize=pair.shipped)
    found = check(pair)
    ratio, module = found.worst_column
    assert ratio > 2
    assert module == Q
    assert f"worst column: RMS folded/shipped {ratio:.4f} in {Q}" in found.describe()
    assert "worst" not in " ".join(gate.name for gate in found.gates)
    assert [gate.ok for gate in found.gates if gate.name != "RMS"] == [True] * 4


@pytest.mark.parametrize("what", ["broken link", "pipe", "folder"])
def test_anything_but_plain_files_in_the_output_fails(folded, what):
    path = folded.root / "out" / "tokenizer.json"
    path.unlink()
    {"broken link": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[what]()
    found = check(folded)
    assert failed(found) == ["files"]
    assert "tokenizer.json" in found.describe()


# Adapters without effect.


@pytest.mark.parametrize("kind", ["alpha", "factor"])
def test_an_adapter_without_effect_must_leave_every_byte_and_has_ratios_of_one(tmp_path, kind):
    pair = Pair(tmp_path)
    adapter = pair.adapter(alpha=0) if kind == "alpha" else pair.adapter(size=0)
    lib_merge.fold(pair.dense, adapter, tmp_path / "out", quantize=pair.shipped)
    found = check(pair)
    assert found.ok
    assert (found.rms_ratio, found.worst_column[0]) == (1.0, 1.0)
    assert "6 files byte-identical, 0 touched by an adapter without effect: ok" in found.describe()


def test_bytes_that_an_adapter_without_effect_changed_fail(tmp_path):
    """A checkpoint that no rounding reproduces: the fold is as computed, but it is not the checkpoint."""
    pair = Pair(tmp_path)
    flip(pair, f"{Q}.weight", folder="shipped")
    lib_merge.fold(pair.dense, pair.adapter(alpha=0), tmp_path / "out", quantize=pair.shipped)
    assert failed(check(pair)) == ["identity"]


def test_the_golden_adapter_without_effect_passes(tmp_path):
    shipped = PAIR / "shipped_4bit_g64"
    found = lib_merge.fold_check(PAIR / "dense", PAIR / "adapter_zero", shipped, shipped)
    assert (found.ok, found.identical, found.rms_ratio, found.worst_column[0]) == (True, 9, 1.0, 1.0)


# The RMS ratio.


def test_the_ratios_are_those_of_an_independent_computation(folded):
    found = check(folded)
    ours, theirs = (load(folded.root / name) for name in ("out", "shipped"))
    after, before, columns = 0.0, 0.0, []
    for module in (Q, DOWN):
        wide = widened(folded.weights[module]).astype(np.float64)
        down, up = (each.astype(np.float64) for each in folded.factors[module])
        errors = []
        for tensors, reference in ((ours, wide + 1.5 * (up @ down)), (theirs, wide)):
            words, scales, biases = (tensors[f"{module}.{leaf}"] for leaf in ("weight", "scales", "biases"))
            values = dequantized(words, widened(scales), widened(biases), 4, 64)
            errors.append((values - reference) ** 2)
        after, before = after + errors[0].sum(), before + errors[1].sum()
        columns.append(np.sqrt(errors[0].sum(0) / errors[1].sum(0)).max())
    assert found.rms_ratio == pytest.approx(math.sqrt(after / before), rel=1e-12)
    assert found.worst_column[0] == pytest.approx(max(columns), rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "ok"), [(1.06, True), (2.0, True), (2.01, False), (math.inf, False), (math.nan, False)]
)
def test_only_a_ratio_above_two_fails(ratio, ok):
    assert passes(ratio) is ok


@pytest.mark.parametrize(
    ("after", "before", "ratio"), [(4.0, 1.0, 2.0), (0.0, 0.0, 1.0), (1.0, 0.0, math.inf), (0.0, 1.0, 0.0)]
)
def test_the_ratio_of_two_errors(after, before, ratio):
    assert rms_ratio({"ff": after, "ss": before}) == ratio


def test_a_gross_fault_is_above_the_bound(folded):
    """Scales of the wrong sign, as a broken writer would store them."""
    for path in (folded.root / "out").glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        for key, (_, begin, end) in places(path).items():
            if key in (f"{Q}.scales", f"{DOWN}.scales"):
                for byte in range(begin + 1, end, 2):
                    content[byte] ^= 0x80
        path.write_bytes(content)
    assert failed(check(folded)) == ["groups", "RMS"]


def test_a_group_is_decided_without_matrix_multiplication_before_it_counts(folded, monkeypatch):
    """Where multiplication adds in another order, a fold that was made in order still passes."""
    real = torch.mm

    def other_order(up, down, *, out=None):
        changed = real(up, down) + 1.0
        return changed if out is None else out.copy_(changed)

    monkeypatch.setattr("lib_merge.kernels.in_order._multiplication_is_in_order", lambda *shape: True)
    monkeypatch.setattr(torch, "mm", other_order)
    found = check(folded)
    assert (found.groups, found.differing) == (352, 0)


# Single modules.


def test_modules_that_are_reproduced_are_told_share_by_share(folded):
    (found,) = lib_merge.quantizer_check(folded.dense, folded.shipped, Q)
    assert found.equal == {"codes": 1, "scales": 1, "biases": 1, "groups": 1}
    assert (found.dense, found.shipped, found.rounding, found.groups) == (f"{Q}.weight", Q, "even", 160)
    assert "100.0000 %" in found.describe()


def test_shares_are_exact(folded):
    flip(folded, f"{Q}.weight", folder="shipped")
    flip(folded, f"{Q}.scales", byte=4, folder="shipped")
    (found,) = lib_merge.quantizer_check(folded.dense, folded.shipped, Q)
    assert found.equal == {"codes": 1 - 1 / 10240, "scales": 1 - 1 / 160, "biases": 1, "groups": 1 - 2 / 160}
    assert not found.identical


@pytest.mark.parametrize("rounding", ["even", "away"])
def test_the_rounding_is_that_which_reproduces_best_or_the_one_asked_for(tmp_path, rounding):
    pair = Pair(tmp_path, rounding="away")
    pair.weights[Q] = bf16(np.round(widened(pair.weights[Q]) * 256) / 256)
    pair.write_dense()
    pair.write_shipped()
    (found,) = lib_merge.quantizer_check(pair.dense, pair.shipped, Q)
    assert (found.rounding, found.identical) == ("away", True)
    (asked,) = lib_merge.quantizer_check(pair.dense, pair.shipped, Q, rounding=rounding)
    assert (asked.rounding, asked.identical) == (rounding, rounding == "away")


def test_modules_may_be_named_in_either_way_and_the_pair_is_told(tmp_path):
    one, other = "model.language_model.layers.0.q", "language_model.model.layers.0.q"
    pair = Pair(tmp_path, shapes={one: (32, 64)}, group=32, rename={one: other})
    for name in (one, other, f"{one}.weight"):
        (found,) = lib_merge.quantizer_check(pair.dense, pair.shipped, name)
        assert (found.dense, found.shipped, found.identical) == (f"{one}.weight", other, True)
        assert one in found.describe()
        assert other in found.describe()


def test_modules_that_cannot_be_checked_are_refused(folded):
    for module, said in (("nowhere", "not in both"), (ROUTER, "not quantized")):
        with pytest.raises(MergeError, match=said):
            lib_merge.quantizer_check(folded.dense, folded.shipped, Q, module)
    with pytest.raises(MergeError, match="no module"):
        lib_merge.quantizer_check(folded.dense, folded.shipped)
    (folded.shipped / "tokenizer.json").unlink()
    (folded.shipped / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(FileError, match="broken link"):
        lib_merge.quantizer_check(folded.dense, folded.shipped, Q)


def test_a_fold_under_other_names_passes(tmp_path):
    one, other = "model.language_model.layers.0.q", "language_model.model.layers.0.q"
    pair = Pair(tmp_path, shapes={one: (32, 64)}, group=32, rename={one: other})
    lib_merge.fold(pair.dense, pair.adapter(modules=[one]), tmp_path / "out", quantize=pair.shipped)
    ours = {key: array.tobytes() for key, array in load(tmp_path / "out").items()}
    assert all(ours[f"{other}.{leaf}"] == data for leaf, (_, _, data) in pair.expected(one, 1.5).items())
    assert check(pair).ok
