"""Every test remembers hashes and keeps presets in folders of its own, and leaves the user's alone."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture(autouse=True)
def own_hash_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"  # mktemp looks through all folders each time
    folder.mkdir()
    monkeypatch.setenv("LIB_MERGE_CACHE", str(folder))
    monkeypatch.setenv("LIB_MERGE_DATA", str(folder / "data"))
    return folder
