"""Ctrl-C while the program is loading, and that nothing else is touched by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.portable

ROOT = Path(__file__).resolve().parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
# Stops inside the import of the package, which is what Ctrl-C has to meet.
SLOW = """
import builtins, sys, time
real = builtins.__import__
def slow(name, *rest, **more):
    if name.endswith("analyze"):
        print("importing", flush=True)
        time.sleep(30)
    return real(name, *rest, **more)
builtins.__import__ = slow
sys.argv = {argv!r}
import lib_merge
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C cannot be sent to one process")
@pytest.mark.parametrize(("argv", "quiet"), [(["/usr/bin/lib-merge", "methods"], True), (["webui.py"], False)])
def test_ctrl_c_during_imports(argv, quiet):
    process = subprocess.Popen([sys.executable, "-c", SLOW.format(argv=argv)], env=ENV, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=20)[1]
    if quiet:
        assert (process.returncode, told) == (130, "error: interrupted; what was not finished is removed\n")
    else:
        assert told.endswith("KeyboardInterrupt\n")


def test_a_program_that_loads_the_library_keeps_its_ctrl_c():
    code = "import signal, sys; before = signal.getsignal(2); import lib_merge; print(signal.getsignal(2) is before)"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_command_line_gives_ctrl_c_back():
    code = (
        "import signal, sys; sys.argv = ['lib-merge']; import lib_merge; from lib_merge.cli import main; "
        "quiet = signal.getsignal(2); main(['--version']); "
        "print(quiet is not signal.default_int_handler, signal.getsignal(2) is signal.default_int_handler)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True True\n")
