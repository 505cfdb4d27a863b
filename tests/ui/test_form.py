from __future__ import annotations

import json
from dataclasses import replace

import pytest

import lib_merge
from lib_merge import recipe as recipes
from lib_merge.cli import main
from lib_merge.errors import RecipeError
from lib_merge.host import standalone
from lib_merge.kernels.registry import all_methods
from lib_merge.ui import form
from lib_merge.ui.filling import not_found, values_of
from lib_merge.ui.form import FormError, request
from lib_merge.ui.tasks.registry import BY_ID, TASKS
from tests.support import values, write

MERGE = BY_ID["merge"]


@pytest.fixture
def host(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for number, name in enumerate("abc"):
        write(folder / f"{name}.safetensors", {"w": values((9, 9), number), "v": values((9,), 5 + number)})
    return standalone([folder])


def filled(**changed):
    """The form as it is at first, with A and B chosen."""
    return {**MERGE.first_values(), "A": "a.safetensors", "B": "b.safetensors", **changed}


def test_the_first_values_ask_for_a_plain_merge(host):
    asked = request(MERGE, filled(), host)
    plain = lib_merge.Recipe(
        method="weighted_sum",
        params={"alpha": 0.5},
        models={slot: recipes.Slot(file=f"{slot.lower()}.safetensors") for slot in "AB"},
    )
    assert asked.recipe == plain
    assert {slot: path.name for slot, path in asked.files.items()} == {"A": "a.safetensors", "B": "b.safetensors"}
    assert asked.target.name == "a+b weighted_sum 0.5.safetensors"
    assert (asked.exists, asked.keep_recipe, asked.device) == ("number", True, "cpu")


def test_every_entry_reaches_the_recipe(host):
    asked = request(
        MERGE,
        filled(
            method="add_difference", alpha=0.25, smooth=True, C="c.safetensors", blocks="BASE=0, IN00-IN05=0.2",
            rule="attn2: alpha=0.5 smooth=false\n\n*proj*: alpha=0",
            exclude="attn1\nattn2", glob=True, include_mode=True, discard="*ema*", mismatch="zeros", seed=7,
            allow_mixed_prediction=True, vae="c.safetensors", save_dtype="fp16", override_dtype=True, name="new",
            exists="overwrite", keep_recipe=False,
        ),
        host,
    )  # fmt: skip
    recipe = asked.recipe
    assert (recipe.method, recipe.params) == ("add_difference", {"alpha": 0.25, "smooth": True})
    assert recipe.blocks == {"BASE": {"alpha": 0.0}, "IN00-IN05": {"alpha": 0.2}}
    assert recipe.rules == (
        recipes.Rule(match="attn2", params={"alpha": 0.5, "smooth": False}),
        recipes.Rule(match="*proj*", params={"alpha": 0.0}),
    )
    assert values_of(MERGE, recipe, host)["rule"] == "attn2: alpha=0.5 smooth=false\n*proj*: alpha=0"
    assert (recipe.exclude, recipe.discard) == (("attn1", "attn2"), ("*ema*",))
    assert (recipe.glob, recipe.include_mode, recipe.mismatch, recipe.seed) == (True, True, "zeros", 7)
    assert recipe.allow_mixed_prediction
    assert (recipe.vae.file, recipe.output.save_dtype, recipe.output.override_dtype) == ("c.safetensors", "fp16", True)
    assert (asked.target.name, asked.exists, asked.keep_recipe) == ("new.safetensors", "overwrite", False)


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_there_and_back_for_every_method(host, method):
    chosen = all_methods()[method]
    params = {param.name: param.default for param in chosen.params}
    asked = request(MERGE, filled(method=method, C="c.safetensors", **params), host)
    back = values_of(MERGE, asked.recipe, host)
    assert request(MERGE, back, host).recipe == asked.recipe
    assert back["C"] == ("c.safetensors" if "C" in chosen.inputs else None)


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_extreme_values_survive_the_form_of_every_method(host, method):
    """The lowest and highest a method takes, beyond its sliders too, and more digits than a slider has steps."""
    chosen = all_methods()[method]
    for extreme in (-1e9, -0.123456789, 0.123456789, 1e9):
        params = {
            param.name: param.default if isinstance(param.default, bool) else min(max(param.low, extreme), param.high)
            for param in chosen.params
        }
        slots = {slot: recipes.Slot(file=f"{slot.lower()}.safetensors") for slot in chosen.inputs}
        recipe = lib_merge.Recipe(method=method, params=params, models=slots)
        assert request(MERGE, values_of(MERGE, recipe, host), host).recipe == recipe


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_an_emptied_parameter_is_an_error(host, method):
    chosen = all_methods()[method]
    params = {param.name: param.default for param in chosen.params}
    for param in (param for param in chosen.params if not isinstance(param.default, bool)):
        for nothing in (None, ""):
            with pytest.raises(FormError) as caught:
                request(MERGE, filled(method=method, C="c.safetensors", **{**params, param.name: nothing}), host)
            assert list(caught.value.fields) == [param.name]


def test_every_field_of_a_recipe_is_shown_or_refused():
    # a field that is added to the recipe must not be lost on its way through the form
    shown = {field.name for field in MERGE.fields} | {
        "lib_merge",
        "task",
        "method",
        "params",
        "models",
        "output",
        "vae",
        "rules",  # its field is named after the option
    }
    hidden = set(lib_merge.Recipe().__struct_fields__) - shown
    examples = {"loras": (recipes.Lora(file="x"),), "only": "vae"}
    examples["optimizer"] = recipes.Optimizer(scope="global")
    for name in hidden & examples.keys():
        with pytest.raises(RecipeError, match=name):
            values_of(MERGE, lib_merge.Recipe(**{name: examples[name]}), standalone([]))
    assert hidden <= examples.keys(), "give the form a field for it, or this test an example"


def test_what_the_form_cannot_show_is_refused(host):
    nested = recipes.Slot(recipe=lib_merge.Recipe())
    for recipe, said in [
        (lib_merge.Recipe(method="weighted_sum", models={"A": nested}), "models.A"),
        (lib_merge.Recipe(method="auto", models={"B": recipes.Slot(file="b", strength=0.5)}), "models.B.strength"),
        (lib_merge.Recipe(output=recipes.Output(metadata={"x": "y"})), "metadata"),
        (lib_merge.Recipe(task="convert"), "convert"),
        (lib_merge.Recipe(method="karcher"), "karcher"),
    ]:
        with pytest.raises(RecipeError, match=said):
            values_of(MERGE, recipe, host)


def test_models_of_a_recipe_are_found_by_their_contents_first(host, tmp_path):
    path = tmp_path / "models" / "b.safetensors"
    digest = host.hashes().compute(path)
    slot = recipes.Slot(file="its old name.safetensors", sha256=digest)
    recipe = lib_merge.Recipe(method="weighted_sum", models={"A": recipes.Slot(file="gone.safetensors"), "B": slot})
    shown = values_of(MERGE, recipe, host)
    assert (shown["A"], shown["B"]) == (None, "b.safetensors")
    assert [said.endswith("gone.safetensors is not among the models") for said in not_found(MERGE, recipe, host)] == [
        True
    ]


def test_a_model_that_could_be_either_of_two_is_left_open_and_said(tmp_path):
    for folder in ("", "sub"):
        (tmp_path / folder).mkdir(exist_ok=True)
        write(tmp_path / folder / "twin.safetensors", {"w": values((2,), 0)})
    recipe = lib_merge.Recipe(method="weighted_sum", models={"A": recipes.Slot(file="twin.safetensors")})
    (said,) = not_found(MERGE, recipe, standalone([tmp_path]))
    assert "Model A" in said
    assert "twin.safetensors is there 2 times" in said
    assert "sub/twin.safetensors" in said


@pytest.mark.parametrize(
    ("changed", "field", "said"),
    [
        ({"A": None}, "A", "choose a model"),
        ({"B": ""}, "B", "choose a model"),
        ({"B": "d.safetensors"}, "B", "not among"),
        ({"method": "triple_sum", "beta": 0.5}, "C", "choose a model"),
        ({"blocks": "IN00=x"}, "blocks", "cannot read"),
        ({"blocks": "1, 2, 3"}, "blocks", "3 numbers"),
        ({"alpha": None}, "alpha", "type a number"),
        ({"rule": "w: alpha=1\n\nv alpha=1"}, "rule", "line 3.*no.* rule"),
        ({"rule": "w: alpha=1 alpha=2"}, "rule", "line 1.*given twice"),
        ({"seed": None}, "seed", "whole number"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"name": "../x"}, "name", "leads out"),
        ({"vae": "no.safetensors"}, "vae", "not among"),
    ],
)
def test_each_wrong_entry_is_named(host, changed, field, said):
    with pytest.raises(FormError, match=said) as caught:
        request(MERGE, filled(**changed), host)
    assert list(caught.value.fields) == [field]


def test_all_wrong_entries_are_named_at_once(host):
    with pytest.raises(FormError) as caught:
        request(MERGE, filled(A=None, B="no", blocks="?", seed=None), host)
    assert set(caught.value.fields) == {"A", "B", "blocks", "seed"}


def test_the_form_the_command_line_and_the_library_give_the_same_bytes(host, tmp_path):
    asked = request(MERGE, filled(method="power_up_dare", alpha=0.5, beta=1.5, seed=3, name="tab"), host)
    from_tab = asked.run(host).output
    recipe = tmp_path / "recipe.json"
    recipe.write_text(form.recipe_text(asked))
    out = tmp_path / "cli.safetensors"
    assert main(["run", str(recipe), "-o", str(out), "--models", str(tmp_path / "models")]) == 0
    direct = lib_merge.merge(
        asked.files["A"],
        asked.files["B"],
        out=tmp_path / "api.safetensors",
        method="power_up_dare",
        beta=1.5,
        alpha=0.5,
        seed=3,
    ).output
    assert from_tab.read_bytes() == out.read_bytes() == direct.read_bytes()


def test_names_that_are_taken(host):
    """Add a number, stop, or overwrite: as the form says, and nothing else is touched."""
    asked = request(MERGE, filled(name="new"), host)
    assert [asked.run(host).output.name for _ in range(3)] == [
        "new.safetensors",
        "new_1.safetensors",
        "new_2.safetensors",
    ]
    before = asked.target.read_bytes()
    with pytest.raises(lib_merge.PlanError, match="exists"):
        request(MERGE, filled(name="new", alpha=0.9, exists="stop"), host).run(host)
    assert asked.target.read_bytes() == before
    made = request(MERGE, filled(name="new", alpha=0.9, exists="overwrite"), host).run(host).output
    assert made == asked.target
    assert made.read_bytes() != before


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_a_task_is_whole(task):
    names = [field.name for field in task.fields]
    labels = [field.label for field in task.fields]
    assert len(set(names)) == len(names)
    assert len(set(labels)) == len(labels)
    assert set(task.first_values()) >= {field.name for field in task.fields} | {
        "name",
        "folder",
        "exists",
        "keep_recipe",
    }
    for field in task.fields:
        assert field.kind != "choice" or field.default in {value for _, value in field.choices}


def test_parameters_stand_in_their_usual_order():
    # of every method: a slider that several share has one place
    usual = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    assert [name for name in MERGE.params if name in usual] == usual


def test_recipe_text_is_a_recipe(host):
    asked = request(MERGE, filled(), host)
    assert recipes.from_json(form.recipe_text(asked)) == asked.recipe
    assert json.loads(form.recipe_text(asked))["models"]["A"]["file"] == "a.safetensors"


def test_a_missing_folder_is_made_for_the_result_and_by_a_run_alone(host, tmp_path):
    asked = request(MERGE, filled(name="new/mixes/one"), host)
    planned = asked.run(host, dry_run=True)
    planned.plan.close()
    assert (planned.output, planned.plan.errors()) == (tmp_path / "models" / "new" / "mixes" / "one.safetensors", [])
    assert not (tmp_path / "models" / "new").exists()
    asked.check(host)
    assert asked.run(host).output.exists()
    broken = request(MERGE, filled(name="other/deep/one", exclude="no tensor has this name"), host)
    broken = replace(broken, files={**broken.files, "B": tmp_path / "gone.safetensors"})
    with pytest.raises(lib_merge.MergeError):
        broken.run(host)
    assert not (tmp_path / "models" / "other").exists()


def test_loras_lie_on_top_of_a_merge(tmp_path):
    from tests.test_bake import Q, V, base, lora

    for name in ("models", "loras"):
        (tmp_path / name).mkdir()
    base(tmp_path / "models" / "a.safetensors")
    base(tmp_path / "models" / "b.safetensors")
    lora(tmp_path / "loras" / "ink.safetensors", Q, V)
    host = standalone([tmp_path / "models"], [tmp_path / "loras"])
    asked = request(MERGE, filled(loras="<lora:ink:0.5>", lora_alpha="2", name="tab"), host)
    assert asked.recipe.loras == (recipes.Lora(file="ink.safetensors", strength=0.5, alpha=2.0),)
    assert values_of(MERGE, asked.recipe, host)["loras"] == "ink.safetensors @ 0.5"
    direct = lib_merge.run(
        asked.recipe, out=tmp_path / "direct.safetensors", models=[tmp_path / "models", tmp_path / "loras"]
    )
    assert asked.run(host).output.read_bytes() == direct.output.read_bytes()
    plain = request(MERGE, filled(name="plain"), host).run(host).output
    assert plain.read_bytes() != direct.output.read_bytes()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_every_entry_is_read_or_is_one_of_the_result(task):
    """Each field fills something of the recipe: a model, LoRAs, a parameter, or an entry that has a reader."""
    for field in task.fields:
        known = field.kind in ("model", "loras") or field.param or field.name in form.READERS
        assert known or field.name == "lora_alpha", field.name
