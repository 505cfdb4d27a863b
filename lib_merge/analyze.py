"""Compare models tensor by tensor and write none: how far B, C … are from A, and where they contradict each other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contrast import COMPARED, measure
from .differences import difference_row, summary, warnings
from .errors import FileError, RecipeError
from .events import CancelToken, OnProgress
from .families import Detected, detect
from .files.hashes import HashCache
from .files.open import open_model
from .files.source import Source
from .memory import peak_rss_mb
from .pairs import Pair, matched
from .patterns import Patterns
from .plan import default_threads
from .report_charts import sentence
from .version import __version__

if TYPE_CHECKING:
    from .report import Rows

SLOTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        rows: one per tensor of A, in A's order, then those that A lacks.
        summary: numbers over all of them; see `compare`.
    """

    rows: Rows
    summary: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The fields of the command line's `--json`; a number that is not finite is None."""
        return {"rows": _strict(self.rows), "summary": _strict(self.summary)}

    def header(self) -> dict[str, str]:
        """What the top of an HTML report says of it."""
        from importlib.metadata import version  # here: it takes a while to load, and only reports need it

        models = {f"model {slot}": _described(model) for slot, model in self.summary["models"].items()}
        return {**models, "versions": f"lib_merge {__version__}, torch {version('torch')}"}

    def describe(self) -> str:
        """For a terminal: one sentence, the tensors that differ most, and what should not be overlooked."""
        lines = [sentence(self.rows)]
        lines += [f"  {item['rel_diff']:<10.4g} {item['key']}" for item in self.summary["most_different"][:_SHOWN]]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.summary["warnings"])])


def compare(
    a: Path | str,
    b: Path | str,
    *more: Path | str,
    exclude: Sequence[str] = (),
    include_mode: bool = False,
    glob: bool = False,
    threads: int | None = None,
    tile: int = COMPARED,
    on_progress: OnProgress = lambda progress: None,
    cancel: CancelToken | None = None,
    cache: HashCache | None = None,
) -> Comparison:
    """Measure how models differ, tensor by tensor, in bounded memory; nothing is written.

    Names are matched as in a merge. Floats are measured as numbers; integers and coded weights are compared bit for
    bit, and the note says `same` or `differs`. A tensor with a value that is not finite has no numbers and a note that
    names the model. With more than two models `cosine` and `sign_conflict` are those of the differences to A, over all
    pairs of B, C, D …, and columns that end in `_c`, `_d` … say how far those are from A.

    Args:
        a: file or folder that the others are measured against.
        b: file or folder.
        *more: C, D …
        exclude: patterns of tensors to leave out.
        include_mode: compare only what `exclude` matches.
        glob: patterns are globs instead of regular expressions.
        threads: workers; None for the cores of this machine, at most 8.
        tile: elements worked on at a time; no number depends on it.
        on_progress: told about ten times a second.
        cancel: stops the comparison from another thread.
        cache: remembered hashes; none is computed here.

    Returns:
        The rows, and the summary: `models` (file, family, sha256 where it is remembered); the counts `tensors,
        compared, identical, differing, missing, extra, shape_differs, excluded, not_finite`; `all_identical`, true when
        nothing differs, is missing or left over; `rel_diff, norm_diff, cosine, sign_conflict, max_diff` of all tensors
        together, the same by `components` and `blocks`; `pairs` of donors, where there are more than two models;
        `most_different`; `warnings`; `seconds, peak_rss_mb`.

    Raises:
        FileError: a model cannot be opened or read, or was written to meanwhile.
        RecipeError: a pattern is not usable, or the models have no tensor in common.
        CancelledError: it was asked for.
    """
    start = time.perf_counter()
    paths = (a, b, *more)
    if len(paths) > len(SLOTS):
        raise RecipeError(f"{len(paths)} models are more than the {len(SLOTS)} that can be compared")
    patterns = Patterns(exclude, glob)
    with ExitStack() as stack:
        sources = {
            slot: stack.enter_context(closing(open_model(path))) for slot, path in zip(SLOTS, paths, strict=False)
        }
        pairs = matched(sources, patterns, include_mode)
        _refuse_strangers(pairs, sources)
        sums = measure(
            sources,
            pairs,
            threads=threads or default_threads(),
            tile=tile,
            on_progress=on_progress,
            cancel=cancel or CancelToken(),
        )
        _check_unchanged(sources)
    families = {slot: detect(_headers(source)) for slot, source in sources.items()}
    rows = [difference_row(pair, found, sources, families) for pair, found in zip(pairs, sums, strict=True)]
    unmatched = patterns.unmatched(sources["A"].tensors)
    return Comparison(
        rows,
        {
            "models": {slot: _model(source, families[slot], cache) for slot, source in sources.items()},
            **summary(rows, sums, list(sources)),
            "warnings": [f"the pattern {text!r} matches no tensor of A" for text in unmatched] + warnings(rows),
            "seconds": round(time.perf_counter() - start, 3),
            "peak_rss_mb": round(peak_rss_mb(), 1),
        },
    )


def _model(source: Source, family: Detected, cache: HashCache | None) -> dict[str, Any]:
    digest = (cache or HashCache()).get_source(source)
    return {"file": str(source.path), "family": family.name, "sha256": digest, "notes": list(source.notes)}


def _refuse_strangers(pairs: Sequence[Pair], sources: Mapping[str, Source]) -> None:
    if any(pair.action in ("compared", "shape differs") for pair in pairs):
        return
    samples = ", ".join(f"{slot} has {next(iter(source.tensors), 'no tensors')}" for slot, source in sources.items())
    raise RecipeError(
        f"nothing to compare: no tensor of A is both wanted and found in another model ({samples})",
        hint="check that the models are of one family and name their tensors alike, and the patterns",
    )


def _check_unchanged(sources: Mapping[str, Source]) -> None:
    for source in sources.values():
        if changed := source.changed():
            raise FileError(
                "the file was written to while it was read",
                file=changed,
                hint="start again when nothing else writes to it",
            )


def _headers(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (info.dtype, info.shape) for key, info in source.tensors.items()}


def _described(model: Mapping[str, Any]) -> str:
    digest = f", sha256 {model['sha256'][:10]}…" if model["sha256"] else ""
    return f"{model['file']}, {model['family']}{digest}"


def _strict(value: Any) -> Any:
    """Strict JSON: what is not a finite number becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
