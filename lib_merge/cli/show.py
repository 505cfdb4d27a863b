"""Results, errors and progress on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ..errors import MergeError, PlanError, Problem
from ..events import Progress


class Bar:
    """A progress bar on stderr, only where somebody watches."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        """Move the bar."""
        if self._bar is None:
            from tqdm import tqdm  # here: what only reads headers shows no bar and need not wait for it

            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, disable=None, leave=False)
        self._bar.set_description(progress.stage, refresh=False)
        self._bar.update(progress.done_bytes - self._bar.n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


def print_json(value: Any, indent: int | None = None) -> None:
    """One JSON value on stdout, in ASCII where the console is not UTF-8."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, indent=indent, ensure_ascii=not unicode))


def print_error(error: MergeError, as_json: bool) -> None:
    """An error with all its problems on stderr; with `as_json` one object on stdout too."""
    only = Problem("error", error.what, error.file, error.tensor, error.hint)
    problems = error.problems if isinstance(error, PlanError) else (only,)
    if as_json:
        print_json(error_fields(problems, error.what))
    print_problems(problems)


def error_fields(problems: Sequence[Problem], what: str | None = None) -> dict[str, Any]:
    """`error` and `problems` of a command that failed, for `--json`: the same fields whatever went wrong.

    Args:
        problems: all findings, the worst first; the first one is the error.
        what: the error in one sentence, where it is not the first finding's.
    """
    first = {name: value for name, value in vars(problems[0]).items() if name != "level"}
    return {"error": {**first, "what": what or problems[0].what}, "problems": [vars(problem) for problem in problems]}


def print_problems(problems: Iterable[Problem]) -> None:
    """`error:` and `hint:` lines on stderr."""
    for item in problems:
        where = [f"{name} {value}" for name, value in (("file", item.file), ("tensor", item.tensor)) if value]
        print(f"error: {item.what}" + (f" ({', '.join(where)})" if where else ""), file=sys.stderr)
        if item.hint:
            print(f"hint: {item.hint}", file=sys.stderr)


def print_usage_error(error: click.UsageError, as_json: bool) -> None:
    """What is wrong with a command line, and where its help is."""
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: click shows the help
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "lib-merge"
    print_error(MergeError(error.format_message(), hint=f"{command} --help"), as_json)
