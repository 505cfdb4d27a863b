"""Writes the tables of README.md, docs/methods.md and docs/optimizer.md: `python docs/write_methods.py`."""

from __future__ import annotations

from pathlib import Path

from lib_merge.kernels.registry import Method, all_methods
from lib_merge.lora._needs import needs_table

ROOT = Path(__file__).resolve().parent.parent
_MORE = ": any number, each but A with a strength of its own, `FILE@W`"
START, END = "<!-- methods -->", "<!-- /methods -->"
NEEDS_START, NEEDS_END = "<!-- needs -->", "<!-- /needs -->"


def readme(text: str) -> str:
    """README with its table between the markers made anew."""
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    lines = ["| method | models | parameters (default) | formula |", "|---|---|---|---|"]
    for item in all_methods().values():
        params = ", ".join(f"{param.name} {param.shown_default}" for param in item.params)
        lines.append(f"| [`{item.id}`](docs/modes/{item.id}.md) | {item.models} | {params} | {_cell(item.formula)} |")
    return f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{after}"


def optimizer(text: str) -> str:
    """The page on Auto with its table of options between the markers made anew."""
    before, _, rest = text.partition(NEEDS_START)
    return f"{before}{NEEDS_START}\n{needs_table()}\n{NEEDS_END}{rest.partition(NEEDS_END)[2]}"


def methods_page() -> str:
    """docs/methods.md: one section for each method."""
    intro = (
        "# Merge methods\n\nA, B and C are the models' tensors. The strength is the parameter that a bare block number "
        "sets;\n0 always gives A. This page is written by `docs/write_methods.py`; `lib-merge methods ID` shows the "
        "same.\n"
    )
    return intro + "".join(f"\n{_section(item)}" for item in all_methods().values())


def _section(item: Method) -> str:
    lines = [f"## {item.id}", "", f"**{item.label}.** {item.summary}", "", f"- Formula: {item.formula}"]
    lines += [
        f"- Models: {item.models.replace(' ', ', ')}{_MORE if item.more else ''}",
        f"- Strength: `{item.strength}`",
        f"- Exactly A when {item.exact_a}.",
    ]
    lines += [f"- Exactly B when {item.exact_b}."] if item.exact_b else []
    lines += (
        ["- Random: the same seed gives the same result, whatever the threads and the order."] if item.random else []
    )
    where = "on every CPU" if item.exact_arithmetic else "on one kind of CPU and torch build, within 2 ulp elsewhere"
    lines += [f"- The same bytes {where}.", "", "| parameter | default | range | meaning |", "|---|---|---|---|"]
    lines += [f"| `{p.name}` | {p.shown_default} | {p.range} | {_cell(p.meaning)} |" for p in item.params]
    lines += ["", f"When to use it, and what it does: [modes/{item.id}.md](modes/{item.id}.md)."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    page, front = ROOT / "docs" / "methods.md", ROOT / "README.md"
    page.write_text(methods_page(), "utf-8")
    front.write_text(readme(front.read_text("utf-8")), "utf-8")
    auto = ROOT / "docs" / "optimizer.md"
    auto.write_text(optimizer(auto.read_text("utf-8")), "utf-8")
