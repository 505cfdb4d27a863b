"""Extracting a LoRA at rank 64 against full singular value decompositions: time, and error beside the best there is.

`python benchmarks/extract.py [--dir DIR] [--threads 2]` makes two checkpoints of 40 matrices, one of every shape in
SDXL and one more of the largest kind, and extracts twice, each in a fresh process: as is, and with exact=True. Every
other change is a signal (128 singular values falling as i^-0.8) under noise, the others are noise alone, the hardest.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Topology, default_folder, topology, write_tensors
from measure import measured

RANK, SIGNAL_RANK, POWER = 64, 128, -0.8
BASE, SIGNAL, NOISE = 0.02, 0.02, 0.001
LARGEST = (10240, 1280)
COUNT = 40
# Looked up, or marks of the family: equal in both checkpoints.
MARKS = ("model.diffusion_model.input_blocks.0.0.weight", "model.diffusion_model.label_emb.0.0.weight",
         "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight")  # fmt: skip


def sample() -> Topology:
    """One weight of every shape, as matrices, and one more of the shape that takes longest of the frequent ones."""
    seen: dict[tuple[int, int], list[str]] = {}
    tensors = topology("sdxl_base_sgm")
    for key, (_, shape) in tensors.items():
        table = "embedding" in key or key.startswith("first_stage") or key.endswith("text_projection")
        if len(shape) > 1 and not table:
            seen.setdefault((shape[0], math.prod(shape[1:])), []).append(key)
    chosen = [keys[0] for keys in seen.values()] + seen[LARGEST][1:]
    return {key: ("F16", tensors[key][1]) for key in dict.fromkeys(chosen[:COUNT])}


def changes(tensors: Topology) -> Iterator[tuple[str, Any, Any]]:
    """Key, base and tuned weight."""
    random = np.random.Generator(np.random.SFC64(20))
    for number, (key, (_, shape)) in enumerate(tensors.items()):
        rows, columns = shape[0], math.prod(shape[1:])
        base = BASE * random.standard_normal((rows, columns), dtype=np.float32)
        change = NOISE * random.standard_normal((rows, columns), dtype=np.float32)
        if number % 2 == 0:
            rank = min(SIGNAL_RANK, rows, columns)
            left, right = (random.standard_normal(size, dtype=np.float32) for size in ((rows, rank), (rank, columns)))
            falling = np.arange(1, rank + 1, dtype=np.float32) ** POWER
            change += SIGNAL / math.sqrt(rank) * (left * falling) @ right
        yield key, base.astype(np.float16).reshape(shape), (base + change).astype(np.float16).reshape(shape)


def build(folder: Path) -> tuple[Path, Path]:
    """The two checkpoints, made anew."""
    tensors = sample()
    made = list(changes(tensors))
    marks = {key: topology("sdxl_base_sgm")[key] for key in MARKS if key not in tensors}
    same = {key: np.zeros(shape, np.float16) for key, (_, shape) in marks.items()}
    paths = folder / "extract_base.safetensors", folder / "extract_tuned.safetensors"
    for path, which in zip(paths, (1, 2), strict=True):
        write_tensors(path, {**{item[0]: item[which] for item in made}, **same})
    return paths


def run(tuned: Path, base: Path, out: Path, exact: bool, threads: int) -> None:
    """One extraction in this process; prints a JSON line."""
    import torch

    from lib_merge import extract_lora

    torch.empty(1)
    results = []
    how = {"rank": RANK, "conv_rank": RANK, "save_dtype": "fp32", "threads": threads, "fsync": False, "overwrite": True}
    taken = measured(lambda: results.append(extract_lora(tuned, base, out=out, exact=exact, **how)))
    errors = {row["key"]: (row["svd_error"], row["shape"]) for row in results[0].rows}
    print(json.dumps({"seconds": taken.seconds, "peak_rss_mb": taken.peak_rss_mb, "foreign": taken.foreign,
                      "errors": errors}))  # fmt: skip


def main() -> None:
    """Parse, build, run both, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs (default: %(default)s)")
    parser.add_argument("--run", choices=("exact", "sampled"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    base, tuned = args.dir / "extract_base.safetensors", args.dir / "extract_tuned.safetensors"
    if args.run:
        with tempfile.TemporaryDirectory() as folder:
            run(tuned, base, Path(folder) / "lora.safetensors", args.run == "exact", args.threads)
        return
    if not (base.is_file() and tuned.is_file()):
        args.dir.mkdir(parents=True, exist_ok=True)
        build(args.dir)
    found = {}
    for mode in ("sampled", "exact"):
        command = [sys.executable, __file__, "--run", mode, "--dir", str(args.dir), "--threads", str(args.threads)]
        found[mode] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print("| module | up | error | best | ratio |\n|---|---|---|---|---|")
    ratios = []
    for key, (error, shape) in found["sampled"]["errors"].items():
        best = found["exact"]["errors"][key][0]
        ratios.append(error / best if best else 1.0)
        print(f"| `{key}` | {shape} | {error:.4f} | {best:.4f} | {ratios[-1]:.4f} |")
    fast, full = found["sampled"], found["exact"]
    print(f"\n{len(ratios)} modules: {fast['seconds']:.1f} s, full decompositions {full['seconds']:.1f} s, "
          f"{full['seconds'] / fast['seconds']:.1f} times faster; worst ratio {max(ratios):.4f}; "
          f"peak memory {fast['peak_rss_mb']:.0f} MB; "
          f"foreign load {fast['foreign']:.0%} and {full['foreign']:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
