"""A fold into a 4-bit checkpoint against the bare cost of reading DENSE and SHIPPED and writing OUT.

`python benchmarks/fold.py --dir DIR [--modules 12] [--size 4096] [--rank 64]` makes the inputs where they are missing,
and prints a line for the floor, the fold and the check, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def make(root: Path, modules: int, size: int, rank: int) -> None:
    """A dense bf16 model of square matrices, its 4-bit conversion in groups of 64, and an adapter on all of it."""
    import torch
    from safetensors.torch import save_file

    from lib_merge.quant.affine import quantize

    dense, shipped, adapter = {}, {}, {}
    for number in range(modules):
        generator = torch.Generator().manual_seed(number)
        name = f"model.layers.{number}.mlp.up_proj"
        weight = (0.02 * torch.randn(size, size, generator=generator)).bfloat16()
        dense[f"{name}.weight"] = weight
        coded = quantize(weight.float(), bits=4, group=64, rounding="metal", dtype=torch.bfloat16)
        shipped[f"{name}.weight"] = coded.words.view(torch.uint32)
        shipped[f"{name}.scales"], shipped[f"{name}.biases"] = coded.scales, coded.biases
        for side, shape in (("A", (rank, size)), ("B", (size, rank))):
            adapter[f"base_model.model.{name}.lora_{side}.weight"] = 0.01 * torch.randn(shape, generator=generator)
    for folder, tensors, file in (
        ("dense", dense, "model"),
        ("shipped", shipped, "model"),
        ("adapter", adapter, "adapter_model"),
    ):
        (root / folder).mkdir(parents=True)
        save_file(tensors, root / folder / f"{file}.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def run(name: str, command: list[str]) -> None:
    """Print what a command measures about itself."""
    made = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=HERE.parent)
    print(f"{name:6} {made.stdout.strip() or made.stderr.strip()}", flush=True)


JOB = """
import sys; sys.path[:0] = ["benchmarks", "."]
import torch, lib_merge
from measure import measured, report
root = sys.argv[1]
dense, adapter, out, shipped = (f"{root}/{name}" for name in ("dense", "adapter", "out", "shipped"))
work = {
    "fold": lambda: lib_merge.fold(dense, adapter, out, quantize=shipped, fsync=False),
    "check": lambda: lib_merge.fold_check(dense, adapter, out, shipped),
}
report(measured(work[sys.argv[2]]))
"""


def main() -> None:
    """Make the inputs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--modules", type=int, default=12)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=64)
    args = parser.parse_args()
    if not args.dir.exists():
        sys.path[:0] = [str(HERE.parent)]
        make(args.dir, args.modules, args.size, args.rank)
    inputs = [str(args.dir / name / "model.safetensors") for name in ("dense", "shipped")]
    size = Path(inputs[1]).stat().st_size
    floor = [str(HERE / "floor.py"), *inputs, "--out", str(args.dir / "floor.bin"), "--bytes", str(size)]
    run("floor", floor)
    for name in ("fold", "check"):
        if name == "fold":
            shutil.rmtree(args.dir / "out", ignore_errors=True)
        run(name, ["-c", JOB, str(args.dir), name])


if __name__ == "__main__":
    main()
