"""A few threads at work on one list."""

from __future__ import annotations

import threading

import pytest
import torch

from lib_merge.crew import Crew
from lib_merge.errors import CancelledError
from lib_merge.events import CancelToken


def run(jobs, do, threads=3, cancel=None, beat=lambda: None):
    Crew(iter(jobs), lambda: do, threads=threads, beat=beat, cancel=cancel or CancelToken()).run()


@pytest.mark.parametrize("threads", [1, 4])
def test_every_job_is_done_once(threads):
    done = []
    run(range(200), done.append, threads)
    assert sorted(done) == list(range(200))


def test_each_thread_has_a_worker_of_its_own():
    made = []

    def worker():
        made.append(1)
        return lambda job: None

    Crew(iter(range(9)), worker, threads=3, beat=lambda: None, cancel=CancelToken()).run()
    assert len(made) == 3


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_error_stops_the_others_and_is_raised(threads):
    done = []

    def do(job):
        done.append(job)
        if job == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        run(range(10_000), do, threads)
    assert len(done) < 10_000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lib_merge-")]


def test_an_error_of_a_worker_that_cannot_start_is_raised():
    def worker():
        raise MemoryError

    with pytest.raises(MemoryError):
        Crew(iter(range(3)), worker, threads=2, beat=lambda: None, cancel=CancelToken()).run()


def test_it_stops_on_request():
    token, done = CancelToken(), []

    def do(job):
        done.append(job)
        if job == 3:
            token.cancel()

    with pytest.raises(CancelledError):
        run(range(10_000), do, 2, token)
    assert len(done) < 10_000


def test_an_interrupt_of_the_caller_ends_the_threads():
    hold = threading.Event()

    def beat():
        hold.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(range(4), lambda job: hold.wait(10), 2, beat=beat)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lib_merge-")]


def test_torch_gets_its_own_threads_back():
    before = torch.get_num_threads()
    seen = []
    run(range(3), lambda job: seen.append(torch.get_num_threads()), 2)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before
