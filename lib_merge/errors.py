"""Every error a user can meet: what happened, in which file, at which tensor, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


class MergeError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence, no trailing full stop.
        file: file or folder it is about, as the user named it.
        tensor: full tensor name it is about.
        hint: what the user can do.
    """

    def __init__(self, what: str, *, file: object = None, tensor: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        """`what (file …, tensor …)` on one line."""
        where = [f"{name} {value}" for name, value in (("file", self.file), ("tensor", self.tensor)) if value]
        return f"{self.what} ({', '.join(where)})" if where else self.what


class FileError(MergeError):
    """An input cannot be read, or is not what its name says."""


class RecipeError(MergeError):
    """A recipe, a method, a parameter or a pattern is not usable."""


class NumberError(MergeError):
    """A value that is not finite, in an input or in a result."""


class OutputError(MergeError):
    """The result cannot be written where it was asked for."""


class CancelledError(MergeError):
    """The run was stopped on request; nothing was published."""


@dataclass(frozen=True)
class Problem:
    """One finding of the planner, made from headers and the recipe alone."""

    level: Level
    what: str
    file: str | None = None
    tensor: str | None = None
    hint: str | None = None


class PlanError(MergeError):
    """The plan has problems that stop the run; `problems` holds all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        more = f" (and {len(self.problems) - 1} more problems)" if len(self.problems) > 1 else ""
        super().__init__(first.what + more, file=first.file, tensor=first.tensor, hint=first.hint)
