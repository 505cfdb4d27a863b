"""A few threads that take jobs from one list until it is empty, one fails, or the run is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import CancelledError
from .events import CancelToken
from .lazy import torch

Job = TypeVar("Job")

_BEAT_S = 0.1


class Crew(Generic[Job]):
    """Threads at work on one list of jobs.

    Args:
        jobs: taken in order, one at a time.
        worker: called once in each thread; gives the function that does a job there.
        threads: how many; torch uses one thread inside each.
        beat: called about ten times a second from the calling thread.
        cancel: stops the work before the next job.
    """

    def __init__(
        self,
        jobs: Iterator[Job],
        worker: Callable[[], Callable[[Job], None]],
        *,
        threads: int,
        beat: Callable[[], None],
        cancel: CancelToken,
    ) -> None:
        self._jobs, self._worker, self._threads, self._beat, self._cancel = jobs, worker, threads, beat, cancel
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stopped = False

    def run(self) -> None:
        """Do all jobs.

        Raises:
            CancelledError: it was stopped.
            BaseException: the first error of a job; work in the other threads has ended.
        """
        before = torch.get_num_threads()
        threads = [
            threading.Thread(target=self._work, name=f"lib_merge-{n}", daemon=True) for n in range(self._threads)
        ]
        try:
            self._beat()  # short runs have one too
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_BEAT_S)
                    self._beat()
        finally:  # an interrupt of the calling thread ends here too: no thread may outlive what it writes to
            self._stopped = self._stopped or any(thread.is_alive() for thread in threads)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            torch.set_num_threads(before)  # torch hands a worker's setting on to threads that start later
        if self._error is not None:
            raise self._error
        if self._cancel.cancelled:
            raise CancelledError("the run was stopped", hint="nothing was written under the output's name")

    def _work(self) -> None:
        torch.set_num_threads(1)
        try:
            do = self._worker()
            while (job := self._next()) is not None:
                do(job)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._stopped = True

    def _next(self) -> Job | None:
        with self._lock:
            return None if self._stopped or self._cancel.cancelled else next(self._jobs, None)
