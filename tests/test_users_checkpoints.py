"""More faults that users of comparable tools reported of merging checkpoints, by their number in our list."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lib_merge
from lib_merge import PlanError
from lib_merge.cli import main
from lib_merge.files.source import Source
from lib_merge.kernels.registry import all_methods
from tests.support import decode, header_size, raw, read, read_raw, values, write, write_raw

ROOT = Path(__file__).resolve().parent.parent
METHODS = list(all_methods())
CONV = "model.diffusion_model.input_blocks.0.0.weight"
BLOCK = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0"
EMPTY = ("F32", (0,), b"")


# 04: fp8 stays fp8, rounded once from the wide result


def test_04_three_fp8_checkpoints_average_to_fp8_of_the_same_size(tmp_path):
    rng = np.random.default_rng(4)
    codes = [rng.integers(0, 0x7F, (40, 50), np.uint8) | rng.integers(0, 2, (40, 50), np.uint8) << 7 for _ in range(3)]
    paths = [
        write_raw(tmp_path / f"{n}.safetensors", {"w": ("F8_E4M3", (40, 50), code.tobytes())})
        for n, code in enumerate(codes)
    ]
    params = {"alpha": 2 / 3, "beta": 0.5}
    out = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method="triple_sum", params=params).output
    dtype, shape, data = read_raw(out)[1]["w"]
    assert (dtype, shape) == ("F8_E4M3", (40, 50))
    assert out.stat().st_size - header_size(out) == paths[0].stat().st_size - header_size(paths[0])
    known = np.unique(decode("F8_E4M3", bytes(code for code in range(256) if code & 0x7F != 0x7F)).astype("<f8"))
    mean = sum(decode("F8_E4M3", code.tobytes()).astype("<f8") for code in codes) / 3
    found = decode("F8_E4M3", data).astype("<f8")
    least = np.abs(known[None] - mean[:, None]).min(1)
    np.testing.assert_allclose(
        np.abs(found - mean), least, rtol=0, atol=1e-5
    )  # half way between two codes both are right
    exact = least < 0.4 * np.diff(known).min()
    assert exact.sum() > 100
    nearest = known[np.abs(known[None] - mean[exact, None]).argmin(1)]
    assert np.array_equal(found[exact], nearest)


def test_04_what_is_beyond_fp8_is_cut_and_counted(tmp_path):
    a, b, c = (
        write_raw(tmp_path / f"{n}.safetensors", {"w": raw("F8_E4M3", [[448.0, 1.0]] if n < 2 else [[0.0, 1.0]])})
        for n in range(3)
    )
    made = lib_merge.merge(a, b, c, out=tmp_path / "out.safetensors", method="add_difference")
    assert read(made.output)["w"].tolist() == [[448.0, 1.0]]
    assert made.saturated == 1
    assert any("beyond fp8" in warning for warning in made.warnings)


# 06: markers are kept, and their absence is told


def with_markers(path, number, *markers):
    tensors = {
        "model.diffusion_model.w": raw("F32", values((6, 5), number)),
        "scalar": raw("F32", np.float32(number + 1)),
    }
    return write_raw(path, tensors | dict.fromkeys(markers, EMPTY))


@pytest.mark.parametrize("method", METHODS)
def test_06_markers_and_scalars_come_through_every_method(tmp_path, method):
    markers = ("v_pred", "ztsnr", "scaled_fp8")
    paths = [
        with_markers(tmp_path / f"{slot}.safetensors", n, *markers)
        for n, slot in enumerate(all_methods()[method].inputs)
    ]
    made = lib_merge.merge(*paths, out=tmp_path / "out.safetensors", method=method, report=True)
    stored = read_raw(made.output)[1]
    assert {marker: stored[marker] for marker in markers} == dict.fromkeys(markers, EMPTY)
    assert stored["scalar"][1] == ()
    for row in made.rows:
        if row["key"] in markers:
            assert row["action"] == "copied"
            assert all(math.isnan(row[name]) for name in ("norm_a", "norm_b", "rel_diff", "norm_out", "max_change"))
    assert lib_merge.verify(made.output).ok


def test_06_markers_of_another_input_are_told(tmp_path):
    a, b = with_markers(tmp_path / "a.safetensors", 1), with_markers(tmp_path / "b.safetensors", 2, "v_pred")
    with pytest.raises(PlanError, match="only model B has the marker v_pred"):
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", allow_mixed_prediction=True)
    assert "v_pred" not in read_raw(made.output)[1]
    assert any("v_pred" in warning for warning in made.warnings)


# 13: inpainting and pix2pix, whichever side they are on


@pytest.mark.parametrize("channels", [9, 8, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_13_the_first_layer_of_a_special_model(tmp_path, channels, turned):
    plain, special = values((4, 4, 3, 3), 1), values((4, channels, 3, 3), 2)
    paths = [write(tmp_path / f"{n}.safetensors", {CONV: array}) for n, array in enumerate((plain, special))]
    made = lib_merge.merge(*(paths[::-1] if turned else paths), out=tmp_path / "out.safetensors", alpha=0.5)
    result = read(made.output)[CONV]
    assert result.shape == special.shape
    np.testing.assert_allclose(result[:, :4], (plain + special[:, :4]) / 2, rtol=0, atol=1e-7)
    assert result[:, 4:].tobytes() == special[:, 4:].tobytes()


# 14: a tensor of another shape is kept from A and told, or an error


@pytest.fixture
def mismatched(tmp_path):
    tensors = {f"t{n}.weight": values((3, 4), n) for n in range(5)}
    a = write(tmp_path / "a.safetensors", tensors)
    b = write(
        tmp_path / "b.safetensors",
        {**{key: array + 1 for key, array in tensors.items()}, "t2.weight": values((5, 4), 9)},
    )
    return a, b


def test_14_it_keeps_a_s_bytes_and_is_listed(mismatched, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["merge", *map(str, mismatched), "-o", str(out), "--report", str(tmp_path / "r.json")]) == 0
    assert "t2.weight ([3, 4] in A, [5, 4] in B)" in capsys.readouterr().out
    before, after = (read_raw(path)[1] for path in (mismatched[0], out))
    assert [key for key in before if before[key] == after[key]] == ["t2.weight"]
    rows = {row["key"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert (rows["t2.weight"]["action"], rows["t2.weight"]["reason"]) == ("copied", "[3, 4] in A, [5, 4] in B")


@pytest.mark.parametrize("option", [["--mismatch", "error"], ["--strict"]])
def test_14_or_it_is_an_error_before_work(mismatched, tmp_path, monkeypatch, capsys, option):
    monkeypatch.setattr(Source, "read_into", None)
    assert main(["merge", *map(str, mismatched), "-o", str(tmp_path / "out.safetensors"), *option]) == 1
    assert "t2.weight" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == sorted(mismatched)


# 15: the kind of model is read from the file


@pytest.mark.parametrize(
    ("tensors", "family"),
    [
        ({CONV: (8, 4, 3, 3), f"{BLOCK}.attn2.to_k.weight": (8, 768)}, "SD 1.x"),
        ({CONV: (8, 4, 3, 3), "model.diffusion_model.label_emb.0.0.weight": (8, 2816)}, "SDXL"),
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (8,), "img_in.weight": (8, 64)}, "Flux"),
    ],
)  # fmt: skip
def test_15_small_files_are_told_apart(tmp_path, tensors, family):
    path = write(tmp_path / "a.safetensors", {key: values(shape, 1) for key, shape in tensors.items()})
    assert lib_merge.inspect(path)["family"].startswith(family)


def test_15_models_of_two_families_are_refused_at_once(tmp_path, monkeypatch):
    one = write(tmp_path / "sd.safetensors", {CONV: values((8, 4, 3, 3), 1)})
    other = write(tmp_path / "flux.safetensors", {"double_blocks.0.img_attn.norm.key_norm.scale": values((8,), 1)})
    monkeypatch.setattr(Source, "read_into", None)
    with pytest.raises(PlanError, match="nothing would be merged") as caught:
        lib_merge.merge(one, other, out=tmp_path / "out.safetensors")
    assert "one family" in caught.value.hint


# 43: the config of a v-prediction model comes along


def test_43_the_config_beside_a_is_copied(tmp_path):
    a, b = (write(tmp_path / f"{name}.safetensors", {"w": values((4,), n)}) for n, name in enumerate("ab"))
    lib_merge.merge(a, b, out=tmp_path / "none.safetensors")
    assert not (tmp_path / "none.yaml").exists()
    (tmp_path / "a.yaml").write_text("model: v\n")
    lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert (tmp_path / "out.yaml").read_text() == "model: v\n"


# 51: no web UI is needed


def test_51_everything_runs_where_no_web_ui_is_installed(tmp_path):
    a, b = (write(tmp_path / f"{name}.safetensors", {"w": values((4, 4), n)}) for n, name in enumerate("ab"))
    program = (
        "import sys\n"
        "for name in ('gradio', 'modules'): sys.modules[name] = None\n"
        "import lib_merge\n"
        f"made = lib_merge.merge({str(a)!r}, {str(b)!r}, out={str(tmp_path / 'one.safetensors')!r}, alpha=0.3)\n"
        "assert lib_merge.verify(made.output).ok\n"
        "from lib_merge.cli import main\n"
        f"sys.exit(main(['run', {str(tmp_path / 'one.safetensors')!r}, '-o', {str(tmp_path / 'two.safetensors')!r}]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, capture_output=True)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
