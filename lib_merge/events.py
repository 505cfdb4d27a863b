"""Progress and cancelling, as a run tells and hears them; knows no user interface."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["merging", "hashing", "publishing", "verifying", "comparing"]


@dataclass(frozen=True)
class Progress:
    """How far a run is: output done and in all, and the tensor worked on.

    Attributes:
        stage: what goes on.
        done_bytes, total_bytes: of the output; numbers of modules where `counted` says so.
        key: tensor or module worked on.
        counted: what the two count.
    """

    stage: Stage
    done_bytes: int
    total_bytes: int
    key: str = ""
    counted: Literal["bytes", "modules"] = "bytes"


OnProgress = Callable[[Progress], None]


class CancelToken:
    """Asks a run to stop; may be set from any thread, any number of times."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop the run at its next tile."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._event.is_set()
