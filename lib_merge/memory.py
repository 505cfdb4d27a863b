"""Memory of this process, from the system."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def peak_rss_mb() -> float:
    """Largest resident set so far, in MB of 10**6 bytes; 0 where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def rss_mb() -> float:
    """Resident set now, in MB of 10**6 bytes; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        pass
    try:
        import psutil
    except ImportError:
        return 0.0
    return float(psutil.Process().memory_info().rss) / 1e6
