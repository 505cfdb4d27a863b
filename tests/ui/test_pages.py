"""The pages of recipes and history as gradio builds them: what their events answer."""

from __future__ import annotations

import json

import pytest

from lib_merge.host import standalone
from lib_merge.presets import Presets, shared_text
from lib_merge.recipe import from_json
from tests.support import values, write

pytestmark = pytest.mark.gradio

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture
def host(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    for number, name in enumerate("ab"):
        write(models / f"{name}.safetensors", {"w": values((9, 9), number)})
    return standalone([models])


@pytest.fixture
def pages(host):
    import gradio as gr

    from lib_merge.ui.history_page import HistoryPage
    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.pages import Pages
    from lib_merge.ui.recipes_page import RecipesPage
    from lib_merge.ui.tasks.registry import TASKS

    with gr.Blocks() as blocks:
        tabs = Pages()
        with tabs.page("merge", "Merge"):
            merging = MergePage(host, TASKS)
        with tabs.page("recipes", "Recipes"):
            recipes = RecipesPage(host)
        with tabs.page("history", "History"):
            history = HistoryPage(host)
        merging.listen(blocks)
        recipes.listen(blocks, merging, tabs)
        history.listen(blocks, merging, tabs)
    return merging, recipes, history


def form_values(merging, **chosen):
    raw = [widget.component.value for _, _, widget in merging._named]
    for place, (id, name, _) in enumerate(merging._named):
        if id in ("", "merge") and name in chosen:
            raw[place] = chosen[name]
    return raw


def by_id(updates):
    return {component.elem_id: update for component, update in updates.items() if component.elem_id}


def test_a_preset_fills_the_form_and_leaves_the_models(pages):
    merging, recipes, _ = pages
    raw = form_values(merging, B="b.safetensors")
    text = recipes._choose("style-30-percent")[recipes._text]
    updates = by_id(recipes._fill(text, "style-30-percent", *raw))
    assert updates["merge_merge_param_alpha"]["value"] == 0.3
    assert (updates["merge_merge_A"]["value"], updates["merge_merge_B"]["value"]) == ("a.safetensors", "b.safetensors")
    assert updates["merge_pages"]["selected"] == "merge"
    assert "filled from style-30-percent" in updates["merge_note_filled"]
    assert "1 merged" in updates["merge_plan"]


@pytest.mark.parametrize("name", sorted(Presets().all()))
def test_every_shipped_preset_can_be_loaded_into_its_form(pages, name):
    merging, recipes, _ = pages
    text = recipes._choose(name)[recipes._text]
    updates = by_id(recipes._fill(text, name, *form_values(merging)))
    assert updates["merge_pages"]["selected"] == "merge"
    task = from_json(text).task
    assert updates[f"merge_{task}_form"]["visible"] is True


def test_what_the_form_says_is_saved_changed_and_deleted_with_a_second_press(pages, host):
    merging, recipes, _ = pages
    raw = form_values(merging, B="b.safetensors", alpha=0.75)
    text = recipes._take_form(*raw)[recipes._text]
    saved = recipes._keep(text, " mine ", False, False)
    assert saved[recipes._list]["value"] == "mine"
    assert Presets(host.data() / "presets").load("mine").models["B"].file == "b.safetensors"
    assert "already" in recipes._keep(text, "mine", False, False)[recipes._said]
    recipes._keep(text, "mine", True, True)
    assert Presets(host.data() / "presets").load("mine").models == {"A": None, "B": None}
    armed = recipes._remove("mine", "")
    assert armed[recipes._armed] == "mine"
    assert "mine" in Presets(host.data() / "presets").all()
    recipes._remove("mine", "mine")
    assert "mine" not in Presets(host.data() / "presets").all()
    assert "stays" in recipes._remove("style-30-percent", "style-30-percent")[recipes._said]


def test_recipes_come_in_and_go_out(pages, tmp_path):
    _, recipes, _ = pages
    text = recipes._choose("style-30-percent")[recipes._text]
    out = recipes._export_it(text, "style-30-percent")
    word, path = out[recipes._shared], out[recipes._download]["value"]
    assert word == shared_text(from_json(text))
    assert recipes._take_pasted(f"see {word}")[recipes._text] == text
    assert recipes._take_file(path)[recipes._text] == text
    assert recipes._take_file(type("Upload", (), {"name": path}))[recipes._name] == "style-30-percent"
    (tmp_path / "models" / "made.safetensors").write_bytes((tmp_path / "models" / "a.safetensors").read_bytes())
    assert "no file of text" in recipes._take_file(str(tmp_path / "models" / "made.safetensors"))[recipes._said]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lib_merge": 99}'])
def test_text_that_is_no_recipe_is_told_by_every_button(pages, text):
    merging, recipes, _ = pages
    for answer in (
        recipes._keep(text, "x", False, False),
        recipes._export_it(text, "x"),
        recipes._fill(text, "x", *form_values(merging)),
        recipes._run_it(text),
        recipes._take_pasted(text),
    ):
        assert "Not done" in answer[recipes._said]


def test_names_are_escaped_wherever_they_are_shown(pages, host):
    merging, recipes, _ = pages
    folder = host.data() / "presets"
    folder.mkdir(parents=True)
    recipe = {"lib_merge": 1, "method": "weighted_sum", "models": {"A": {"file": NASTY}, "B": {"file": NASTY}}}
    (folder / f"{NASTY}.json").write_text(json.dumps(recipe), "utf-8")
    shown = recipes._choose(NASTY)
    filled = by_id(recipes._fill(shown[recipes._text], NASTY, *form_values(merging)))
    asked = recipes._remove(NASTY, "")
    lost = recipes._run_it(shown[recipes._text])
    for html in (shown[recipes._said], filled["merge_note_filled"], asked[recipes._said], lost[recipes._said]):
        assert "&lt;img" in html
        assert "<img" not in html


def test_a_run_of_the_history_is_told_loaded_and_verified(pages, host):
    merging, _, history = pages
    from lib_merge.ui import form, past

    made, stand = merging._read(form_values(merging, B="b.safetensors", alpha=0.25))
    wanted = form.request(made.task, stand, host)
    with past.recorded(wanted, host) as kept:
        kept.append(wanted.run(host))
    (choice,) = history.refreshed(None)[history._list]["choices"]
    assert "a+b weighted_sum 0.25.safetensors · 1 merged" in choice[0]
    assert "alpha 0.25" in history._choose(choice[1])[history._said]
    updates = by_id(history._fill(choice[1], *form_values(merging)))
    assert updates["merge_merge_param_alpha"]["value"] == 0.25
    assert updates["merge_merge_B"]["value"] == "b.safetensors"
    *_, last = history._check(choice[1])
    assert "1 tensors are what the recipe says" in last[history._checked]
    for answer in (history._choose(None), history._fill("", *form_values(merging)), history._run_it([])):
        assert "no run is chosen" in answer[history._said]
    assert history._forget(False)[history._armed] is True
    assert len(history._history().entries()) == 1
    history._forget(True)
    assert history._history().entries() == []


def test_a_row_of_a_report_shows_the_values_of_its_tensor(host):
    import gradio as gr

    from lib_merge.ui import form, past
    from lib_merge.ui.pages import Pages
    from lib_merge.ui.report_page import ReportPage
    from lib_merge.ui.tasks.registry import BY_ID

    task = BY_ID["merge"]
    stand = {**task.first_values(), "A": "a.safetensors", "B": "b.safetensors", "alpha": 0.5}
    wanted = form.request(task, stand, host)
    with past.recorded(wanted, host) as kept:
        kept.append(wanted.run(host))
    with gr.Blocks() as blocks:
        pages = Pages()
        with pages.page("report", "Report"):
            page = ReportPage(host)
        page.listen(blocks, pages)
    opened = page._turned_to(None, "")
    name, table = opened[page._report]["value"], opened[page._table]["value"]
    assert "Press a row" in opened[page._numbers]
    pressed = page._pick(name, None, table, type("Event", (), {"value": "w", "index": [0, 0]}))
    assert (pressed[page._tensor]["value"], "being read" in pressed[page._numbers]) == ("w", True)
    shown = page._read(name, "w")
    assert shown[page._values]["visible"] is True
    largest = [f"<td>{values((9, 9), number).max():.4g}</td>" for number in range(2)]
    assert all(text in shown[page._numbers] for text in (*largest, "A: a.safetensors", "result: a+b"))
    assert page._read(name, "another")[page._numbers] == ""
