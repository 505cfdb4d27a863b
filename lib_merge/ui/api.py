"""What other programs may ask the tab for, as plain values: runs by recipe, plans, jobs; no gradio.

Models come by the names of the host's lists and results go to the host's folders, as in the form; no path is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

from .. import recipe as recipes
from ..errors import FileError, MergeError, PlanError, RecipeError
from ..execute import Result
from ..fold import Folded
from ..host import Host, Kind
from ..job import Job
from ..memory import rss_mb
from ..recipe import Recipe, Slot
from ..wording import suggestion
from .filling import listed, namesakes
from .form import Made, Request, file_name
from .runs import RUNS, Run
from .task import EXISTS_CHOICES, NAME, Task
from .tasks.registry import BY_ID

Answer = dict[str, Any]
# Name of a call -> the task whose recipes it takes.
CALLS: Mapping[str, str] = {
    "merge": "merge",
    "bake": "bake",
    "combine": "lora_merge",
    "extract": "lora_extract",
    "resize": "lora_resize",
    "convert": "convert",
    "fold": "fold",
}


def submit(host: Host, call: str, *asked: str) -> Answer:
    """Put a run in line; `asked` as for `request_of`. Answers the job, or the error that `answered` makes of it."""
    request = request_of(host, *asked)
    if request.task.id != CALLS[call]:
        right = next((name for name, task in CALLS.items() if task == request.task.id), None)
        raise RecipeError(f"{call} takes no recipe of the task {request.task.id}", hint=f"call {right}")
    return job_answer(RUNS.start(request, host), host)


def plan(host: Host, *asked: str) -> Answer:
    """What a run would do, from headers alone; `asked` as for `request_of`."""
    request = request_of(host, *asked)
    made = request.run(host, dry_run=True)
    if isinstance(made, Result):
        with closing(made.plan) as found:
            problems = [_located(problem.__dict__) for problem in found.problems]
            said = {"counts": dict(found.counts), "problems": problems, "output_bytes": found.output_bytes}
            said["peak_memory_mb"] = round(found.peak_bytes / 1e6)
    elif isinstance(made, Folded):
        said = {"counts": {"merged": made.folded, "copied": made.copied}, "output_bytes": made.output_bytes}
        said["problems"] = [_located(problem.__dict__) for problem in made.problems]
        said["peak_memory_mb"] = round(made.expected_peak_bytes / 1e6)
    else:
        said = {"problems": [{"level": "warning", "what": text} for text in made.warnings]}
    return {"task": request.task.id, **said, **_place(made.output, request, host)}


def jobs(host: Host) -> Answer:
    """All runs that are known, as the tab lists them."""
    return {"jobs": [job_answer(run, host) for run in RUNS.all]}


def job(host: Host, id: str) -> Answer:
    """One run as it stands.

    Raises:
        RecipeError: no run of that id is known.
    """
    return job_answer(_known(id), host)


def stop(host: Host, id: str) -> Answer:
    """Ask a run to stop, also one that waits; answers it as it stands."""
    run = _known(id)
    RUNS.stop(run.job.id)
    return job_answer(run, host)


def models(host: Host, kind: str) -> Answer:
    """The names that calls take: of `checkpoint`, `lora` or `vae`."""
    kinds = get_args(Kind)
    if kind not in kinds:
        raise RecipeError(f"there is no kind of model {kind!r}", hint=f"one of {', '.join(kinds)}")
    host.look_again()
    named: Any = kind
    return {"models": host.models(named).names, "folders": list(host.save_folders(named))}


def answered(function: Callable[..., Answer], *values: Any) -> Answer:
    """The answer of a call; of an error, what it says: `{"error": …}`."""
    try:
        return function(*values)
    except MergeError as error:
        said = _located({"error": error.what, "file": error.file, "tensor": error.tensor, "hint": error.hint})
        if isinstance(error, PlanError):
            said["problems"] = [_located(problem.__dict__) for problem in error.problems]
        return said


ASKED = ("recipe", "name", "files", "folder", "exists")


def texts(body: str | bytes) -> list[str]:
    """What `request_of` takes, of a JSON object whose recipe and files may be JSON themselves.

    Raises:
        RecipeError: it is none, or has other entries.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"the call is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RecipeError("the call is no JSON object", hint=f"with the entries {', '.join(ASKED)}")
    for name in given.keys() - set(ASKED):
        raise RecipeError(f"a call has no entry {name}", hint=suggestion(name, ASKED))
    defaults = {**dict.fromkeys(ASKED, ""), "exists": "number"}
    return [value if isinstance(value, str) else json.dumps(value) for value in (defaults | given).values()]


def request_of(
    host: Host, recipe: str, name: str = "", files: str = "", folder: str = "", exists: str = "number"
) -> Request:
    """A run by its recipe.

    Args:
        host: where models are looked for and the result goes.
        recipe: JSON.
        name: of the result; empty for one made of the inputs.
        files: JSON object, slot (`A`, `vae`, `lora1`, `B.C`) -> name as the lists show it; needed where several
            models have the name that the recipe tells.
        folder: one of the folders to save to, as `models` tells them; empty for the first.
        exists: where a file of that name exists: `number`, `stop`, `overwrite`.

    Raises:
        MergeError: the recipe is none, a model is not among the host's, or the name leads out of the folder.
    """
    wanted = recipes.from_json(recipe)
    task = BY_ID.get(wanted.task)
    if task is None:
        raise RecipeError(f"the tab has no task {wanted.task}")
    ways = [way for _, way in EXISTS_CHOICES]
    if (exists or "number") not in ways:
        raise RecipeError(f"exists is {exists!r}", hint=f"one of {', '.join(ways)}")
    found = _files(host, wanted, _names(files))
    values = {NAME: name, "method": wanted.method, **wanted.params, **_defaults(task, wanted)}
    target = host.target(task.writes, folder or "", file_name(task, values, found))
    return Request(task, wanted, found, target, exists or "number", keep_recipe=True)


def _names(files: str) -> dict[str, str]:
    """Slot -> name, from JSON."""
    try:
        named = json.loads(files or "{}")
    except ValueError as error:
        raise RecipeError(f"files is no JSON: {error}") from error
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise RecipeError("files is no JSON object of texts", hint='as {"A": "sub/base.safetensors"}')
    return named


def _files(host: Host, recipe: Recipe, named: Mapping[str, str]) -> dict[str, Path]:
    slots = dict(recipes.files(recipe))
    for slot in named.keys() - slots.keys():
        raise RecipeError(f"the recipe has no model {slot}", hint=suggestion(slot, list(slots)))
    return {slot: _file(host, slot, wanted, named.get(slot)) for slot, wanted in slots.items()}


def _file(host: Host, slot: str, wanted: Slot, named: str | None) -> Path:
    last = slot.rpartition(".")[2]
    kind: Kind = "vae" if last == "vae" else "lora" if last.startswith("lora") else "checkpoint"
    models = host.models(kind)
    name = named or listed(host, kind, wanted)
    if name is None:
        same = namesakes(host, kind, wanted)
        why = f"is there {len(same)} times: {', '.join(same)}" if same else "is not among the models"
        raise FileError(f"{recipes.called(slot)}: {wanted.file} {why}", hint="say in files which one is meant")
    return models.resolve(name)


def _defaults(task: Task, recipe: Recipe) -> dict[str, Any]:
    """The method's parameters with its defaults, for the proposed name."""
    method = task.method({"method": recipe.method})
    return method.check(recipe.params) if method else {}


def _known(id: str) -> Run:
    run = RUNS.find(id)
    if run is None:
        raise RecipeError(f"no run {id!r} is known", hint="the last ones are; a restart forgets them")
    return run


def job_answer(run: Run, host: Host) -> Answer:
    """A run as plain values: state, progress, log, and what came of it."""
    job = run.job
    return {
        "job": job.id,
        "task": run.request.task.id,
        "title": job.title,
        "state": job.state,
        "share": round(job.share, 4),
        "seconds": round(job.seconds, 3),
        **(_pace(job) if job.state == "running" else {}),
        "log": list(job.log),
        **({"result": _result(job.result, run.request, host)} if job.state == "done" else {}),
        **(answered(_raised, job.error) if job.state == "failed" else {}),
    }


def _pace(job: Job) -> Answer:
    told = job.progress
    return {
        "stage": told.stage if told else None,
        "key": told.key if told else None,
        "counted": told.counted if told else None,
        "per_second": job.per_second,
        "seconds_left": job.seconds_left,
        "rss_mb": round(rss_mb(), 1),
    }


def _raised(error: BaseException) -> Answer:
    if isinstance(error, MergeError):
        raise error
    return {"error": f"{type(error).__name__}: {error}"}


def _result(made: Made, request: Request, host: Host) -> Answer:
    return {**made.to_dict(), **_place(made.output, request, host)}


def _place(output: Path, request: Request, host: Host) -> Answer:
    """Where a result lies, as the lists name it: no path of this machine."""
    folder, name = host.place_of(request.task.writes, output)
    return {"output": name, "folder": folder}


def _located(said: Mapping[str, Any]) -> Answer:
    """The entries that say something; files by their names alone."""
    return {key: Path(value).name if key == "file" else value for key, value in said.items() if value is not None}
