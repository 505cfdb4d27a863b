"""The history of runs: bounded, robust against damage, and written by several processes at once."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from lib_merge.history import KEPT, REPORTS_KEPT, Entry, History, Report, new_id
from lib_merge.recipe import Recipe, to_json

pytestmark = pytest.mark.portable

RECIPE = Recipe(method="weighted_sum", params={"alpha": 0.3})


def entry(number, **more):
    fields = {
        "id": f"{number:012x}",
        "task": "merge",
        "state": "done",
        "started": 1e9 + number,
        "seconds": 2.5,
        "kind": "checkpoint",
        "output": f"sub/mix {number}.safetensors",
        "said": "1,130 merged",
        "recipe": to_json(RECIPE),
    }
    return Entry(**{**fields, **more})


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "data")


def test_nothing_is_remembered_at_first(history):
    assert history.entries() == []
    assert history.get("0" * 12) is None
    assert not history.folder.exists()


def test_runs_come_back_newest_first(history):
    for number in range(3):
        history.add(entry(number))
    assert history.entries() == [entry(2), entry(1), entry(0)]
    assert history.get(entry(1).id) == entry(1)
    assert history.entries()[0].read_recipe() == RECIPE


def test_the_oldest_are_forgotten(history):
    for number in range(KEPT + 5):
        history.add(entry(number))
    assert [e.id for e in history.entries()] == [entry(n).id for n in reversed(range(5, KEPT + 5))]
    assert len(history.path.read_bytes().splitlines()) == KEPT


@pytest.mark.parametrize(
    "damage",
    [
        b'{"id": "00000000\n',
        b"\xff\xfe\x00\n",
        b"{}\n",
        b"[1, 2]\n\n\n",
        b'{"id": "../../etc/x", "task": "merge"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_damaged_lines_are_passed_over_and_then_gone(history, damage):
    history.add(entry(1))
    whole = history.path.read_bytes()
    history.path.write_bytes(damage + whole + damage.rstrip(b"\n"))  # the last line was cut off by a kill
    assert history.entries() == [entry(1)]
    history.add(entry(2))
    assert history.path.read_bytes().splitlines() == [
        line for line in history.path.read_bytes().splitlines() if line.startswith(b'{"id":"00000000000')
    ]
    assert history.entries() == [entry(2), entry(1)]


_ADD = """
import sys
from pathlib import Path
from tests.test_history import entry
from lib_merge.history import History
for number in range(10):
    History(Path(sys.argv[1])).add(entry(100 * int(sys.argv[2]) + number))
"""


def test_two_processes_lose_nothing_of_each_other(history):
    root = str(Path(__file__).resolve().parent.parent)
    words = [sys.executable, "-c", _ADD, str(history.folder)]
    others = [subprocess.Popen([*words, str(number)], cwd=root) for number in (1, 2)]
    assert [process.wait(120) for process in others] == [0, 0]
    found = {e.id for e in history.entries()}
    assert found == {entry(100 * process + number).id for process in (1, 2) for number in range(10)}


def test_reports_come_back_exactly_and_only_the_newest_stay(history):
    rows = [{"key": "a.weight", "shape": [2, 3], "norm_a": 0.1, "cosine": math.nan, "note": "<b>"}]
    report = Report(title="mix", header={"method": "x"}, rows=rows)
    for number in range(REPORTS_KEPT + 3):
        history.add(entry(number, has_report=True), report)
    history.add(entry(99))
    found = history.report(entry(REPORTS_KEPT).id)
    assert (found.title, found.header) == ("mix", {"method": "x"})
    assert found.rows[0]["norm_a"] == 0.1
    assert math.isnan(found.rows[0]["cosine"])
    assert [e.id for e in history.with_reports()] == [entry(n).id for n in reversed(range(3, REPORTS_KEPT + 3))]
    assert history.report(entry(0).id) is None
    assert len(list((history.folder / "reports").iterdir())) == REPORTS_KEPT


@pytest.mark.parametrize("text", [b"", b"x", b"\x1f\x8b\x08", "../history"])
def test_a_report_that_cannot_be_read_is_none(history, text):
    history.add(entry(1, has_report=True), Report(title="t", header={}, rows=[]))
    if isinstance(text, bytes):
        (history.folder / "reports" / f"{entry(1).id}.json.gz").write_bytes(text)
        assert history.report(entry(1).id) is None
    else:
        assert history.report(text) is None


def test_a_folder_that_cannot_be_written_fails_no_run(tmp_path):
    (tmp_path / "file").write_text("x")
    history = History(tmp_path / "file")
    history.add(entry(1), Report(title="t", header={}, rows=[]))
    assert history.entries() == []


def test_all_can_be_forgotten(history):
    history.add(entry(1, has_report=True), Report(title="t", header={}, rows=[]))
    history.clear()
    assert (history.entries(), history.report(entry(1).id)) == ([], None)


def test_ids_differ():
    assert len({new_id() for _ in range(1000)}) == 1000
