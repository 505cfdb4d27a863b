"""What a child process measures about itself, from the first read to the last byte written.

Only the standard library, so that the floor does not carry torch and a peer may run in another environment. Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One timed piece of work.

    Attributes:
        seconds: wall time.
        cpu_seconds: user and system time of this process and of children it waited for.
        peak_rss_mb: VmHWM of this process over its whole life, in 10^6 bytes.
        foreign: share of the machine's CPU time that others took meanwhile, 0…1.
        disk_read_mb: what this process had to fetch from the disk (0 = all inputs were in the page cache).
    """

    seconds: float
    cpu_seconds: float
    peak_rss_mb: float
    foreign: float
    disk_read_mb: float


def measured(work: Callable[[], object]) -> Measured:
    """Run `work` once and say what it took."""
    read, busy, cpu = disk_read_bytes(), busy_seconds(), own_cpu_seconds()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    cpu, busy, read = own_cpu_seconds() - cpu, busy_seconds() - busy, disk_read_bytes() - read
    foreign = max(0.0, busy - cpu) / (seconds * (os.cpu_count() or 1))
    return Measured(seconds, cpu, _status_kib("VmHWM") * 1024 / 1e6, foreign, read / 1e6)


def report(result: Measured) -> None:
    """Print the one JSON line that the protocol reads."""
    print(json.dumps({name: round(value, 4) for name, value in asdict(result).items()}), flush=True)


def own_cpu_seconds() -> float:
    """CPU time of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def busy_seconds() -> float:
    """CPU time of the whole machine but idling and waiting for I/O; what the hypervisor stole counts."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def disk_read_bytes() -> int:
    """Bytes this process made the kernel fetch from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
