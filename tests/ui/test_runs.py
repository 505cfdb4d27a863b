"""The line of runs: order, stopping what goes on and what waits, no run twice, what is remembered."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from lib_merge import MergeError, PlanError
from lib_merge.host import standalone
from lib_merge.ui.form import request
from lib_merge.ui.runs import DOUBLE_CLICK_S, KEPT, Runs
from lib_merge.ui.tasks.registry import BY_ID
from tests.support import values, write

MERGE = BY_ID["merge"]


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), number)})
    return tmp_path


class Gate:
    """A host whose runs wait, before they read anything, until they are let go."""

    def __init__(self, folder):
        self.go, self.begun = threading.Event(), []
        self.host = replace(standalone([folder]), refresh=self._refresh)

    def _refresh(self, kind):
        self.begun.append(kind)
        assert self.go.wait(30)


def asked(host, name, **changed):
    entries = {**MERGE.first_values(), "A": "a.safetensors", "B": "b.safetensors", "name": name, **changed}
    return request(MERGE, entries, host)


def names(runs):
    return [run.request.target.stem for run in runs]


def test_runs_are_carried_out_one_after_the_other_in_their_order(folder):
    gate, runs = Gate(folder), Runs()
    three = [runs.start(asked(gate.host, name), gate.host) for name in ("x", "y", "z")]
    while not gate.begun:
        time.sleep(0.005)
    assert [run.job.state for run in three] == ["running", "waiting", "waiting"]
    assert (runs.latest, names(runs.waiting), names(runs.all)) == (three[0], ["y", "z"], ["x", "y", "z"])
    assert runs.busy
    gate.go.set()
    assert all(run.job.wait(60) for run in three)
    assert [run.job.state for run in three] == ["done"] * 3
    assert three[0].job.ended <= three[1].job.started
    assert three[1].job.ended <= three[2].job.started
    assert names(runs.all) == ["z", "y", "x"]  # what ended last comes first
    assert (runs.busy, runs.waiting, runs.latest) == (False, [], three[2])
    assert {path.stem for path in folder.iterdir()} == {"a", "b", "x", "y", "z"}


def test_one_that_waits_can_be_stopped_and_leaves_nothing(folder):
    gate, runs = Gate(folder), Runs()
    first, second, third = (runs.start(asked(gate.host, name), gate.host) for name in ("x", "y", "z"))
    while not gate.begun:
        time.sleep(0.005)
    pressed = time.monotonic()
    runs.stop(second.job.id)
    assert second.job.wait(1)
    assert time.monotonic() - pressed < 1
    assert (second.job.state, names(runs.waiting)) == ("stopped", ["z"])
    gate.go.set()
    assert third.job.wait(60)
    assert (first.job.state, second.job.state, third.job.state) == ("done", "stopped", "done")
    assert not list(folder.glob("*y*"))
    runs.stop(second.job.id)
    runs.stop("no such id")
    assert third.job.state == "done"


def test_the_same_run_is_not_started_twice(folder):
    gate, runs = Gate(folder), Runs()
    first = runs.start(asked(gate.host, "x"), gate.host)
    assert runs.start(asked(gate.host, "x"), gate.host) is first
    other = runs.start(asked(gate.host, "x", alpha=0.25), gate.host)
    assert other is not first
    assert runs.start(asked(gate.host, "x", alpha=0.25), gate.host) is other  # it waits
    gate.go.set()
    assert other.job.wait(60)
    assert sorted(path.stem for path in folder.iterdir()) == ["a", "b", "x", "x_1"]


def test_a_double_click_on_a_short_run_is_one_run_and_a_later_click_another(folder):
    host, runs = standalone([folder]), Runs()
    first = runs.start(asked(host, "x"), host)
    assert first.job.wait(60)
    if time.monotonic() - first.asked < DOUBLE_CLICK_S / 2:
        assert runs.start(asked(host, "x"), host) is first
    time.sleep(DOUBLE_CLICK_S)
    again = runs.start(asked(host, "x"), host)
    assert again is not first
    assert again.job.wait(60)


def test_what_headers_tell_is_said_before_a_run_waits(folder):
    write(folder / "odd.safetensors", {"other": values((3,), 1)})
    gate, runs = Gate(folder), Runs()
    first = runs.start(asked(gate.host, "x"), gate.host)
    with pytest.raises(PlanError):
        runs.start(asked(gate.host, "y", B="odd.safetensors"), gate.host)
    with pytest.raises(MergeError, match="not over yet writes that file"):
        runs.start(asked(gate.host, "x", alpha=0.1, exists="stop"), gate.host)
    assert names(runs.all) == ["x"]
    gate.go.set()
    assert first.job.wait(60)


def test_the_last_ones_stay_known(folder):
    host, runs = standalone([folder]), Runs()
    made = [runs.start(asked(host, f"n{number:02}"), host) for number in range(KEPT + 3)]
    assert all(run.job.wait(60) for run in made)
    assert names(runs.all) == [f"n{number:02}" for number in reversed(range(3, KEPT + 3))]
    runs.start(asked(host, "one more"), host).job.wait(60)
    assert runs.find(made[0].job.id) is None
    assert runs.find(made[-1].job.id) is made[-1]
