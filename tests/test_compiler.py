"""Numba is used where it is found and works, and nowhere else."""

from __future__ import annotations

import pytest

from lib_merge import compiled, compiler


@pytest.fixture
def fresh():
    """The search for numba is made anew, before and after."""
    compiler.compiler.cache_clear()
    yield
    compiler.compiler.cache_clear()


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError])
def test_a_numba_that_does_not_go_with_this_numpy_is_not_used(monkeypatch, fresh, error):
    def refuse(name):
        raise error("Numba needs another NumPy")

    monkeypatch.setattr(compiler.importlib, "import_module", refuse)
    assert compiler.compiler() is None
    assert compiled.available() is None


def test_a_numba_that_is_told_to_compile_nothing_is_not_used(monkeypatch, fresh):
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert compiler.compiler() is None
