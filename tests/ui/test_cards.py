from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lib_merge import Job, MergeError, PlanError, Problem
from lib_merge.host import standalone
from lib_merge.kernels.registry import all_methods
from lib_merge.ui import cards, run_cards
from lib_merge.ui.facts import facts, size_text
from lib_merge.ui.form import request
from lib_merge.ui.tasks.registry import BY_ID
from tests.support import raw, values, write, write_raw

EVIL = "<script>alert(1)</script>&\"'`${x}{{y}}"


class Text(HTMLParser):
    """Text of a piece of HTML; fails on tags that are not closed."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tags, self.seen = [], [], set()
        self.feed(html)
        assert self.tags == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag != "br":
            self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.tags.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def text(html):
    parsed = Text(html)
    assert "script" not in parsed.seen
    return " ".join(" ".join(parsed.words).split())


def test_nothing_of_a_file_becomes_html():
    problem = Problem("warning", EVIL, f"/x/{EVIL}", EVIL, EVIL)
    for html in (
        cards.problem_list([problem]),
        cards.error_card(MergeError(EVIL, file=EVIL, tensor=EVIL, hint=EVIL)),
        cards.error_card(PlanError([problem])),
        cards.error_card(ValueError(EVIL)),
        cards.model_note(None, MergeError(EVIL, hint=EVIL)),
        cards.help_note(EVIL),
        run_cards.job_card(Job(EVIL, lambda follow, cancel: None)),
        run_cards.job_list([Job(EVIL, lambda follow, cancel: None)]),
    ):
        assert "alert(1)" in text(html)


def test_wrong_entries_are_called_by_their_labels():
    said = text(
        cards.form_card([("Model B", MergeError("choose a model")), ("Seed", MergeError("odd", hint="type 3"))])
    )
    assert said == "Not done Error: Model B: choose a model Error: Seed: odd type 3"


def test_problems_come_worst_first_and_say_what_to_do():
    levels = ("note", "warning", "error")
    said = text(cards.problem_list(Problem(level, f"the {level}", hint=f"do {level}") for level in levels))
    assert said == "Error: the error do error Warning: the warning do warning Note: the note do note"
    many = text(cards.problem_list(Problem("note", f"n{number}") for number in range(50)))
    assert "n11" in many
    assert "n12" not in many
    assert "38 more" in many


@pytest.fixture
def asked(tmp_path):
    write(tmp_path / "a.safetensors", {"w": values((9, 9), 0), "only": values((3,), 1)})
    write(tmp_path / "b.safetensors", {"w": values((9, 9), 2), "spare": values((3,), 1)})
    host = standalone([tmp_path])
    task = BY_ID["merge"]
    return request(task, {**task.first_values(), "A": "a.safetensors", "B": "b.safetensors", "name": "new"}, host), host


def test_the_plan_and_the_result(asked, tmp_path):
    request_, host = asked
    plan = request_.run(host, dry_run=True)
    known = [(slot, facts(path)) for slot, path in request_.files.items()]
    said = text(cards.plan_card(plan.plan, known, plan.output))
    assert said.startswith("Plan Model File Is A a.safetensors family not known, fp32, ")
    assert "Tensors: 1 merged, 1 copied, 1 unused" in said
    assert f"Writes new.safetensors (new) in {tmp_path}" in said
    assert "Warning:" in said
    assert not (tmp_path / "new.safetensors").exists()
    done = Job("A + B", lambda follow, cancel: request_.run(host, on_progress=follow, cancel=cancel)).start()
    done.wait(60)
    said = text(run_cards.job_card(done))
    assert said.startswith(f"Merged new.safetensors in {tmp_path} Tensors: 1 merged, 1 copied, 1 unused")
    assert "Warning:" in said
    replaced = text(cards.plan_card(plan.plan, known, tmp_path / "new.safetensors"))
    assert "replaces the file that is there" in replaced
    kept = text(cards.plan_card(plan.plan, known, tmp_path / "new.safetensors", replaces=False))
    assert "a file of that name is there" in kept
    assert "replaces" not in kept
    assert "in a folder that is made" in text(cards.plan_card(plan.plan, known, tmp_path / "sub" / "new.safetensors"))
    too_long = text(cards.plan_card(plan.plan, known, tmp_path / f"{'n' * 300}.safetensors"))
    assert "(new)" in too_long  # what refuses it is the run
    plan.plan.close()


def test_facts_follow_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    write_raw(path, {"w": raw("BF16", [[1.0, 2.0]])})
    assert facts(path).text == "family not known, bf16, 4 bytes"
    write(path, {"w": values((300, 300), 0, "<f2")})
    assert facts(path).text == "family not known, fp16, 0.2 MB"


@pytest.mark.parametrize(
    ("count", "said"), [(12, "12 bytes"), (8_619_126, "8.6 MB"), (2_132_474_150, "2.13 GB"), (99_000, "99,000 bytes")]
)
def test_sizes(count, said):
    assert size_text(count) == said


@pytest.mark.parametrize("method", all_methods().values(), ids=lambda method: method.id)
def test_a_method_shows_its_formula(method):
    said = text(cards.method_text(method))
    assert " ".join(method.formula.split()) in said
    assert method.summary in said


def test_the_style_knows_the_cards_and_reaches_no_other_tab():
    style = (Path(__file__).resolve().parents[2] / "style.css").read_text()
    for name in ("lm-card", "lm-bar", "lm-note", "lm-error", "lm-table", "lm-problems", "lm-good", "lm-bad", "lm-busy"):
        assert f".{name}" in style
    rules = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", rules) for part in rule.split(",")]
    assert all("#merge_root" in part or part.startswith("@media") for part in selectors if part)


def test_the_plan_counts_what_rules_and_filters_reach(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {key: values((3,), 1) for key in ("q.1", "q.2", "v.1", "v.2", "o")})
    host = standalone([tmp_path])
    entries = {**BY_ID["merge"].first_values(), "A": "a.safetensors", "B": "b.safetensors"}

    def said(**changed):
        asked = request(BY_ID["merge"], entries | changed, host)
        return text(cards.planned_card(asked.run(host, dry_run=True), []))

    assert "Rules and filters" not in said()
    counted = said(rule="q: alpha=0.1", exclude="v", discard="^o$")
    assert "Rules and filters: 2 with parameters of a rule, 2 excluded" in counted
    assert "1 discarded" in counted
    assert "3 not included" in said(exclude="v", include_mode=True)
