"""Tables of positions that an earlier merge made floats of."""

from __future__ import annotations

import numpy as np
import pytest

import lib_merge
from tests.support import raw, read_raw, values, write_raw

KEY = "cond_stage_model.transformer.text_model.embeddings.position_ids"
WHOLE = ("I64", (1, 77), np.arange(77, dtype="<i8").tobytes())


def model(path, dtype, seed, shape=(1, 77)):
    table = (np.arange(np.prod(shape)) * 0.999).reshape(shape) if dtype != "I64" else np.arange(77)[None]
    return write_raw(path, {"w": raw("F32", values((5,), seed)), KEY: raw(dtype, table)})


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize(
    "how", [{}, {"save_dtype": "fp16", "override_dtype": True}, {"save_dtype": "keep"}, {"exclude": ["position"]}]
)
def test_floats_become_the_whole_numbers(tmp_path, dtype, how):
    a, b = model(tmp_path / "a.safetensors", dtype, 1), model(tmp_path / "b.safetensors", "I64", 2)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors", report=True, **how)
    assert read_raw(made.output)[1][KEY] == WHOLE
    assert lib_merge.verify(made.output).ok
    (note,) = [problem for problem in made.plan.problems if problem.tensor == KEY]
    assert (note.level, "int64 0 … 76" in note.what) == ("note", True)
    (row,) = [row for row in made.rows if row["key"] == KEY]
    assert (row["action"], row["dtype_a"], row["dtype_out"]) == ("copied", dtype, "I64")
    assert "int64 0 … 76" in row["reason"]
    assert made.warnings == ()


def test_convert_and_chains_repair_too(tmp_path):
    a = model(tmp_path / "a.safetensors", "F16", 1)
    made = lib_merge.convert(a, out=tmp_path / "out.safetensors")
    assert read_raw(made.output)[1][KEY] == WHOLE
    inner = lib_merge.Recipe(task="convert", models={"A": lib_merge.recipe.Slot(file="a.safetensors")})
    outer = lib_merge.Recipe(
        method="weighted_sum",
        models={"A": lib_merge.recipe.Slot(recipe=inner), "B": lib_merge.recipe.Slot(file="a.safetensors")},
    )
    out = lib_merge.run(outer, out=tmp_path / "chain.safetensors", files={"A.A": a, "B": a}).output
    assert read_raw(out)[1][KEY] == WHOLE


def test_a_sound_table_in_a_stays_whatever_b_has(tmp_path):
    a, b = model(tmp_path / "a.safetensors", "I64", 1), model(tmp_path / "b.safetensors", "F16", 2)
    made = lib_merge.merge(a, b, out=tmp_path / "out.safetensors")
    assert read_raw(made.output)[1][KEY] == read_raw(a)[1][KEY]
    assert all(problem.tensor != KEY for problem in made.plan.problems)


def test_a_table_of_another_size_is_left_and_told(tmp_path):
    a = model(tmp_path / "a.safetensors", "F16", 1, (1, 64))
    made = lib_merge.merge(a, a, out=tmp_path / "out.safetensors")
    assert read_raw(made.output)[1][KEY] == read_raw(a)[1][KEY]
    assert any(KEY in warning and "whole numbers" in warning for warning in made.warnings)


def test_it_may_be_discarded(tmp_path):
    a = model(tmp_path / "a.safetensors", "F16", 1)
    made = lib_merge.merge(a, a, out=tmp_path / "out.safetensors", discard=["position_ids"])
    assert list(read_raw(made.output)[1]) == ["w"]
