"""Ctrl-C while the program itself is loading: one line and status 130, as later, instead of a traceback."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130
TOLD = "interrupted; what was not finished is removed"


def _loading() -> None:
    """From here on Ctrl-C ends the process quietly, if it is the command line that loads and not another program."""
    if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _end)


def loaded() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command_line() -> bool:
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    as_module = name == "-m" and "lib_merge" in sys.orig_argv[1:]
    return as_module or name.removesuffix(".exe") == "lib-merge"


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"error: {TOLD}\n".encode())
    os._exit(INTERRUPTED)


_loading()
