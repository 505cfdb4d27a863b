"""One background run: id, state, progress, log, cancel; knows no user interface and no torch."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import CancelledError, PlanError
from .events import CancelToken, OnProgress, Progress

State = Literal["waiting", "running", "done", "failed", "stopped"]
Work = Callable[[OnProgress, CancelToken], Any]


@dataclass(eq=False)
class Job:
    """A run in a thread of its own.

    Args:
        title: one line for people.
        work: does the run; is given the progress callback and the cancel token.

    Attributes:
        id: unique, for look-ups after a page was loaded again.
        state: waiting, running, and then one of done, failed, stopped.
        progress: the latest; None before the first.
        log: lines with what happened, oldest first.
        result: what `work` returned.
        error: what it raised.
        started, ended: seconds since the epoch; 0 when not yet.
    """

    title: str
    work: Work
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    state: State = "waiting"
    progress: Progress | None = None
    log: list[str] = field(default_factory=list)
    result: Any = None
    error: BaseException | None = None
    started: float = 0.0
    ended: float = 0.0
    _cancel: CancelToken = field(default_factory=CancelToken)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def share(self) -> float:
        """How much of it is done, 0 … 1, as the latest progress says."""
        return (
            self.progress.done_bytes / self.progress.total_bytes if self.progress and self.progress.total_bytes else 0.0
        )

    @property
    def seconds(self) -> float:
        """Wall time since the start, up to the end."""
        return max(0.0, (self.ended or time.time()) - self.started) if self.started else 0.0

    @property
    def per_second(self) -> float | None:
        """Bytes (or what else the progress counts) of the result per second; None while that says nothing yet."""
        if self.progress is None or self.progress.stage != "merging" or self.share <= 0.02 or self.seconds <= 1:
            return None
        return self.progress.done_bytes / self.seconds

    @property
    def seconds_left(self) -> float | None:
        """What is left at that speed; None while that says nothing yet."""
        return self.seconds * (1 - self.share) / self.share if self.per_second else None

    def start(self) -> Job:
        """Begin in a new thread; returns at once. A job that was stopped while it waited stays stopped."""
        with self._lock:
            if self.started:
                raise RuntimeError("a job starts once")
            if self.state != "waiting":
                return self
            self.started = time.time()
            self.state = "running"
        threading.Thread(target=self._run, name=f"lib_merge-job-{self.id}", daemon=True).start()
        return self

    def stop(self) -> None:
        """Ask the run to stop at its next tile; one that waits is stopped at once."""
        self._cancel.cancel()
        with self._lock:
            if self.state == "waiting":
                self.error = CancelledError("the run was stopped before it began")
                self._end("stopped")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when the time ran out first."""
        return self._over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.result = self.work(self._follow, self._cancel)
            self._end("done")
        except CancelledError as error:
            self.error = error
            self._end("stopped")
        except BaseException as error:
            self.error = error
            self._end("failed")

    def _follow(self, progress: Progress) -> None:
        if self.progress is None or progress.stage != self.progress.stage:
            self.log.append(progress.stage)
        self.progress = progress

    def _end(self, state: State) -> None:
        self.ended = time.time()
        if isinstance(self.error, PlanError):
            self.log += [problem.what for problem in self.error.problems]
        else:
            self.log.append(state if self.error is None else str(self.error) or type(self.error).__name__)
        self.state = state
        self._over.set()
