"""The runs of this process: one works, the others wait; the last ones stay known to pages that are loaded again."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from ..errors import OutputError
from ..events import CancelToken, OnProgress
from ..host import Host
from ..job import Job
from .form import Made, Request
from .past import recorded

KEPT = 20
DOUBLE_CLICK_S = 1.5


@dataclass(frozen=True)
class Run:
    """A job with what was asked for.

    Attributes:
        job: its state, progress, log and result.
        request: what the form, or a call, asked for.
        asked: when, in seconds of `time.monotonic`.
    """

    job: Job
    request: Request
    asked: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """True once there is a result or a reason why there is none."""
        return self.job.state in ("done", "failed", "stopped")


class Runs:
    """Carries out one run after the other, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._lock = threading.Lock()
        self._server: threading.Thread | None = None

    @property
    def all(self) -> list[Run]:
        """The run that goes on, those that wait in their order, the last `KEPT` that are over, newest first."""
        runs = list(self._runs)
        over = sorted((run for run in runs if run.over), key=lambda run: run.job.ended, reverse=True)
        return [*(run for run in runs if not run.over), *over[:KEPT]]

    @property
    def latest(self) -> Run | None:
        """The run that goes on, or the next one, or the one that ended last."""
        return next(iter(self.all), None)

    @property
    def waiting(self) -> list[Run]:
        """Those that have not begun, the next one first."""
        return [run for run in self._runs if run.job.state == "waiting"]

    @property
    def busy(self) -> bool:
        """True while a run goes on or waits."""
        return any(not run.over for run in self._runs)

    def find(self, id: str) -> Run | None:
        """The run with that job id; None when it is not known any more."""
        return next((run for run in self._runs if run.job.id == id), None)

    def start(self, request: Request, host: Host) -> Run:
        """Put a run in line; it begins at once where nothing else goes on.

        What was asked for already and is not over, or was asked for a moment ago (a double click), is not done twice.

        Raises:
            MergeError: headers and recipe tell that it cannot run.
        """
        if (same := self._same(request)) is not None:
            return same
        request.check(host)
        with self._lock:
            if (same := self._same(request)) is not None:
                return same
            self._check_target(request)
            title = f"{request.task.label}: {request.target.name}"
            run = Run(Job(title, lambda follow, cancel: _work(request, host, title, follow, cancel)), request)
            known = self.all
            self._runs = [other for other in self._runs if other in known] + [run]
            if self._server is None:
                self._server = threading.Thread(target=self._serve, name="lib_merge-job-queue", daemon=True)
                self._server.start()
            return run

    def stop(self, id: str = "") -> None:
        """Ask a run to stop, at its next tile or before it has begun; without an id, the one that goes on."""
        run = self.find(id) if id else self.latest
        if run is not None and not run.over:
            run.job.stop()

    def _unfinished(self) -> list[Run]:
        return [run for run in self._runs if not run.over]

    def _same(self, request: Request) -> Run | None:
        now = time.monotonic()
        return next(
            (
                run
                for run in self._runs
                if run.request == request
                and (not run.over or (run.job.state == "done" and now - run.asked < DOUBLE_CLICK_S))
            ),
            None,
        )

    def _check_target(self, request: Request) -> None:
        """A file that is still to be made does not exist for the plan: it is looked for here."""
        taken = any(run.request.target == request.target for run in self._unfinished())
        if taken and request.exists == "stop":
            raise OutputError(
                "a run that is not over yet writes that file",
                file=request.target,
                hint="type another name, or let a number be added",
            )

    def _serve(self) -> None:
        """Carry out what is in line until nothing is."""
        while True:
            with self._lock:
                run = next(iter(self.waiting), None)
                if run is None:
                    self._server = None
                    return
            run.job.start()
            run.job.wait()


def _work(request: Request, host: Host, title: str, on_progress: OnProgress, cancel: CancelToken) -> Made:
    with (
        host.gpu() if request.device != "cpu" else nullcontext(),
        host.follow(title, cancel, on_progress) as told,
        recorded(request, host) as kept,
    ):
        made = request.run(host, on_progress=told, cancel=cancel)
        kept.append(made)
    try:
        host.refresh(request.task.writes)
    except Exception as error:  # the result is there, whatever the host makes of it
        made = replace(made, warnings=(*made.warnings, f"the lists of {host.name} were not refreshed: {error}"))
    return made


# Of this process: pages come and go, also when a host builds its interface anew, and find the runs again.
RUNS = Runs()
