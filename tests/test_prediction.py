"""Models that predict different things are not averaged unless that is meant."""

from __future__ import annotations

import numpy as np
import pytest

import lib_merge
from lib_merge import PlanError
from lib_merge.cli import main
from lib_merge.files.source import Source
from lib_merge.recipe import from_json, to_json
from tests.support import read_raw, values, write

UNET, TE = "model.diffusion_model.out.2.weight", "cond_stage_model.transformer.text_model.final_layer_norm.weight"
EMPTY = np.zeros(0, "<f4")


def model(path, seed, *markers):
    return write(path, {UNET: values((4, 4), seed), TE: values((4,), seed), **dict.fromkeys(markers, EMPTY)})


@pytest.mark.parametrize("markers", [("v_pred",), ("ztsnr",), ("v_pred", "ztsnr"), ("model.diffusion_model.v_pred",)])
@pytest.mark.parametrize("holder", ["A", "B"])
def test_a_marker_in_one_model_alone_is_refused_by_name(tmp_path, monkeypatch, markers, holder):
    a = model(tmp_path / "a.safetensors", 1, *(markers if holder == "A" else ()))
    b = model(tmp_path / "b.safetensors", 2, *(markers if holder == "B" else ()))
    monkeypatch.setattr(Source, "read_into", None)
    with pytest.raises(PlanError) as caught:
        lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert [problem.tensor for problem in caught.value.problems] == list(markers)
    assert all(f"only model {holder} has the marker" in problem.what for problem in caught.value.problems)
    assert "--allow-mixed-prediction" in caught.value.hint
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("holder", ["A", "B"])
def test_the_option_keeps_a_s_markers_and_warns(tmp_path, holder):
    a = model(tmp_path / "a.safetensors", 1, *(["v_pred", "ztsnr"] if holder == "A" else []))
    b = model(tmp_path / "b.safetensors", 2, *(["v_pred", "ztsnr"] if holder == "B" else []))
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", allow_mixed_prediction=True)
    assert list(read_raw(made.output)[1]) == list(read_raw(a)[1])
    assert ["v_pred" in warning or "ztsnr" in warning for warning in made.warnings] == [True, True]
    assert lib_merge.verify(made.output).ok


def test_the_command_line_and_recipes_have_it_too(tmp_path, capsys):
    a, b = model(tmp_path / "a.safetensors", 1, "v_pred"), model(tmp_path / "b.safetensors", 2)
    out = tmp_path / "out.safetensors"
    assert main(["merge", str(a), str(b), "-o", str(out)]) == 1
    assert "v_pred" in capsys.readouterr().err
    assert main(["merge", str(a), str(b), "-o", str(out), "--allow-mixed-prediction"]) == 0
    assert "warning: only model A has the marker v_pred" in capsys.readouterr().out
    recipe = from_json(read_raw(out)[0]["lib_merge.recipe"])
    assert recipe.allow_mixed_prediction
    assert from_json(to_json(recipe)).allow_mixed_prediction


def test_markers_in_both_or_only_in_c_are_no_matter(tmp_path):
    a, b = model(tmp_path / "a.safetensors", 1, "v_pred"), model(tmp_path / "b.safetensors", 2, "v_pred")
    assert lib_merge.merge(a, b, out=tmp_path / "both.safetensors").warnings == ()
    plain, c = model(tmp_path / "plain.safetensors", 3), model(tmp_path / "c.safetensors", 4, "v_pred")
    other = model(tmp_path / "other.safetensors", 5)
    made = lib_merge.merge(plain, other, c, out=tmp_path / "c_only.safetensors", method="add_difference")
    assert made.warnings == ()


def test_text_encoders_of_any_two_models_may_be_merged(tmp_path):
    a, b = model(tmp_path / "a.safetensors", 1, "v_pred"), model(tmp_path / "b.safetensors", 2)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", exclude=["diffusion_model"])
    assert (made.merged, made.warnings) == (1, ())
