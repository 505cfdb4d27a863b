"""`--dry-run` of LoRA tasks: what headers tell beforehand is what a run then writes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from lib_merge.cli import main
from lib_merge.lora import extract_lora, merge_loras, resize_lora
from tests.lora.files import CONV, LINEAR, SIZES, TEXT, make
from tests.lora.test_extract import SD15, tuned


@pytest.fixture
def two(tmp_path):
    return make(tmp_path / "a.safetensors", 4, 2.0, 1), make(
        tmp_path / "b.safetensors", 8, None, 2, stems=(LINEAR, CONV)
    )


def tensor_bytes(path) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in load_file(path).values())


def ranks(path) -> dict[str, int]:
    ends = {".lora_down.weight": "kohya", ".lora_A.weight": "peft"}
    return {key.removesuffix(end): tensor.shape[0] for key, tensor in load_file(path).items() for end in ends
            if key.endswith(end)}  # fmt: skip


def test_the_exact_sum_is_told_to_the_byte(two, tmp_path):
    plan = merge_loras(*two, out=tmp_path / "none.safetensors", dry_run=True).plan
    made = merge_loras(*two, out=tmp_path / "out.safetensors")
    assert made.plan is None
    assert not (tmp_path / "none.safetensors").exists()
    assert {step.key: step.rank for step in plan.steps} == ranks(made.output) == {LINEAR: 12, CONV: 12, TEXT: 4}
    assert {step.key: step.ranks for step in plan.steps} == {LINEAR: (4, 8), CONV: (4, 8), TEXT: (4,)}
    assert {step.key: step.shape for step in plan.steps} == {LINEAR: (24, 36), CONV: (24, 180), TEXT: (24, 24)}
    assert set(SIZES) == {step.key for step in plan.steps}
    assert plan.exact
    # F32: 4 bytes × rank × (out + in·k), and an alpha of 4 bytes each
    assert plan.output_bytes == 4 * (12 * 60 + 12 * 204 + 4 * 48) + 3 * 4 == tensor_bytes(made.output)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "auto"},
        {"method": "ties"},
        {"method": "auto", "refinement": "maximum"},
        {"method": "weighted_average", "rank": 3},
        {"method": "slerp", "lossless": True},
        {"method": "ties", "lossless": True},
        {"rank": "auto", "max_error": 0.2},
        {"max_rank": 5},
        {"method": "kohya_svd", "params": {"rank": 6}},
        {"method": "peft_cat"},
    ],
    ids=str,
)
def test_other_ways_write_no_more_than_was_told(two, tmp_path, options):
    plan = merge_loras(*two, out=tmp_path / "none.safetensors", dry_run=True, **options).plan
    made = merge_loras(*two, out=tmp_path / "out.safetensors", **options)
    told = {step.key: step for step in plan.steps}
    for stem, rank in ranks(made.output).items():
        assert rank <= told[stem].rank
        assert rank == told[stem].rank or not told[stem].exact
    assert len(told) == made.modules
    assert tensor_bytes(made.output) <= plan.output_bytes


@pytest.mark.parametrize("options", [{"rank": 2}, {"keep": 0.8}, {"keep": 0.8, "max_rank": 3}], ids=str)
def test_resize(two, tmp_path, options):
    plan = resize_lora(two[0], out=tmp_path / "none.safetensors", dry_run=True, **options).plan
    made = resize_lora(two[0], out=tmp_path / "out.safetensors", **options)
    told = {step.key: step.rank for step in plan.steps}
    got = ranks(made.output)
    assert told.keys() == got.keys()
    assert all(got[stem] <= told[stem] <= 4 for stem in got)
    assert tensor_bytes(made.output) <= plan.output_bytes
    if "rank" in options:
        assert told == got


@pytest.mark.parametrize("options", [{"rank": 4}, {"keep": 0.9}, {"rank": 2, "store_diffs": True}], ids=str)
def test_extract(tmp_path, options):
    new, old = tuned(SD15, tmp_path / "tuned.safetensors")
    plan = extract_lora(new, old, out=tmp_path / "none.safetensors", dry_run=True, **options).plan
    made = extract_lora(new, old, out=tmp_path / "out.safetensors", **options)
    told = {step.key: step for step in plan.steps}
    got = ranks(made.output)
    assert got
    assert all(rank <= told[stem].rank for stem, rank in got.items())
    assert tensor_bytes(made.output) <= plan.output_bytes


def test_the_command_line_tells_it_without_loading_torch(two, tmp_path):
    words = ["lora", "merge", *map(str, two), "-o", str(tmp_path / "out.safetensors"), "--dry-run", "--json"]
    code = f"import sys; from lib_merge.cli import main; main({words!r}); sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() == {"steps", "counts", "problems", "output_bytes", "peak_memory_mb"}
    assert found["counts"] == {"merged": 3, "copied": 0, "discarded": 0, "unused": 0}
    assert found["peak_memory_mb"] > 0
    step = next(step for step in found["steps"] if step["key"] == LINEAR)
    assert (step["ranks"], step["rank"], step["exact"], step["shape"]) == ([4, 8], 12, True, [24, 36])


def test_the_plan_for_people(two, tmp_path, capsys):
    words = ["lora", "merge", str(two[0]), f"{two[1]}:M00=0", "-o", str(tmp_path / "out.safetensors"), "--dry-run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "would write" in text
    assert "rank 4 + 8 to 12" in text
    assert "warning: the block weights of b.safetensors name M00" in text
    assert not (tmp_path / "out.safetensors").exists()
