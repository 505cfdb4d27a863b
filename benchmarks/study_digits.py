"""Small networks on scikit-learn's digits, cut into tasks: LoRAs by PEFT on a base network that they share.

Four ways in which LoRAs meet each other: other pictures (domains), other classes, other questions (heads), other halves
of the same data. Everything is fixed by the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from study_setting import Setting, train
from torch import Tensor, nn

HIDDEN, RANK = 96, 8
TARGETS = ("0", "2", "4")
STEPS, BATCH, RATE = 400, 64, 3e-3
FEW = 100

DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "mirrored": lambda x: x.flip(-1),
    "turned": lambda x: x.rot90(1, (-2, -1)),
    "shifted": lambda x: x.roll((2, 3), (-2, -1)),
}
QUESTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "odd": lambda y: y % 2,
    "large": lambda y: (y > 4).long(),
    "loops": lambda y: torch.isin(y, torch.tensor([0, 6, 8, 9])).long(),
}


def settings(seed: int, folder: Path) -> list[Setting]:
    """All settings of a seed; networks and LoRAs are trained on the way."""
    parts = _split(seed)
    return [build(seed, folder / build.__name__.strip("_"), parts) for build in (_domains, _classes, _heads, _halves)]


def _split(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pictures [n, 8, 8] of 0 … 1 and labels: 60 % to train, 40 % to test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    x = torch.tensor(found.images[order] / 16, dtype=torch.float32)
    y = torch.tensor(found.target[order])
    at = int(0.6 * len(y))
    return {"train": (x[:at], y[:at]), "test": (x[at:], y[at:])}


def _network(seed: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


def _scores(network: nn.Module, tasks: Sequence[dict[str, tuple[Tensor, Tensor]]], heads: Sequence[nn.Module]):
    """What evaluates weights: the share of right answers of each task."""

    def evaluate(weights: dict[str, Tensor]) -> list[float]:
        network.load_state_dict(weights, strict=False)
        found = []
        with torch.no_grad():
            for task, head in zip(tasks, heads, strict=True):
                x, y = task["test"]
                found.append(float((head(network(x.reshape(len(x), -1))).argmax(1) == y).float().mean()))
        return found

    return evaluate


def _make(
    seed: int,
    folder: Path,
    network: nn.Sequential,
    names: Sequence[str],
    tasks: Sequence[dict[str, tuple[Tensor, Tensor]]],
    heads: Sequence[nn.Module] | None = None,
    same: bool = False,
) -> Setting:
    """Train a LoRA for each task (and its head, where it has one of its own); `same`: there is one task in all."""
    base = {f"{name}.weight": network.get_submodule(name).weight.detach().clone() for name in TARGETS}
    paths = []
    for number, task in enumerate(tasks):
        x, y = task["train"]
        head = heads[number] if heads else nn.Identity()
        torch.manual_seed(1000 * seed + number)
        order = np.random.default_rng(1000 * seed + number)

        batches = [torch.tensor(order.integers(0, len(y), BATCH)) for _ in range(STEPS)]
        path = folder / f"seed{seed}" / names[number]
        train(network, head, [(x[at].reshape(BATCH, -1), y[at]) for at in batches], TARGETS, RANK, RATE, path)
        paths.append(path)
    judged = tasks[:1] if same else tasks
    evaluate = _scores(network, judged, heads or [nn.Identity()] * len(judged))
    return Setting(f"digits, {folder.name}", seed, base, paths, evaluate, same)


def _pretrain(network: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    """The base: plain training of all weights."""
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    order = np.random.default_rng(500 + seed)
    for _ in range(STEPS):
        at = torch.tensor(order.integers(0, len(y), BATCH))
        loss = nn.functional.cross_entropy(network(x[at].reshape(BATCH, -1)), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _domains(seed: int, folder: Path, parts: dict[str, tuple[Tensor, Tensor]]) -> Setting:
    """A base for upright digits; LoRAs for mirrored, turned and shifted ones."""
    network = _network(seed, 10)
    _pretrain(network, *parts["train"], seed)
    tasks = [{part: (change(x), y) for part, (x, y) in parts.items()} for change in DOMAINS.values()]
    return _make(seed, folder, network, list(DOMAINS), tasks)


def _classes(seed: int, folder: Path, parts: dict[str, tuple[Tensor, Tensor]]) -> Setting:
    """A base that saw few digits; one LoRA trained on 0 to 4 alone, one on 5 to 9."""
    network = _network(seed, 10)
    x, y = parts["train"]
    _pretrain(network, x[:FEW], y[:FEW], seed)
    tasks = [
        {part: (x[(y > 4) == upper], y[(y > 4) == upper]) for part, (x, y) in parts.items()} for upper in (False, True)
    ]
    return _make(seed, folder, network, ["lower", "upper"], tasks)


def _heads(seed: int, folder: Path, parts: dict[str, tuple[Tensor, Tensor]]) -> Setting:
    """A base that learned how far pictures are turned; LoRAs that answer three questions, each with its own head."""
    x, _ = parts["train"]
    turns = torch.tensor(np.random.default_rng(seed).integers(0, 4, len(x)))
    network = _network(seed, 32)
    guess = nn.Linear(32, 4)
    turned = torch.stack([picture.rot90(int(turn)) for picture, turn in zip(x, turns, strict=True)])
    _pretrain(nn.Sequential(network, guess), turned, turns, seed)
    tasks = [{part: (x, question(y)) for part, (x, y) in parts.items()} for question in QUESTIONS.values()]
    torch.manual_seed(seed)
    return _make(seed, folder, network, list(QUESTIONS), tasks, [nn.Linear(32, 2) for _ in QUESTIONS])


def _halves(seed: int, folder: Path, parts: dict[str, tuple[Tensor, Tensor]]) -> Setting:
    """A base for upright digits; two LoRAs for mirrored ones, each from half of the data."""
    network = _network(seed, 10)
    _pretrain(network, *parts["train"], seed)
    mirrored = {part: (DOMAINS["mirrored"](x), y) for part, (x, y) in parts.items()}
    x, y = mirrored["train"]
    half = len(y) // 2
    tasks = [mirrored | {"train": (x[:half], y[:half])}, mirrored | {"train": (x[half:], y[half:])}]
    return _make(seed, folder, network, ["first", "second"], tasks, same=True)
