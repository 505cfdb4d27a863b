"""How fast the commands that need headers only answer, and the refusals: wall time of the whole process.

`python benchmarks/headers.py [--model sd15] [--dir DIR] [--rounds 5]`
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inputs import build_pair, default_folder

ROOT = Path(__file__).parent.parent


def commands(a: str, b: str, out: str) -> dict[str, tuple[int, list[str]]]:
    """Title -> (exit status it must have, arguments)."""
    merge = ["merge", a, b, "-o", out]
    return {
        "methods": (0, ["methods"]),
        "inspect FILE": (0, ["inspect", a]),
        "merge … --dry-run": (0, [*merge, "--method", "weighted_sum", "--alpha", "0.3", "--dry-run"]),
        "refusal: unknown method": (1, [*merge, "--method", "weigted_sum"]),
        "refusal: unknown parameter": (1, [*merge, "-p", "alhpa=0.3"]),
        "refusal: missing file": (1, ["merge", a, b + ".missing", "-o", out]),
        "refusal: output exists": (1, ["merge", a, b, "-o", b]),
    }


def timed(arguments: list[str], env: dict[str, str]) -> tuple[float, int, str]:
    """Wall seconds of the process, exit status, and the last line it said on stderr."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "lib_merge", *arguments], env=env, cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    return time.perf_counter() - start, done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def main() -> None:
    """Run each command after a warm-up, print the table; exit 1 when one ends as it should not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sd15")
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    a, b = map(str, build_pair(args.model, args.dir))
    failed = False
    print("| command | median s | min | max | exit |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIB_MERGE_CACHE": f"{folder}/cache"}
        for title, (wanted, arguments) in commands(a, b, f"{folder}/out.safetensors").items():
            runs = [timed(arguments, env) for _ in range(args.rounds + 1)][1:]
            seconds = [run[0] for run in runs]
            _, status, said = runs[-1]
            failed |= status != wanted
            note = "" if status == wanted else f", expected {wanted}: {said}"
            figures = " | ".join(f"{f(seconds):.2f}" for f in (statistics.median, min, max))
            print(f"| {title} | {figures} | {status}{note} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
