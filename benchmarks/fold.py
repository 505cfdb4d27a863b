"""A fold into a 4-bit checkpoint with Qwen3-4B's shapes, against the bare cost of reading its inputs and writing OUT.

`python benchmarks/fold.py --dir DIR [--layers 36] [--rank 64] [--runs 3]` makes the inputs where they are missing
(11 GB for 36 layers), and prints lines for the floor, the fold and the check, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# Rows and columns of a layer's projections: 252 in 36 layers, 3.6·10⁹ weights.
SHAPES = {
    "self_attn.q_proj": (4096, 2560),
    "self_attn.k_proj": (1024, 2560),
    "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 4096),
    "mlp.gate_proj": (9728, 2560),
    "mlp.up_proj": (9728, 2560),
    "mlp.down_proj": (2560, 9728),
}
SHARD_LAYERS = 12
FOLD_DEVIATION = 2e-3  # of a factor: the change is then some percent of a step, as trained adapters make it


def make(root: Path, layers: int, rank: int) -> None:
    """A dense bf16 model in shards, its 4-bit conversion in groups of 64, and an adapter of all projections."""
    import torch
    from safetensors.torch import save_file

    from lib_merge.quant.affine import quantize

    for name in ("dense", "shipped", "adapter"):
        (root / name).mkdir(parents=True)
    adapter: dict[str, torch.Tensor] = {}
    homes: dict[str, dict[str, str]] = {"dense": {}, "shipped": {}}
    for first in range(0, layers, SHARD_LAYERS):
        shard: dict[str, dict[str, torch.Tensor]] = {"dense": {}, "shipped": {}}
        for layer in range(first, min(first + SHARD_LAYERS, layers)):
            numbers = torch.Generator().manual_seed(layer)
            for module, shape in SHAPES.items():
                name = f"model.layers.{layer}.{module}"
                weight = torch.randn(shape, generator=numbers).mul_(0.02).bfloat16()
                coded = quantize(weight.float(), bits=4, group=64, rounding="metal", dtype=torch.bfloat16)
                words = coded.words.view(torch.uint32)
                shard["dense"][f"{name}.weight"] = weight
                shard["shipped"] |= {
                    f"{name}.weight": words,
                    f"{name}.scales": coded.scales,
                    f"{name}.biases": coded.biases,
                }
                for side, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                    factor = torch.randn(size, generator=numbers).mul_(FOLD_DEVIATION)
                    adapter[f"base_model.model.{name}.lora_{side}.weight"] = factor
        for kind, tensors in shard.items():
            file = f"model-{first // SHARD_LAYERS + 1:05}.safetensors"
            save_file(tensors, root / kind / file)
            homes[kind] |= dict.fromkeys(tensors, file)
    for kind, home in homes.items():
        (root / kind / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    general = {"bits": 4, "group_size": 64, "mode": "affine"}
    (root / "shipped" / "config.json").write_text(json.dumps({"quantization": general}))
    save_file(adapter, root / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16}
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
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if not args.dir.exists():
        sys.path[:0] = [str(HERE.parent)]
        make(args.dir, args.layers, args.rank)
    inputs = sorted(args.dir.glob("dense/*.safetensors")) + sorted(args.dir.glob("shipped/*.safetensors"))
    size = sum(path.stat().st_size for path in args.dir.glob("shipped/*.safetensors"))
    out = args.dir / "floor.bin"
    floor = [str(HERE / "floor.py"), *map(str, inputs), "--out", str(out), "--bytes", str(size)]
    for _ in range(args.runs):
        run("floor", floor)
        out.unlink(missing_ok=True)
        shutil.rmtree(args.dir / "out", ignore_errors=True)
        run("fold", ["-c", JOB, str(args.dir), "fold"])
        run("check", ["-c", JOB, str(args.dir), "check"])


if __name__ == "__main__":
    main()
