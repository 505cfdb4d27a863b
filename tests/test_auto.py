"""Whole runs of the method that chooses, through files, recipes and the command line: many models, a strength each."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import lib_merge
from lib_merge.cli import main
from lib_merge.errors import MergeError
from lib_merge.kernels.registry import method
from lib_merge.recipe import Recipe, Slot, from_json, to_json
from tests.data.oracles import optimizer_ref as oracle

QUICK = {"fsync": False}
KEYS = ("blocks.0.attn.weight", "blocks.1.conv.weight", "blocks.1.bias")
SHAPES = ((20, 30), (8, 4, 3, 3), (40,))


@pytest.fixture
def models(tmp_path):
    """A base and three tunes of it; C leaves the bias alone, D the bias and the convolution."""
    generator = torch.Generator().manual_seed(1)
    base = {key: torch.randn(shape, generator=generator) for key, shape in zip(KEYS, SHAPES, strict=True)}
    paths = [tmp_path / "base.safetensors"]
    save_file(base, paths[0])
    for name, changed in (("b", KEYS), ("c", KEYS[:2]), ("d", KEYS[:1])):
        tensors = {key: tensor.clone() for key, tensor in base.items()}
        for key in changed:
            tensors[key] += 0.1 * torch.randn(tensors[key].shape, generator=generator)
        paths.append(tmp_path / f"{name}.safetensors")
        save_file(tensors, paths[-1])
    return paths


def change(path, base, key):
    return (load_file(path)[key].double() - load_file(base)[key].double()).numpy()


def test_each_tensor_is_merged_from_the_models_that_change_it(models, tmp_path):
    base, b, c, d = models
    out = tmp_path / "out.safetensors"
    done = lib_merge.merge(base, (b, 0.8), (c, -0.5), d, out=out, method="auto", report=True, **QUICK)
    three = [change(path, base, KEYS[0]) for path in (b, c, d)]
    two = [change(path, base, KEYS[1]) for path in (b, c)]
    (one,) = (change(path, base, KEYS[2]) for path in (b,))
    wanted = [oracle.slerp(three, (0.8, -0.5, 1.0)), oracle.slerp(two, (0.8, -0.5)), 0.8 * one]
    for key, want in zip(KEYS, wanted, strict=True):
        assert torch.allclose(torch.tensor(change(out, base, key)), torch.tensor(want), atol=1e-6), key
    rows = {row["key"]: row for row in done.rows}
    assert [rows[key]["strategy"] for key in KEYS] == ["slerp", "slerp", "weighted_sum"]
    assert [rows[key]["n"] for key in KEYS] == [3, 2, 1]
    assert all(rows[key]["reason"] for key in KEYS)
    assert rows[KEYS[1]]["cosine"] == pytest.approx(oracle.group_metrics(two, (0.8, -0.5))["cos"], abs=1e-6)


def test_strengths_stand_in_the_recipe_and_verify_takes_them(models, tmp_path):
    base, b, c, _ = models
    out = tmp_path / "out.safetensors"
    done = lib_merge.merge(base, (b, 0.8), c, out=out, method="auto", **QUICK)
    stored = from_json(to_json(done.plan.recipe))
    assert [slot.strength for slot in stored.models.values()] == [None, 0.8, None]
    assert lib_merge.verify(out, models=[tmp_path]).ok
    again = tmp_path / "again.safetensors"
    lib_merge.run(stored, out=again, models=[tmp_path], **QUICK)
    assert again.read_bytes() == out.read_bytes()


def test_the_order_of_slots_in_a_recipe_s_text_is_no_order_of_models(models, tmp_path):
    """C first in the text is still C: for this method, and for one with a place for each model."""
    base, b, c, d = models
    files = {"A": base, "B": b, "C": c, "D": d}
    for id, slots in (("auto", "ABCD"), ("add_difference", "ABC")):
        outs = []
        for order in (slots, slots[::-1]):
            recipe = Recipe(method=id, models={slot: Slot(file=files[slot].name) for slot in order})
            outs.append(tmp_path / f"{id}{order}.safetensors")
            lib_merge.run(recipe, out=outs[-1], files={slot: files[slot] for slot in order}, **QUICK)
        one, other = (load_file(out) for out in outs)
        assert all(torch.equal(one[key], other[key]) for key in KEYS)


def test_a_model_that_is_a_recipe_has_a_strength_too(models, tmp_path):
    base, b, _, d = models
    inner = Recipe(method="weighted_sum", models={"A": Slot(file=base.name), "B": Slot(file=b.name)})
    slots = {"A": Slot(file=base.name), "B": Slot(recipe=inner, strength=2.0), "C": Slot(file=d.name, strength=0.0)}
    out = tmp_path / "out.safetensors"
    files = {"A": base, "B.A": base, "B.B": b, "C": d}
    lib_merge.run(Recipe(method="auto", models=slots), out=out, files=files, **QUICK)
    for key in KEYS:  # half of the change, twice
        assert torch.allclose(load_file(out)[key], load_file(b)[key], atol=1e-6)
    assert lib_merge.verify(out, models=[tmp_path]).ok


def test_a_model_of_strength_0_does_not_widen_the_result(models, tmp_path):
    base, b, c, d = models
    for path in (base, b, c):
        save_file({key: tensor.half() for key, tensor in load_file(path).items()}, path)
    out = tmp_path / "out.safetensors"
    for strength, dtype in ((0.0, torch.float16), (1.0, torch.float32)):
        lib_merge.merge(base, b, c, (d, strength), out=out, method="auto", overwrite=True, **QUICK)
        assert {tensor.dtype for tensor in load_file(out).values()} == {dtype}


def command(*args, capsys):
    return main([str(arg) for arg in args]), capsys.readouterr()


def test_the_command_line_takes_a_strength_for_each_model(models, tmp_path, capsys):
    base, b, c, d = models
    out, table, same = tmp_path / "out.safetensors", tmp_path / "t.json", tmp_path / "same.safetensors"
    args = ("merge", base, f"{b}@0.8", f"{c}@-0.5", d, "-o", out, "--method", "auto", "--report", table, "--no-recipe")
    code, _ = command(*args, capsys=capsys)
    assert code == 0
    rows = {row["key"]: row for row in json.loads(table.read_text())["rows"]}
    assert rows[KEYS[2]]["strategy"] == "weighted_sum"
    assert rows[KEYS[2]]["ratio"] is None
    lib_merge.merge(base, (b, 0.8), (c, -0.5), d, out=same, method="auto", keep_recipe=False, **QUICK)
    assert same.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("strengths", "id", "told"),
    [
        ("@1 _ _", "auto", "base and takes no strength"),
        ("_ @0 @0", "auto", "every model but A has strength 0"),
        ("_ @1@2 _", "auto", "one strength, not two"),
        ("_ @0.5 _", "add_difference", "takes no weight for each model"),
        ("_ _", "auto", "auto needs model C"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(models, tmp_path, capsys, strengths, id, told):
    args = [f"{path}{text.strip('_')}" for path, text in zip(models, strengths.split(), strict=False)]
    code, printed = command("merge", *args, "-o", tmp_path / "out.safetensors", "--method", id, capsys=capsys)
    assert code == 1
    assert told in printed.err
    assert "hint:" in printed.err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("models_of", [{"A": 1, "B": 1, "C": 1, "vae": 1}, {"A": 1, "B": None, "C": 1}])
def test_strange_and_open_slots_are_refused(models, tmp_path, models_of):
    slots = {name: Slot(file=models[0].name) if there else None for name, there in models_of.items()}
    files = {name: models[0] for name, there in models_of.items() if there}
    with pytest.raises(MergeError):
        lib_merge.run(Recipe(method="auto", models=slots), out=tmp_path / "out.safetensors", files=files, **QUICK)


def test_strengths_of_other_methods_are_refused(models, tmp_path):
    with pytest.raises(MergeError, match="takes no strength for each model"):
        lib_merge.merge(models[0], (models[1], 0.5), out=tmp_path / "out.safetensors", **QUICK)


def test_it_is_the_only_method_of_any_number_of_models_so_far():
    assert method("auto").models == "A B C …"
    assert method("weighted_sum").models == "A B"
