"""Baking LoRAs against its floor, which reads the checkpoint and writes the output: one LoRA, and several at once.

`python benchmarks/bake.py [--models sdxl,sd15] [--loras 1,5] [--rounds 5] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from inputs import LORAS, build_base, build_loras, default_folder
from merge import machine
from protocol import OUT, Job, Place, Row, alternate, output_place, table

HERE = Path(__file__).parent


def measure(model: str, args: argparse.Namespace) -> tuple[Place, list[Row]]:
    """One checkpoint with each number of LoRAs."""
    counts = [int(count) for count in args.loras.split(",")]
    base, loras = build_base(model, args.dir), build_loras(model, args.dir, max(counts))
    options = ["--out", OUT, "--threads", str(args.threads)]
    floor = Job("floor", [sys.executable, str(HERE / "floor.py"), str(base), *options])
    jobs = [
        Job(f"bake, {count} × rank 16",
            [sys.executable, str(HERE / "jobs.py"), "bake", str(base), *map(str, loras[:count]), *options])
        for count in counts
    ]  # fmt: skip
    size = base.stat().st_size
    place = output_place(size, size, args.disk or args.dir)
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"LIB_MERGE_CACHE": str(args.dir / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    print(f"{model}: output in {place.folder}", file=sys.stderr)
    return place, alternate(floor, jobs, place, rounds=args.rounds, env=env)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="sdxl", help=f"of {','.join(LORAS)} (default: %(default)s)")
    parser.add_argument("--loras", default="1,5", help="how many LoRAs at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs and hashes (default: %(default)s)")
    parser.add_argument("--disk", type=Path, help="outputs that do not go to memory (default: --dir)")
    parser.add_argument("--json", type=Path, help="write every single run there")
    args = parser.parse_args()
    if unknown := [model for model in args.models.split(",") if model not in LORAS]:
        parser.error(f"unknown model {unknown[0]}, known: {', '.join(LORAS)}")
    results = []
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for model in args.models.split(","):
        place, rows = measure(model, args)
        where = "in memory" if place.in_memory else "on a disk, synced before each run"
        print(f"\n### {model}: hashes cached, no fsync (output {where})\n\n{table(rows)}", flush=True)
        results.append({"model": model, "in_memory": place.in_memory, "jobs": [asdict(row) for row in rows]})
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
