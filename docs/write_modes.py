"""Writes a page and a picture for each merge method into docs/modes: `python docs/write_modes.py`.

The pages come from the registry and from docs/modes/texts.json, the pictures from merges by the methods themselves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lib_merge
from lib_merge.kernels.registry import Method, all_methods

HERE = Path(__file__).resolve().parent / "modes"
KEY = "model.diffusion_model.middle_block.0.weight"
SHAPE = (25, 16)
# Values of the strength that a picture shows, by its range: shares of B, and multipliers.
SHARES, MULTIPLIERS = (0.25, 0.5, 1.0), (0.5, 1.0, 1.5)
COLOURS = ("#9aa5b1", "#2f6fdd", "#d9480f")
SIZE, GAP, REACH = 220, 40, 3.0
_QUICK: dict[str, Any] = {"threads": 1, "fsync": False, "keep_recipe": False}
# What C is in the pictures, by its shares of B's change and of one of its own.
_THIRD = {
    (0, 0.3): "C is a model near A.",
    (0, 1): "C is as far from A as B, on another side.",
    (0.6, 0.8): "C is as far from A as B, and went partly the same way.",
}
TITLES = ("many small changes (Gaussian)", "few large changes (heavy tails)")


def pages() -> dict[str, str]:
    """File name -> text, of every method."""
    return {f"{item.id}.md": _page(item, text) for item, text in _texts()}


def _texts() -> list[tuple[Method, dict[str, Any]]]:
    """Every method with what is written by hand about it: when, facts, what its picture shows."""
    texts = json.loads((HERE / "texts.json").read_text("utf-8"))
    return [(item, texts[item.id]) for item in all_methods().values()]


def _page(item: Method, text: dict[str, Any]) -> str:
    lines = [f"# {item.label}", "", f"`{item.id}` — {item.summary}", "", "## When to use it", "", text["when"], ""]
    lines += ["## Formula", "", item.formula, "", f"Exactly A when {item.exact_a}."]
    lines += [f"Exactly B when {item.exact_b}."] if item.exact_b else []
    lines += ["", "| parameter | default | range | meaning |", "|---|---|---|---|"]
    lines += [f"| `{p.name}` | {p.shown_default} | {p.range} | {p.meaning} |" for p in item.params]
    lines += ["", "## What it does", "", f"![What becomes of a change]({item.id}.svg)", "", _caption(item, text), ""]
    if text["facts"]:
        lines += ["## Often read, and not so", ""]
        lines += [f"- Often read: {claim}. In fact: {fact}." for claim, fact in text["facts"]]
        lines += [""]
    lines += [f"All parameters at a glance: [methods.md](../methods.md#{item.id})."]
    return "\n".join(lines) + "\n"


def _caption(item: Method, text: dict[str, Any]) -> str:
    shown = ", ".join(f"{value:g}" for value in _strengths(item))
    others = "".join(f"`{name}` {value:g}, " for name, value in text.get("shown", {}).items())
    third = f" {_THIRD[tuple(text['third'])]}" if "third" in text else ""
    return (
        "Each dot is a weight: how far B is from A there, and how far the result went. The line is B itself. "
        f"`{item.strength}` is {shown}, {others}the other parameters have their defaults.{third}"
    )


def _strengths(item: Method) -> Sequence[float]:
    return SHARES if item.param(item.strength).high == 1 else MULTIPLIERS


def pictures() -> dict[str, str]:
    """File name -> SVG, of every method."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"{item.id}.svg": _picture(item, text.get("shown", {}), _models(Path(folder), text), Path(folder))
            for item, text in _texts()
        }


def _models(folder: Path, text: dict[str, Any]) -> list[list[Path]]:
    """A, B and C, once for each of the two distributions; the change from A to B has mean size 1."""
    from safetensors.numpy import save_file

    of_b, own = text.get("third", (0, 1))
    found = []
    for number in range(len(TITLES)):
        rng = np.random.default_rng(7 + number)
        a = rng.standard_normal(SHAPE)
        draws = [rng.standard_normal(SHAPE) if number == 0 else rng.standard_t(2, SHAPE) for _ in range(2)]
        change, other = (draw / np.abs(draw).mean() for draw in draws)
        models = {"A": a, "B": a + change, "C": a + of_b * change + own * other}
        paths = [folder / f"{slot}{number}.safetensors" for slot in models]
        for path, tensor in zip(paths, models.values(), strict=True):
            save_file({KEY: tensor.astype(np.float32)}, path)
        found.append(paths)
    return found


def _picture(item: Method, params: dict[str, float], models: Sequence[Sequence[Path]], folder: Path) -> str:
    width, height = 2 * SIZE + 3 * GAP, SIZE + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, title in enumerate(TITLES):
        parts.append(f'<g transform="translate({GAP + number * (SIZE + GAP)},{GAP})">')
        parts += _frame(title, number)
        for value, colour in zip(_strengths(item), COLOURS, strict=True):
            points = "".join(
                f"M{x:.1f} {y:.1f}h0" for x, y in _points(item, params | {item.strength: value}, models[number], folder)
            )
            parts.append(
                f'<path d="{points}" stroke="{colour}" stroke-width="2.4" stroke-linecap="round" fill="none"/>'
            )
        parts.append("</g>")
    at = GAP
    for value, colour in zip(_strengths(item), COLOURS, strict=True):
        parts.append(f'<text x="{at}" y="{height - 6}" fill="{colour}">● {item.strength} {value:g}</text>')
        at += 90
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(title: str, number: int) -> Iterator[str]:
    middle = SIZE / 2
    yield f'<rect width="{SIZE}" height="{SIZE}" fill="none" stroke="#ccc"/>'
    yield f'<path d="M0 {middle}H{SIZE}M{middle} 0V{SIZE}" stroke="#e5e5e5"/>'
    yield f'<path d="M0 {SIZE}L{SIZE} 0" stroke="#bbb" stroke-dasharray="4 3"/>'
    yield f'<text x="0" y="-8" fill="#333">{title}</text>'
    yield f'<text x="{SIZE}" y="{SIZE + 14}" text-anchor="end" fill="#666">B − A</text>'
    if number == 0:
        yield '<text x="-6" y="10" text-anchor="end" fill="#666">result</text>'


def _points(
    item: Method, params: dict[str, float], models: Sequence[Path], folder: Path
) -> Iterator[tuple[float, float]]:
    """Places of the weights in the panel, those outside of it left out."""
    from safetensors.numpy import load_file

    chosen = models[: len(item.inputs)]
    out = folder / "out.safetensors"
    lib_merge.merge(*chosen, out=out, method=item.id, params=params, overwrite=True, **_QUICK)
    a, b, result = (load_file(path)[KEY].reshape(-1) for path in (*chosen[:2], out))
    for change, moved in zip(b - a, result - a, strict=True):
        if abs(change) <= REACH and abs(moved) <= REACH:
            yield SIZE / 2 * (1 + float(change) / REACH), SIZE / 2 * (1 - float(moved) / REACH)


if __name__ == "__main__":
    for name, text in (pages() | pictures()).items():
        (HERE / name).write_text(text, "utf-8")
