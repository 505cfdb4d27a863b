"""The commands fold, fold-check and quantizer-check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lib_merge.cli import main
from tests.fold.making import DOWN, Pair, Q, contents

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    made.adapter()
    return made


def words(pair, *more, out="out"):
    return ["fold", str(pair.dense), str(pair.root / "adapter"), str(pair.root / out), "--quantize", str(pair.shipped),
            *more]  # fmt: skip


def check(pair, *more):
    return main(["fold-check", str(pair.dense), str(pair.root / "adapter"), str(pair.root / "out"), str(pair.shipped),
                 *more])  # fmt: skip


def test_a_fold_says_what_it_did_and_how_it_rounded(pair, capsys):
    assert main(words(pair)) == 0
    said = capsys.readouterr().out
    assert "2 modules folded, 5 tensors copied" in said
    assert "rounding even" in said
    assert "reproduces 100 %" in said


def test_a_fold_as_json(pair, capsys):
    assert main(words(pair, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"output", "sha256", "merged", "copied", "discarded", "unused", "warnings", "seconds", "peak_rss_mb"} <= set(
        found
    )
    assert (found["merged"], found["copied"], found["rounding"], found["reproduced"]) == (2, 5, "even", 1)
    assert len(found["sha256"]) == 64


def test_the_check_ends_with_its_verdict_and_status(pair, capsys):
    assert main(words(pair)) == 0
    assert check(pair) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "merge check: all gates pass"
    (pair.root / "out" / "tokenizer.json").write_bytes(b"{}")
    assert check(pair) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "merge check: FAILED"
    assert check(pair, "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_options_of_the_fold_are_options_of_the_check(pair, capsys):
    options = ("--round-dense", "--lora-alpha", "3", "--rounding", "away")
    assert main(words(pair, *options)) == 0
    assert check(pair, *options) == 0
    assert check(pair) == 1


def test_the_quantizer_check_prints_a_line_for_each_module(pair, capsys):
    assert main(["quantizer-check", str(pair.dense), str(pair.shipped), Q, DOWN]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said] == [Q, DOWN]
    assert all("groups 100.0000 %" in line for line in said)
    assert main(["quantizer-check", str(pair.dense), str(pair.shipped), "nowhere", "--json"]) == 1
    assert main(["quantizer-check", str(pair.dense), str(pair.shipped), Q.replace("q_proj", "q_porj")]) == 1
    assert f"hint: did you mean {Q}?" in capsys.readouterr().err


def test_a_report_has_a_row_for_each_module_and_the_columns_of_a_fold(pair, capsys):
    table = pair.root / "report.json"
    assert main(words(pair, "--report", str(table))) == 0
    rows = {row["key"]: row for row in json.loads(table.read_text())["rows"]}
    assert rows[f"{Q}.weight"]["action"] == "merged"
    for column in ("step", "delta_step_ratio", "codes_changed", "correlation", "rms_ratio"):
        assert isinstance(rows[f"{Q}.weight"][column], float)
        assert rows["lm_head.weight"][column] is None
    for suffix in (".csv", ".html"):
        assert main(words(pair, "--report", str(pair.root / f"report{suffix}"), out=f"out{suffix[1:]}")) == 0


def test_a_dry_run_prints_the_plan(pair, capsys):
    assert main(words(pair, "--dry-run")) == 0
    assert "2 modules folded" in capsys.readouterr().out
    assert main(words(pair, "--dry-run", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"merged": 2, "copied": 5, "discarded": 0}
    assert found["steps"][0]["params"] == {"rank": 4, "scale": 1.5}
    assert not (pair.root / "out").exists()


def test_a_refusal_is_an_error_a_hint_and_status_1(pair, capsys):
    (pair.root / "adapter" / "adapter_config.json").unlink()
    assert main(words(pair)) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the adapter's alpha is not known")
    assert "hint: " in said
    assert not (pair.root / "out").exists()


def test_refusals_and_plans_need_no_torch(pair):
    code = (
        "import sys; from lib_merge.cli import main; status = main(sys.argv[1:]); print('torch' in sys.modules, status)"
    )
    for more in (["--dry-run"], ["--rounding", "up"]):
        made = subprocess.run(
            [sys.executable, "-c", code, *words(pair, *more)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert made.stdout.splitlines()[-1] == f"False {int('up' in more)}"


def test_no_recipe_changes_no_byte(pair):
    assert main(words(pair)) == 0
    assert main(words(pair, "--no-recipe", "--no-fsync", out="other")) == 0
    assert contents(pair.root / "out") == contents(pair.root / "other")
