"""Every component of the form changes what is asked for: none is there for show."""

from __future__ import annotations

import pytest

from lib_merge.host import standalone
from lib_merge.ui import form
from lib_merge.ui.tasks.registry import TASKS
from tests.support import values, write

pytestmark = pytest.mark.gradio

# Field -> a text that differs from what stands there at first and is allowed; others by their kind.
TEXTS = {
    "blocks": "IN01=0.25",
    "rule": "w: alpha=0.25",
    "loras": "m @ 0.5",
    "seed": "7",
    "name": "another",
    "number": "0.25",
    "count": "3",
}


@pytest.fixture
def host(tmp_path):
    for kind, names in (("c", "abc"), ("l", "lm")):
        (tmp_path / kind / "second").mkdir(parents=True)
        for number, name in enumerate(names):
            write(tmp_path / kind / f"{name}.safetensors", {"w": values((9, 9), number)})
    write(tmp_path / "c" / "d.vae.safetensors", {"decoder.conv_in.weight": values((4, 4, 3, 3), 5)})
    return standalone(*([tmp_path / kind, tmp_path / kind / "second"] for kind in "cl"))


@pytest.fixture
def page(host):
    import gradio as gr

    from lib_merge.ui.merge_page import MergePage

    with gr.Blocks():
        return MergePage(host, TASKS)


def filled(task, host):
    """What stands in the form with every model chosen that is needed."""
    entries = {param.name: param.default for param in task.params.values()} | task.first_values()
    entries["folder"] = next(iter(host.save_folders(task.writes)))
    for field in task.fields:
        if field.kind == "model":
            entries[field.name] = host.models(field.models).names[0] if field.needed else None
        elif field.kind == "loras":  # without one its alpha means nothing
            entries[field.name] = "l @ 1"
    return entries


def showing(task, name, entries):
    """The entries with a method that has the entry of that name, and the parameters of it."""
    offered = {method.id: method for method in task.methods}
    words = [value for field in task.fields if field.name == "method" for _, value in field.choices]
    for id in dict.fromkeys([entries.get("method"), *offered, *words]):
        params = {param.name: param.default for param in offered[id].params} if id in offered else {}
        found = {**entries, "method": id, **params}
        mine = [field for field in task.fields if field.name == name]
        if name in params or (mine and task.shows(mine[0], found)) or (not mine and name not in task.params):
            return found
    raise AssertionError(f"no method shows {name}")


def another(component, task, name, raw):
    """Something else that a person can leave in a component."""
    import gradio as gr

    if isinstance(component, gr.Checkbox):
        return not raw
    if isinstance(component, gr.Slider):
        return component.minimum if raw != component.minimum else component.maximum
    if isinstance(component, gr.Dropdown):
        texts = [choice if isinstance(choice, str) else choice[1] for choice in component.choices]
        return next(text for text in reversed(texts) if text != raw)
    kind = next((field.kind for field in task.fields if field.name == name), name)
    return TEXTS.get(name) or TEXTS.get(kind, "attn1")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_every_component_changes_what_is_asked_for(page, host, task):
    from lib_merge.ui.merge_page import SHOWN

    def raw_of(entries):
        return [
            widget.show(task.id if name == "task" else entries.get(name) if id in ("", task.id) else None)
            for id, name, widget in page._named
        ]

    def asked(raw):
        made, read = page._read(raw)
        return form.request(made.task, read, host)

    seen = 0
    for place, (id, name, widget) in enumerate(page._named):
        if id not in ("", task.id) or name in ("task", SHOWN):
            continue
        if name == "folder":  # its choices are those of the task that is shown
            widget.component.choices = list(host.save_folders(task.writes))
        raw = raw_of(showing(task, name, filled(task, host)))
        changed = [*raw]
        changed[place] = another(widget.component, task, name, raw[place])
        assert changed[place] != raw[place], name
        assert asked(raw) == asked(raw)
        assert asked(raw) != asked(changed), f"{name} changes nothing"
        seen += 1
    assert seen == len(page._forms[task.id].widgets) + len(page._result)
