"""Promise 4 on whole runs: a kill, a full disk, an error or a changed input at any point loses nothing.

At each point there is no output or a whole one, no input has changed, and the next run clears away what is left.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lib_merge
from lib_merge.errors import CancelledError, FileError, MergeError, NumberError, OutputError, PlanError, RecipeError
from lib_merge.files.temporary import sweep
from lib_merge.samples import make_sample
from tests.support import descriptors, failing

ROOT = Path(__file__).resolve().parent.parent
OUT = "out.safetensors"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No run reads or writes the user's own cache of hashes, and each hashes its inputs anew."""
    monkeypatch.setenv("LIB_MERGE_CACHE", str(tmp_path_factory.mktemp("cache")))


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(root):
    """Relative path -> sha256 of every file of a folder; of a file, its own."""
    files = [root] if root.is_file() else [item for item in root.rglob("*") if item.is_file()]
    return {item.relative_to(root.parent).as_posix(): sha(item) for item in files}


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def leftovers(folder):
    return [name for name in names(folder) if ".lib_merge-" in name]


class Job:
    """Two inputs, what merging them gives, and a way to tell that they are as they were."""

    def __init__(self, a, b, folder):
        self.a, self.b = a, b
        self.before = (tree(a), tree(b))
        self.made = folder / (OUT if a.is_file() else "out")
        lib_merge.merge(a, b, out=self.made, alpha=0.25)
        self.result = tree(self.made)

    def inputs_are_as_they_were(self):
        return (tree(self.a), tree(self.b)) == self.before


def merged(a, b):
    """A + (B − A) / 4 in float32, rounded once to float16, by numpy."""
    wide = a.astype(np.float32)
    return (wide + np.float32(0.25) * (b.astype(np.float32) - wide)).astype(np.float16)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A run of about a second: two sample models of 34 MB with the tensors of SD1.5."""
    root = tmp_path_factory.mktemp("large")
    return Job(*(make_sample(root / f"{name}.safetensors", n, shrink=8) for n, name in enumerate("ab")), root)


def shards(root, seed):
    """A sharded model with side files, of about 25 MB."""
    rng = np.random.default_rng(seed)
    root.mkdir()
    home = {}
    for number in range(1, 4):
        name = f"model-0000{number}-of-00003.safetensors"
        tensors = {
            f"model.layers.{number}{n}.mlp.up_proj.weight": rng.standard_normal((512, 1024)).astype(np.float16)
            for n in range(8)
        }
        save_file(tensors, root / name, {"format": "pt"})
        home |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    (root / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "vocab.json").write_bytes(bytes(100_000))
    return root


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    return Job(shards(root / "a", 1), shards(root / "b", 2), root)


def small_models(root):
    """Models of a few tensors, so that a run makes few calls: merged ones, copied ones, one that only A has."""
    rng = np.random.default_rng(3)
    shapes = {f"model.diffusion_model.{n}.weight": (40, 30) for n in range(3)}
    for name in "ab":
        tensors = {key: rng.standard_normal(shape).astype(np.float16) for key, shape in shapes.items()}
        tensors["position_ids"] = np.arange(77)
        if name == "a":
            tensors["only.a"] = rng.standard_normal(900).astype(np.float16)
        save_file(tensors, root / f"{name}.safetensors", {"format": "pt"})
    return root / "a.safetensors", root / "b.safetensors"


@pytest.fixture
def small(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    return Job(*small_models(root), root)


def test_what_the_runs_are_compared_with_is_right(large, sharded):
    pairs = [(large.a, large.b, large.made)]
    pairs += [(sharded.a / name, sharded.b / name, sharded.made / name) for name in names(sharded.a) if "-of-" in name]
    for a, b, out in pairs:
        ours, first, second = load_file(out), load_file(a), load_file(b)
        assert set(ours) == set(first)
        for key, value in ours.items():
            expected = merged(first[key], second[key]) if value.dtype == np.float16 else first[key]
            assert np.array_equal(value, expected), key


# Killed at random moments.

SERVER = """
    import json, os, sys, time
    import torch, msgspec
    import lib_merge

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                if "limit" in request:
                    import resource
                    resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
                lib_merge.merge(*request["models"], out=request["out"], alpha=0.25, overwrite=request["overwrite"])
            except lib_merge.MergeError as error:
                print(json.dumps(str(error)), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        sys.stdin.readline()  # until then the number stays the child's own
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process that has torch loaded and forks a child for each merge: starting one takes milliseconds."""
    root = tmp_path_factory.mktemp("server")
    with (root / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "LIB_MERGE_CACHE": "/dev/null/none"},
        )
        process.errors = root / "errors"
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


def run_child(server, job, out, *, kill_after=None, writing=False, overwrite=False, **request):
    """Exit status of a merge in a process of its own, killed after some seconds (from its first write on)."""
    request |= {"models": [str(job.a), str(job.b)], "out": str(out), "overwrite": overwrite}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    if kill_after is not None:
        deadline = time.monotonic() + 20
        while writing and not leftovers(out.parent) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    server.stdin.write("\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@pytest.fixture(scope="module")
def duration(server, large, sharded, tmp_path_factory):
    """Seconds that each run takes in such a process."""
    root, took = tmp_path_factory.mktemp("whole"), {}
    for job in (large, sharded):
        start = time.perf_counter()
        assert run_child(server, job, root / job.made.name) == 0
        took[job.made.name] = time.perf_counter() - start
        assert tree(root / job.made.name) == job.result
    return took


def kill_and_run_again(server, job, folder, overwrite, **moment):
    """Kill a run, look at what is there, run again, look again; True where the kill came while it wrote."""
    folder.mkdir()
    out = folder / job.made.name
    old = None
    if overwrite:
        if job.made.is_file():
            out.write_bytes(b"what stood there before")
        else:
            out.mkdir()
            (out / "x").write_bytes(b"what stood there before")
        old = tree(out)
    run_child(server, job, out, overwrite=overwrite, **moment)
    left = leftovers(folder)
    sweep(folder)  # puts back a folder that was killed between two renames, as every start does
    there = tree(out) if out.exists() else None
    assert there in (old, job.result), "a part of an output under its final name"
    assert job.inputs_are_as_they_were()
    lib_merge.merge(job.a, job.b, out=out, alpha=0.25, overwrite=there is not None)
    assert tree(out) == job.result
    assert names(folder) == [out.name]
    assert job.inputs_are_as_they_were()
    return bool(left)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_run_leaves_no_part_of_an_output(server, large, sharded, duration, tmp_path, kind, overwrite):
    job, moments, rng = (large, 5, random.Random(1)) if kind == "file" else (sharded, 4, random.Random(2))
    hits = []
    for number in range(moments):
        share = (number + rng.random()) / moments
        if number % 2:
            moment = {"kill_after": share * duration[job.made.name]}
        else:
            moment = {"kill_after": share * number * 0.05, "writing": True}
        hits.append(kill_and_run_again(server, job, tmp_path / str(number), overwrite, **moment))
    assert any(hits), "no kill came while the output was written"


def test_a_start_sweeps_what_dead_runs_left(server, small, tmp_path):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = int(process.stdout)
    (tmp_path / f".x.safetensors.lib_merge-{dead}-0123abcd.part").write_bytes(b"half")
    (tmp_path / f".y.safetensors.lib_merge-{server.pid}-0123abcd.part").write_bytes(b"somebody is at it")
    lib_merge.merge(small.a, small.b, out=tmp_path / OUT)
    assert leftovers(tmp_path) == [f".y.safetensors.lib_merge-{server.pid}-0123abcd.part"]


# Interrupted on the command line.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_command_leaves_nothing(large, tmp_path, number):
    out = tmp_path / OUT
    command = [sys.executable, "-m", "lib_merge", "merge", str(large.a), str(large.b), "-o", str(out), "--threads", "1"]
    for _ in range(3):  # a machine that is busy elsewhere may let the run end first
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not leftovers(tmp_path) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        printed, said = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        assert tree(out)
        out.unlink()
    assert process.returncode == 130
    assert printed == ""
    assert "interrupted" in said
    assert "Traceback" not in said
    assert names(tmp_path) == []
    assert large.inputs_are_as_they_were()


# A disk that is full.


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.99])
def test_a_limit_of_the_system_on_file_sizes(server, large, tmp_path, share):
    limit = int(share * large.made.stat().st_size)
    assert run_child(server, large, tmp_path / OUT, limit=limit) == 1
    said = server.errors.read_text().splitlines()[-1]
    assert "cannot write: File too large" in said
    assert str(tmp_path / OUT) in json.loads(said)
    assert names(tmp_path) == []
    assert large.inputs_are_as_they_were()


def test_too_little_room_is_found_before_the_run(small, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5_000, 5_000))
    with pytest.raises(PlanError, match="not enough room"):
        lib_merge.merge(small.a, small.b, out=tmp_path / OUT)
    assert names(tmp_path) == ["in"]


CALLS = ("open", "pwrite", "copy_file_range", "ftruncate", "fsync", "close", "link", "replace", "unlink", "preadv")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CALLS)
def test_an_error_in_every_nth_call(small, tmp_path, monkeypatch, name, number, overwrite):
    met = 0
    for nth in itertools.count(1):
        folder = tmp_path / f"run-{nth}"
        folder.mkdir()
        if overwrite:
            (folder / OUT).write_bytes(b"what stood there before")
        call, hit = failing(name, nth, number)
        before, threads = descriptors(), threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            error = None
            try:
                lib_merge.merge(small.a, small.b, out=folder / OUT, alpha=0.25, overwrite=overwrite, tile=500)
            except MergeError as caught:
                error = caught
        assert (descriptors(), threading.active_count()) == (before, threads)
        assert small.inputs_are_as_they_were()
        if error is None:
            assert tree(folder / OUT) == small.result
            assert names(folder) == [OUT]
        else:
            judge_failure(folder, error, small, overwrite)
        if not hit:
            assert error is None
            break
        met += 1
    assert met or (name == "link" and overwrite) or (name == "replace" and not overwrite) or name == "unlink"
    if name == "pwrite":
        assert met >= 10  # two headers and the tiles of three tensors


def judge_failure(folder, error, job, overwrite):
    """Nothing new under the final name, and nothing beside it unless only the rename failed."""
    there = (folder / OUT).read_bytes() if (folder / OUT).exists() else None
    assert there == (b"what stood there before" if overwrite else None)
    kept = re.search(r"stands at (\S+):", error.hint or "")
    if kept:
        assert leftovers(folder) == [Path(kept[1]).name]
        assert list(tree(Path(kept[1])).values()) == list(job.result.values())
    else:
        assert leftovers(folder) == []
    assert isinstance(error, (OutputError, FileError, PlanError))
    assert error.file


# Inputs that are broken, or become so.


@pytest.mark.parametrize("length", [0, 5, 100, 0.5, -1])
@pytest.mark.parametrize("which", ["A", "B", "C", "vae"])
def test_a_truncated_input_is_named_and_nothing_is_written(small, tmp_path, which, length):
    paths = {slot: shutil.copy(small.a, tmp_path / f"{slot}.safetensors") for slot in ("A", "B", "C", "vae")}
    bad = paths[which]
    size = bad.stat().st_size
    os.truncate(bad, int(size * length) if isinstance(length, float) else length % size)
    (tmp_path / "to").mkdir()
    with pytest.raises(PlanError) as caught:
        lib_merge.merge(
            paths["A"], paths["B"], paths["C"], out=tmp_path / "to" / OUT, method="add_difference", vae=paths["vae"]
        )
    assert {problem.file for problem in caught.value.problems} == {str(bad)}
    assert f"model {which}" in caught.value.what
    assert names(tmp_path / "to") == []


def during(stage, action):
    """A listener that does something once, when the run has come to a stage."""
    done = []

    def listen(progress):
        if progress.stage == stage and not done:
            done.append(1)
            action()

    return listen


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def touch(path):
    os.utime(path, ns=(1, 1))


def replace_by_another(path):
    shutil.copy(path, path.with_name("other"))
    os.utime(path.with_name("other"), ns=(1, 1))
    path.with_name("other").replace(path)


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("change", [lengthen, touch, replace_by_another, Path.unlink])
def test_an_input_that_changes_during_the_run_is_refused(small, tmp_path, which, change):
    path = getattr(small, which)
    with pytest.raises(FileError) as caught:
        lib_merge.merge(small.a, small.b, out=tmp_path / OUT, on_progress=during("merging", lambda: change(path)))
    assert caught.value.file == str(path)
    assert names(tmp_path) == ["in"]


def test_an_input_that_is_cut_off_during_the_run_is_refused(large, tmp_path):
    copies = [shutil.copy(path, tmp_path / path.name) for path in (large.a, large.b)]
    for path in copies:
        whole = path.read_bytes()
        listen = during("merging", lambda path=path: os.truncate(path, 200_000))
        with pytest.raises(FileError) as caught:
            lib_merge.merge(*copies, out=tmp_path / OUT, threads=1, on_progress=listen)
        assert caught.value.file == str(path)
        assert names(tmp_path) == sorted(copy.name for copy in copies)
        path.write_bytes(whole)


def test_a_number_that_is_not_finite_leaves_nothing(small, tmp_path):
    tensors = load_file(small.b)
    tensors["model.diffusion_model.2.weight"][39, 29] = np.nan
    save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(NumberError) as caught:
        lib_merge.merge(small.a, tmp_path / "b.safetensors", out=tmp_path / OUT)
    assert (caught.value.file, caught.value.tensor) == (
        str(tmp_path / "b.safetensors"), "model.diffusion_model.2.weight"
    )  # fmt: skip
    assert names(tmp_path) == ["b.safetensors", "in"]


@pytest.mark.parametrize("stage", ["merging", "hashing"])
def test_a_cancelled_run_leaves_nothing(large, tmp_path, monkeypatch, stage):
    def slow(path, stop):
        while not stop():
            time.sleep(0.01)
        return ""

    monkeypatch.setattr("lib_merge.files.hashes.sha256_file", slow)
    token = lib_merge.CancelToken()
    with pytest.raises(CancelledError):
        lib_merge.merge(large.a, large.b, out=tmp_path / OUT, on_progress=during(stage, token.cancel), cancel=token)
    assert names(tmp_path) == []
    assert large.inputs_are_as_they_were()


# The output's name.


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("how", ["itself", "symlink", "dots"])
def test_an_output_that_is_an_input_is_refused(small, tmp_path, which, how):
    path = getattr(small, which)
    if how == "symlink":
        (tmp_path / "link.safetensors").symlink_to(path)
        path = tmp_path / "link.safetensors"
    elif how == "dots":
        (tmp_path / "sub").mkdir()
        path = tmp_path / "sub" / ".." / "in" / path.name
    with pytest.raises(PlanError, match="replace input"):
        lib_merge.merge(small.a, small.b, out=path, overwrite=True)
    assert small.inputs_are_as_they_were()


def test_a_shard_of_an_input_is_not_overwritten(small, sharded, tmp_path):
    folder = shutil.copytree(sharded.b, tmp_path / "b")
    save_file(load_file(sharded.a / "model-00001-of-00003.safetensors"), tmp_path / "a.safetensors")
    before = tree(folder)
    for name in ("model-00001-of-00003.safetensors", "new.safetensors"):
        with pytest.raises(PlanError, match="lie inside"):
            lib_merge.merge(tmp_path / "a.safetensors", folder, out=folder / name, overwrite=True)
    assert tree(folder) == before


def test_an_existing_output_is_kept_unless_told(small, tmp_path):
    out = tmp_path / OUT
    out.write_bytes(b"old")
    with pytest.raises(PlanError, match="the output exists"):
        lib_merge.merge(small.a, small.b, out=out, alpha=0.25)
    assert out.read_bytes() == b"old"
    with pytest.raises(RecipeError, match="exclude each other"):
        lib_merge.merge(small.a, small.b, out=out, number=True, overwrite=True)
    assert lib_merge.merge(small.a, small.b, out=out, number=True, alpha=0.25).output == tmp_path / "out_1.safetensors"
    assert out.read_bytes() == b"old"
    lib_merge.merge(small.a, small.b, out=out, overwrite=True, alpha=0.25)
    assert tree(out) == small.result


def test_an_output_that_appears_during_the_run_is_kept(small, tmp_path):
    out = tmp_path / OUT
    appear = during("publishing", lambda: out.write_bytes(b"somebody else's"))
    with pytest.raises(OutputError) as caught:
        lib_merge.merge(small.a, small.b, out=out, alpha=0.25, on_progress=appear)
    assert out.read_bytes() == b"somebody else's"
    (left,) = leftovers(tmp_path)
    assert str(tmp_path / left) in caught.value.hint
    assert sha(tmp_path / left) == small.result[OUT]


def test_runs_at_the_same_time_do_not_disturb_each_other(large, tmp_path):
    failures = []

    def work(name):
        try:
            lib_merge.merge(large.a, large.b, out=tmp_path / name, alpha=0.25, threads=1)
        except MergeError as error:
            failures.append(error)

    targets = ["one.safetensors", "two.safetensors", "same.safetensors", "same.safetensors"]
    threads = [threading.Thread(target=work, args=(name,)) for name in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sha(tmp_path / name) for name in sorted(set(targets))] == [*large.result.values()] * 3
    assert len(failures) == 1
    assert "another run is writing" in failures[0].what or "exists" in failures[0].what
