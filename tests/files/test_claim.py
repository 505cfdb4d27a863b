"""One run for one output, in one process and in two."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from lib_merge.cli import main
from lib_merge.errors import OutputError
from lib_merge.files.claim import Claim, is_claimed
from lib_merge.files.target import numbered
from tests.support import write

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from lib_merge.files.claim import Claim
with Claim(Path(sys.argv[1])):
    print("holding", flush=True)
    sys.stdin.read()
"""


def child(text, *words):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *map(str, words)], env=env, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.portable
def test_a_claim_is_there_while_it_is_held_and_gone_afterwards(tmp_path):
    target = tmp_path / "out.safetensors"
    with Claim(target), Claim(tmp_path / "other.safetensors"):
        assert is_claimed(target)
        assert numbered(target).name == "out_1.safetensors"
        with pytest.raises(OutputError, match=f"another run is writing this output: process {os.getpid()}"):
            Claim(target).__enter__()
        assert is_claimed(target)
    assert not is_claimed(target)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), Claim(target):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.portable
@pytest.mark.parametrize("text", ["", "none", "OWN NODE", "DEAD NODE"])
def test_what_a_dead_process_left_is_taken_away(tmp_path, text):
    dead = child("")
    dead.communicate()
    for word, value in (("OWN", os.getpid()), ("DEAD", dead.pid), ("NODE", platform.node())):
        text = text.replace(word, str(value))
    stale = tmp_path / ".out.safetensors.lib_merge.lock"
    stale.write_text(text)
    (tmp_path / ".x.lib_merge.lock").write_text(f"{dead.pid} {platform.node()}")
    with Claim(tmp_path / "out.safetensors"):
        assert [path.name for path in tmp_path.iterdir()] == [stale.name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.portable
def test_another_computer_s_claim_is_kept(tmp_path):
    lock = tmp_path / ".out.safetensors.lib_merge.lock"
    lock.write_text("7 elsewhere")
    with pytest.raises(OutputError, match="process 7 on elsewhere") as caught:
        Claim(tmp_path / "out.safetensors").__enter__()
    assert str(lock) in caught.value.hint
    assert lock.read_text() == "7 elsewhere"


@pytest.mark.portable
def test_of_many_at_once_one_gets_it(tmp_path):
    ready, got, done = threading.Barrier(8), [], threading.Event()

    def attempt():
        ready.wait()
        try:
            with Claim(tmp_path / "out.safetensors"):
                got.append(True)
                done.wait(30)
        except OutputError:
            got.append(False)
            if len(got) == 8:
                done.set()

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(got) < 8 and any(thread.is_alive() for thread in threads):
        threads[0].join(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_a_second_process_is_told_which_one_writes(tmp_path, capsys):
    paths = [write(tmp_path / f"{name}.safetensors", {"x.weight": np.ones((2, 2), "f4") * 3}) for name in "ab"]
    out = tmp_path / "out.safetensors"
    words = ["merge", *map(str, paths), "-o", str(out)]
    first = child(HOLDER, out)
    try:
        assert first.stdout.readline() == "holding\n"
        for more in ([], ["--overwrite"]):
            assert main([*words, *more]) == 1
            told = capsys.readouterr().err
            assert f"error: another run is writing this output: process {first.pid} (file {out})" in told
        assert not out.exists()
        assert main([*words, "--number"]) == 0
        assert (tmp_path / "out_1.safetensors").exists()
        first.kill()
        first.wait()
        assert main(words) == 0
    finally:
        first.kill()
        first.communicate()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.safetensors", "b.safetensors", "out.safetensors", "out_1.safetensors"]


WRITER = """
import sys
import lib_merge
def wait(progress):
    if progress.stage == "publishing":
        print("almost", flush=True)
        sys.stdin.readline()
a, b, out = sys.argv[1:]
lib_merge.merge_loras(a, b, out=out, on_progress=wait)
"""


def test_a_run_holds_its_output_from_before_its_work_on(tmp_path, capsys):
    from tests.lora.files import make

    a, b = (make(tmp_path / f"{name}.safetensors") for name in "ab")
    out = tmp_path / "out.safetensors"
    first = child(WRITER, a, b, out)
    try:
        assert first.stdout.readline() == "almost\n"
        assert main(["lora", "merge", str(a), str(b), "-o", str(out)]) == 1
        assert f"another run is writing this output: process {first.pid}" in capsys.readouterr().err
        assert main(["lora", "convert", str(a), "--names", "peft", "--family", "sd1", "-o", str(out)]) == 1
        assert f"process {first.pid}" in capsys.readouterr().err
        first.communicate("\n", timeout=60)
        assert first.returncode == 0
    finally:
        first.kill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "out.safetensors"]
