from __future__ import annotations

import re
import threading
import time

import pytest

import lib_merge
from lib_merge import CancelledError, Job, MergeError, PlanError, Problem, Progress
from tests.support import values, write, write_sparse

portable = pytest.mark.portable


def merging(*paths, **options):
    """The work of a job: a merge that can be followed and stopped."""
    return lambda follow, cancel: lib_merge.merge(*paths, on_progress=follow, cancel=cancel, **options)


@portable
def test_a_job_waits_runs_and_is_done():
    go, seen = threading.Event(), []

    def work(follow, cancel):
        seen.append(threading.current_thread())
        follow(Progress("merging", 1, 4, "w"))
        go.wait(10)
        follow(Progress("merging", 4, 4))
        follow(Progress("publishing", 4, 4))
        return "result"

    job = Job("A + B", work)
    assert (job.state, job.progress, job.started, job.result) == ("waiting", None, 0.0, None)
    before = time.time()
    assert job.start() is job
    assert job.wait(0.05) is False
    assert job.state == "running"
    assert before <= job.started <= time.time()
    while job.progress is None:
        time.sleep(0.001)
    assert job.progress == Progress("merging", 1, 4, "w")
    go.set()
    assert job.wait(10)
    assert (job.state, job.result, job.error) == ("done", "result", None)
    assert job.log == ["merging", "publishing", "done"]
    assert job.started <= job.ended <= time.time()
    assert seen[0] is not threading.current_thread()


@portable
def test_an_error_is_kept_and_stands_in_the_log():
    def work(follow, cancel):
        raise MergeError("it broke", file="a.safetensors")

    job = Job("x", work).start()
    assert job.wait(10)
    assert (job.state, job.result) == ("failed", None)
    assert isinstance(job.error, MergeError)
    assert job.log == ["it broke (file a.safetensors)"]


@portable
@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_no_error_is_lost(error):
    def work(follow, cancel):
        raise error

    job = Job("x", work).start()
    assert job.wait(10)
    assert (job.state, job.error) == ("failed", error)
    assert job.log[-1]


@portable
def test_all_problems_of_a_plan_stand_in_the_log():
    def work(follow, cancel):
        raise PlanError([Problem("error", "one"), Problem("error", "two")])

    job = Job("x", work).start()
    assert job.wait(10)
    assert job.log == ["one", "two"]


@portable
def test_a_job_that_is_told_to_stop_stops():
    def work(follow, cancel):
        while not cancel.cancelled:
            time.sleep(0.001)
        raise CancelledError("the run was stopped")

    job = Job("x", work).start()
    job.stop()
    job.stop()
    assert job.wait(10)
    assert (job.state, job.result) == ("stopped", None)


@portable
def test_a_job_that_is_stopped_while_it_waits_never_runs():
    ran = []
    job = Job("x", lambda follow, cancel: ran.append(1))
    job.stop()
    assert (job.state, job.wait(0), job.started) == ("stopped", True, 0.0)
    assert isinstance(job.error, CancelledError)
    assert job.start().state == "stopped"
    assert ran == []


@portable
def test_a_job_starts_once_and_has_an_id_of_its_own():
    job = Job("x", lambda follow, cancel: None).start()
    with pytest.raises(RuntimeError):
        job.start()
    assert job.wait(10)
    with pytest.raises(RuntimeError):
        job.start()
    assert len({Job("x", job.work).id for _ in range(100)}) == 100
    assert len({job, Job("x", job.work)}) == 2


def test_a_merge_as_a_job(tmp_path):
    paths = [write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), n)}) for n, name in enumerate("ab")]
    job = Job("A + B", merging(*paths, out=tmp_path / "out.safetensors")).start()
    assert job.wait(60)
    assert (job.state, job.result.output, job.result.merged) == ("done", tmp_path / "out.safetensors", 1)
    assert job.log[0] == "merging"
    assert job.log[-1] == "done"
    assert job.progress.done_bytes == job.progress.total_bytes
    failed = Job("A + B", merging(*paths, out=tmp_path / "out.safetensors")).start()
    assert failed.wait(60)
    assert (failed.state, failed.log) == ("failed", ["the output exists"])


@pytest.mark.parametrize("options", [{}, {"exclude": ["w"], "include_mode": False}], ids=["merged", "copied"])
def test_stop_ends_a_long_merge_at_once(tmp_path, options):
    # 2 GB of output: some seconds of work; the inputs take no room
    tensors = {f"w{n}": ("F16", (1 << 26,)) for n in range(15)} | {"v": ("F16", (1 << 26,))}
    paths = [write_sparse(tmp_path / f"{name}.safetensors", tensors) for name in "ab"]
    job = Job("A + B", merging(*paths, out=tmp_path / "out.safetensors", fsync=False, **options)).start()
    deadline = time.monotonic() + 60
    while not (job.progress and job.progress.done_bytes):
        assert job.state == "running", job.error
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert job.progress.total_bytes == 16 << 27
    job.stop()
    asked = time.time()
    assert job.wait(30)
    assert job.state == "stopped"
    assert job.ended - asked < 1.5
    assert job.progress.done_bytes < job.progress.total_bytes
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    assert not [thread for thread in threading.enumerate() if re.match(r"lib_merge-(?!job)", thread.name)]


def test_a_job_stopped_before_it_began_writes_nothing(tmp_path):
    paths = [write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), n)}) for n, name in enumerate("ab")]
    job = Job("A + B", merging(*paths, out=tmp_path / "out.safetensors"))
    job.stop()
    job.start()
    assert job.wait(60)
    assert job.state == "stopped"
    assert not (tmp_path / "out.safetensors").exists()
