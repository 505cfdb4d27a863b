"""Runs as they end -> the history; entries of the history -> texts, files and runs. Knows no gradio."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..catalog import Catalog, refuse_missing, search
from ..errors import CancelledError, FileError, MergeError
from ..execute import Result
from ..files.open import open_model
from ..fold import Folded
from ..history import Entry, History, Report, State, new_id
from ..host import Host, Kind
from ..presets import described, in_header, open_slots
from ..recipe import Recipe, to_json
from ..wording import count_of
from . import form
from .form import Request
from .task import Task
from .tasks.registry import BY_ID

_KINDS: tuple[Kind, ...] = ("checkpoint", "lora", "vae")
_STATES = {"done": "done", "failed": "not done", "stopped": "stopped"}


@contextmanager
def recorded(request: Request, host: Host) -> Iterator[list[Any]]:
    """Remembers the run that goes on inside, however it ends; its result is appended to the list that is given."""
    made: list[Any] = []
    started, begun = time.time(), time.monotonic()
    try:
        yield made
    except CancelledError:
        _remember(request, host, started, begun, "stopped", "nothing was written")
        raise
    except Exception as error:
        _remember(request, host, started, begun, "failed", _why(error))
        raise
    for result in made:
        _remember(request, host, started, begun, "done", _said(result), result)


def _why(error: Exception) -> str:
    return error.what if isinstance(error, MergeError) else f"{type(error).__name__}: {error}"


def _remember(
    request: Request, host: Host, started: float, begun: float, state: State, said: str, made: Any = None
) -> None:
    rows = [dict(row) for row in getattr(made, "rows", None) or ()]
    task = request.task
    entry = Entry(
        id=new_id(),
        task=task.id,
        state=state,
        started=started,
        seconds=time.monotonic() - begun,
        kind=task.writes,
        output=host.place_of(task.writes, made.output)[1] if made is not None else "",
        said=said,
        recipe=to_json(_with_hashes(request, made)),
        has_report=bool(rows),
    )
    report = Report(title=made.output.name, header=_header(request, made), rows=rows) if rows else None
    History(host.data()).add(entry, report)


def _with_hashes(request: Request, made: Any) -> Recipe:
    """The recipe as the result holds it, with the hashes of its inputs; as asked for where it holds none."""
    if made is not None:
        with suppress(MergeError, OSError), closing(open_model(made.output)) as source:
            return in_header(source.metadata, made.output)
    return request.recipe


def _said(made: Any) -> str:
    """What a run made, in one line."""
    if isinstance(made, Result):
        counts = {"merged": made.merged, "copied": made.copied, "discarded": made.discarded}
        return ", ".join(f"{count:,} {action}" for action, count in counts.items() if count)
    if isinstance(made, Folded):
        return f"{made.folded:,} modules folded"
    modules = getattr(made, "modules", None)
    return f"{modules:,} modules" if isinstance(modules, int) else count_of(getattr(made, "rows", None) or ())


def _header(request: Request, made: Any) -> dict[str, str]:
    names = {slot: path.name for slot, path in request.files.items()}
    method = request.recipe.method or request.recipe.task
    params = ", ".join(f"{name} {value}" for name, value in request.recipe.params.items())
    return {"method": f"{method} {params}".strip(), **names, "result": made.output.name}


# Files


def result_of(entry: Entry, host: Host) -> Path:
    """The file or folder that a run made.

    Raises:
        FileError: it is not there any more, or the run made none.
    """
    if not entry.output:
        raise FileError("this run made no file")
    for folder in host.save_folders(entry.kind):
        path = host.target(entry.kind, folder, entry.output)
        if path.exists():
            return path
    raise FileError(f"{entry.output} is not there any more", hint="it was moved, renamed or deleted")


def model_folders(host: Host) -> list[Path]:
    """Every folder in which models of any kind lie."""
    return list(dict.fromkeys(Path(folder) for kind in _KINDS for folder in host.folders(kind)))


# Runs


def again(recipe: Recipe, host: Host, name: str = "") -> Request:
    """A run of a recipe as it stands, its models found in the host's folders by hash and name.

    Args:
        recipe: with all its models; also one that the form cannot show.
        host: where they are looked for, and where the result goes.
        name: of the result; empty for one made of the inputs.

    Raises:
        MergeError: the recipe leaves models open, or they are not found.
    """
    task = BY_ID.get(recipe.task)
    if task is None:
        raise MergeError(f"the tab has no task {recipe.task}", hint="run the recipe with lib-merge run")
    if slots := open_slots(recipe):
        raise MergeError(
            f"the recipe leaves open which models it is for: {', '.join(slots)}", hint="load it into the form"
        )
    located, missing = search(recipe, {}, Catalog(model_folders(host), host.hashes()))
    refuse_missing(missing)
    base = located.get("A")
    folder = task.writes == "checkpoint" and base is not None and base.is_dir()
    proposed = name or _proposed(task, recipe, located)
    target = host.target(
        task.writes, "", proposed if folder else f"{proposed.removesuffix('.safetensors')}.safetensors"
    )
    return Request(task, recipe, located, target, "number", True)


def _proposed(task: Task, recipe: Recipe, located: dict[str, Path]) -> str:
    """A name made of the inputs, the method and its strength, as the form proposes it."""
    values = {**task.first_values(), **recipe.params, "method": recipe.method}
    method = task.method(values)
    values |= method.check(recipe.params) if method else {}
    return form.proposed_name(task, values, located)


# Texts


def when(entry: Entry) -> str:
    """When a run began, in this machine's time: `30 Nov 20:54`."""
    return time.strftime("%d %b %H:%M", time.localtime(entry.started))


def line(entry: Entry) -> str:
    """One run in a list."""
    what = entry.output or f"{entry.task}: {_STATES[entry.state]}"
    return f"{when(entry)} · {what} · {entry.said}"[:160]


def facts(entry: Entry) -> dict[str, str]:
    """All that is known of a run, for people."""
    with suppress(MergeError):
        recipe = described(entry.read_recipe())
        return {**_facts(entry), "did": recipe}
    return _facts(entry)


def _facts(entry: Entry) -> dict[str, str]:
    label = BY_ID[entry.task].label if entry.task in BY_ID else entry.task
    return {
        "what": label,
        "when": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started)),
        "how long": f"{entry.seconds:.1f} s",
        "result": f"{_STATES[entry.state]}: {entry.said}",
        **({"file": entry.output} if entry.output else {}),
    }
