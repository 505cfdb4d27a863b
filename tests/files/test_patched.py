"""A copy with holes: every byte outside is the original's, every byte inside is what was written."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from lib_merge.errors import FileError, OutputError
from lib_merge.files import patched
from lib_merge.files.patched import PatchedCopy, Range, outside

pytestmark = pytest.mark.portable

NAMES = ("one.bin", "two.bin", "empty")
HOLES = (Range(0, 10, 20), Range(0, 30, 5), Range(1, 0, 7), Range(1, 993, 7))


@pytest.fixture
def original(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    for number, name in enumerate(NAMES):
        (root / name).write_bytes(bytes((number * 7 + at) % 251 for at in range(0 if name == "empty" else 1000)))
    return root


def make(original, target, holes=HOLES, **options):
    copy = PatchedCopy([original / name for name in NAMES], NAMES, target, holes, folder=True, **options)
    with copy:
        for piece in copy.pieces():
            copy.copy(piece)
        for hole in holes:
            copy.write(hole.file, hole.offset, memoryview(b"\xff" * hole.count), "a tensor")
        return copy.publish()


def expected(original):
    made = {name: bytearray((original / name).read_bytes()) for name in NAMES}
    for hole in HOLES:
        made[NAMES[hole.file]][hole.offset : hole.offset + hole.count] = b"\xff" * hole.count
    return made


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def test_only_the_holes_are_other_bytes(original, tmp_path, file_calls):
    before = {name: (original / name).read_bytes() for name in NAMES}
    make(original, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in NAMES} == expected(original)
    assert {name: (original / name).read_bytes() for name in NAMES} == before
    assert names(tmp_path) == ["in", "out"]


def test_a_single_file_is_copied_to_a_single_file(original, tmp_path):
    copy = PatchedCopy([original / "one.bin"], [""], tmp_path / "out.bin", [Range(0, 1, 2)], folder=False)
    with copy:
        for piece in copy.pieces():
            copy.copy(piece)
        copy.write(0, 1, memoryview(b"xy"))
        copy.publish()
    whole = (original / "one.bin").read_bytes()
    assert (tmp_path / "out.bin").read_bytes() == whole[:1] + b"xy" + whole[3:]
    assert names(tmp_path) == ["in", "out.bin"]


def test_bytes_inside_of_holes_are_not_copied(original, tmp_path):
    copy = PatchedCopy([original / name for name in NAMES], NAMES, tmp_path / "out", HOLES, folder=True)
    with copy:
        for piece in copy.pieces():
            copy.copy(piece)
        assert (copy.temporary / "one.bin").read_bytes()[10:35] == bytes(25)
    assert names(tmp_path) == ["in"]


@pytest.mark.parametrize("piece", [1, 3, 64, 10_000])
def test_pieces_cover_what_no_hole_covers_once(monkeypatch, piece):
    monkeypatch.setattr(patched, "_PIECE_BYTES", piece)
    sizes = [100, 0, 5, 50]
    holes = [Range(0, 90, 10), Range(0, 0, 3), Range(3, 10, 20), Range(2, 0, 5), Range(3, 15, 5), Range(0, 3, 4)]
    counts = [[0] * size for size in sizes]
    for part in (*outside(sizes, holes), *holes):
        for at in range(part.offset, part.offset + part.count):
            counts[part.file][at] += 1
    assert counts[0] == [1] * 100
    assert counts[2] == [1] * 5
    assert counts[3] == [1] * 15 + [2] * 5 + [1] * 30  # where two holes overlap
    assert all(part.count <= piece for part in outside(sizes, holes))


def test_leaving_without_publishing_removes_everything(original, tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        PatchedCopy([original / name for name in NAMES], NAMES, tmp_path / "out", HOLES, folder=True),
    ):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["in"]


def test_an_empty_folder_is_replaced(original, tmp_path):
    (tmp_path / "out").mkdir()
    make(original, tmp_path / "out")
    assert names(tmp_path / "out") == sorted(NAMES)


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_stands_there_is_never_replaced(original, tmp_path, kind):
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
        (target / "x").write_bytes(b"theirs")
    elif kind == "file":
        target.write_bytes(b"theirs")
    else:
        (tmp_path / "other").mkdir()
        target.symlink_to(tmp_path / "other")
    with pytest.raises(OutputError, match="could not be given its name") as caught:
        make(original, target)
    kept = Path(re.search(r"stands at (\S+):", caught.value.hint)[1])
    assert {name: (kept / name).read_bytes() for name in NAMES} == expected(original)
    assert kind != "folder" or (target / "x").read_bytes() == b"theirs"
    assert kind != "file" or target.read_bytes() == b"theirs"
    assert kind != "link" or target.is_symlink()


def test_it_is_replaced_where_that_was_asked_for(original, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_bytes(b"old")
    make(original, tmp_path / "out", overwrite=True)
    assert names(tmp_path / "out") == sorted(NAMES)
    assert names(tmp_path) == ["in", "out"]


@pytest.mark.parametrize("change", ["longer", "touched", "gone"])
def test_an_original_that_changes_meanwhile_is_refused(original, tmp_path, change):
    copy = PatchedCopy([original / name for name in NAMES], NAMES, tmp_path / "out", (), folder=True)
    with pytest.raises(FileError) as caught, copy:
        for piece in copy.pieces():
            copy.copy(piece)
        path = original / "two.bin"
        if change == "longer":
            path.write_bytes(path.read_bytes() + b"x")
        elif change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        copy.publish()
    assert caught.value.file == str(original / "two.bin")
    assert names(tmp_path) == ["in"]


def test_an_original_that_is_cut_off_is_named(original, tmp_path, file_calls):
    copy = PatchedCopy([original / name for name in NAMES], NAMES, tmp_path / "out", (), folder=True)
    os.truncate(original / "one.bin", 100)
    with pytest.raises(FileError, match="shorter") as caught, copy:
        for piece in copy.pieces():
            copy.copy(piece)
    assert caught.value.file == str(original / "one.bin")
    assert names(tmp_path) == ["in"]


def test_the_disk_being_full_names_file_and_tensor(original, tmp_path, monkeypatch, file_calls):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy = PatchedCopy([original / name for name in NAMES], NAMES, tmp_path / "out", HOLES, folder=True)
    with pytest.raises(OutputError, match="disk is full") as caught, copy:
        monkeypatch.setattr(os, "pwrite" if file_calls == "fast" else "write", full)
        copy.write(0, 10, memoryview(bytes(20)), "l.weight")
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "out" / "one.bin"), "l.weight")
    monkeypatch.undo()
    assert names(tmp_path) == ["in"]
