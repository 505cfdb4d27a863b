"""Three LoRAs of rank 32 put together weight by weight; each strategy in a fresh process.

`python benchmarks/optimize.py [--model sdxl] [--methods auto,ties] [--dir DIR] [--threads 2] [--rounds 3]`
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

RANK, STRENGTHS = 32, (1.0, 0.8, 0.6)


def run(method: str, out: str, loras: list[str], threads: int) -> None:
    """One merge in this process; prints a JSON line."""
    import torch

    from lib_merge import merge_loras

    torch.empty(1)
    given = list(zip(loras, STRENGTHS, strict=True))
    report(measured(lambda: merge_loras(*given, out=out, method=method, threads=threads, fsync=False)))


def main() -> None:
    """Parse, build, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sdxl", choices=LORAS)
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs (default: %(default)s)")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        method, out, *loras = args.run
        run(method, out, loras, args.threads)
        return
    print("| method | wall s | CPU s | peak MB | foreign load (max) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as folder:
        loras = [str(path) for path in build_loras(args.model, args.dir, len(STRENGTHS), RANK)]
        for method in args.methods.split(","):
            runs = []
            for number in range(args.rounds + 1):  # the first one fills the caches
                out = f"{folder}/{method}{number}.safetensors"
                command = [sys.executable, __file__, "--threads", str(args.threads), "--run", method, out, *loras]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                Path(out).unlink()
                runs.append(json.loads(done.stdout))
            middle = {field: statistics.median(run[field] for run in runs[1:]) for field in ("seconds", "cpu_seconds")}
            peak, foreign = (max(run[field] for run in runs[1:]) for field in ("peak_rss_mb", "foreign"))
            print(f"| {method} | {middle['seconds']:.1f} | {middle['cpu_seconds']:.1f} | {peak:.0f} | {foreign:.0%} |")


if __name__ == "__main__":
    main()
