"""What the tests of the file room share: the two sets of file calls, and a cache folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lib_merge.files import calls

FAST = ("preadv", "pwrite", "copy_file_range")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's own cache of hashes."""
    monkeypatch.setenv("LIB_MERGE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=["fast", "portable"])
def file_calls(request, monkeypatch):
    """The test runs twice: with the calls of this system, and with the fast ones removed from `os`."""
    if request.param == "portable":
        for name in FAST:
            monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(calls, "CALLS", calls.choose())
    return request.param


@pytest.fixture
def open_files():
    """A function that counts the descriptors of this process, where the system tells them."""
    table = Path("/proc/self/fd")
    return lambda: len(list(table.iterdir())) if table.is_dir() else 0
