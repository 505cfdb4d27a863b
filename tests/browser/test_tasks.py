"""Each task of the tab as a person does it: choose, press, result, within four presses; typing is no press."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import lib_merge
from lib_merge.ui.tasks.registry import BY_ID, TASKS
from tests.browser.loras import RANK

pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Use:
    """A main job, and what is typed for it; the first entry is pressed, Tab leads to the next.

    Attributes:
        entries: field -> text.
        plan: a word of the plan once everything stands there.
        said: words of what came of it.
        library: the same by the library: (server, output) -> its result.
    """

    entries: dict[str, str]
    plan: str
    said: str
    library: Any


def lora(server, name):
    return server.loras / f"{name}.safetensors"


def model(server, name):
    return server.models / f"{name}.safetensors"


USES = {
    "bake": Use(
        {"add_lora": "ink.safetensors"},
        "3 merged",
        "3 merged, 1,140 copied",
        lambda s, out: lib_merge.bake(model(s, "base"), (lora(s, "ink"), 1.0), out=out),
    ),
    "convert": Use(
        {"save_dtype": "bf16"},
        "bf16",
        "Tensors:",
        lambda s, out: lib_merge.convert(model(s, "base"), out=out, save_dtype="bf16"),
    ),
    "lora_merge": Use(
        {"loras": "ink @ 0.5\nmira"},
        "3 modules",
        "3 modules",
        lambda s, out: lib_merge.merge_loras((lora(s, "ink"), 0.5), (lora(s, "mira"), 1.0), out=out, method="auto"),
    ),
    "lora_extract": Use(
        {"A": "style.safetensors", "B": "base.safetensors", "rank": "2"},
        "modules",
        "modules, rank 2",
        lambda s, out: lib_merge.extract_lora(model(s, "style"), model(s, "base"), out=out, rank=2),
    ),
    "lora_resize": Use(
        {"lora1": "ink.safetensors", "rank": f"{RANK // 2}"},
        "3 modules",
        "3 modules, rank 2",
        lambda s, out: lib_merge.resize_lora(lora(s, "ink"), out=out, rank=RANK // 2),
    ),
    "fold": Use(
        {"SHIPPED": "pair/shipped", "DENSE": "pair/dense", "lora1": "adapter"},
        "2 modules",
        "2 modules folded",
        lambda s, out: lib_merge.fold(
            s.models / "pair" / "dense", s.loras / "adapter", out, quantize=s.models / "pair" / "shipped"
        ),
    ),
}


def test_every_task_has_a_main_job_here_or_in_test_tab():
    assert {task.id for task in TASKS} == {"merge", *USES}


@pytest.mark.parametrize("task", USES)
def test_the_main_job_of_each_task_takes_four_presses(tab, server, tmp_path, task):
    use, name = USES[task], f"main job {task}"
    tab.open()
    tab.choose_task(task, BY_ID[task].label)
    tab.page.click(f"{tab.field(next(iter(use.entries)))} :is(input, textarea)")
    for field, text in use.entries.items():
        tab.type_entry(field, text)
    tab.wait_plan(use.plan)
    tab.tab_to("#merge_name")
    tab.page.keyboard.type(name)
    tab.page.keyboard.press("Tab")
    tab.wait_plan(name)
    tab.merge()
    assert use.said in tab.made(name)
    assert tab.presses <= 4
    folder = server.loras if BY_ID[task].writes == "lora" else server.models
    (made,) = (path for path in folder.iterdir() if path.name.startswith(name))
    direct = use.library(server, tmp_path / made.name).output
    assert tensors(made) == tensors(direct)


def tensors(path):
    """Every file of a model with its bytes; of a file its tensors: the tab keeps the recipe in the metadata."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]
