"""The floor of every merge: read all inputs once, write as many bytes as the output has, and compute nothing.

`python benchmarks/floor.py A B --out FILE [--bytes N] [--threads 2] [--fsync]` prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from measure import measured, report

CHUNK = 8 << 20


def opened(path: Path, flags: int, stack: ExitStack) -> int:
    """A file descriptor that closes with `stack`."""
    fd = os.open(path, flags, 0o644)
    stack.callback(os.close, fd)
    return fd


def read_chunk(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from `offset`; stops at the end of the file."""
    done = 0
    while done < len(buffer) and (got := os.preadv(fd, [buffer[done:]], offset + done)):
        done += got


def write_chunk(fd: int, buffer: memoryview, offset: int) -> None:
    """Write the whole of `buffer` at `offset`."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(fd, buffer[done:], offset + done)


def copy(inputs: list[int], sizes: list[int], out: int, out_size: int, buffers: list[memoryview], fsync: bool) -> None:
    """Go through all files chunk by chunk, one worker per buffer; the workers share a counter of offsets."""
    offsets = itertools.count(0, CHUNK)  # next() on it is atomic

    def work(buffer: memoryview) -> None:
        for offset in offsets:
            if offset >= max(*sizes, out_size):
                return
            for fd, size in zip(inputs, sizes, strict=True):
                if offset < size:
                    read_chunk(fd, buffer[: min(CHUNK, size - offset)], offset)
            if offset < out_size:
                write_chunk(out, buffer[: min(CHUNK, out_size - offset)], offset)

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(work, buffers))
    if fsync:
        os.fsync(out)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--bytes", type=int, help="size of the output (default: that of the first input)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fsync", action="store_true")
    args = parser.parse_args()
    sizes = [path.stat().st_size for path in args.inputs]
    out_size = sizes[0] if args.bytes is None else args.bytes
    buffers = [memoryview(bytearray(CHUNK)) for _ in range(args.threads)]
    with ExitStack() as stack:
        inputs = [opened(path, os.O_RDONLY, stack) for path in args.inputs]
        out = opened(args.out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stack)
        report(measured(lambda: copy(inputs, sizes, out, out_size, buffers, args.fsync)))


if __name__ == "__main__":
    main()
