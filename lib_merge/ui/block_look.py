"""What block weights reach in a model, as a line and a picture: one dot for each block; text in, HTML out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .. import blocks
from ..errors import RecipeError
from ..wording import named
from .facts import Facts

_STEP, _HEIGHT, _EDGE = 14, 60, 8


def blocks_note(text: str, model: Facts) -> str:
    """The note below the block weights of a form; empty where there are none or the model's blocks are not known.

    Args:
        text: block weights as typed.
        model: whose blocks they are for.
    """
    names = list(model.blocks)
    if not (text or "").strip() or not names:
        return ""
    try:
        given = blocks.parse(text)
        reached, missing = blocks.expand(given, names, model.layers), blocks.unknown(given, names)
    except RecipeError as error:
        return _line(f"This model has {_count(names)}; {error.what}", wrong=True)
    said = f"{len(reached)} of this model's {_count(names)} have a weight of their own"
    lacking = f"; it has no block {named(missing)}" if missing else ""
    values = [next(iter(reached[name].values()), None) if name in reached else None for name in names]
    return _line(said + lacking, wrong=bool(missing)) + _curve(names, values)


def shape_text(shape: str, model: Facts | None) -> str:
    """Block weights to go on from: a shape as the weights of a model's layers, to 3 decimals.

    Args:
        shape: a name of `blocks.SHAPES`.
        model: whose layers; None, or one whose blocks are not known, gives the shape's name, which fits any model.
    """
    if model is None or not model.layers:
        return shape
    found = blocks.expand(blocks.parse(shape), model.blocks, model.layers)
    rounded = {name: {param: round(value, 3) for param, value in entry.items()} for name, entry in found.items()}
    return blocks.format(rounded)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} block{'s' if len(names) != 1 else ''}"


def _line(text: str, *, wrong: bool) -> str:
    mark = "<b>!</b> " if wrong else ""
    return f"<div class='lm-note {'lm-error' if wrong else ''}'>{mark}{escape(text)}</div>"


def _curve(names: Sequence[str], values: Sequence[float | None]) -> str:
    """A dot at the height of each block's weight; those without one are hollow and stand at the foot."""
    told = [value for value in values if value is not None]
    low, high = min([0.0, *told]), max([1.0, *told])
    width = 2 * _EDGE + _STEP * (len(names) - 1)
    dots = []
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        x = _EDGE + _STEP * place
        y = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * ((low if value is None else value) - low) / (high - low)
        fill, said = ("none", "no weight of its own") if value is None else ("currentColor", f"{value:g}")
        dots.append(
            f"<circle cx='{x}' cy='{y:.1f}' r='3.5' fill='{fill}' stroke='currentColor'>"
            f"<title>{escape(name)}: {said}</title></circle>"
        )
    label = f"weights of {_count(names)}, from {low:g} to {high:g}, {escape(names[0])} to {escape(names[-1])}"
    return (
        f"<svg class='lm-curve' viewBox='0 0 {width} {_HEIGHT}' style='max-width:{width}px' role='img' "
        f"aria-label='{label}'>{''.join(dots)}</svg>"
    )
