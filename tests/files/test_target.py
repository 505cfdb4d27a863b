"""Everything that can be wrong with an output path is said before any work, and says what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lib_merge.files.target import numbered, target_problems

pytestmark = pytest.mark.portable


@pytest.fixture
def inputs(tmp_path):
    """A file and a model folder, and what names they go by."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.safetensors").write_bytes(b"a")
    (tmp_path / "in" / "model").mkdir()
    (tmp_path / "in" / "model" / "model.safetensors").write_bytes(b"b")
    return {"A": tmp_path / "in" / "a.safetensors", "B": tmp_path / "in" / "model"}


def problems(target, inputs=(), *, folder=False, overwrite=False, size_bytes=1):
    found = list(
        target_problems(target, folder=folder, overwrite=overwrite, inputs=dict(inputs), size_bytes=size_bytes)
    )
    assert all(problem.level == "error" and problem.file == str(target) and problem.hint for problem in found)
    return [problem.what for problem in found]


def test_a_good_target_has_none(tmp_path, inputs):
    assert problems(tmp_path / "out.safetensors", inputs) == []
    assert problems(tmp_path / "out", inputs, folder=True) == []
    assert problems(tmp_path / "sdxl-v1.0", inputs, folder=True) == []


def test_a_target_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problems(Path("out.safetensors")) == []
    assert problems(Path("./out.safetensors")) == []


@pytest.mark.parametrize("name", ["", ".", "/", "..", "sub/.."])
@pytest.mark.parametrize("folder", [False, True])
def test_no_name(tmp_path, monkeypatch, name, folder):
    monkeypatch.chdir(tmp_path)
    (what,) = problems(Path(name), folder=folder, overwrite=True)
    assert "no name" in what


def test_a_name_that_no_file_can_have(tmp_path):
    (what,) = problems(tmp_path / "a\0b.safetensors")
    assert "no name that a file can have" in what


@pytest.mark.parametrize("name", ["out", "out.ckpt", "out.safetensors.bak", ".safetensors", "out.SAFETENSORS"])
def test_another_suffix(tmp_path, name):
    assert problems(tmp_path / name) == ["the output's name must end in .safetensors"]


def test_a_folder_with_the_suffix_of_a_file(tmp_path):
    (what,) = problems(tmp_path / "out.safetensors", folder=True)
    assert "folder too" in what


@pytest.mark.parametrize(
    ("name", "fits"), [("x" * 210, True), ("x" * 211, False), ("é" * 105, True), ("é" * 106, False)]
)
def test_names_leave_room_for_the_temporary_one(tmp_path, name, fits):
    target = tmp_path / f"{name}.safetensors"
    assert (problems(target) == []) == fits
    if fits:  # the longest temporary name is one that the file system takes
        (tmp_path / f".{target.name}.lib_merge-4194304-01234567.part").touch()
    else:
        assert "longer than 222 bytes" in problems(target)[0]


@pytest.mark.parametrize("length", [256, 300, 5_000])
def test_names_that_the_system_itself_refuses(tmp_path, inputs, length):
    assert "longer" in problems(tmp_path / ("x" * length + ".safetensors"), inputs)[0]
    assert "longer" in problems(tmp_path / ("x" * length), inputs, folder=True)[0]
    assert any("does not exist" in what for what in problems(tmp_path / ("x" * length) / "x.safetensors", inputs))


def test_a_name_of_another_encoding(tmp_path):
    assert problems(tmp_path / os.fsdecode(b"caf\xe9.safetensors")) == []


def test_a_missing_folder(tmp_path):
    assert problems(tmp_path / "missing" / "out.safetensors") == ["the output's folder does not exist"]
    (tmp_path / "file").touch()
    assert problems(tmp_path / "file" / "out.safetensors") == ["the output's folder does not exist"]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert problems(tmp_path / "out.safetensors") == ["the output's folder cannot be written to"]


@pytest.mark.parametrize(("free", "fits"), [(999_999, False), (1_000_000, True), (0, False)])
def test_room(tmp_path, monkeypatch, free, fits):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    found = problems(tmp_path / "out.safetensors", size_bytes=1_000_000)
    assert (found == []) == fits
    assert fits or "not enough room: 1 MB are needed" in found[0]


# What stands there already.


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("there", ["file", "folder", "link", "dangling link"])
def test_an_existing_output(tmp_path, there, folder):
    target = tmp_path / ("out" if folder else "out.safetensors")
    if there == "file":
        target.touch()
    elif there == "folder":
        target.mkdir()
    else:
        other = tmp_path / "other"
        if there == "link":
            other.mkdir() if folder else other.touch()
        target.symlink_to(other)
    assert "the output exists" in problems(target, folder=folder)
    other_kind = there in ("file", "folder") and (there == "folder") != folder
    expected = [f"the output exists and is a {there}"] if other_kind else []
    assert problems(target, folder=folder, overwrite=True) == expected


def same(tmp_path, how):
    """A path that is the same file as in/a.safetensors."""
    file = tmp_path / "in" / "a.safetensors"
    if how == "itself":
        return file
    if how == "dots":
        return tmp_path / "in" / "model" / ".." / "a.safetensors"
    link = tmp_path / "link.safetensors"
    if how == "symlink":
        link.symlink_to(file)
    elif how == "hard link":
        os.link(file, link)
    elif how == "linked folder":
        (tmp_path / "linked").symlink_to(tmp_path / "in", target_is_directory=True)
        return tmp_path / "linked" / "a.safetensors"
    return link


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["itself", "dots", "symlink", "hard link", "linked folder"])
def test_an_output_that_is_an_input(tmp_path, inputs, how, overwrite):
    found = problems(same(tmp_path, how), inputs, overwrite=overwrite)
    assert "the output would replace input A or lie inside it" in found
    assert ("the output exists" in found) != overwrite


def test_an_input_that_is_a_link_to_the_output(tmp_path, inputs):
    (tmp_path / "b.safetensors").symlink_to(inputs["A"])
    found = problems(inputs["A"], {"B": tmp_path / "b.safetensors"}, overwrite=True)
    assert found == ["the output would replace input B or lie inside it"]


@pytest.mark.parametrize("name", ["model.safetensors", "new.safetensors", "sub/new.safetensors"])
def test_an_output_inside_an_input_folder(tmp_path, inputs, name):
    (inputs["B"] / "sub").mkdir()
    found = problems(inputs["B"] / name, inputs, overwrite=True)
    assert found == ["the output would replace input B or lie inside it"]


def test_an_output_folder_around_an_input(tmp_path, inputs):
    slots = {"A": inputs["B"], "vae": inputs["B"] / "model.safetensors"}
    found = problems(inputs["B"], slots, folder=True, overwrite=True)
    assert found == [f"the output would replace input {slot} or lie inside it" for slot in ("A", "vae")]
    found = problems(tmp_path / "in", {"A": inputs["B"]}, folder=True, overwrite=True)
    assert found == ["the output would replace input A or lie inside it"]
    (tmp_path / "linked").symlink_to(inputs["B"], target_is_directory=True)
    assert problems(tmp_path / "linked", slots, folder=True, overwrite=True) != []


def test_neighbours_are_no_inputs(tmp_path, inputs):
    assert problems(tmp_path / "in" / "model2", inputs, folder=True) == []
    assert problems(tmp_path / "in" / "b.safetensors", inputs) == []
    assert problems(tmp_path / "in" / "b.safetensors", {"A": tmp_path / "gone.safetensors"}) == []


def test_several_problems_are_told_together(tmp_path, inputs):
    found = problems(inputs["A"].with_name("model"), inputs)
    assert len(found) == 4  # suffix, input, exists, is a folder


# Numbers.


def test_numbers_count_up(tmp_path):
    target = tmp_path / "mix.safetensors"
    assert numbered(target) == target
    for number in (1, 2, 3):
        numbered(target).touch()
        assert numbered(target) == tmp_path / f"mix_{number}.safetensors"
    (tmp_path / "mix_1.safetensors").unlink()
    assert numbered(target) == tmp_path / "mix_1.safetensors"


def test_a_dangling_link_is_a_taken_name(tmp_path):
    (tmp_path / "mix.safetensors").symlink_to(tmp_path / "nowhere")
    assert numbered(tmp_path / "mix.safetensors") == tmp_path / "mix_1.safetensors"


@pytest.mark.parametrize("name", ["model", "sdxl-v1.0", "a.b.c", ".hidden"])
def test_a_dot_in_a_folder_name_begins_no_suffix(tmp_path, name):
    (tmp_path / name).mkdir()
    assert numbered(tmp_path / name) == tmp_path / f"{name}_1"


def test_a_dot_in_a_file_name(tmp_path):
    (tmp_path / "sd_xl_1.0.safetensors").touch()
    assert numbered(tmp_path / "sd_xl_1.0.safetensors") == tmp_path / "sd_xl_1.0_1.safetensors"


def test_a_name_too_long_to_exist_is_free(tmp_path):
    target = tmp_path / ("x" * 300 + ".safetensors")
    assert numbered(target) == target
