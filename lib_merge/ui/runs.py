"""The runs of this process: one at a time, and the last one is remembered for pages that are loaded again."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace

from ..errors import MergeError
from ..events import CancelToken, OnProgress
from ..execute import Result
from ..host import Host
from ..job import Job
from ..lora import LoraResult
from .form import Request
from .past import recorded


@dataclass(frozen=True)
class Run:
    """A job with what was asked for."""

    job: Job
    request: Request

    @property
    def over(self) -> bool:
        """True once there is a result or a reason why there is none."""
        return self.job.state in ("done", "failed", "stopped")


class Runs:
    """Starts jobs, one at a time."""

    def __init__(self) -> None:
        self._latest: Run | None = None
        self._lock = threading.Lock()

    @property
    def latest(self) -> Run | None:
        """The run that goes on or ended last."""
        return self._latest

    def start(self, request: Request, host: Host) -> Run:
        """Begin a run in the background.

        Raises:
            MergeError: another one goes on.
        """
        with self._lock:
            if self._latest is not None and not self._latest.over:
                raise MergeError("another run goes on", hint="wait for its end, or stop it")
            title = f"{request.task.label}: {request.target.name}"
            self._latest = Run(Job(title, lambda follow, cancel: _work(request, host, title, follow, cancel)), request)
            self._latest.job.start()
            return self._latest

    def stop(self) -> None:
        """Ask the run that goes on to stop."""
        if self._latest is not None:
            self._latest.job.stop()


def _work(
    request: Request, host: Host, title: str, on_progress: OnProgress, cancel: CancelToken
) -> Result | LoraResult:
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


# Of this process: pages come and go, also when a host builds its interface anew, and find the run again.
RUNS = Runs()
