"""Golden adapters: a case's files, and a bake that is as plain as can be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lib_merge.adapters import FORMATS, Adapter, Piece, read

ROOT = Path(__file__).resolve().parents[1] / "data" / "golden" / "adapters"
CASES = sorted(path.parent.name for path in ROOT.glob("*/expected.safetensors"))


@dataclass(frozen=True)
class Case:
    name: str
    base: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    adapter: Adapter
    expected: dict[str, dict[str, torch.Tensor]]  # strength -> tensor name -> weight


def header(path: Path) -> tuple[dict, dict]:
    """(key -> (dtype, shape), metadata)."""
    with safe_open(path, "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        tensors = {key: (item.get_dtype(), tuple(item.get_shape())) for key, item in slices.items()}
        return tensors, file.metadata() or {}


def load(name: str) -> Case:
    folder = ROOT / name
    case = json.loads((folder / "case.json").read_text())
    (path,) = folder.glob("adapter*.safetensors")
    config = folder / "adapter_config.json"
    adapter = read(*header(path), json.loads(config.read_text()) if config.exists() else None)
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "expected.safetensors").items():
        strength, _, tensor_name = key.partition("|")
        expected.setdefault(strength, {})[tensor_name] = tensor
    return Case(name, load_file(ROOT / case["base"]), load_file(path), adapter, expected)


def parts_of(piece: Piece, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {role: tensors[key].double() for role, key in piece.keys.items()}


def baked(weight: torch.Tensor, pieces: list[Piece], tensors: dict[str, torch.Tensor], strength: float) -> torch.Tensor:
    """The pieces applied to one float64 weight, stage after stage."""
    for stage in ("replace", "add", "multiply", "dora"):
        for piece in pieces:
            format = FORMATS[piece.format]
            if format.stage != stage:
                continue
            parts = parts_of(piece, tensors)
            if stage == "add":
                weight = weight + strength * format.delta(parts, piece.settings, tuple(weight.shape))
            else:
                weight = format.apply(weight, parts, piece.settings, strength)
    return weight


MORE = sorted(path.stem for path in (ROOT / "more").glob("*.safetensors"))


@dataclass(frozen=True)
class Single:
    base: torch.Tensor
    expected: torch.Tensor
    tensors: dict[str, torch.Tensor]
    adapter: Adapter
    strength: float


def load_more(name: str) -> Single:
    path = ROOT / "more" / f"{name}.safetensors"
    held = load_file(path)
    shapes, info = header(path)
    start = "adapter."
    tensors = {key.removeprefix(start): shapes[key] for key in shapes if key.startswith(start)}
    adapter = read(tensors, json.loads(info["metadata"]), json.loads(info["config"]) or None)
    parts = {key: held[start + key] for key in tensors}
    return Single(held["base"].double(), held["expected"], parts, adapter, float(info["strength"]))
