"""Commands that read models: verify, compare, inspect, recipe, methods, blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .. import report
from ..analyze import compare
from ..blocks import LISTS, SHAPES
from ..errors import RecipeError
from ..inspection import inspect
from ..kernels.registry import all_methods, method
from ..recipe import to_json
from ..verify import verify
from .keeping import kept_recipe
from .options import debug_option, glob_option, json_option, models_option
from .show import Bar, print_json
from .text import blocks_text, inspect_text, method_dict, method_text, methods_table

# Layers of the model that shapes are shown on where none is named.
_SHOWN_LAYERS = 9


@click.command("verify")
@click.argument("out", metavar="OUT")
@models_option
@click.option("--threads", type=click.IntRange(1), help="Worker threads.")
@json_option
@debug_option
def _verify(out: str, models: Sequence[str], threads: int | None, as_json: bool, debug: bool) -> None:
    """Compute a merged model anew from its recipe and compare it byte for byte."""
    with Bar() as bar:
        found = verify(out, models=models, threads=threads, on_progress=bar)
    if as_json:
        print_json(found.to_dict())
    elif found.missing_inputs:
        names = ", ".join(found.missing_inputs)
        print(f"not verified: {names} not found, or there with other contents; name the right folder with --models DIR")
    elif found.differing:
        print(f"different: {len(found.differing)} of {found.compared} tensors differ")
        print("\n".join(f"  {key}" for key in found.differing[:20]))
    else:
        near = f"; {len(found.within_2_ulp)} differ within 2 ulp (another CPU)" if found.within_2_ulp else ""
        print(f"verified: {found.compared} tensors are what the recipe says{near}")
    if not as_json and found.sidecar in ("different", "missing"):
        print(f"note: the config beside it is {found.sidecar}, A has one")
    if not found.ok:
        raise SystemExit(1)


@click.command("inspect")
@click.argument("file", metavar="FILE")
@click.option("--check", is_flag=True, help="Read all numbers and look for NaN and infinities.")
@json_option
@debug_option
def _inspect(file: str, check: bool, as_json: bool, debug: bool) -> None:
    """Say what a model file is, from its header."""
    found = inspect(file, check=check)
    print_json(found) if as_json else print(inspect_text(found))
    if found.get("damaged"):
        raise SystemExit(1)


@click.command("recipe")
@click.argument("file", metavar="FILE")
@json_option
@debug_option
def _recipe(file: str, as_json: bool, debug: bool) -> None:
    """Print the recipe that a merged file, or a preset, holds; also one of a web UI's own merger."""
    print_json(json.loads(to_json(kept_recipe(file))), indent=None if as_json else 2)


@click.command("methods")
@click.argument("method_id", required=False, metavar="[ID]")
@click.option("--all", "show_all", is_flag=True, help="Compatibility methods too.")
@json_option
@debug_option
def _methods(method_id: str | None, show_all: bool, as_json: bool, debug: bool) -> None:
    """List the merge methods, or show one with formula and parameters."""
    chosen = [method(method_id)] if method_id else list(all_methods().values())
    if as_json:
        print_json({"methods": [method_dict(item) for item in chosen]})
    else:
        print(method_text(chosen[0]) if method_id else methods_table(chosen))


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--exclude", multiple=True, metavar="P", help="Leave matching tensors out; repeatable.")
@click.option("--include-mode", is_flag=True, help="Compare only what --exclude matches.")
@glob_option
@click.option("--report", "report_path", metavar="FILE", help="Write the rows: .csv, .json or .html.")
@click.option("--overwrite", is_flag=True, help="Replace an existing report.")
@click.option("--threads", type=click.IntRange(1), help="Worker threads; default: the cores, at most 8.")
@json_option
@debug_option
def _compare(
    models: Sequence[str], report_path: str | None, overwrite: bool, as_json: bool, debug: bool, **options: Any
) -> None:
    """Measure how models differ, tensor by tensor: differences, conflicts, cosine; no output model."""
    if len(models) < 2:
        raise RecipeError("compare needs at least two models", hint="lib-merge compare A B")
    path = Path(report_path) if report_path else None
    if path is not None:
        report.check_report_path(path, overwrite)
    with Bar() as bar:
        found = compare(*models, on_progress=bar, **options)
    if path is not None:
        report.save(found.rows, path, " · ".join(Path(model).name for model in models), found.header())
    print_json(found.to_dict()) if as_json else print(found.describe())


@click.command("blocks")
@click.argument("file", required=False, metavar="[FILE]")
@json_option
@debug_option
def _blocks(file: str | None, as_json: bool, debug: bool) -> None:
    """List the shapes that --blocks knows by name, and the lists of numbers; with FILE, that model's blocks."""
    layers = inspect(file)["layers"] if file else [f"layer {number}" for number in range(1, _SHOWN_LAYERS + 1)]
    shapes = {name: dict(zip(layers, values(len(layers)), strict=True)) for name, values in SHAPES.items()}
    if as_json:
        print_json({"layers": layers, "shapes": shapes, "lists": {str(size): names for size, names in LISTS.items()}})
    else:
        print(blocks_text(shapes, LISTS))
