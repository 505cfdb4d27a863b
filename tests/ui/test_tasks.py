"""Every task of the tab: its form makes the recipe that the library makes, and its runs give the same bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lib_merge
from lib_merge import Job
from lib_merge import recipe as recipes
from lib_merge.cli import main
from lib_merge.errors import FileError, RecipeError
from lib_merge.host import Host, standalone
from lib_merge.lora import LoraResult
from lib_merge.ui import cards, form, lora_lines, run_cards
from lib_merge.ui.facts import facts, size_text
from lib_merge.ui.filling import values_of
from lib_merge.ui.form import FormError, request
from lib_merge.ui.tasks.registry import BY_ID, TASKS
from tests.support import read, values, write
from tests.test_bake import CONV, CROSS, OUT, SIZE, K, Q, V, base, lora
from tests.ui.test_cards import text


@dataclass(frozen=True)
class House:
    """Two folders of models, and a host that shows them."""

    host: Host
    checkpoints: Path
    loras: Path


@pytest.fixture
def house(tmp_path):
    checkpoints, loras = tmp_path / "checkpoints", tmp_path / "loras"
    (loras / "sub").mkdir(parents=True)
    checkpoints.mkdir()
    base(checkpoints / "base.safetensors")
    tensors = read(checkpoints / "base.safetensors")
    tuned = {key: tensor + 0.01 * values(tensor.shape, 70) for key, tensor in tensors.items()}
    write(checkpoints / "tuned.safetensors", tuned)
    write(checkpoints / "new.vae.safetensors", {"decoder.conv_in.weight": values((4, 4, 3, 3), 5)})
    lora(loras / "ink.safetensors", Q, CONV, OUT)
    lora(loras / "sub" / "mira.safetensors", Q, V, CROSS, seed=200, rank=2)
    return House(standalone([checkpoints], [loras]), checkpoints, loras)


LINES = "ink.safetensors @ 0.8\nsub/mira.safetensors @ -0.5 @ 0.25"


def filled(task: str, **changed: Any) -> dict[str, Any]:
    """The form of a task as it is at first, with some entries."""
    return {**BY_ID[task].first_values(), **changed}


def by_library(task: str, house: House, out: Path) -> lib_merge.Result | LoraResult:
    """What the library makes of what `FILLED` says."""
    given = {"base": house.checkpoints / "base.safetensors", "tuned": house.checkpoints / "tuned.safetensors"}
    ink, mira = house.loras / "ink.safetensors", house.loras / "sub" / "mira.safetensors"
    two = ((ink, 0.8), (mira, -0.5, 0.25))
    if task == "bake":
        return lib_merge.bake(given["base"], *two, out=out, blocks="IN01=0.5", exclude="attn2", save_dtype="fp16",
                              override_dtype=True, lora_alpha=3.0)  # fmt: skip
    if task == "convert":
        return lib_merge.convert(given["base"], out=out, save_dtype="fp16", override_dtype=True, discard="attn2",
                                 only="unet")  # fmt: skip
    if task == "lora_merge":
        return lib_merge.merge_loras(*two, out=out, method="weighted_average", rank=3, save_dtype="fp32")
    if task == "lora_extract":
        return lib_merge.extract_lora(given["tuned"], given["base"], out=out, rank=4, conv_rank=2, clamp=0.99,
                                      store_diffs=True, names="diffusers")  # fmt: skip
    assert task == "lora_resize"
    return lib_merge.resize_lora(ink, out=out, keep=0.8, rule="cumulative", max_rank=3)


FILLED = {
    "bake": {"A": "base.safetensors", "loras": LINES, "blocks": "IN01=0.5", "exclude": "attn2", "save_dtype": "fp16",
             "override_dtype": True, "lora_alpha": "3"},
    "convert": {"A": "base.safetensors", "save_dtype": "fp16", "override_dtype": True, "discard": "attn2",
                "only": "unet"},
    "lora_merge": {"loras": LINES, "method": "weighted_average", "rank": "3", "save_dtype": "fp32"},
    "lora_extract": {"A": "tuned.safetensors", "B": "base.safetensors", "rank": "4", "conv_rank": "2", "clamp": "0.99",
                     "store_diffs": True, "names": "diffusers"},
    "lora_resize": {"lora1": "ink.safetensors", "method": "cumulative", "keep": "0.8", "max_rank": "3"},
}  # fmt: skip


@pytest.mark.parametrize("task", FILLED)
def test_the_form_the_command_line_and_the_library_give_the_same_bytes(house, tmp_path, task):
    asked = request(BY_ID[task], filled(task, name="tab", **FILLED[task]), house.host)
    from_tab = asked.run(house.host).output
    assert from_tab.parent == (house.checkpoints if task in ("bake", "convert") else house.loras)
    recipe, out = tmp_path / "recipe.json", tmp_path / "cli.safetensors"
    recipe.write_text(form.recipe_text(asked))
    folders = ["--models", str(house.checkpoints), "--models", str(house.loras)]
    assert main(["run", str(recipe), "-o", str(out), *folders]) == 0
    direct = by_library(task, house, tmp_path / "api.safetensors").output
    assert from_tab.read_bytes() == out.read_bytes() == direct.read_bytes()


@pytest.mark.parametrize("task", FILLED)
def test_there_and_back(house, task):
    asked = request(BY_ID[task], filled(task, **FILLED[task]), house.host)
    back = values_of(BY_ID[task], asked.recipe, house.host)
    assert request(BY_ID[task], back, house.host).recipe == asked.recipe
    shown = {name: value for name, value in FILLED[task].items() if name not in ("loras", "blocks")}
    assert {name: back[name] for name in shown} == shown


def test_the_optimizer_s_fields_become_its_recipe_and_are_shown_again(house):
    entries = {"method": "auto", "scope": "global", "profile": "no_slerp", "refinement": "maximum", "sparsify": "dare"}
    entries["rules"] = "document"
    entries |= {"density": "0.6", "smoothing": "0", "lossless": True, "auto_output_strength": True, "seed": "5"}
    asked = request(BY_ID["lora_merge"], filled("lora_merge", loras=LINES, name="tab", **entries), house.host)
    words = asked.recipe.optimizer
    assert (words.scope, words.profile, words.refinement, words.sparsify) == ("global", "no_slerp", "maximum", "dare")
    assert asked.recipe.params == {"density": 0.6, "smoothing": 0.0, "lossless": True, "auto_output_strength": True}
    back = values_of(BY_ID["lora_merge"], asked.recipe, house.host)
    assert {name: back[name] for name in entries} == entries
    assert asked.run(house.host).strategies
    plain = request(
        BY_ID["lora_merge"], filled("lora_merge", loras=LINES, **{**entries, "method": "concat"}), house.host
    )
    assert (plain.recipe.params, plain.recipe.optimizer) == ({}, recipes.Optimizer())
    plain.run(house.host, dry_run=True)


def test_every_task_has_such_an_example():
    assert {task.id for task in TASKS} == {"merge", "fold", *FILLED}  # the last one: see test_fold_task.py


@pytest.mark.parametrize("task", FILLED)
def test_the_cards_of_every_task(house, task):
    asked = request(BY_ID[task], filled(task, name="new", **FILLED[task]), house.host)
    known = [(slot, facts(path)) for slot, path in asked.files.items()]
    plan = text(cards.planned_card(asked.run(house.host, dry_run=True), known))
    assert plan.startswith("Plan Model File Is")
    assert "Writes new.safetensors (new)" in plan
    assert not asked.target.exists()
    job = Job(asked.task.label, lambda follow, cancel: asked.run(house.host, on_progress=follow, cancel=cancel)).start()
    assert job.wait(60)
    said = text(run_cards.job_card(job))
    assert said.split()[0] in ("Baked", "Converted", "Done")
    assert f"new.safetensors in {asked.target.parent}" in said


def test_the_plan_of_a_lora_tells_what_a_dry_run_tells(house):
    """Modules, ranks and bytes are those of the file that is made after it."""
    asked = request(
        BY_ID["lora_merge"], filled("lora_merge", loras=LINES, method="concat", save_dtype="fp32"), house.host
    )
    planned = asked.run(house.host, dry_run=True)
    said = text(cards.planned_card(planned, []))
    made = asked.run(house.host)
    assert f"LoRA: {made.modules} modules" in said
    assert all(f"{rank} ({count})" in said for rank, count in made.ranks.items())
    assert f"Result: {size_text(made.output_bytes)}, expected peak memory" in said


def test_modules_are_not_called_bytes(house):
    asked = request(BY_ID["lora_merge"], filled("lora_merge", loras=LINES), house.host)
    told = []
    asked.run(house.host, on_progress=told.append)
    modules = [progress for progress in told if progress.stage == "merging"]
    assert [progress.done_bytes for progress in modules] == list(range(1, len(modules) + 1))
    assert {progress.counted for progress in modules} == {"modules"}
    counted = [progress.counted for progress in told if progress.stage not in ("merging", "comparing")]
    assert set(counted) == {"bytes"}


@pytest.mark.parametrize(
    ("task", "entries", "field", "said"),
    [
        ("bake", {"loras": ""}, "loras", "choose a LoRA"),
        ("bake", {"loras": "inc.safetensors"}, "loras", "not among"),
        ("bake", {"loras": "ink.safetensors @ high"}, "loras", "strength"),
        ("bake", {"lora_alpha": "a lot"}, "lora_alpha", "no number"),
        ("bake", {"A": None}, "A", "choose a model"),
        ("bake", {"blocks": "IN00=x"}, "blocks", "cannot read"),
        ("lora_merge", {"rank": "2.5"}, "rank", "whole number"),
        ("lora_merge", {"rank": "0"}, "rank", "whole number"),
        ("lora_merge", {"max_error": "nan"}, "max_error", "no number"),
        ("lora_extract", {"B": None}, "B", "choose a model"),
        ("lora_resize", {"lora1": None}, "lora1", "choose a model"),
    ],
)
def test_each_wrong_entry_is_named(house, task, entries, field, said):
    with pytest.raises(FormError, match=said) as caught:
        request(BY_ID[task], filled(task, **{**FILLED[task], **entries}), house.host)
    assert list(caught.value.fields) == [field]


def test_a_number_of_another_way_to_cut_is_left_out(house):
    resize = {"lora1": "ink.safetensors", "rank": "2", "keep": "0.5"}
    for method, params in [("rank", {"rank": 2.0}), ("ratio", {"keep": 0.5})]:
        asked = request(BY_ID["lora_resize"], filled("lora_resize", method=method, **resize), house.host)
        assert asked.recipe.params == params
        asked.run(house.host, dry_run=True)


def test_what_a_form_cannot_show_is_refused(house):
    slot, two = recipes.Slot(file="base.safetensors"), (recipes.Lora(file="a", alpha=1.0), recipes.Lora(file="b"))
    for recipe, said in [
        (lib_merge.Recipe(task="bake", models={"A": slot}, discard=("x",)), "discard"),
        (lib_merge.Recipe(task="bake", models={"A": slot, "B": slot}), "models.B"),
        (lib_merge.Recipe(task="bake", models={"A": slot}, vae=slot), "vae"),
        (lib_merge.Recipe(task="bake", models={"A": slot}, loras=two), "alpha"),
        (lib_merge.Recipe(task="bake", models={"A": slot}, params={"x": 1.0}), "params.x"),
        (lib_merge.Recipe(task="lora_merge", method="kohya_merge"), "kohya_merge"),
        (lib_merge.Recipe(task="lora_merge", params={"dampening": 0.5}), "dampening"),
        (lib_merge.Recipe(task="lora_merge", rules=(recipes.Rule(match="x", params={}),)), "rules"),
        (lib_merge.Recipe(task="lora_merge", loras=(recipes.Lora(file="a", key_filter="shared_only"),)), "key_filter"),
        (lib_merge.Recipe(task="lora_merge", output=recipes.Output(override_dtype=True)), "override_dtype"),
        (lib_merge.Recipe(task="lora_resize", loras=(recipes.Lora(file="a"), recipes.Lora(file="b"))), "loras"),
        (lib_merge.Recipe(task="lora_resize", loras=(recipes.Lora(file="a", strength=0.5),)), "loras"),
        (lib_merge.Recipe(task="convert", models={"A": slot}, loras=two), "loras"),
    ]:
        with pytest.raises(RecipeError, match=said):
            values_of(BY_ID[recipe.task], recipe, house.host)


def test_proposed_names_tell_inputs_and_task(house):
    proposed = {task: request(BY_ID[task], filled(task, **FILLED[task]), house.host).target.name for task in FILLED}
    assert proposed == {
        "bake": "base+ink+mira baked.safetensors",
        "convert": "base converted.safetensors",
        "lora_merge": "ink+mira combined.safetensors",
        "lora_extract": "tuned-base extracted.safetensors",
        "lora_resize": "ink resized.safetensors",
    }


def test_lines_of_loras(house, tmp_path):
    shutil.copy(house.loras / "ink.safetensors", house.loras / "ink@0.5.safetensors")
    shutil.copy(house.loras / "ink.safetensors", house.loras / "x @ 2")
    models = standalone([house.checkpoints], [house.loras]).models("lora")
    for line, name, strength, te_strength, blocks in [
        ("ink.safetensors", "ink.safetensors", 1.0, None, ""),
        ("  ink.safetensors@.5 ", "ink.safetensors", 0.5, None, ""),
        ("ink.safetensors @ -1e-1 @ +2", "ink.safetensors", -0.1, 2.0, ""),
        ("sub/mira.safetensors @1: IN01=0.5, OUT=0", "mira.safetensors", 1.0, None, "IN01=0.5, OUT=0"),
        ("ink@0.5.safetensors", "ink@0.5.safetensors", 1.0, None, ""),
        ("ink@0.5.safetensors @ 2", "ink@0.5.safetensors", 2.0, None, ""),
        ("mira.safetensors @ 0.3", "mira.safetensors", 0.3, None, ""),
        ("sub/mira @ 0.3", "mira.safetensors", 0.3, None, ""),
        ("ink", "ink.safetensors", 1.0, None, ""),
        ("<lora:mira:0.8>", "mira.safetensors", 0.8, None, ""),
        ("<lora:sub/mira>,", "mira.safetensors", 1.0, None, ""),
        ("<LoRA:ink:0.25:0.5>", "ink.safetensors", 0.5, 0.25, ""),  # A1111 reads the text encoders' strength first
    ]:
        (found,) = lora_lines.read(f"\n{line}\n\n", models)
        assert (found.path.name, found.strength, found.te_strength, found.blocks) == (
            name, strength, te_strength, blocks
        )  # fmt: skip
    assert [line.strength for line in lora_lines.read("<lora:ink:1> <lora:mira:-0.5>", models)] == [1, -0.5]
    for wrong in (
        "<lora:ink:high>",
        "<lora:ink:1:2:3>",
        "<lora:inc:1>",
        "<lora:ink:1> a cat",
        "ink.safetensors @",
        "ink.safetensors @ 1 @ 2 @ x",
        "@ 1",
    ):
        with pytest.raises((RecipeError, FileError)):
            lora_lines.read(wrong, models)
    assert lora_lines.read("\n \n", models) == ()


def test_a_lora_that_is_added_stands_below_the_others():
    assert lora_lines.added("", "a b.safetensors") == "a b.safetensors @ 1"
    assert lora_lines.added("x @ 0.5\n\n", "y") == "x @ 0.5\ny @ 1"


def test_block_weights_of_a_single_lora_are_baked_and_combined(house):
    line = "ink.safetensors @ 1: IN01=0"
    asked = request(BY_ID["bake"], filled("bake", A="base.safetensors", loras=line, name="b"), house.host)
    before, after = (read(path) for path in (house.checkpoints / "base.safetensors", asked.run(house.host).output))
    assert {key for key in SIZE if (before[key] != after[key]).any()} == {CONV}  # the one outside of IN01
    assert K in before
    combined = request(BY_ID["lora_merge"], filled("lora_merge", loras=line, name="c"), house.host).run(house.host)
    whole, made = (len(read(path)) for path in (house.loras / "ink.safetensors", combined.output))
    assert 0 < made < whole  # the modules in IN01 are left out
