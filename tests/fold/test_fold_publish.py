"""A fold that is killed, runs out of disk or fails at any call leaves nothing under the output's name."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import lib_merge
from lib_merge.errors import CancelledError, FileError, MergeError, OutputError, PlanError
from tests.fold.making import DOWN, Pair, Q, contents
from tests.support import descriptors, failing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    made.adapter()
    made.out = tmp_path / "to" / "out"
    made.out.parent.mkdir()
    return made


def fold(pair, **options):
    return lib_merge.fold(pair.dense, pair.root / "adapter", pair.out, quantize=pair.shipped, **options)


@pytest.fixture
def result(pair):
    """What the whole fold gives."""
    lib_merge.fold(pair.dense, pair.root / "adapter", pair.root / "whole", quantize=pair.shipped)
    return contents(pair.root / "whole")


def inputs(pair):
    return [contents(folder) for folder in (pair.dense, pair.shipped, pair.root / "adapter")]


def names(folder):
    return sorted(item.name for item in folder.iterdir())


CALLS = ("open", "mkdir", "pwrite", "copy_file_range", "ftruncate", "fsync", "close", "rename", "preadv", "fstat")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CALLS)
def test_an_error_in_every_nth_call(pair, result, monkeypatch, name, number):
    met, before = 0, inputs(pair)
    for nth in itertools.count(1):
        call, hit = failing(name, nth, number)
        open_before, threads = descriptors(), threading.active_count()
        error = None
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            try:
                fold(pair, tile=3000, threads=2)
            except MergeError as caught:
                error = caught
        assert (descriptors(), threading.active_count()) == (open_before, threads)
        assert inputs(pair) == before
        if error is None:
            assert contents(pair.out) == result
            assert names(pair.out.parent) == ["out"]
            for path in pair.out.iterdir():
                path.unlink()
            pair.out.rmdir()
        else:
            judge(pair, error, result)
        if not hit:
            assert error is None
            break
        met += 1
    assert met
    if name == "pwrite":
        assert met >= 6  # three leaves of each of two modules


def judge(pair, error, result):
    """Nothing under the final name, and nothing beside it unless only the rename failed."""
    assert isinstance(error, (OutputError, FileError, PlanError))
    assert not pair.out.exists()
    kept = re.search(r"stands at (\S+):", error.hint or "")
    if kept:
        assert contents(Path(kept[1])) == result
        for path in Path(kept[1]).iterdir():
            path.unlink()
        Path(kept[1]).rmdir()
    assert names(pair.out.parent) == []


def test_a_failure_on_the_second_module_leaves_nothing(pair):
    pair.weights[DOWN][47, 255] = 0x7F80  # +inf in bf16, in the last row
    pair.write_dense()
    with pytest.raises(MergeError, match="not finite"):
        fold(pair, rounding="even", tile=2000, threads=1)
    assert names(pair.out.parent) == []


def test_a_full_output_folder_that_appears_late_is_never_overwritten(pair, result):
    def appear(progress):
        if progress.stage == "publishing":
            pair.out.mkdir(exist_ok=True)
            (pair.out / "theirs").write_bytes(b"theirs")

    with pytest.raises(OutputError, match="could not be given its name") as caught:
        fold(pair, on_progress=appear)
    assert contents(pair.out) == {"theirs": b"theirs"}
    kept = Path(re.search(r"stands at (\S+):", caught.value.hint)[1])
    assert contents(kept) == result


@pytest.mark.parametrize("when", ["before", "late"])
def test_an_empty_output_folder_is_replaced(pair, result, when):
    if when == "before":
        pair.out.mkdir()
    fold(pair, on_progress=lambda progress: pair.out.mkdir(exist_ok=True) if progress.stage == "publishing" else None)
    assert contents(pair.out) == result
    assert names(pair.out.parent) == ["out"]


def test_a_full_output_folder_is_refused_before_any_work(pair, result):
    pair.out.mkdir()
    (pair.out / "theirs").write_bytes(b"theirs")
    with pytest.raises(PlanError, match="the output exists"):
        fold(pair)
    assert contents(pair.out) == {"theirs": b"theirs"}
    fold(pair, number=True)
    assert contents(pair.out.with_name("out_1")) == result
    fold(pair, overwrite=True)
    assert contents(pair.out) == result


@pytest.mark.parametrize("which", ["dense", "shipped", "adapter"])
def test_an_output_that_is_an_input_or_inside_one_is_refused(pair, which):
    before = inputs(pair)
    folder = {"dense": pair.dense, "shipped": pair.shipped, "adapter": pair.root / "adapter"}[which]
    for out in (folder, folder / "out") if which != "adapter" else (folder,):
        pair.out = out
        with pytest.raises(PlanError, match="replace input"):
            fold(pair, overwrite=True)
    assert inputs(pair) == before


@pytest.mark.parametrize("which", ["dense", "shipped", "adapter"])
def test_an_input_that_changes_during_the_run_is_refused(pair, which):
    path = {
        "dense": pair.dense / "model-00001-of-00002.safetensors",
        "shipped": pair.shipped / "tokenizer.json",
        "adapter": pair.root / "adapter" / "adapter_model.safetensors",
    }[which]
    with pytest.raises(FileError, match="written to") as caught:
        fold(pair, on_progress=lambda progress: os.utime(path, ns=(1, 1)))
    assert caught.value.file == str(path)
    assert names(pair.out.parent) == []


def test_a_cancelled_run_leaves_nothing(pair):
    token = lib_merge.CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        fold(pair, cancel=token)
    assert names(pair.out.parent) == []


def test_what_dead_runs_left_is_swept(pair):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = pair.out.parent / f".out.lib_merge-{int(process.stdout)}-0123abcd.part"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    fold(pair)
    assert names(pair.out.parent) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_command_leaves_nothing_under_its_name(tmp_path, number):
    pair = Pair(tmp_path, shapes={Q: (4096, 2048), DOWN: (4096, 2048)})
    pair.adapter(rank=64)
    (tmp_path / "to").mkdir()
    out, before = tmp_path / "to" / "out", inputs(pair)
    command = [sys.executable, "-m", "lib_merge", "fold", str(pair.dense), str(tmp_path / "adapter"), str(out),
               "--quantize", str(pair.shipped), "--threads", "1"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not names(tmp_path / "to") and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    printed, said = process.communicate(timeout=120)
    assert process.returncode in (-signal.SIGKILL, 130), said
    assert printed == ""
    assert not out.exists()
    left = names(tmp_path / "to")
    assert all(re.fullmatch(r"\.out\.lib_merge(-\d+-[0-9a-f]+\.part|\.lock)", name) for name in left)
    assert number == signal.SIGKILL or left == []
    assert inputs(pair) == before
    lib_merge.fold(pair.dense, tmp_path / "adapter", out, quantize=pair.shipped)
    assert names(tmp_path / "to") == ["out"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are a POSIX matter")
def test_a_limit_of_the_system_on_file_sizes(pair):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "from lib_merge.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["fold", str(pair.dense), str(pair.root / "adapter"), str(pair.out), "--quantize", str(pair.shipped)]
    made = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 1, made.stderr
    assert "cannot write: File too large" in made.stderr
    assert names(pair.out.parent) == []
