"""Writes the tables and the picture of docs/optimizer-study.md from its figures: `python docs/write_study.py`.

The figures, docs/optimizer-study.csv, come from benchmarks/optimizer_study.py. The picture needs matplotlib.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
FIGURES, PAGE, PICTURE = (HERE / f"optimizer-study.{end}" for end in ("csv", "md", "svg"))
START, END = "<!-- tables -->", "<!-- /tables -->"
BASE, OWN, PEER = "no LoRA", "each LoRA alone, on its own task", "weighted_average"
STRENGTHS = (1.0, 2.0)
COLOURS = ("#2f6fdd", "#d9480f")

# (setting, method, strength) -> accuracy in per cent by seed.
Figures = dict[tuple[str, str, float], list[float]]


def figures() -> Figures:
    """Everything that was measured, seeds in order."""
    found: Figures = {}
    with FIGURES.open(encoding="utf-8", newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["seed"])):
            place = row["setting"], row["method"], float(row["strength"])
            found.setdefault(place, []).append(100 * float(row["accuracy"]))
    return found


def page(text: str) -> str:
    """The page with its tables between the markers made anew."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n" + "\n".join(_tables(figures())) + f"\n{END}{rest.partition(END)[2]}"


def _tables(found: Figures) -> Iterator[str]:
    settings, methods = _settings(found), _methods(found)
    head = " | ".join(settings)
    line = "|---" * (len(settings) + 1) + "|"
    for strength in STRENGTHS:
        yield f"Right answers in per cent, the merged LoRA at strength {strength:g}:\n\n| method | {head} |\n{line}"
        for method in (BASE, OWN) if strength == 1 else ():
            yield f"| *{method}* | {' | '.join(_accuracy(found[setting, method, 1.0]) for setting in settings)} |"
        for method in methods:
            cells = [_accuracy(found[setting, method, strength]) for setting in settings]
            yield f"| {method} | {' | '.join(cells)} |"
        yield ""
    head, line = f"| method | {head} | all |", f"{line}---|"
    yield f"Points more or less than `{PEER}`, seed by seed, both at strength 1:\n\n{head}\n{line}"
    yield from _gains(found, lambda setting, method: found[setting, method, 1.0])
    yield f"\nThe same, both at the better of the two strengths:\n\n{head}\n{line}"
    yield from _gains(found, lambda setting, method: _better(found, setting, method))


def _gains(found: Figures, figure) -> Iterator[str]:
    for method in _methods(found):
        if method != PEER:
            gains = [
                [own - peer for own, peer in zip(figure(setting, method), figure(setting, PEER), strict=True)]
                for setting in _settings(found)
            ]
            cells = [_gain(gain) for gain in [*gains, [gain for several in gains for gain in several]]]
            yield f"| {method} | {' | '.join(cells)} |"


def _better(found: Figures, setting: str, method: str) -> list[float]:
    return max((found[setting, method, strength] for strength in STRENGTHS), key=mean)


def _settings(found: Figures) -> list[str]:
    return list(dict.fromkeys(setting for setting, _, _ in found))


def _methods(found: Figures) -> list[str]:
    return [name for name in dict.fromkeys(method for _, method, _ in found) if name not in (BASE, OWN)]


def _error(values: list[float]) -> float:
    """Standard error of the mean."""
    return stdev(values) / len(values) ** 0.5


def _accuracy(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {_error(values):.1f}"


def _gain(values: list[float]) -> str:
    return f"{mean(values):+.1f} ± {_error(values):.1f}"


def picture() -> None:
    """Accuracy of every method in every setting, with standard errors."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "lib_merge", "svg.fonttype": "none"})
    from matplotlib import pyplot

    found = figures()
    settings, methods = _settings(found), _methods(found)
    figure, axes = pyplot.subplots(1, len(settings), figsize=(2.3 * len(settings) + 1.2, 4.8), sharey=True)
    for axis, setting in zip(axes, settings, strict=True):
        for shift, (strength, colour) in enumerate(zip(STRENGTHS, COLOURS, strict=True)):
            values = [found[setting, method, strength] for method in methods]
            axis.errorbar(
                list(map(mean, values)),
                [place + 0.25 * shift - 0.12 for place in range(len(methods))],
                xerr=list(map(_error, values)),
                fmt="o",
                markersize=3.5,
                color=colour,
                label=f"strength {strength:g}",
            )
        for name, style in ((BASE, ":"), (OWN, "--")):
            axis.axvline(mean(found[setting, name, 1.0]), color="#888", linestyle=style, linewidth=1, label=name)
        axis.set_title(setting, fontsize=9)
        axis.set_xlim(0, 102)
        axis.grid(axis="x", color="#eee")
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.supxlabel("right answers, %: mean over tasks and seeds ± standard error", fontsize=8, y=0.06)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    picture()
