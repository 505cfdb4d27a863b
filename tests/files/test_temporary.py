"""Leftovers of dead runs are swept, those of live ones never; a folder caught between renames gets its name back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from lib_merge.files import temporary
from lib_merge.files.temporary import remove, replace_folder, sweep, temporary_beside

pytestmark = pytest.mark.portable


@pytest.fixture(scope="module")
def dead():
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(scope="module")
def alive():
    """Number of another process that runs."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def leave(folder, name):
    path = folder / name
    path.write_bytes(b"half a model")
    return path


def test_names(tmp_path):
    one, two = temporary_beside(tmp_path / "out.safetensors"), temporary_beside(tmp_path / "out.safetensors")
    assert one.parent == tmp_path
    assert one != two
    start, _, end = one.name.partition(f".lib_merge-{os.getpid()}-")
    assert start == ".out.safetensors"
    assert end.endswith(".part")
    int(end.removesuffix(".part"), 16)
    assert names(tmp_path) == []


def test_what_a_dead_process_left_is_deleted(tmp_path, dead):
    left = [
        leave(tmp_path, name)
        for name in (
            f".out.safetensors.lib_merge-{dead}-0123abcd.part",
            f".out.lib_merge-{dead}-ff.part",
            f".ein langer Name ü.safetensors.lib_merge-{dead}-0.part",
            f".two\nlines.safetensors.lib_merge-{dead}-0.part",
            f"...lib_merge-{dead}-0.part",
            f".x.lib_merge-1-a.part.lib_merge-{dead}-0.part",
        )
    ]
    kept = leave(tmp_path, "out.safetensors")
    assert sorted(sweep(tmp_path)) == sorted(left)
    assert names(tmp_path) == [kept.name]
    assert sweep(tmp_path) == []


def test_folders_too(tmp_path, dead):
    left = tmp_path / f".model.lib_merge-{dead}-0123abcd.part"
    (left / "unet").mkdir(parents=True)
    leave(left / "unet", "x.safetensors")
    link = tmp_path / f".link.lib_merge-{dead}-0123abcd.part"
    (tmp_path / "kept").mkdir()
    leave(tmp_path / "kept", "x")
    link.symlink_to(tmp_path / "kept", target_is_directory=True)
    assert sorted(sweep(tmp_path)) == sorted([left, link])
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["x"]


def test_what_a_live_process_writes_is_left_alone(tmp_path, alive):
    leave(tmp_path, f".out.safetensors.lib_merge-{alive}-0123abcd.part")
    leave(tmp_path, f".out.lib_merge-{alive}-0123abcd.old")
    leave(tmp_path, f".out.safetensors.lib_merge-{os.getppid()}-0123abcd.part")
    before = names(tmp_path)
    assert sweep(tmp_path) == []
    assert names(tmp_path) == before


def test_a_process_that_nobody_has_waited_for_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()
    left = leave(tmp_path, f".out.safetensors.lib_merge-{process.pid}-0123abcd.part")
    for _ in range(500):  # its output is closed a moment before it ends
        if swept := sweep(tmp_path):
            break
        time.sleep(0.01)
    assert process.returncode is None
    assert swept == [left]
    process.communicate()


def test_a_process_of_another_user_is_alive(tmp_path, dead, monkeypatch):
    def denied(pid, number):
        assert number == 0
        raise PermissionError(1, "Operation not permitted")

    left = leave(tmp_path, f".out.safetensors.lib_merge-{dead}-0123abcd.part")
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", denied)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [left]


def test_own_runs_that_go_on_are_left_alone(tmp_path):
    one, two = temporary_beside(tmp_path / "a.safetensors"), temporary_beside(tmp_path / "b", "old")
    for path in (one, two):
        leave(tmp_path, path.name)
    assert sweep(tmp_path) == []
    assert sorted(names(tmp_path)) == sorted([one.name, two.name])
    for path in (one, two):
        remove(path)
    assert names(tmp_path) == []


def test_own_number_of_an_earlier_life_is_swept(tmp_path):
    left = leave(tmp_path, f".out.safetensors.lib_merge-{os.getpid()}-0123abcd.part")
    assert sweep(tmp_path) == [left]


@pytest.mark.parametrize(
    "name",
    [
        "out.safetensors",
        "out.safetensors.lib_merge-{dead}-0123abcd.part",
        ".lib_merge-{dead}-0123abcd.part",
        ".out.lib_merge-{dead}-0123abcd.part.safetensors",
        ".out.lib_merge-{dead}-0123abcd",
        ".out.lib_merge-{dead}-0123ABCD.part",
        ".out.lib_merge-{dead}-xyz.part",
        ".out.lib_merge-{dead}-.part",
        ".out.lib_merge--5-ab.part",
        ".out.lib_merge-abc-ab.part",
        ".out.lib_merge-\u0663\u0664-ab.part",
        ".out.lib_merge-0-ab.part",
        ".out.lib_merge-99999999999999999999-ab.part",
        ".out.other-{dead}-0123abcd.part",
        ".out.lib_merge-{dead}-0123abcd.part\n",
    ],
)
def test_other_names_are_not_ours(tmp_path, dead, name):
    left = leave(tmp_path, name.format(dead=dead))
    assert sweep(tmp_path) == []
    assert left.read_bytes() == b"half a model"


def test_only_the_folder_itself_is_swept(tmp_path, dead):
    (tmp_path / "sub").mkdir()
    leave(tmp_path / "sub", f".out.safetensors.lib_merge-{dead}-0123abcd.part")
    assert sweep(tmp_path) == []
    assert len(names(tmp_path / "sub")) == 1


def test_a_folder_that_cannot_be_changed(tmp_path, dead, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    leave(tmp_path, f".a.lib_merge-{dead}-01.part")
    (tmp_path / f".b.lib_merge-{dead}-01.part" / "sub").mkdir(parents=True)
    leave(tmp_path, f".c.lib_merge-{dead}-01.old")
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "rename", "replace"):
            patch.setattr(os, name, denied)
        assert sweep(tmp_path) == []
    assert names(tmp_path) == before


@pytest.mark.parametrize("place", ["missing", "file", "missing/deeper", "x" * 300])
def test_a_folder_that_is_none(tmp_path, place):
    leave(tmp_path, "file")
    assert sweep(tmp_path / place) == []


def test_removing_what_is_not_there(tmp_path):
    leave(tmp_path, "file")
    for path in (tmp_path / "missing", tmp_path / "file" / "x", tmp_path / "missing" / "x"):
        remove(path)
    assert names(tmp_path) == ["file"]


def test_removing_needs_a_second_attempt_now_and_then(tmp_path, monkeypatch):
    real, left = os.unlink, [1]

    def call(*args, **options):
        if left.pop() if left else False:
            raise PermissionError(13, "used by another program")
        real(*args, **options)

    monkeypatch.setattr(os, "unlink", call)
    remove(leave(tmp_path, "x"))
    assert names(tmp_path) == []


def test_sweeps_at_the_same_time(tmp_path, dead):
    for number in range(60):
        leave(tmp_path, f".out.lib_merge-{dead}-{number:x}.part")
        (tmp_path / f".folder.lib_merge-{dead}-{number:x}.part" / "x").mkdir(parents=True)
    threads = [threading.Thread(target=sweep, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == []


# Folders that replace another one.


def folder(path, text):
    path.mkdir()
    (path / "x").write_text(text)
    return path


def test_a_folder_is_replaced(tmp_path):
    new, target = folder(tmp_path / "new", "new"), folder(tmp_path / "target", "old")
    replace_folder(new, target)
    assert names(tmp_path) == ["target"]
    assert (target / "x").read_text() == "new"


@pytest.mark.parametrize("number", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, number):
    new, target = folder(tmp_path / "new", "new"), folder(tmp_path / "target", "old")
    real, count = os.rename, []

    def call(*args):
        count.append(args)
        if len(count) == number:
            raise PermissionError(13, "used by another program")
        real(*args)

    monkeypatch.setattr(os, "rename", call)
    with pytest.raises(PermissionError):
        replace_folder(new, target)
    assert names(tmp_path) == ["new", "target"]
    assert ((new / "x").read_text(), (target / "x").read_text()) == ("new", "old")


@pytest.mark.parametrize("number", range(1, 8))
def test_a_process_killed_at_any_step_loses_no_folder(tmp_path, number):
    """What the next start finds after the n-th step was the last: the old folder or the new one, whole."""
    folder(tmp_path / "new", "new"), folder(tmp_path / "target", "old")
    script = f"""
import os
from pathlib import Path
from lib_merge.files.temporary import replace_folder
steps = [0]
def killing(name):
    real = getattr(os, name)
    def call(*args, **options):
        real(*args, **options)
        steps[0] += 1
        if steps[0] == {number}:
            os._exit(9)
    setattr(os, name, call)
for name in ("rename", "unlink", "rmdir"):
    killing(name)
replace_folder(Path("new"), Path("target"))
os._exit(0)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, check=False).returncode
    assert ended == (9 if number <= 5 else 0)  # three renames, one file and one folder deleted
    sweep(tmp_path)
    text = (tmp_path / "target" / "x").read_text()
    assert (text, names(tmp_path)) in (("old", ["new", "target"]), ("new", ["target"]))
    assert text == ("old" if number == 1 else "new")


def test_nothing_of_a_run_stays_remembered(tmp_path):
    active = set(temporary._ACTIVE)
    new, target = folder(tmp_path / "new", "new"), folder(tmp_path / "target", "old")
    replace_folder(new, target)
    remove(temporary_beside(tmp_path / "x"))
    assert active == temporary._ACTIVE
