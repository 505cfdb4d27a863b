"""The command line `lib-merge`: options to recipes, results to text or one JSON object.

Nothing else in the library prints, and nothing here decides what a merge does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from .. import starting
from ..errors import MergeError
from ..version import __version__
from . import folding, keeping, lora, reading, serving, writing
from .show import print_error, print_usage_error


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="lib-merge")
def cli() -> None:
    """Merge checkpoints by streaming: exact, reproducible, verifiable, in a few hundred MB of memory."""


for _module in (writing, folding, lora, reading, keeping, serving):
    _commands = [item for item in vars(_module).values() if isinstance(item, click.Command)]
    _below = [item for group in _commands if isinstance(group, click.Group) for item in group.commands.values()]
    for _command in _commands:
        if _command not in _below:
            cli.add_command(_command)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        0 done or check passed, 1 stopped or failed, 2 the command line cannot be parsed, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    for stream in (sys.stdout, sys.stderr):  # a console that lacks a character shows its number instead
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, _terminated)
        starting.loaded()
        cli.main(args=words, prog_name="lib-merge", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        print_usage_error(error, as_json)
        return 2
    except (click.Abort, KeyboardInterrupt):
        print_error(MergeError(starting.TOLD), as_json)
        return starting.INTERRUPTED
    except MergeError as error:
        if "--debug" in words:
            raise
        print_error(error, as_json)
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)
    except BrokenPipeError:  # who read our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for what Python still flushes at its end
        return 1
    except Exception as error:
        if "--debug" in words:
            raise
        hint = "this should not happen: run it again with --debug and report what it shows"
        print_error(MergeError(f"{type(error).__name__}: {error}", hint=hint), as_json)
        return 1
    return 0


def run() -> NoReturn:
    """The whole process: the command line, then its exit status."""
    status = main()
    if status == starting.INTERRUPTED:  # torch may be half loaded: its own threads would abort an orderly end
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)
