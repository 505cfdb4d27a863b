"""The values of a report's tensor: found through the run, told where a file is gone, names as text."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from lib_merge.files.hashes import HashCache
from lib_merge.history import History
from lib_merge.host import standalone
from lib_merge.samples import make_sample
from lib_merge.ui import form, past, value_view
from lib_merge.ui.tasks.registry import BY_ID
from tests.support import write

KEY = "model.diffusion_model.input_blocks.0.0.weight"
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two samples: the host, its entry, and the names in its report."""
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate("ab"):
        make_sample(folder / f"{name}.safetensors", number, shrink=64)
    data = tmp_path_factory.mktemp("data")
    host = replace(standalone([folder]), data=lambda: data, hashes=lambda: HashCache(data))
    task = BY_ID["merge"]
    wanted = form.request(
        task, {**task.first_values(), "A": "a.safetensors", "B": "b.safetensors", "alpha": 0.25, "name": "new"}, host
    )
    with past.recorded(wanted, host) as kept:
        kept.append(wanted.run(host))
    (entry,) = History(data).entries()
    return host, entry, [row["key"] for row in History(data).report(entry.id).rows]


def test_a_tensor_of_a_run_is_shown_in_its_inputs_and_its_result(made):
    host, entry, keys = made
    shown = value_view.values_of(entry, host, KEY, keys)
    assert shown.problems == ()
    assert list(shown.found) == ["A: a.safetensors", "B: b.safetensors", "result: new.safetensors"]
    for name, values in shown.found.items():
        stored = load_file(host.folders("checkpoint")[0] / name.split(": ")[1])[KEY].astype(np.float64)
        assert values.summary.total == values.summary.read == stored.size
        assert values.summary.deviation == pytest.approx(stored.std())
        assert f"{stored.min():.4g}</td><td>{stored.max():.4g}</td><td>{stored.mean():.4g}" in value_view.card(shown)


def test_the_picture_holds_all_values_in_the_same_steps(made):
    pytest.importorskip("plotly")
    host, entry, keys = made
    traces = value_view.picture(value_view.values_of(entry, host, KEY, keys)).data
    assert len({tuple(trace.x) for trace in traces}) == 1
    assert [sum(trace.y) for trace in traces] == pytest.approx([100] * 3)
    assert len({trace.line.dash for trace in traces}) == len({trace.line.color for trace in traces}) == 3


def test_files_that_are_gone_and_tensors_that_are_not_there_are_told(made):
    host, entry, keys = made
    gone = msgspec.structs.replace(entry, output="moved.safetensors", recipe=entry.recipe.replace("b.saf", "lost.saf"))
    shown = value_view.values_of(gone, host, KEY, keys)
    assert list(shown.found) == ["A: a.safetensors", "B: b.safetensors"]  # by its hash, under another name
    (line,) = shown.problems
    assert line.startswith("result: moved.safetensors is not there any more")
    other = value_view.values_of(entry, host, NASTY, [*keys, NASTY])
    assert other.found == {}
    assert [line.split(":")[0] for line in other.problems] == ["A", "B", "result"]
    assert "has no tensor of this name" in other.problems[0]
    assert value_view.picture(other) is None
    assert "<img" not in value_view.card(other)


def test_a_changed_history_reads_nothing_outside_the_folders(made, tmp_path):
    host, entry, keys = made
    secret = make_sample(tmp_path / "secret.safetensors", 0, shrink=64)
    for place in (str(secret), f"../{tmp_path.name}/secret.safetensors"):
        recipe = f'{{"lib_merge": 1, "task": "convert", "models": {{"A": {{"file": "{place}"}}}}}}'
        changed = msgspec.structs.replace(entry, output=place, recipe=recipe)
        assert value_view.values_of(changed, host, KEY, keys).found == {}


def test_a_lora_s_modules_are_no_tensors(made):
    host, entry, keys = made
    shown = value_view.values_of(msgspec.structs.replace(entry, kind="lora"), host, KEY, keys)
    assert shown.found == {}
    assert "module of a LoRA" in value_view.card(shown)


def test_pieces_and_broken_values_are_told(made, tmp_path, monkeypatch):
    from lib_merge import values as module

    monkeypatch.setattr(module, "READ", 128)
    path = write(tmp_path / "x.safetensors", {"w": np.array([np.nan, *[0.0] * 999], "<f4")})
    shown = value_view.Shown("w", {"A: x": value_view._read(path, "w", ["w"])}, ())
    said = value_view.card(shown)
    assert "A: x: 128 of 1,000 values, in evenly spaced pieces" in said
    assert "A: x: 1 values are not finite" in said
    assert "100 %" in said
