"""The values of a report's tensor, in its inputs and its result: numbers as text, and a picture. Knows no gradio."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from ..catalog import Catalog, search
from ..errors import FileError, MergeError
from ..families import PREFIXES
from ..files.open import open_model
from ..history import Entry
from ..host import Host
from ..matching import finder
from ..recipe import files
from ..values import BINS, Summary, Values, histogram, read_values
from . import cards, past, report_view

RESULT = "result"
_INPUTS = 2
# A line for each model: of its own colour, and of its own kind for eyes that do not tell these apart.
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#2563eb", "width": 2, "dash": "dot"},
    {"color": "#9b59b6", "width": 2, "dash": "dash"},
    {"color": "#d97706", "width": 2},
)


@dataclass(frozen=True)
class Shown:
    """The values of one tensor.

    Attributes:
        key: the report's name of it.
        found: what the model is called -> the values; in the order in which they are shown.
        problems: why models are missing in it, a line each.
    """

    key: str
    found: dict[str, Values]
    problems: tuple[str, ...]


def values_of(entry: Entry, host: Host, key: str, keys: Collection[str]) -> Shown:
    """Read a tensor from the first two inputs of a run and from its result, as these files are now.

    Args:
        entry: the run.
        host: in whose folders the files are looked for.
        key: the tensor, by the report's name.
        keys: the report's names of all tensors.
    """
    if entry.kind == "lora":
        why = "each row of this report is a module of a LoRA, which several tensors make together"
        return Shown(key, {}, (why,))
    found: dict[str, Values] = {}
    problems: list[str] = []
    for name, path in _models(entry, host):
        try:
            if isinstance(path, MergeError):
                raise path
            found[f"{name}: {path.name}"] = _read(path, key, keys)
        except (MergeError, OSError) as error:
            problems.append(f"{name}: {_said(error)}")
    return Shown(key, found, tuple(problems))


def _said(error: MergeError | OSError) -> str:
    if isinstance(error, MergeError):
        return error.what  # hints speak of the command line
    return f"cannot be read: {error.strerror or error}"


def _models(entry: Entry, host: Host) -> Iterator[tuple[str, Path | MergeError]]:
    """What a model is called, and where it lies or why it is not found; the inputs first."""
    try:
        recipe = entry.read_recipe()
        located, missing = search(recipe, {}, Catalog(past.model_folders(host), host.hashes()))
        models = (slot for slot, _ in files(recipe) if "lora" not in slot)
        for slot in islice(models, _INPUTS):
            yield slot, located.get(slot) or missing[slot]
    except MergeError as error:
        yield "inputs", error
    try:
        yield RESULT, past.result_of(entry, host)
    except MergeError as error:
        yield RESULT, error


def _read(path: Path, key: str, keys: Collection[str]) -> Values:
    with closing(open_model(path)) as source:
        name = finder(keys, source.tensors, PREFIXES)(key)
        if name is None:
            raise FileError(f"{path.name} has no tensor of this name")
        return read_values(source, name)


# What is shown


def card(shown: Shown) -> str:
    """The numbers of a tensor as a table, what they are about, and what is missing."""
    notes = [*shown.problems]
    summaries = {name: values.summary for name, values in shown.found.items()}
    for name, one in summaries.items():
        if one.read < one.total:
            notes.append(f"{name}: {one.read:,} of {one.total:,} values, in evenly spaced pieces")
        if one.broken:
            notes.append(f"{name}: {one.broken:,} values are not finite, and are left out")
    body = _table(summaries) + "".join(map(cards.line, notes))
    return cards.card("note", f"Values of {shown.key}", body, tone="" if shown.found else "bad", live=True)


def _table(summaries: dict[str, Summary]) -> str:
    if not summaries:
        return ""
    columns = ("Model", "Smallest", "Largest", "Mean", "Standard deviation", "Zeros")
    head = "".join(f"<th scope='col'>{name}</th>" for name in columns)
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th>{''.join(f'<td>{text}</td>' for text in _texts(one))}</tr>"
        for name, one in summaries.items()
    )
    return f"<table class='lm-table'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _texts(one: Summary) -> tuple[str, ...]:
    numbers = tuple(f"{value:.4g}" for value in (one.low, one.high, one.mean, one.deviation))
    return (*numbers, f"{100 * one.zeros:.3g} %")


def picture(shown: Shown) -> Any:
    """How often which values occur: the same steps for all models. None without values, or without plotly."""
    counted = {name: values for name, values in shown.found.items() if values.finite.size}
    if not counted:
        return None
    low = min(values.summary.low for values in counted.values())
    high = max(values.summary.high for values in counted.values())
    step = high / BINS - low / BINS
    middles = [low + step * (number + 0.5) for number in range(BINS)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(name, quote=False),
            "x": middles,
            "y": [100 * count / values.finite.size for count in histogram(values.finite, low, high)],
            "line": {"shape": "hvh"} | (_LINES[-1] if name.startswith(f"{RESULT}: ") else _LINES[place]),
            "hovertemplate": "%{x:.4g}: %{y:.3g} %",
        }
        for place, (name, values) in enumerate(counted.items())
    ]
    return report_view.figure(
        traces,
        300,
        f"Values of {shown.key}",
        showlegend=True,
        legend={"orientation": "h", "y": -0.2},
        xaxis={"automargin": True, "showgrid": False, "zeroline": False},
        yaxis={"automargin": True, "nticks": 5, "gridcolor": report_view.LINE, "title": "% of the values"},
    )
