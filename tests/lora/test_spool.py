"""Tensors that wait in a file: the same bits, at any size and from many threads; nothing left behind, nothing lost."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lib_merge.errors import OutputError
from lib_merge.files import calls
from lib_merge.lora._spool import Spool

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def drawn(number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 33, generator=generator).to(DTYPES[number % len(DTYPES)])


def test_what_is_kept_comes_back_also_after_it_was_forgotten(tmp_path):
    tensors = [drawn(number, 1 + 211 * number) for number in range(40)] + [drawn(0, 700_000)]  # beyond one chunk
    with Spool(tmp_path / "out.safetensors") as spool:
        with ThreadPoolExecutor(4) as pool:
            kept = list(pool.map(spool.keep, tensors))
        for _ in range(2):
            assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(tensors, kept, strict=True))
            spool.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_turned_tensor_keeps_its_shape(tmp_path):
    with Spool(tmp_path / "out.safetensors") as spool:
        turned = drawn(0, 2000).T
        assert torch.equal(spool.keep(turned), turned)


def test_large_tensors_do_not_wait_in_memory(tmp_path):
    with Spool(tmp_path / "out.safetensors") as spool:
        room = torch.zeros(1 << 22)
        before = resident()
        kept = [spool.keep(room.fill_(number)) for number in range(16)]  # 256 MB in all
        assert resident() - before < 96 << 20
        assert [float(tensor.sum()) for tensor in kept] == [float(number << 22) for number in range(16)]
        spool.forget()
        assert resident() - before < 96 << 20


def resident() -> int:
    """Bytes of memory that the process holds now."""
    told = Path("/proc/self/statm")
    if not told.exists():
        pytest.skip("this system tells it in another way")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(fd: int, view: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    with Spool(tmp_path / "out.safetensors") as spool:
        monkeypatch.setattr(calls, "CALLS", calls.CALLS._replace(write_at=full))
        with pytest.raises(OutputError, match="disk is full"):
            spool.keep(torch.zeros(1 << 20))
