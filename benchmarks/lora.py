"""Three LoRAs of rank 32 into one, exactly, and the result back to rank 32; each in a fresh process.

`python benchmarks/lora.py [--model sdxl] [--dir DIR] [--threads 2] [--rounds 3]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from inputs import LORAS, build_loras, default_folder
from measure import measured, report
from protocol import MEMORY_FOLDER

RANK, STRENGTHS = 32, (0.8, -0.5, 0.3)


def run(loras: list[str], out: str, rank: int | None, threads: int) -> None:
    """One merge in this process; prints a JSON line."""
    import torch

    from lib_merge import merge_loras

    torch.empty(1)
    given = list(zip(loras, STRENGTHS, strict=False)) if rank is None else loras
    report(measured(lambda: merge_loras(*given, out=out, rank=rank, threads=threads, fsync=False)))


def main() -> None:
    """Parse, build, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sdxl", choices=LORAS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs (default: %(default)s)")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        out, rank, *loras = args.run
        run(loras, out, None if rank == "all" else int(rank), args.threads)
        return
    loras = [str(path) for path in build_loras(args.model, args.dir, len(STRENGTHS), RANK)]
    found: dict[str, list[dict[str, float]]] = {"concatenate": [], "recompress": []}
    for _ in range(args.rounds + 1):  # the first one fills the caches
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as folder:
            joint, small = f"{folder}/joint.safetensors", f"{folder}/small.safetensors"
            for name, words in (("concatenate", [joint, "all", *loras]), ("recompress", [small, str(RANK), joint])):
                command = [sys.executable, __file__, "--threads", str(args.threads), "--run", *words]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[name].append(json.loads(done.stdout))
    print("| job | wall s | CPU s | peak MB | foreign load (max) |\n|---|---|---|---|---|")
    for name, runs in found.items():
        middle = {field: statistics.median(run[field] for run in runs[1:]) for field in ("seconds", "cpu_seconds")}
        peak, foreign = (max(run[field] for run in runs[1:]) for field in ("peak_rss_mb", "foreign"))
        print(f"| {name} | {middle['seconds']:.2f} | {middle['cpu_seconds']:.2f} | {peak:.0f} | {foreign:.0%} |")


if __name__ == "__main__":
    main()
