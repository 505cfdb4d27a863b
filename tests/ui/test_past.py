"""Runs of the tab: remembered however they end, and carried out again from what is remembered."""

from __future__ import annotations

import pytest

from lib_merge.errors import CancelledError, FileError, MergeError
from lib_merge.events import CancelToken
from lib_merge.history import History
from lib_merge.host import standalone
from lib_merge.recipe import Recipe, Slot
from lib_merge.ui import checks, form, past
from lib_merge.ui.tasks.registry import BY_ID
from tests.support import values, write


@pytest.fixture
def host(tmp_path):
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    for number, name in enumerate(("a", "sub/b")):
        write(folder / f"{name}.safetensors", {"w": values((9, 9), number)})
    return standalone([folder])


def request(host, **more):
    task = BY_ID["merge"]
    stand = {**task.first_values(), "A": "a.safetensors", "B": "sub/b.safetensors", "alpha": 0.25, **more}
    return form.request(task, stand, host)


def run(host, wanted, **how):
    with past.recorded(wanted, host) as kept:
        kept.append(wanted.run(host, **how))
    return kept[0]


def test_a_run_is_remembered_with_hashes_and_report(host):
    (host.folders("checkpoint")[0] / "mixes").mkdir()
    made = run(host, request(host, name="mixes/new"))
    (entry,) = History(host.data()).entries()
    assert (entry.task, entry.state, entry.kind) == ("merge", "done", "checkpoint")
    assert entry.output == "mixes/new.safetensors"
    assert entry.said == "1 merged"
    recipe = entry.read_recipe()
    assert recipe.params["alpha"] == 0.25
    assert all(len(recipe.models[slot].sha256) == 64 for slot in "AB")
    assert past.result_of(entry, host) == made.output
    report = History(host.data()).report(entry.id)
    assert [row["key"] for row in report.rows] == ["w"]
    assert report.header["result"] == "new.safetensors"


def test_what_is_not_measured_has_no_report_and_names_what_it_was_asked(host):
    run(host, request(host, measure=False, keep_recipe=False))
    (entry,) = History(host.data()).entries()
    assert not entry.has_report
    assert entry.read_recipe().models["B"].file == "b.safetensors"


def test_failures_and_stops_are_remembered_and_go_on(host):
    wanted = request(host)
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        run(host, wanted, cancel=cancel)
    (host.folders("checkpoint")[0] / "a.safetensors").write_bytes(b"x")
    with pytest.raises(MergeError):
        run(host, wanted)
    failed, stopped = History(host.data()).entries()
    assert (stopped.state, failed.state) == ("stopped", "failed")
    assert stopped.output == failed.output == ""
    with pytest.raises(FileError, match="made no file"):
        past.result_of(failed, host)


def test_a_run_again_gives_the_same_bytes_and_verifies(host):
    first = run(host, request(host))
    (entry,) = History(host.data()).entries()
    wanted = past.again(entry.read_recipe(), host)
    assert wanted.target.name == "a+b weighted_sum 0.25.safetensors"
    second = run(host, wanted)
    assert second.output != first.output
    assert second.output.read_bytes() == first.output.read_bytes()
    job = checks.Checks().start(past.result_of(entry, host), host)
    assert job.wait(60)
    assert "1 tensors are what the recipe says" in checks.card(job)
    data = bytearray(first.output.read_bytes())
    data[-1] ^= 1
    first.output.write_bytes(bytes(data))
    job = checks.Checks().start(first.output, host)
    assert job.wait(60)
    assert "Different" in checks.card(job)


def test_a_chain_that_no_form_shows_runs_from_the_history(host):
    inner = Recipe(method="slerp", models={"A": Slot(file="a.safetensors"), "B": Slot(file="b.safetensors")})
    recipe = Recipe(method="weighted_sum", models={"A": Slot(file="a.safetensors"), "B": Slot(recipe=inner)})
    made = run(host, past.again(recipe, host, "chain"))
    assert made.output.name == "chain.safetensors"


def test_open_or_lost_models_are_refused(host):
    with pytest.raises(MergeError, match="leaves open which models it is for: B"):
        past.again(Recipe(method="weighted_sum", models={"A": Slot(file="a.safetensors"), "B": None}), host)
    with pytest.raises(MergeError, match=r"gone\.safetensors is in none of the folders"):
        past.again(Recipe(task="convert", models={"A": Slot(file="gone.safetensors")}), host)


def test_a_changed_history_reads_nothing_outside_the_folders(host, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    import msgspec

    run(host, request(host))
    (entry,) = History(host.data()).entries()
    for output in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        with pytest.raises(MergeError):
            past.result_of(msgspec.structs.replace(entry, output=output), host)


def test_lines_say_when_what_and_with_what_result(host):
    run(host, request(host, name="new"))
    (entry,) = History(host.data()).entries()
    assert past.line(entry).endswith("· new.safetensors · 1 merged")
    assert past.facts(entry)["did"].startswith("merge weighted_sum; alpha 0.25")
