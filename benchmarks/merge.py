"""Merges against their floor, and against other mergers: builds the inputs, runs the protocol, prints tables.

`python benchmarks/merge.py [--models sd15,sdxl_unet] [--methods weighted_sum,power_up_dare]
[--rows plain,fsync,first] [--peers] [--json FILE]`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inputs import MODELS, build_pair, default_folder
from protocol import MARGIN, OUT, Job, Place, Row, alternate, memory_available, output_place, table

HERE = Path(__file__).parent
ROWS = {
    "plain": "hashes cached, no fsync",
    "fsync": "hashes cached, fsync on both sides",
    "first": "first run: hashes of the inputs not cached, no fsync",
}


def jobs_of(kind: str, pair: tuple[Path, Path], args: argparse.Namespace, hashes: Path) -> tuple[Job, list[Job]]:
    """The floor of one row of the protocol and the jobs to measure against it."""
    a, b = map(str, pair)
    options = ["--out", OUT, "--threads", str(args.threads), *(["--fsync"] if kind == "fsync" else [])]

    def forget() -> None:
        if kind == "first":
            shutil.rmtree(hashes, ignore_errors=True)

    def job(name: str, python: str = sys.executable) -> Job:
        return Job(name, [python, str(HERE / "jobs.py"), name, a, b, *options], before=forget)

    floor = Job("floor", [sys.executable, str(HERE / "floor.py"), a, b, *options])
    jobs = [job(method) for method in args.methods.split(",") if method]
    if args.peers and kind == "plain":
        jobs += peers(job, pair, args.mecha_python)
    return floor, jobs


def peers(job: Any, pair: tuple[Path, Path], mecha_python: str | None) -> list[Job]:
    """The other mergers that this machine can run."""
    found = []
    size = pair[0].stat().st_size
    if memory_available() > 4 * size + MARGIN:  # two state dicts, the result, and the output in memory
        found.append(job("peer_ram"))
    else:
        print(f"peer_ram left out: needs {4 * size / 1e9:.0f} GB of memory", file=sys.stderr)
    if mecha_python or importlib.util.find_spec("sd_mecha"):
        found.append(job("peer_mecha", mecha_python or sys.executable))
    else:
        print("peer_mecha left out: sd_mecha is not installed (see --mecha-python)", file=sys.stderr)
    return found


def measure(model: str, kind: str, args: argparse.Namespace) -> tuple[Place, list[Row]]:
    """One row of the protocol on one pair of models."""
    pair = build_pair(model, args.dir)
    hashes = args.dir / "cache"
    floor, jobs = jobs_of(kind, pair, args, hashes)
    size = pair[0].stat().st_size
    place = output_place(size, 2 * size, args.disk or args.dir, on_disk=kind == "fsync")
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"LIB_MERGE_CACHE": str(hashes), "PYTHONPATH": os.pathsep.join(paths)}
    print(f"{model}, {kind}: output in {place.folder}", file=sys.stderr)
    return place, alternate(floor, jobs, place, rounds=args.rounds, env=env)


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cpus = f"{os.cpu_count()} × {names[0] if names else platform.machine()}"
    return {"cpu": cpus, "kernel": platform.release(), "python": platform.python_version()}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="sd15,sdxl_unet", help=f"of {','.join(MODELS)} (default: %(default)s)")
    parser.add_argument("--methods", default="weighted_sum,power_up_dare", help="default: %(default)s")
    parser.add_argument("--rows", default="plain", help=f"of {','.join(ROWS)} (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="other mergers too, in the plain row")
    parser.add_argument("--mecha-python", help="interpreter of an environment that has sd-mecha")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=default_folder(), help="inputs and hashes (default: %(default)s)")
    parser.add_argument("--disk", type=Path, help="outputs that do not go to memory (default: --dir)")
    parser.add_argument("--json", type=Path, help="write every single run there")
    args = parser.parse_args()
    if unknown := [kind for kind in args.rows.split(",") if kind not in ROWS]:
        parser.error(f"unknown row {unknown[0]}, known: {', '.join(ROWS)}")
    results = []
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for model in args.models.split(","):
        for kind in args.rows.split(","):
            place, rows = measure(model, kind, args)
            where = "in memory" if place.in_memory else "on a disk, synced before each run"
            print(f"\n### {model}: {ROWS[kind]} (output {where})\n\n{table(rows)}", flush=True)
            jobs = [asdict(row) for row in rows]
            results.append({"model": model, "row": kind, "in_memory": place.in_memory, "jobs": jobs})
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
