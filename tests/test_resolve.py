from __future__ import annotations

import math

import pytest

import lib_merge
from lib_merge import PlanError, Recipe, RecipeError, make_plan
from lib_merge.files.source import Source
from lib_merge.recipe import Output, Rule, Slot
from lib_merge.steps import Merged, Stored, Zeros
from tests.support import STORAGES, write_raw

pytestmark = pytest.mark.portable

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I8": 8,
        "U8": 8, "U32": 32, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F8_E8M0": 8, "C64": 64}  # fmt: skip
BLOCKS = [f"model.diffusion_model.blocks.{n}.weight" for n in range(4)]


@pytest.fixture
def files(tmp_path):
    """Makes files that hold zeros: `files(A={"key": "F16"})`, or ("F16", shape) where the shape matters."""

    def make(**models):
        paths = {}
        for slot, tensors in models.items():
            entries = {}
            for key, entry in tensors.items():
                dtype, shape = entry if isinstance(entry, tuple) else (entry, (4, 8))
                entries[key] = (dtype, shape, bytes(math.prod(shape) * BITS[dtype] // 8))
            paths[slot] = write_raw(tmp_path / f"{slot}.safetensors", entries)
        return paths

    return make


def recipe(*, slots="AB", **fields) -> Recipe:
    fields.setdefault("method", "weighted_sum" if fields.get("task", "merge") == "merge" else None)
    return Recipe(models={slot: Slot(file=f"{slot}.safetensors") for slot in slots}, **fields)


def same(dtype="F16", keys=BLOCKS):
    return dict.fromkeys(keys, dtype)


def steps(plan):
    return {step.key: step for step in plan.steps}


def actions(plan):
    return {step.key: step.action for step in plan.steps}


def said(plan, level):
    return [problem.what for problem in plan.problems if problem.level == level]


# Filters: discard, then exclude or include, then mismatch, then merge


def test_each_tensor_meets_the_filters_in_order(files):
    paths = files(
        A={"gone.both": "F16", "kept.missing": "F16", "missing": "F16", "merged": "F16", "position_ids": "I64"},
        B={"gone.both": "F16", "merged": "F16", "position_ids": "I64", "extra": "F16"},
    )
    plan = make_plan(recipe(discard=("gone",), exclude=("kept", "gone")), paths)
    assert actions(plan) == {
        "kept.missing": "copied",
        "missing": "copied",
        "merged": "merged",
        "position_ids": "copied",
    }
    reasons = {key: step.reason for key, step in steps(plan).items()}
    assert reasons["kept.missing"] == "excluded"  # so its being missing is nobody's concern
    assert reasons["missing"] == "missing in B"
    assert reasons["position_ids"] == "integers are copied"
    assert plan.discarded == ("gone.both",)
    assert plan.unused == (("B", "extra"),)
    assert plan.counts == {"merged": 1, "copied": 3, "discarded": 1, "unused": 1}
    assert said(plan, "warning") == ["1 tensor missing in B: missing; A's values are kept"]
    assert any("extra" in text for text in said(plan, "note"))


def test_discard_wins_over_include(files):
    plan = make_plan(
        recipe(discard=("blocks.1",), exclude=("blocks.1", "blocks.2"), include_mode=True), files(A=same(), B=same())
    )
    assert plan.discarded == (BLOCKS[1],)
    assert actions(plan) == {BLOCKS[0]: "copied", BLOCKS[2]: "merged", BLOCKS[3]: "copied"}
    assert steps(plan)[BLOCKS[0]].reason == "not included"


def test_include_mode_without_a_pattern_merges_nothing(files):
    for patterns in ((), ("",), (" \n ",)):
        plan = make_plan(recipe(include_mode=True, exclude=patterns), files(A=same(), B=same()))
        assert [problem.what for problem in plan.errors()] == [
            "nothing would be merged: include mode without a pattern includes nothing"
        ]
        with pytest.raises(PlanError, match="nothing would be merged"):
            plan.check()


def test_empty_patterns_discard_and_exclude_nothing(files):
    plan = make_plan(recipe(discard=("", " "), exclude=("",)), files(A=same(), B=same()))
    assert plan.counts == {"merged": 4, "copied": 0, "discarded": 0, "unused": 0}


@pytest.mark.parametrize(
    ("glob", "pattern", "excluded"),
    [
        (False, "blocks.[12]", [1, 2]),
        (False, "blocks.1.weight$", [1]),
        (False, "^blocks", []),
        (True, "blocks.[12]", [1, 2]),
        (True, "blocks.*.weight", [0, 1, 2, 3]),
        (True, "blocks.?.w", [0, 1, 2, 3]),
        (True, "^model", []),
        (True, "BLOCKS", []),
    ],
)
def test_patterns_of_both_kinds(files, glob, pattern, excluded):
    plan = make_plan(recipe(exclude=(pattern,), glob=glob), files(A=same(), B=same()))
    assert [key for key, action in actions(plan).items() if action == "copied"] == [BLOCKS[n] for n in excluded]


@pytest.mark.parametrize("field", ["exclude", "discard"])
def test_a_pattern_without_a_tensor_is_a_warning(files, field):
    plan = make_plan(recipe(**{field: ("blocks.1", "typo", "tpyo")}), files(A=same(), B=same()))
    assert said(plan, "warning") == [
        f"the {field} pattern 'typo' matches no tensor of model A",
        f"the {field} pattern 'tpyo' matches no tensor of model A",
    ]
    plan.check()
    strict = make_plan(recipe(**{field: ("typo",)}), files(A=same(), B=same()), strict=True)
    with pytest.raises(PlanError, match="typo"):
        strict.check()


@pytest.mark.parametrize("field", ["exclude", "discard"])
def test_a_bad_pattern_is_refused(files, field):
    with pytest.raises(RecipeError, match="not a regular expression"):
        make_plan(recipe(**{field: ("blocks.(",)}), files(A=same(), B=same()))
    with pytest.raises(RecipeError, match="not a regular expression"):
        make_plan(recipe(rules=(Rule(match="*", params={"alpha": 1}),)), files(A=same(), B=same()))


# Rules and blocks


def test_rules_override_in_order_and_say_so(files):
    rules = (
        Rule(match="blocks", params={"alpha": 0.1}),
        Rule(match="blocks.[01]", params={"alpha": 0.2}),
        Rule(match="blocks.0", params={"beta": 2}),
    )
    made = recipe(method="power_up_dare", params={"alpha": 0.9}, rules=rules)
    plan = steps(make_plan(made, files(A={**same(), "free": "F16"}, B={**same(), "free": "F16"})))
    assert plan["free"].node.params == {"alpha": 0.9, "beta": 1.0}
    assert plan["free"].reason == ""
    assert plan[BLOCKS[2]].node.params == {"alpha": 0.1, "beta": 1.0}
    assert plan[BLOCKS[1]].node.params == {"alpha": 0.2, "beta": 1.0}
    assert plan[BLOCKS[0]].node.params == {"alpha": 0.2, "beta": 2.0}
    assert plan[BLOCKS[0]].reason == "rule blocks, rule blocks.[01], rule blocks.0"


def test_a_rule_does_not_bring_an_excluded_tensor_back(files):
    made = recipe(rules=(Rule(match="blocks.0", params={"alpha": 1}),), exclude=("blocks.0",))
    assert actions(make_plan(made, files(A=same(), B=same())))[BLOCKS[0]] == "copied"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(match="typo", params={"alpha": 1}), "'typo' matches no tensor"),
        (Rule(match="blocks", params={}), "sets nothing"),
        (Rule(match="", params={"alpha": 1}), "no pattern"),
        (Rule(match="blocks", params={"beta": 1}), "no parameter 'beta'"),
        (Rule(match="blocks", params={"alpha": True}), "finite number"),
        (Rule(match="blocks", params={"alpha": float("nan")}), "finite number"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(files, rule, said):
    with pytest.raises(RecipeError, match=said):
        make_plan(recipe(rules=(rule,)), files(A=same(), B=same()))


UNET = {
    "model.diffusion_model.input_blocks.1.0.in_layers.2.weight": "IN01",
    "model.diffusion_model.input_blocks.4.1.proj_in.weight": "IN04",
    "model.diffusion_model.middle_block.0.in_layers.2.weight": "M00",
    "model.diffusion_model.output_blocks.3.0.in_layers.2.weight": "OUT03",
}


def test_block_values_go_over_the_general_ones_and_rules_over_both(files):
    made = recipe(
        params={"alpha": 0.5},
        blocks={"IN01": {"alpha": 0.1}, "M00": {"alpha": 0.2}},
        rules=(Rule(match="middle", params={"alpha": 0.9}),),
    )
    plan = make_plan(made, files(A=dict.fromkeys(UNET, "F16"), B=dict.fromkeys(UNET, "F16")))
    alphas = {UNET[key]: (step.node.params["alpha"], step.reason) for key, step in steps(plan).items()}
    assert alphas == {
        "IN01": (0.1, "block IN01"),
        "IN04": (0.5, ""),
        "M00": (0.9, "block M00, rule middle"),
        "OUT03": (0.5, ""),
    }


def test_values_beyond_the_limit_are_told_wherever_they_stand(files):
    made = recipe(
        params={"alpha": 1.5},
        blocks={"IN01": {"alpha": -0.5}},
        rules=(Rule(match="middle", params={"alpha": 2}),),
    )
    plan = make_plan(made, files(A=dict.fromkeys(UNET, "F16"), B=dict.fromkeys(UNET, "F16")))
    assert said(plan, "warning") == [
        "alpha 1.5 is outside 0 … 1 and counts as 1",
        "alpha 2 is outside 0 … 1 and counts as 1 (rule middle)",
        "alpha -0.5 is outside 0 … 1 and counts as 0 (block IN01)",
    ]
    assert all("task_arithmetic" in problem.hint for problem in plan.warnings())
    assert [step.node.params["alpha"] for step in plan.steps] == [0, 1, 1, 1]
    assert plan.recipe.params == {"alpha": 1.0}


# Mismatch: what B lacks, or has in another shape


def uneven(files, slots="AB"):
    paths = files(
        A={"both": "F16", "only_a": "F16", "shape": ("F16", (4, 4)), "rank": ("F16", (4,))},
        B={"both": "F16", "only_b": "F16", "shape": ("F16", (4, 9)), "rank": ("F16", (4, 1))},
        C={"both": "F16", "shape": ("F16", (4, 4)), "rank": ("F16", (4,)), "only_a": "F16"},
    )
    return {slot: paths[slot] for slot in slots}


METHODS = ("weighted_sum", "add_difference", "power_up_dare", "slerp")


@pytest.mark.parametrize("method", METHODS)
def test_skip_keeps_a_and_names_what_differs(files, method):
    slots = "ABC" if method == "add_difference" else "AB"
    plan = make_plan(recipe(method=method, slots=slots), uneven(files, slots))
    assert actions(plan) == {"both": "merged", "only_a": "copied", "shape": "copied", "rank": "copied"}
    assert said(plan, "warning") == [
        "1 tensor missing in B: only_a; A's values are kept",
        "2 tensors of another shape in B: shape ([4, 4] in A, [4, 9] in B), rank ([4] in A, [4, 1] in B); "
        "A's values are kept",
    ]
    assert ("B", "only_b") in plan.unused
    with pytest.raises(PlanError):
        make_plan(recipe(method=method, slots=slots), uneven(files, slots), strict=True).check()


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stand_in_for_what_is_lacking(files, method):
    slots = "ABC" if method == "add_difference" else "AB"
    plan = make_plan(recipe(method=method, slots=slots, mismatch="zeros"), uneven(files, slots))
    assert set(actions(plan).values()) == {"merged"}
    for key, shape in {"only_a": (4, 8), "shape": (4, 4), "rank": (4,)}.items():
        assert steps(plan)[key].node.inputs[1] == Zeros("F16", shape)
        assert isinstance(steps(plan)[key].node.inputs[0], Stored)
    assert len(said(plan, "warning")) == 2
    assert all("zeros stand in" in text for text in said(plan, "warning"))


@pytest.mark.parametrize("method", METHODS)
def test_error_refuses_from_the_headers_alone(files, method, monkeypatch, tmp_path):
    slots = "ABC" if method == "add_difference" else "AB"
    paths = uneven(files, slots)
    monkeypatch.setattr(Source, "read_into", None)  # any read of tensor data would fail
    monkeypatch.setattr(Source, "descriptor", None)
    with pytest.raises(PlanError) as caught:
        lib_merge.merge(*paths.values(), out=tmp_path / "out.safetensors", method=method, mismatch="error")
    told = [problem.what for problem in caught.value.problems]
    assert len(told) == 2
    assert "missing in B: only_a" in told[0]
    assert "[4, 9] in B" in told[1]
    assert not (tmp_path / "out.safetensors").exists()


def test_error_minds_only_what_would_be_merged(files):
    made = recipe(mismatch="error", discard=("only_a",), exclude=("shape", "rank"))
    assert make_plan(made, uneven(files)).errors() == []


def test_both_of_several_donors_are_looked_at(files):
    paths = files(A=same(), B=same(keys=BLOCKS[:3]), C=same(keys=BLOCKS[1:]))
    plan = make_plan(recipe(method="add_difference", slots="ABC"), paths)
    assert actions(plan) == dict(zip(BLOCKS, ["copied", "merged", "merged", "copied"], strict=True))
    assert [text.split(":")[0] for text in said(plan, "warning")] == ["1 tensor missing in C", "1 tensor missing in B"]


def test_many_names_are_cut_short_but_counted(files):
    keys = [f"layer.{n}" for n in range(30)]
    plan = make_plan(recipe(), files(A=same(keys=[*keys, "x"]), B=same(keys=["x"])))
    (text,) = said(plan, "warning")
    assert text.startswith("30 tensors missing in B: layer.0, layer.1,")
    assert "layer.7 and 22 more;" in text


def test_integers_in_b_are_no_numbers_to_merge(files):
    plan = make_plan(recipe(), files(A={"w": "F16", "x": "F16"}, B={"w": "I64", "x": "F16"}))
    assert actions(plan) == {"w": "copied", "x": "merged"}
    assert "I64 in B" in said(plan, "warning")[0]


# Rows 07, 10, 11 of the fault reports: what is merged is said, and nothing merged is an error


def test_nothing_merged_is_an_error_that_shows_names(files):
    plan = make_plan(recipe(), files(A=same(keys=["unet.in.weight"]), B=same(keys=["encoder.weight"])))
    (error,) = plan.errors()
    assert error.what.startswith("nothing would be merged")
    assert "A has unet.in.weight" in error.what
    assert "B has encoder.weight" in error.what


def test_everything_excluded_is_nothing_merged(files):
    plan = make_plan(recipe(exclude=(".",)), files(A=same(), B=same()))
    assert plan.errors()[0].what.startswith("nothing would be merged")


def test_everything_discarded_is_an_error(files):
    plan = make_plan(recipe(discard=(".",)), files(A=same(), B=same()))
    assert any("every tensor is discarded" in problem.what for problem in plan.errors())
    lacking = make_plan(recipe(task="convert", slots="A", only="vae"), files(A=same()))
    assert any("no vae" in problem.what for problem in lacking.errors())


def test_the_order_of_the_keys_is_that_of_a(files):
    keys = [BLOCKS[n] for n in (2, 0, 3, 1)]
    plan = make_plan(recipe(), files(A=same(keys=keys), B=same(keys=sorted(keys))))
    assert [step.key for step in plan.steps] == keys


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("model.diffusion_model.", ""),
        ("", "model.diffusion_model."),
        ("model.diffusion_model.", "diffusion_model."),
    ],
)
def test_denoisers_match_whatever_their_prefix(files, mine, theirs):
    names = ["double_blocks.0.img_attn.qkv.weight", "double_blocks.0.txt_attn.qkv.weight", "img_in.weight"]
    plan = make_plan(
        recipe(), files(A=same("F8_E4M3", [mine + n for n in names]), B=same("F8_E4M3", [theirs + n for n in names]))
    )
    assert actions(plan) == {mine + name: "merged" for name in names}
    assert [step.node.inputs[1].key for step in plan.steps] == [theirs + name for name in names]
    assert plan.unused == ()


def test_counterparts_of_discarded_tensors_are_not_called_unused(files):
    plan = make_plan(recipe(discard=("blocks.0",)), files(A=same(), B=same()))
    assert plan.unused == ()


# Slots


@pytest.mark.parametrize(
    ("slots", "method", "said"),
    [
        ("AB", "add_difference", "add_difference needs model C"),
        ("ABC", "weighted_sum", "weighted_sum does not use model C"),
        ("ABD", "add_difference", "add_difference needs model C"),
        ("A", "slerp", "slerp needs model B"),
        ("B", "slerp", "slerp needs model A"),
    ],
)
def test_models_must_be_those_that_the_method_takes(files, slots, method, said):
    with pytest.raises(RecipeError, match=said):
        make_plan(recipe(slots=slots, method=method), files(**{slot: same() for slot in slots}))


def test_open_slots_take_the_files_given_for_them(files):
    made = Recipe(method="weighted_sum", models={"A": None, "B": None})
    plan = make_plan(made, files(A=same(), B=same()))
    assert plan.recipe.models == {"A": Slot(file="A.safetensors"), "B": Slot(file="B.safetensors")}
    with pytest.raises((RecipeError, PlanError)):
        make_plan(made, {slot: path for slot, path in files(A=same(), B=same()).items() if slot == "A"})


def test_all_missing_files_are_named_at_once(tmp_path):
    with pytest.raises(PlanError) as caught:
        lib_merge.merge(tmp_path / "no_a.safetensors", tmp_path / "no_b.safetensors", out=tmp_path / "o.safetensors")
    assert [problem.file for problem in caught.value.problems] == [
        str(tmp_path / "no_a.safetensors"),
        str(tmp_path / "no_b.safetensors"),
    ]


# What a recipe may ask for


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        ({"method": "wieghted_sum"}, "no method 'wieghted_sum'", "did you mean weighted_sum"),
        ({"method": "power-up-dare"}, "no method", "did you mean power_up_dare"),
        ({"method": None}, "names no method", "methods"),
        ({"params": {"alhpa": 1}}, "no parameter 'alhpa'", "did you mean alpha"),
        ({"params": {"alpha": float("nan")}}, "finite number", None),
        ({"params": {"alpha": float("inf")}}, "finite number", None),
        ({"params": {"alpha": True}}, "finite number", None),
        ({"method": "slerp", "params": {"alpha": 1.1}}, "must be 0 … 1", None),
        ({"method": "power_up_dare", "params": {"alpha": -0.1}}, "must be 0 … 1", None),
        ({"seed": -1}, "seed must be", None),
        ({"seed": 2**64}, "seed must be", None),
        ({"only": "vae"}, "only is for the task convert", None),
        ({"task": "fold"}, "cannot run the task fold", None),
        ({"task": "bake", "method": None}, "bake does not use model B", None),
        ({"output": Output(override_dtype=True)}, "override_dtype has nothing", "--save-dtype"),
        ({"output": Output(override_dtype=True, save_dtype="keep")}, "override_dtype has nothing", "--save-dtype"),
        ({"output": Output(save_dtype="fp12")}, "fp12", "fp16"),
        ({"output": Output(metadata={"lib_merge.recipe": "x"})}, "lib_merge's own", None),
        ({"output": Output(metadata={"sd_merge_recipe": "x"})}, "lib_merge's own", None),
        ({"mismatch": "pad"}, "pad", "zeros"),
        ({"blocks": {"IN00": {"alhpa": 1}}}, "alhpa", "alpha"),
        ({"blocks": {"IN00-": {"alpha": 1}}}, "IN00-", None),
    ],
)
def test_what_cannot_be_done_is_refused(files, fields, said, hint):
    unet = {"model.diffusion_model.input_blocks.0.0.weight": "F16"}
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(**fields), files(A=unet, B=unet))
    assert said in caught.value.what
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize("fields", [{"method": "weighted_sum"}, {"params": {"alpha": 1}}, {"slots": "AB"}])
def test_convert_takes_one_model_and_no_method(files, fields):
    fields = {"slots": "A", "method": None, **fields}
    with pytest.raises(RecipeError, match="convert"):
        make_plan(recipe(task="convert", **fields), files(**{slot: same() for slot in fields["slots"]}))


def test_the_plans_recipe_has_every_parameter_written_out(files):
    plan = make_plan(recipe(method="power_up_dare", params={"beta": 2}), files(A=same(), B=same()))
    assert plan.recipe.params == {"alpha": 0.85, "beta": 2.0}


# The dtype rule, worked out by hand


@pytest.mark.parametrize(
    ("a", "b", "output", "expected"),
    [
        # auto: the highest of the sources; a tie goes to A
        ("F16", "F16", {}, "F16"),
        ("F16", "F32", {}, "F32"),
        ("F32", "F16", {}, "F32"),
        ("F16", "BF16", {}, "F16"),
        ("BF16", "F16", {}, "BF16"),
        ("F8_E4M3", "F16", {}, "F16"),
        ("F8_E4M3", "F8_E5M2", {}, "F8_E4M3"),
        ("F32", "F64", {}, "F64"),
        ("F8_E5M2", "F64", {}, "F64"),
        # keep: as in A
        ("F16", "F32", {"save_dtype": "keep"}, "F16"),
        ("F64", "F16", {"save_dtype": "keep"}, "F64"),
        ("F8_E4M3", "F32", {"save_dtype": "keep"}, "F8_E4M3"),
        # named: at least that; a tie goes to the one that was named
        ("F16", "F16", {"save_dtype": "fp32"}, "F32"),
        ("F16", "F16", {"save_dtype": "fp64"}, "F64"),
        ("F8_E4M3", "F8_E4M3", {"save_dtype": "fp16"}, "F16"),
        ("BF16", "BF16", {"save_dtype": "fp16"}, "F16"),
        ("F16", "BF16", {"save_dtype": "bf16"}, "BF16"),
        ("F8_E5M2", "F8_E5M2", {"save_dtype": "fp8_e4m3fn"}, "F8_E4M3"),
        ("F32", "F16", {"save_dtype": "fp16"}, "F32"),
        ("F16", "F64", {"save_dtype": "fp32"}, "F64"),
        ("F16", "F16", {"save_dtype": "fp8_e4m3fn"}, "F16"),
        ("F16", "F8_E4M3", {"save_dtype": "fp8_e4m3fn"}, "F16"),
        # override: that and nothing else
        ("F32", "F32", {"save_dtype": "fp16", "override_dtype": True}, "F16"),
        ("F64", "F16", {"save_dtype": "bf16", "override_dtype": True}, "BF16"),
        ("F8_E4M3", "F16", {"save_dtype": "fp32", "override_dtype": True}, "F32"),
        ("F32", "F16", {"save_dtype": "fp8_e5m2", "override_dtype": True}, "F8_E5M2"),
    ],
)
def test_dtype_of_a_merged_tensor(files, a, b, output, expected):
    plan = make_plan(recipe(output=Output(**output)), files(A={"w": a}, B={"w": b}))
    assert [step.dtype for step in plan.steps] == [expected]


@pytest.mark.parametrize(
    ("a", "output", "expected"),
    [
        ("F16", {}, "F16"),
        ("F16", {"save_dtype": "fp32"}, "F32"),
        ("BF16", {"save_dtype": "fp16"}, "F16"),
        ("F32", {"save_dtype": "fp16"}, "F32"),
        ("F32", {"save_dtype": "fp16", "override_dtype": True}, "F16"),
        ("F64", {"save_dtype": "fp8_e4m3fn", "override_dtype": True}, "F8_E4M3"),
        ("F32", {"save_dtype": "keep"}, "F32"),
    ],
)
def test_dtype_of_a_copied_tensor_ignores_b(files, a, output, expected):
    made = recipe(exclude=("^w$",), output=Output(**output))
    plan = steps(make_plan(made, files(A={"w": a, "x": a}, B={"w": "F64", "x": a})))
    assert (plan["w"].action, plan["w"].dtype) == ("copied", expected)
    converted = make_plan(recipe(task="convert", slots="A", output=Output(**output)), files(A={"w": a}))
    assert steps(converted)["w"].dtype == expected


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("weighted_sum", {"alpha": 0}),
        ("weighted_sum", {"alpha": -1}),
        ("slerp", {"alpha": 0}),
        ("power_up_dare", {"beta": 0}),
    ],
)
def test_a_donor_without_a_share_has_no_say(files, method, params):
    plan = make_plan(recipe(method=method, params=params), files(A={"w": "F16"}, B={"w": "F32"}))
    assert (plan.steps[0].action, plan.steps[0].dtype) == ("merged", "F16")
    rule = Rule(match="w", params=params)
    ruled = make_plan(recipe(method=method, rules=(rule,)), files(A={"w": "F16"}, B={"w": "F32"}))
    assert ruled.steps[0].dtype == "F16"


@pytest.mark.parametrize("dtype", ["I64", "I32", "I8", "U8", "BOOL", "C64"])
def test_what_is_no_float_is_never_cast(files, dtype):
    output = Output(save_dtype="fp16", override_dtype=True)
    both = {"w": "F32", "n": dtype}
    plan = steps(make_plan(recipe(output=output), files(A=both, B=both)))
    assert (plan["n"].action, plan["n"].dtype, plan["n"].verbatim) == ("copied", dtype, True)
    assert plan["w"].dtype == "F16"


@pytest.mark.parametrize("task", ["merge", "convert"])
@pytest.mark.parametrize("save", ["fp16", "fp64"])
def test_markers_are_never_cast_nor_merged(files, task, save):
    markers = {
        "v_pred": ("F32", (0,)),
        "ztsnr": ("F32", (1,)),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": ("F32", (1, 512)),
        "model.diffusion_model.empty": ("F32", (0, 4)),
    }
    both = {"w": "F32", **markers}
    output = Output(save_dtype=save, override_dtype=True)
    slots = "AB" if task == "merge" else "A"
    plan = steps(make_plan(recipe(task=task, slots=slots, output=output), files(**dict.fromkeys(slots, both))))
    for key in markers:
        assert (plan[key].action, plan[key].dtype, plan[key].verbatim) == ("copied", "F32", True), key
    assert plan["w"].dtype == {"fp16": "F16", "fp64": "F64"}[save]


def test_wider_results_are_told_with_the_option_that_changes_them(files):
    plan = make_plan(recipe(), files(A={"w": "F16", "x": "F16"}, B={"w": "F32", "x": "F16"}))
    (problem,) = [problem for problem in plan.problems if problem.level == "note"]
    assert problem.what == "1 tensor stored wider than in A: w"
    assert "--save-dtype keep" in problem.hint
    over = make_plan(recipe(output=Output(save_dtype="fp16")), files(A={"w": "F32"}, B={"w": "F32"}))
    (problem,) = [problem for problem in over.problems if problem.level == "note"]
    assert problem.what == "1 tensor still wider than fp16: w"
    assert "--override-dtype" in problem.hint


# Coded weights


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("slot", ["A", "B"])
def test_coded_weights_are_refused_by_name(files, name, slot):
    tensors, storage = STORAGES[name]
    coded = {**{key: (dtype, (8, 16)) for key, dtype in tensors.items()}, "norm.weight": "F16"}
    plain = {key: ("F16", (8, 16)) for key in tensors if ".weight." not in key} | {"norm.weight": "F16"}
    paths = files(A=coded, B=plain) if slot == "A" else files(A=plain, B=coded)
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(), paths)
    assert f"model {slot} holds coded weights" in caught.value.what
    assert storage.lower() in caught.value.what.lower()
    assert caught.value.tensor in tensors
    assert "16-bit" in caught.value.hint


@pytest.mark.parametrize("name", STORAGES)
def test_coded_weights_may_be_excluded(files, name):
    tensors, _ = STORAGES[name]
    coded = {**{key: (dtype, (8, 16)) for key, dtype in tensors.items()}, "norm.weight": "F16"}
    made = recipe(exclude=("^l\\.",), output=Output(save_dtype="fp32", override_dtype=True))
    plan = steps(make_plan(made, files(A=coded, B=coded)))
    assert all((plan[key].dtype, plan[key].verbatim) == (dtype, True) for key, dtype in tensors.items())
    assert (plan["norm.weight"].action, plan["norm.weight"].dtype) == ("merged", "F32")


def test_codes_that_a_merge_leaves_as_they_are_are_told(files):
    coded = {"l.weight": "F8_E4M3", "l.scale_weight": ("F32", ()), "norm.weight": "F16"}
    made = recipe(exclude=("^l\\.",), output=Output(save_dtype="bf16"))
    plan = make_plan(made, files(A=coded, B=coded))
    assert any(text == "1 tensor of coded weights kept as stored: l.weight" for text in said(plan, "note"))


def test_convert_copies_codes_but_does_not_cast_them(files):
    coded = {"l.weight": "F8_E4M3", "l.weight_scale": "F32", "norm.weight": "F16"}  # a scale for each weight: no layout
    copied = steps(make_plan(recipe(task="convert", slots="A"), files(A=coded)))
    assert all(step.verbatim for step in copied.values())
    with pytest.raises(RecipeError, match=r"coded weights \(scaled fp8\)"):
        make_plan(recipe(task="convert", slots="A", output=Output(save_dtype="bf16")), files(A=coded))


def test_plain_fp8_is_merged(files):
    plan = make_plan(recipe(), files(A=same("F8_E4M3"), B=same("F8_E4M3")))
    assert plan.counts["merged"] == 4


# VAE

VAE = ["encoder.conv_in.weight", "decoder.conv_in.weight", "decoder.conv_out.weight", "quant_conv.weight"]


def full(dtype="F16"):
    return {"model.diffusion_model.input_blocks.0.0.weight": dtype, **{f"first_stage_model.{k}": dtype for k in VAE}}


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_the_vae_is_replaced_as_a_whole(files, prefix):
    paths = files(A=full(), B=full(), vae={**{prefix + key: "F32" for key in VAE}, f"{prefix}extra.weight": "F32"})
    made = recipe(vae=Slot(file="vae.safetensors"), exclude=("first_stage_model",))
    plan = make_plan(made, paths)
    for key in VAE:
        step = steps(plan)[f"first_stage_model.{key}"]
        assert (step.action, step.dtype, step.reason) == ("copied", "F32", "taken from the VAE file")
        assert (step.node.slot, step.node.key) == ("vae", prefix + key)
    assert plan.unused == (("vae", f"{prefix}extra.weight"),)
    assert plan.counts == {"merged": 1, "copied": 4, "discarded": 0, "unused": 1}


def test_keep_stores_a_new_vae_as_a_stored_its_own(files):
    made = recipe(task="convert", slots="A", vae=Slot(file="vae.safetensors"), output=Output(save_dtype="keep"))
    plan = make_plan(made, files(A=full("F16"), vae=dict.fromkeys(VAE, "F32")))
    assert {step.dtype for step in plan.steps} == {"F16"}


def test_discard_wins_over_the_vae_file(files):
    made = recipe(task="convert", slots="A", vae=Slot(file="vae.safetensors"), discard=("quant_conv",))
    plan = make_plan(made, files(A=full(), vae=dict.fromkeys(VAE, "F16")))
    assert plan.discarded == ("first_stage_model.quant_conv.weight",)


@pytest.mark.parametrize(
    ("vae", "said"),
    [
        (dict.fromkeys(VAE[:3], "F16"), "lacks 1 tensor that A's VAE has, or in another shape: "
                                        "first_stage_model.quant_conv.weight"),
        ({**dict.fromkeys(VAE[:3], "F16"), VAE[3]: ("F16", (8, 8))}, "first_stage_model.quant_conv.weight"),
        ({"encoder.conv_in.weight": "F16", "decoder.conv_in.weight": "F16", "decoder.up_blocks.0.weight": "F16"},
         "lacks 2 tensors"),  # diffusers' names: a few are the same
        ({"something.weight": "F16"}, "lacks 4 tensors"),
        ({**dict.fromkeys(VAE, "F8_E4M3"), "decoder.conv_in.scale_weight": ("F32", ())}, "coded"),
    ],
)  # fmt: skip
def test_half_a_vae_is_refused(files, vae, said):
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe(task="convert", slots="A", vae=Slot(file="vae.safetensors")), files(A=full(), vae=vae))
    assert said in caught.value.what


def test_a_model_without_a_vae_gets_none(files):
    with pytest.raises(RecipeError, match="model A has no VAE"):
        make_plan(
            recipe(task="convert", slots="A", vae=Slot(file="vae.safetensors")),
            files(A={"model.diffusion_model.x.weight": "F16"}, vae=dict.fromkeys(VAE, "F16")),
        )


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ("unet", ["model.diffusion_model.input_blocks.0.0.weight"]),
        ("te", ["cond_stage_model.transformer.text_model.final_layer_norm.weight"]),
        ("vae", ["first_stage_model.decoder.conv_in.weight"]),
    ],
)
def test_convert_keeps_one_component(files, only, kept):
    model = dict.fromkeys(
        [
            "model.diffusion_model.input_blocks.0.0.weight",
            "cond_stage_model.transformer.text_model.final_layer_norm.weight",
            "first_stage_model.decoder.conv_in.weight",
            "model_ema.decay",
            "alphas_cumprod",
        ],
        "F16",
    )
    plan = make_plan(recipe(task="convert", slots="A", only=only), files(A=model))
    assert [step.key for step in plan.steps] == kept
    assert set(plan.discarded) == set(model) - set(kept)


# Recipes inside recipes: what the plan says (what comes out is shown in test_chains.py)


def chain(inner: Recipe, slot="B", **fields) -> Recipe:
    other = "A" if slot == "B" else "B"
    models = {slot: Slot(recipe=inner), other: Slot(file=f"{other}.safetensors")}
    return Recipe(method="weighted_sum", models=dict(sorted(models.items())), **fields)


def test_files_of_inner_recipes_have_the_path_of_their_slots(files):
    paths = files(A=same(), X=same(), Y=same())
    plan = make_plan(chain(recipe()), {"A": paths["A"], "B.A": paths["X"], "B.B": paths["Y"]})
    (a, inner) = plan.steps[0].node.inputs
    assert (a.slot, isinstance(inner, Merged)) == ("A", True)
    assert [leaf.slot for leaf in inner.inputs] == ["B.A", "B.B"]
    assert set(plan.sources) == {"A", "B.A", "B.B"}


def test_findings_of_inner_recipes_say_where(files):
    paths = files(A=same(), X={**same(), "x": "F16"}, Y={**same(), "y": "F16"})
    given = {"A": paths["A"], "B.A": paths["X"], "B.B": paths["Y"]}
    plan = make_plan(chain(recipe(exclude=("typo",))), given)
    assert "in the recipe of B: the exclude pattern 'typo' matches no tensor of model A" in said(plan, "warning")
    assert "in the recipe of B: 1 tensor missing in B: x; A's values are kept" in said(plan, "warning")
    assert set(plan.unused) == {("B.B", "y"), ("B", "x")}
    nothing = make_plan(chain(recipe(exclude=(".",))), given)
    assert any(problem.what.startswith("in the recipe of B: nothing would be merged") for problem in nothing.errors())
    with pytest.raises(RecipeError, match="in the recipe of B: there is no method 'slrep'"):
        make_plan(chain(recipe(method="slrep")), given)
    with pytest.raises(RecipeError, match="in the recipe of B: the rule 'typo'"):
        make_plan(chain(recipe(rules=(Rule(match="typo", params={"alpha": 1}),))), given)


def test_what_an_inner_recipe_of_a_discards_is_discarded(files):
    paths = files(X=same(), Y=same(), B=same())
    given = {"A.A": paths["X"], "A.B": paths["Y"], "B": paths["B"]}
    plan = make_plan(chain(recipe(discard=("blocks.0",)), slot="A", discard=("blocks.1",)), given)
    assert plan.discarded == (BLOCKS[0], BLOCKS[1])
    assert [step.key for step in plan.steps] == BLOCKS[2:]


def test_a_tensor_that_only_the_inner_recipe_merges_counts_as_merged(files):
    paths = files(X=same(), Y=same(), B=same())
    given = {"A.A": paths["X"], "A.B": paths["Y"], "B": paths["B"]}
    plan = make_plan(chain(recipe(), slot="A", exclude=("blocks.0",)), given)
    assert (steps(plan)[BLOCKS[0]].action, steps(plan)[BLOCKS[0]].reason) == ("merged", "excluded")
    nothing = make_plan(chain(recipe(), slot="A", exclude=(".",)), given)
    assert nothing.errors()[0].what.startswith("nothing would be merged")


def test_the_dtype_of_an_inner_result_has_a_say(files):
    paths = files(A=same("F16"), X=same("F16"), Y=same("F16"))
    given = {"A": paths["A"], "B.A": paths["X"], "B.B": paths["Y"]}
    assert {step.dtype for step in make_plan(chain(recipe()), given).steps} == {"F16"}
    wide = make_plan(chain(recipe(output=Output(save_dtype="fp32"))), given)
    assert {step.dtype for step in wide.steps} == {"F32"}


def test_notes_about_the_width_of_inner_results_are_left_out(files):
    paths = files(A=same("F32"), X=same("F16"), Y=same("F32"))
    plan = make_plan(chain(recipe()), {"A": paths["A"], "B.A": paths["X"], "B.B": paths["Y"]})
    assert said(plan, "note") == []


def test_the_first_file_of_the_chain_is_the_base(files):
    paths = files(X=same(), Y=same(), B=same())
    plan = make_plan(chain(recipe(), slot="A"), {"A.A": paths["X"], "A.B": paths["Y"], "B": paths["B"]})
    assert plan.base == "A.A"


def test_coded_weights_are_refused_inside_too(files):
    coded = {**same(), "l.weight": "I8", "l.SCB": "F32"}
    paths = files(A={**same(), "l.weight": "F16"}, X=coded, Y=coded)
    given = {"A": paths["A"], "B.A": paths["X"], "B.B": paths["Y"]}
    with pytest.raises(RecipeError, match="in the recipe of B: model A holds coded"):
        make_plan(chain(recipe()), given)
    # excluded inside: the codes come through to the outer merge, which may not take them for numbers either
    with pytest.raises(RecipeError, match="model B holds coded"):
        make_plan(chain(recipe(exclude=("^l\\.",))), given)
    made = chain(recipe(exclude=("^l\\.",)), exclude=("^l\\.",))
    assert make_plan(made, given).counts["merged"] == 4


# Dry runs


def test_a_dry_run_tells_and_writes_nothing(files, tmp_path):
    paths = files(A=same(), B=same())
    before = sorted(tmp_path.iterdir())
    made = lib_merge.merge(paths["A"], paths["B"], out=tmp_path / "out.safetensors", dry_run=True)
    assert (made.merged, made.copied, made.discarded, made.unused) == (4, 0, 0, ())
    assert made.plan.errors() == []
    assert sorted(tmp_path.iterdir()) == before


def test_problems_of_output_and_inputs_are_told_together(files, tmp_path):
    paths = files(A=same(), B=same(keys=BLOCKS[:2]))
    (tmp_path / "out.safetensors").write_bytes(b"")
    made = lib_merge.merge(*paths.values(), out=tmp_path / "out.safetensors", mismatch="error", dry_run=True)
    assert len(made.plan.errors()) == 2


# Parameters that cannot be meant


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("enhanced_man_interp", {"beta": 0.8, "gamma": 0.3}),
        ("enhanced_man_interp", {"beta": 0.5, "gamma": 0.5}),
        ("weight_sum_cutoff", {"beta": 0.3, "gamma": 0.8}),
    ],
)
def test_limits_with_nothing_between_them_are_a_warning(files, method, params):
    paths = files(A=same(), B=same())
    (warning,) = said(make_plan(recipe(method=method, params=params), paths), "warning")
    assert warning.startswith("4 tensors: nothing lies above")
    swapped = dict(zip(params, reversed(params.values()), strict=True))
    if swapped != params:
        assert said(make_plan(recipe(method=method, params=swapped), paths), "warning") == []
    (ruled,) = said(make_plan(recipe(method=method, rules=(Rule(match="blocks.1", params=params),)), paths), "warning")
    assert ruled.startswith("1 tensor: nothing lies above")
