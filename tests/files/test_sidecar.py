"""The config beside a checkpoint: copied with the model, whole or not at all, and never over another one."""

from __future__ import annotations

import os

import pytest

import lib_merge
from lib_merge import OutputError, PlanError
from lib_merge.cli import main
from lib_merge.files import publish, sidecar
from tests.support import values, write

CONFIG = b"model:\n  params:\n    parameterization: v\n"


@pytest.fixture
def models(tmp_path):
    """Two models in a folder of their own; A has a config."""
    folder = tmp_path / "in"
    folder.mkdir()
    paths = [write(folder / f"{name}.v1.safetensors", {"w": values((5,), n)}) for n, name in enumerate("ab")]
    (folder / "a.v1.yaml").write_bytes(CONFIG)
    return paths


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "mix.safetensors"


def names(out):
    return sorted(path.name for path in out.parent.iterdir())


def test_it_is_copied_under_the_name_of_the_output(models, out):
    made = lib_merge.merge(*models, out=out)
    assert names(out) == ["mix.safetensors", "mix.yaml"]
    assert out.with_suffix(".yaml").read_bytes() == CONFIG
    assert any("a.v1.yaml is copied to mix.yaml" in problem.what for problem in made.plan.problems)
    assert made.warnings == ()


def test_nothing_is_written_where_a_has_none(models, out):
    lib_merge.merge(*reversed(models), out=out)
    assert names(out) == ["mix.safetensors"]


def test_a_dry_run_tells_and_writes_nothing(models, out, capsys):
    assert main(["merge", *map(str, models), "-o", str(out), "--dry-run"]) == 0
    assert "a.v1.yaml is copied to mix.yaml" in capsys.readouterr().out
    assert names(out) == []


def test_the_report_and_verify_tell_of_it(models, out, tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main(["merge", *map(str, models), "-o", str(out), "--report", str(report)]) == 0
    assert "a.v1.yaml" in report.read_text("utf-8")
    there = [str(models[0].parent)]
    assert lib_merge.verify(out, models=there).sidecar == "same"
    out.with_suffix(".yaml").write_bytes(b"other")
    assert lib_merge.verify(out, models=there).to_dict()["sidecar"] == "different"
    out.with_suffix(".yaml").unlink()
    capsys.readouterr()
    assert main(["verify", str(out), "--models", *there]) == 0
    assert "the config beside it is missing" in capsys.readouterr().out


def test_another_config_is_not_overwritten_unless_told(models, out):
    place = out.with_suffix(".yaml")
    place.write_bytes(b"mine")
    with pytest.raises(PlanError, match="config beside the output exists") as caught:
        lib_merge.merge(*models, out=out)
    assert caught.value.file == str(place)
    assert (names(out), place.read_bytes()) == (["mix.yaml"], b"mine")
    numbered = lib_merge.merge(*models, out=out, number=True)
    assert numbered.output.name == "mix_1.safetensors"
    assert names(out) == ["mix.yaml", "mix_1.safetensors", "mix_1.yaml"]
    lib_merge.merge(*models, out=out, overwrite=True)
    assert place.read_bytes() == CONFIG


def test_the_same_config_is_no_obstacle(models, out):
    out.with_suffix(".yaml").write_bytes(CONFIG)
    made = lib_merge.merge(*models, out=out)
    assert any("lies beside the output already: mix.yaml" in problem.what for problem in made.plan.problems)
    assert names(out) == ["mix.safetensors", "mix.yaml"]
    beside = models[0].with_name("a.v1_half.safetensors")
    (beside.with_suffix(".yaml")).symlink_to(models[0].with_suffix(".yaml"))
    lib_merge.convert(models[0], out=beside)
    assert beside.with_suffix(".yaml").read_bytes() == CONFIG


def test_a_strange_config_beside_the_output_is_told(models, out):
    out.with_suffix(".yaml").write_bytes(b"mine")
    made = lib_merge.merge(*reversed(models), out=out)
    assert any("mix.yaml lies beside the output" in warning for warning in made.warnings)
    assert out.with_suffix(".yaml").read_bytes() == b"mine"


def test_a_part_that_it_does_not_describe_goes_without(tmp_path, out):
    vae = {"first_stage_model.decoder.conv_in.weight": values((4, 4), 1), "model.diffusion_model.w": values((4,), 2)}
    a = write(tmp_path / "a.safetensors", vae)
    a.with_suffix(".yaml").write_bytes(CONFIG)
    lib_merge.convert(a, out=out, only="vae")
    assert names(out) == ["mix.safetensors"]


@pytest.mark.parametrize("before", [None, b"mine"])
def test_a_model_that_cannot_get_its_name_takes_it_back(models, out, monkeypatch, before):
    place = out.with_suffix(".yaml")
    if before is not None:
        place.write_bytes(before)

    def fails(temporary, target, overwrite):
        raise OSError(13, "held open", str(target))

    monkeypatch.setattr(publish, "name_file", fails)
    with pytest.raises(OutputError, match="held open"):
        lib_merge.merge(*models, out=out, overwrite=True)
    assert (place.read_bytes() if place.exists() else None) == before
    assert not out.exists()


@pytest.mark.parametrize("step", ["open_write", "fsync", "name_file"])
def test_a_config_that_cannot_be_written_leaves_nothing(models, out, monkeypatch, step):
    def fails(*_):
        raise OSError(28, "no space")

    original = os.fsync
    if step == "open_write":
        monkeypatch.setattr(sidecar.calls, "open_write", _only(".yaml", fails, sidecar.calls.open_write))
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", lambda fd: fails() if os.fstat(fd).st_size == len(CONFIG) else original(fd))
    else:
        monkeypatch.setattr(sidecar, "name_file", fails)
    with pytest.raises(OutputError, match="disk is full") as caught:
        lib_merge.merge(*models, out=out)
    assert caught.value.file == str(out.with_suffix(".yaml"))
    assert names(out) == []


def _only(part, first, second):
    return lambda path, *more: first() if part in path.name else second(path, *more)
