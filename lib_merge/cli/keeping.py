"""Recipes that are kept by name, on the command line: list, show, share, save and delete them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..changes import named_loras
from ..errors import RecipeError
from ..presets import Presets, described, filled, from_file, from_text, open_slots, opened, shared_text
from ..recipe import Recipe, to_json
from .options import debug_option, json_option
from .show import print_json


@click.command("presets")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--share", is_flag=True, help="Print it as one word for a link or a message.")
@click.option("--save", "source", metavar="FROM", help="Save under NAME: a .json file, a merged file, or shared text.")
@click.option("--open", "leave_open", is_flag=True, help="With --save: leave out which models it is for.")
@click.option("--overwrite", is_flag=True, help="With --save: replace your preset of that name.")
@click.option("--delete", is_flag=True, help="Delete your preset NAME.")
@json_option
@debug_option
def _presets(
    name: str | None,
    share: bool,
    source: str | None,
    leave_open: bool,
    overwrite: bool,
    delete: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """List the recipes that are kept by name, or show, share, save or delete one.

    `lib-merge run NAME MODEL ... -o OUT` runs one.
    """
    presets = Presets()
    if sum((share, source is not None, delete)) > 1:
        raise click.UsageError("--share, --save and --delete exclude each other")
    if name is None and (share or source is not None or delete):
        raise click.UsageError("name the preset")
    if name is None:
        _list(presets, as_json)
    elif source is not None:
        recipe = _from(source)
        path = presets.save(name, opened(recipe) if leave_open else recipe, overwrite=overwrite)
        print_json({"saved": str(path)}) if as_json else print(f"saved {path}")
    elif delete:
        presets.delete(name)
        print_json({"deleted": name}) if as_json else print(f"deleted {name}")
    elif share:
        text = shared_text(presets.load(name))
        print_json({"shared": text}) if as_json else print(text)
    else:
        print_json(json.loads(to_json(presets.load(name))), indent=None if as_json else 2)


def _list(presets: Presets, as_json: bool) -> None:
    found = [(preset, _line(preset.recipe)) for preset in presets.all().values()]
    if as_json:
        print_json({"presets": [{"name": p.name, "own": p.own, "is": line} for p, line in found]})
        return
    width = max((len(preset.name) for preset, _ in found), default=0)
    for preset, line in found:
        print(f"{preset.name:<{width}}  {line}{'  (yours)' if preset.own else ''}")


def _line(recipe: Any) -> str:
    """What a preset does, or why it cannot be read: one that is damaged hides no other."""
    try:
        return described(recipe())
    except RecipeError as error:
        return error.what


def _from(source: str) -> Recipe:
    """A recipe from a file, or from text on the command line."""
    return from_file(Path(source)) if os.path.exists(source) else from_text(source)


def kept_recipe(text: str) -> Recipe:
    """A recipe by the path of its file, or of a merged model, or by its preset's name; a path that is there wins."""
    looks_like_a_path = Path(text).suffix or len(Path(text).parts) > 1
    if os.path.exists(text) or (looks_like_a_path and text not in Presets().all()):
        return from_file(Path(text), lambda note: click.echo(f"note: {note}", err=True))
    return Presets().load(text)


def with_inputs(
    recipe: Recipe, models: Sequence[str], loras: Sequence[tuple[Any, ...]]
) -> tuple[Recipe, Mapping[str, Path]]:
    """A recipe with models in its open slots and more LoRAs, and slot -> file of these.

    Raises:
        RecipeError: there are more or fewer models than open slots.
    """
    slots = open_slots(recipe)
    if len(models) != len(slots):
        count = f"{len(slots)} model{'s' * (len(slots) > 1)}"
        wanted = f"{count}, for {', '.join(slots)}" if slots else "no models: it names its own"
        told = {0: "none is given", 1: "1 is given"}.get(len(models), f"{len(models)} are given")
        hint = f"lib-merge run RECIPE{''.join(f' {slot}' for slot in slots)} -o OUT"
        raise RecipeError(f"this recipe takes {wanted}; {told}", hint=hint)
    more, paths = named_loras(loras, None)
    before = len(recipe.loras)
    files = {slot: Path(os.path.abspath(path)) for slot, path in zip(slots, models, strict=True)}
    given = {f"lora{before + number}": Path(path) for number, path in enumerate(paths.values(), 1)}
    names = {slot: path.name for slot, path in files.items()}
    return filled(recipe, names, more), files | given
