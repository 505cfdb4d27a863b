"""Kernels run on one torch thread, as in the engine's workers."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch = sys.modules.get("torch")  # tests of the portable tier run where there is none
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
