"""A report as large as an SDXL merge leaves it, for tests of the page that shows it."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

from lib_merge.families import block_of, component_of, detect
from lib_merge.history import Entry, History, Report
from lib_merge.recipe import Recipe, to_json

_TOPOLOGY = Path(__file__).resolve().parent.parent / "data" / "topologies" / "sdxl_base_sgm.json.gz"
NASTY = "<img src=x onerror=window.xss=1>"


def large_rows() -> list[dict]:
    """More than 2,000 rows under SDXL's names; the first one has the largest change, and a name that is no name."""
    text = gzip.decompress(_TOPOLOGY.read_bytes())
    tensors = {key: (dtype, tuple(shape)) for key, (dtype, shape) in json.loads(text).items()}
    found, draw = detect(tensors), random.Random(0)
    rows = []
    for key, (dtype, shape) in tensors.items():
        numel = math.prod(shape)
        norm, share = math.sqrt(numel), draw.uniform(0.01, 0.1)
        row = {
            "key": key,
            "component": component_of(key, found),
            "block": block_of(key, found),
            "action": "merged",
            "method": "weighted_sum",
            "dtype_a": dtype,
            "dtype_b": dtype,
            "dtype_out": dtype,
            "shape": list(shape),
            "numel": numel,
            "norm_a": norm,
            "norm_b": norm,
            "norm_diff": share * norm / 0.3,
            "rel_diff": share / 0.3,
            "cosine": 1 - share**2,
            "norm_out": norm,
            "norm_change": share * norm,
            "max_change": share / 10,
            "sign_conflict": math.nan,
            "reason": "",
            "note": "",
        }
        rows.append(row)
    rows[0] |= {"norm_change": 0.9 * rows[0]["norm_a"], "note": NASTY}
    return rows


def keep_large_report(folder: Path) -> Entry:
    """Leave such a report in a history; returns its run."""
    rows = large_rows()
    entry = Entry(
        id="abcdef012345",
        task="merge",
        state="done",
        started=1e9,
        seconds=60.0,
        kind="checkpoint",
        output=f"{NASTY}.safetensors",
        said=f"{len(rows):,} merged",
        recipe=to_json(Recipe(method="weighted_sum", models={"A": None, "B": None})),
        has_report=True,
    )
    History(folder).add(entry, Report(title=entry.output, header={"result": NASTY}, rows=rows))
    return entry
