"""The task that folds a LoRA into a quantized model: form, recipe, command line and library give the same bytes."""

from __future__ import annotations

import pytest

import lib_merge
from lib_merge import Job, MergeError, PlanError
from lib_merge import recipe as recipes
from lib_merge.cli import main
from lib_merge.host import standalone
from lib_merge.ui import api, cards, form, run_cards
from lib_merge.ui.filling import values_of
from lib_merge.ui.form import FormError, request
from lib_merge.ui.runs import Runs
from lib_merge.ui.tasks.registry import BY_ID
from tests.fold.making import Pair, contents
from tests.ui.test_cards import text

FOLD = BY_ID["fold"]


@pytest.fixture
def pair(tmp_path):
    for name in ("models", "loras"):
        (tmp_path / name).mkdir()
    made = Pair(tmp_path / "models")
    made.adapter()
    (tmp_path / "models" / "adapter").rename(tmp_path / "loras" / "ink")
    return made


@pytest.fixture
def host(pair):
    return standalone([pair.root], [pair.root.parent / "loras"])


def asked(host, **changed):
    entries = {"SHIPPED": "shipped", "DENSE": "dense", "lora1": "ink", "name": "folded", **changed}
    return request(FOLD, {**FOLD.first_values(), **entries}, host)


def ink(pair):
    return pair.root.parent / "loras" / "ink"


@pytest.mark.parametrize(
    "changed", [{}, {"method": "away", "round_dense": True, "lora_alpha": "3"}], ids=["plain", "all"]
)
def test_the_form_the_command_line_and_the_library_give_the_same_bytes(pair, host, tmp_path, changed):
    wanted = asked(host, **changed)
    made = wanted.run(host)
    assert made.output == pair.root / "folded"
    more = {"rounding": "away", "round_dense": True, "lora_alpha": 3.0} if changed else {}
    direct = lib_merge.fold(pair.dense, ink(pair), tmp_path / "direct", quantize=pair.shipped, **more).output
    (tmp_path / "recipe.json").write_text(form.recipe_text(wanted))
    folders = ["--models", str(pair.root), "--models", str(ink(pair).parent)]
    assert main(["run", str(tmp_path / "recipe.json"), "-o", str(tmp_path / "cli"), *folders]) == 0
    assert contents(made.output) == contents(direct) == contents(tmp_path / "cli")
    assert contents(made.output) != contents(pair.shipped)
    back = values_of(FOLD, wanted.recipe, host)
    assert request(FOLD, back, host).recipe == wanted.recipe


def test_a_plan_from_headers_a_run_and_its_card(pair, host):
    wanted = asked(host)
    plan = text(cards.planned_card(wanted.run(host, dry_run=True), []))
    assert plan.startswith("Plan")
    assert "2 modules are computed anew, 5 tensors copied" in plan
    assert "Writes folded (new)" in plan
    assert not wanted.target.exists()
    job = Job("fold", lambda follow, cancel: wanted.run(host, on_progress=follow, cancel=cancel)).start()
    assert job.wait(60)
    said = text(run_cards.job_card(job))
    assert said.startswith("Done folded in")
    assert "2 modules folded, 5 tensors copied" in said
    assert "reproduces 100 %" in said


def test_what_stands_against_it_is_said_before_a_run(pair, host):
    runs = Runs()
    wanted = asked(host, DENSE="shipped")
    with pytest.raises(MergeError):
        runs.start(wanted, host)
    asked(host).run(host)
    with pytest.raises(PlanError, match="exists"):
        runs.start(asked(host, exists="stop"), host)
    assert runs.all == []
    for slot in ("SHIPPED", "DENSE", "lora1"):
        with pytest.raises(FormError) as caught:
            asked(host, **{slot: None})
        assert list(caught.value.fields) == [slot]


def test_names_tell_what_was_folded_into_what(host):
    assert asked(host, name="").target.name == "shipped+ink folded"


def test_a_call_plans_a_fold(host):
    told = api.plan(host, form.recipe_text(asked(host)), "folded")
    assert (told["counts"], told["problems"]) == ({"merged": 2, "copied": 5}, [])
    assert told["output"] == "folded"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loras": ()}, "one adapter, not 0"),
        ({"loras": (recipes.Lora(file="ink", strength=0.5),)}, "strength 1"),
        ({"loras": (recipes.Lora(file="ink", blocks="IN00=0"),)}, "block weights"),
        ({"models": {"SHIPPED": recipes.Slot(file="shipped")}}, "needs model DENSE"),
        ({"method": "up"}, "no rounding 'up'"),
        ({"params": {"density": 0.5}}, r"no params\.density"),
        ({"seed": 3, "glob": True}, "no seed, glob"),
    ],
)
def test_a_recipe_that_says_what_no_fold_has_is_refused(pair, host, tmp_path, changed, said):
    import msgspec

    recipe = msgspec.structs.replace(asked(host).recipe, **changed)
    with pytest.raises(MergeError, match=said):
        lib_merge.run(recipe, out=tmp_path / "out", models=[pair.root, ink(pair).parent])
    assert not (tmp_path / "out").exists()
