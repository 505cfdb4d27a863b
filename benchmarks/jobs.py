"""One merge in this process, timed after imports; prints one JSON line. The protocol starts it for each run.

`python benchmarks/jobs.py JOB A B --out FILE [--threads 2] [--fsync]`; JOB is a method of lib_merge or a peer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import measured, report

PARAMETERS: dict[str, dict[str, Any]] = {
    "weighted_sum": {"alpha": 0.3},
    "power_up_dare": {"alpha": 0.85, "beta": 1.0, "seed": 42},
}
WARM_PACKAGES = ("lib_merge.files", "lib_merge.kernels", *(["lib_merge.compiled"] if find_spec("numba") else []))
Work = Callable[[], object]


def lib_merge(method: str, args: argparse.Namespace) -> Work:
    """Ours, through the public Python API: the only place of the benchmarks that knows it."""
    import torch

    from lib_merge import merge

    torch.empty(1)
    for package in WARM_PACKAGES:  # what a run would import on the way
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            importlib.import_module(module.name)
    parameters = PARAMETERS.get(method, {})
    running = {"threads": args.threads, "fsync": args.fsync, "overwrite": True}
    return lambda: merge(args.a, args.b, out=args.out, method=method, **parameters, **running)


def bake(args: argparse.Namespace) -> Work:
    """LoRAs B, C … at strength 0.8 into checkpoint A."""
    import torch

    from lib_merge import bake

    torch.empty(1)
    for package in (*WARM_PACKAGES, "lib_merge.adapters"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            importlib.import_module(module.name)
    loras = [(path, 0.8) for path in (args.b, *args.more)]
    running = {"threads": args.threads, "fsync": args.fsync, "overwrite": True}
    return lambda: bake(args.a, *loras, out=args.out, **running)


def peer_ram(args: argparse.Namespace) -> Work:
    """What the mergers built into web UIs do: both state dicts in RAM, a float32 loop, save."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(args.threads)

    def work() -> None:
        a, b = load_file(args.a), load_file(args.b)
        for key, value in a.items():
            if value.is_floating_point() and key in b:
                a[key] = ((1 - 0.3) * value.float() + 0.3 * b[key].float()).to(value.dtype)
        save_file(a, args.out, metadata={"format": "pt"})
        if args.fsync:
            sync(args.out)

    return work


def peer_mecha(args: argparse.Namespace) -> Work:
    """sd-mecha's weighted sum, computed in float32, saved as fp16; its own choices otherwise."""
    import sd_mecha
    import torch

    recipe = sd_mecha.weighted_sum(sd_mecha.model(args.a), sd_mecha.model(args.b), alpha=0.3)

    def work() -> None:
        sd_mecha.merge(
            recipe,
            merge_dtype=torch.float32,
            output_dtype=torch.float16,
            threads=args.threads,
            output=args.out,
        )
        if args.fsync:
            sync(args.out)

    return work


JOBS: dict[str, Callable[[argparse.Namespace], Work]] = {"bake": bake, "peer_ram": peer_ram, "peer_mecha": peer_mecha}


def sync(path: Path) -> None:
    """Wait until a file written by somebody else is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> None:
    """Parse, import, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help=f"method of lib_merge, or one of {', '.join(JOBS)}")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("more", nargs="*", type=Path, help="further LoRAs of the job bake")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fsync", action="store_true")
    args = parser.parse_args()
    work = JOBS[args.job](args) if args.job in JOBS else lib_merge(args.job, args)
    report(measured(work))


if __name__ == "__main__":
    main()
