"""A user's small files: where they lie, whole or not at all, and one writer at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import platformdirs
import pytest

from lib_merge.errors import OutputError
from lib_merge.files.userdata import data_folder, locked, write_whole

pytestmark = pytest.mark.portable


def test_where_they_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("LIB_MERGE_DATA", str(tmp_path / "here"))
    assert data_folder() == tmp_path / "here"
    monkeypatch.delenv("LIB_MERGE_DATA")
    assert str(data_folder()) == platformdirs.user_data_dir("lib_merge", appauthor=False)


def test_a_file_is_written_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_whole(path, b"one", overwrite=False)
    with pytest.raises(OutputError):
        write_whole(path, b"two", overwrite=False)
    assert path.read_bytes() == b"one"
    write_whole(path, b"three", overwrite=True)
    assert path.read_bytes() == b"three"
    assert [item.name for item in path.parent.iterdir()] == ["a.json"]


def test_a_write_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, b"one", overwrite=True)

    def full(*args):
        raise OSError(28, "No space left on device")

    from lib_merge.files import calls

    monkeypatch.setattr(calls, "CALLS", calls.CALLS._replace(write_at=full))
    with pytest.raises(OutputError, match="the disk is full"):
        write_whole(path, b"two", overwrite=True)
    assert path.read_bytes() == b"one"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


_COUNT = """
import sys, time
from pathlib import Path
from lib_merge.files.userdata import locked
folder = Path(sys.argv[1])
for _ in range(50):
    with locked(folder / "lock"):
        number = int((folder / "count").read_text())
        time.sleep(0.001)
        (folder / "count").write_text(str(number + 1))
"""


def test_processes_and_threads_wait_for_each_other(tmp_path):
    (tmp_path / "count").write_text("0")
    root = str(Path(__file__).resolve().parents[2])
    others = [subprocess.Popen([sys.executable, "-c", _COUNT, str(tmp_path)], cwd=root) for _ in range(2)]

    def count():
        for _ in range(50):
            with locked(tmp_path / "lock"):
                (tmp_path / "count").write_text(str(int((tmp_path / "count").read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in others] == [0, 0]
    assert (tmp_path / "count").read_text() == "200"
