"""The page as gradio builds it: ids, what a host may keep of it, what its events answer."""

from __future__ import annotations

import pytest

from lib_merge.host import Host, standalone
from tests.support import values, write

pytestmark = pytest.mark.gradio


@pytest.fixture
def host(tmp_path):
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.safetensors", {"w": values((9, 9), number)})
    return standalone([tmp_path])


@pytest.fixture
def tab(host):
    from lib_merge.ui.tab import merge_tab

    return merge_tab(host)


def test_no_component_is_kept_by_a_host(tab):
    import gradio as gr

    kinds = (gr.Slider, gr.Radio, gr.Checkbox, gr.Textbox, gr.Number, gr.Dropdown, gr.Button)
    components = [block for block in tab.blocks.values() if isinstance(block, kinds)]
    assert len(components) > 20
    assert all(block.do_not_save_to_config for block in components)


def test_ids_are_ours_and_each_stands_once(tab):
    import gradio as gr

    ids = [block.elem_id for block in tab.blocks.values() if getattr(block, "elem_id", None)]
    assert len(set(ids)) == len(ids)
    assert all(id.startswith("merge_") for id in ids)
    unnamed = [
        block
        for block in tab.blocks.values()
        if isinstance(block, (gr.Slider, gr.Checkbox, gr.Textbox, gr.Number, gr.Dropdown, gr.Button, gr.HTML))
        and not block.elem_id
    ]
    assert unnamed == []


def test_a_host_finds_its_keys(tab):
    # hosts press these two on Ctrl+Enter and Esc, in whatever tab is open
    ids = {block.elem_id for block in tab.blocks.values()}
    assert {"merge_generate", "merge_interrupt"} <= ids


def test_each_build_is_of_its_own(host):
    from lib_merge.ui.tab import merge_tab

    first, second = merge_tab(host), merge_tab(host)
    assert not {id(block) for block in first.blocks.values()} & {id(block) for block in second.blocks.values()}


def test_only_the_calls_are_offered_as_an_api(tab):
    from lib_merge.ui import api

    config = tab.get_config_file() if hasattr(tab, "get_config_file") else tab.config
    named = [
        event["api_name"]
        for event in config["dependencies"]
        if event["api_name"] and event.get("api_visibility", "public") == "public"
    ]
    assert sorted(named) == sorted([*api.CALLS, "plan", "job", "stop", "models"])


def test_the_loaded_checkpoint_is_the_base(tmp_path, host):
    from lib_merge.ui.tab import merge_tab

    def base(loaded):
        made = merge_tab(Host("x", host.folders, loaded=lambda: loaded))
        return next(b for b in made.blocks.values() if b.elem_id == "merge_merge_A").value

    assert base(tmp_path / "b.safetensors") == "b.safetensors"
    assert base(None) == "a.safetensors"
    assert base(tmp_path / "elsewhere.safetensors") == "a.safetensors"


def test_a_model_that_may_be_left_out_can_be_taken_out_again(tab, host):
    from lib_merge.ui import widgets
    from lib_merge.ui.tasks.registry import BY_ID

    task = BY_ID["merge"]
    vae = widgets.entry(task, task.field("vae"), host)
    assert widgets.model_choices(task.field("vae"), host) == ["(none)", "a.safetensors", "b.safetensors"]
    assert (vae.component.value, vae.read("(none)"), vae.show(None)) == ("(none)", None, "(none)")
    assert vae.read("a.safetensors") == "a.safetensors"
    assert widgets.model_choices(task.field("B"), host) == ["a.safetensors", "b.safetensors"]


def test_a_page_without_models_can_be_built(tmp_path):
    from lib_merge.ui.tab import merge_tab

    (tmp_path / "empty").mkdir()
    assert merge_tab(standalone([tmp_path / "empty"]))
    assert merge_tab(Host("x", lambda kind: []))


def test_a_task_brings_its_form_and_its_folders(tmp_path):
    """A second task is a matter of data: it is offered, shown when it is chosen, and saves where its kind belongs."""
    from dataclasses import replace

    import gradio as gr

    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.tasks.registry import TASKS

    for name in ("c", "l1", "l2"):
        (tmp_path / name).mkdir()
    folders = {"checkpoint": [tmp_path / "c"], "lora": [tmp_path / "l1", tmp_path / "l2"], "vae": []}
    other = replace(TASKS[0], id="convert", label="Another", methods=(), fields=TASKS[0].fields[:1], writes="lora")
    with gr.Blocks() as blocks:
        page = MergePage(Host("x", lambda kind: folders[kind]), [TASKS[0], other])
        page.listen(blocks)
    raw = [widget.component.value for _, _, widget in page._named]
    raw[0] = "Another"
    updates = {
        component.elem_id: update
        for component, update in page._choose_task(*raw).items()
        if isinstance(update, dict) and component.elem_id
    }
    assert updates["merge_merge_form"]["visible"] is False
    assert updates["merge_convert_form"]["visible"] is True
    assert updates["merge_folder"]["choices"] == ["l1", "l2"]


def test_loras_of_the_list_become_lines_and_the_plan_tells_of_them(tmp_path):
    import gradio as gr

    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.tasks.registry import TASKS
    from tests.test_bake import Q, V, base, lora

    for name in ("c", "l"):
        (tmp_path / name).mkdir()
    base(tmp_path / "c" / "base.safetensors")
    lora(tmp_path / "l" / "ink.safetensors", Q, V)
    with gr.Blocks() as blocks:
        page = MergePage(standalone([tmp_path / "c"], [tmp_path / "l"]), TASKS)
        page.listen(blocks)
    cleared, text = page._add_lora("ink.safetensors", "")
    assert (cleared["value"], text) == (None, "ink.safetensors @ 1")
    assert page._add_lora([], text)[1] == text  # what an emptied list gives in some versions
    raw = [widget.component.value for _, _, widget in page._named]
    raw[0] = "Bake LoRAs into a checkpoint"
    raw[[(id, name) for id, name, _ in page._named].index(("bake", "loras"))] = text
    updates = page._choose_task(*raw)
    assert "ink.safetensors</td><td>LoRA, rank 4, fp32" in updates[page._plan]
    assert "2 merged, 5 copied" in updates[page._plan]
    shown = {component.elem_id: update for component, update in updates.items() if component.elem_id}
    assert shown["merge_generate"]["value"] == "Bake"
    assert shown["merge_name"]["placeholder"] == "base+ink baked.safetensors"


def test_the_plan_names_the_models_that_are_missing(tab, host):
    import gradio as gr

    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.tasks.registry import TASKS

    with gr.Blocks() as blocks:
        page = MergePage(host, TASKS)
        page.listen(blocks)
    raw = [widget.component.value for _, _, widget in page._named]
    raw[[(id, name) for id, name, _ in page._named].index(("merge", "B"))] = None
    assert "Choose Model B to see" in page._replan(*raw)[page._plan]


def test_block_weights_are_told_and_drawn_below_their_text(tmp_path):
    import gradio as gr

    from lib_merge.samples import make_sample
    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.tasks.registry import TASKS

    for number, name in enumerate("ab"):
        make_sample(tmp_path / f"{name}.safetensors", number)
    with gr.Blocks() as blocks:
        page = MergePage(standalone([tmp_path]), TASKS)
        page.listen(blocks)
    raw = [widget.component.value for _, _, widget in page._named]
    places = [(id, name) for id, name, _ in page._named]
    raw[places.index(("merge", "B"))] = "b.safetensors"
    note = page._forms["merge"].notes["blocks"]
    for text, said in [("OUT=0.5", "12 of this"), ("0.5, 0.5", "This model has"), ("", "")]:
        raw[places.index(("merge", "blocks"))] = text
        updates = page._replan(*raw)
        assert said in updates[note]
        assert ("<svg" in updates[note]) is (text == "OUT=0.5")
        assert ("merged" in updates[page._plan]) is (text != "0.5, 0.5")


def test_a_shape_of_the_list_becomes_the_text_of_the_block_weights(tmp_path):
    import gradio as gr

    from lib_merge import blocks
    from lib_merge.samples import make_sample
    from lib_merge.ui.merge_page import MergePage
    from lib_merge.ui.tasks.registry import TASKS

    make_sample(tmp_path / "a.safetensors", 0)
    with gr.Blocks() as made:
        page = MergePage(standalone([tmp_path]), TASKS)
        page.listen(made)
    for task in ("merge", "bake"):
        (shaper, text), form = page._forms[task].shapers[0], page._forms[task]
        assert text is form.widgets["blocks"].component
        assert shaper.value in (None, [])
        emptied, written = page._write_shape(form, "gradient_down", "a.safetensors", "IN00=1")
        assert emptied["value"] is None
        found = blocks.parse(written)
        assert (found["IN00"], found["OUT11"], len(found)) == ({"": 1.0}, {"": 0.0}, 25)
        assert page._write_shape(form, "V", "gone.safetensors", "")[1] == "V"
        assert page._write_shape(form, [], "a.safetensors", "IN00=1")[1] == "IN00=1"
