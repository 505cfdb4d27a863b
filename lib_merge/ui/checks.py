"""Verifying a result in the background: one check at a time, shown by whichever page asks."""

from __future__ import annotations

import threading
from pathlib import Path

from ..errors import MergeError
from ..host import Host
from ..job import Job
from ..verify import Verified, verify
from . import cards, run_cards
from .past import model_folders


class Checks:
    """The check that goes on, or went on last, in this process."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._lock = threading.Lock()

    @property
    def latest(self) -> Job | None:
        """The check that goes on or ended last."""
        return self._job

    def start(self, path: Path, host: Host) -> Job:
        """Begin to verify a result.

        Raises:
            MergeError: another check goes on.
        """
        with self._lock:
            if self._job is not None and not self._job.wait(0):
                raise MergeError("another check goes on", hint="wait for its end, or stop it")
            self._job = Job(
                f"Verifying {path.name}",
                lambda follow, cancel: verify(
                    path,
                    models=model_folders(host),
                    on_progress=follow,
                    cancel=cancel,
                    cache=host.hashes(),
                    threads=host.threads,
                ),
            )
            return self._job.start()

    def stop(self) -> None:
        """Ask the check that goes on to stop."""
        if self._job is not None:
            self._job.stop()


def card(job: Job) -> str:
    """A check as it stands."""
    return verdict(job.title, job.result) if job.state == "done" else run_cards.job_card(job)


def verdict(title: str, found: Verified) -> str:
    """What came of a check."""
    lines = [title]
    if found.missing_inputs:
        lines.append(f"Not found, or there with other contents: {', '.join(found.missing_inputs)}")
        return _card("Not verified", lines, "bad")
    if found.differing:
        lines += [f"{len(found.differing)} of {found.compared} tensors differ:", ", ".join(found.differing[:10])]
        return _card("Different", lines, "bad")
    lines.append(f"{found.compared:,} tensors are what the recipe says.")
    if found.within_2_ulp:
        lines.append(f"{len(found.within_2_ulp)} differ within 2 units in the last place: made on another CPU.")
    return _card("Verified", lines, "good")


def _card(title: str, lines: list[str], tone: str) -> str:
    return cards.note_card(title, lines, tone=tone)


CHECKS = Checks()
