from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lib_merge import Recipe, RecipeError
from lib_merge import recipe as recipes
from lib_merge.recipe import Optimizer, Output, Rule, Slot, from_json, to_json, validated

pytestmark = pytest.mark.portable

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "recipe.schema.json"

# A recipe with every field, as users write it.
EXAMPLE = """
{"lib_merge": 1, "task": "merge", "method": "weighted_sum", "params": {"alpha": 0.3}, "seed": 0,
 "models": {"A": {"file": "sdxl_base.safetensors", "sha256": "aa11"},
            "B": {"recipe": {"lib_merge": 1, "task": "merge", "method": "weighted_sum",
                             "models": {"A": {"file": "x.safetensors"}, "B": {"file": "y.safetensors"}}}}},
 "loras": [{"file": "ink.safetensors", "sha256": "bb22", "strength": 0.8, "te_strength": 0.5, "blocks": ""}],
 "blocks": {"IN00-IN05": {"alpha": 0.2}}, "rules": [{"match": "attn2", "params": {"alpha": 0.5}}],
 "exclude": [], "include_mode": false, "discard": ["^model_ema\\\\."], "glob": false, "mismatch": "skip", "vae": null,
 "output": {"save_dtype": "auto", "override_dtype": false, "metadata": {}}}
"""


def document(**fields):
    return json.dumps({"lib_merge": 1, **fields})


def refused(text) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        from_json(text)
    return caught.value


def test_the_example_of_the_design_is_read_field_by_field():
    read = from_json(EXAMPLE)
    assert (read.task, read.method, read.params, read.seed) == ("merge", "weighted_sum", {"alpha": 0.3}, 0)
    assert read.models["A"] == Slot(file="sdxl_base.safetensors", sha256="aa11")
    inner = read.models["B"].recipe
    assert {name: slot.file for name, slot in inner.models.items()} == {"A": "x.safetensors", "B": "y.safetensors"}
    assert (read.loras[0].file, read.loras[0].strength, read.loras[0].te_strength) == ("ink.safetensors", 0.8, 0.5)
    assert read.blocks == {"IN00-IN05": {"alpha": 0.2}}
    assert read.rules == (Rule(match="attn2", params={"alpha": 0.5}),)
    assert (read.exclude, read.include_mode, read.discard, read.glob) == ((), False, ("^model_ema\\.",), False)
    assert (read.mismatch, read.vae, read.output) == ("skip", None, Output())


def test_the_text_is_canonical_json():
    text = to_json(from_json(EXAMPLE))
    told = json.loads(text)
    # sorted at every depth, no spaces outside of strings, letters as they are
    assert text == json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert set(told) == {
        *("lib_merge", "task", "method", "params", "seed", "models", "loras", "blocks", "rules", "exclude"),
        *("include_mode", "discard", "glob", "mismatch", "allow_mixed_prediction", "only", "vae", "output"),
        "optimizer",
    }
    assert from_json(text) == from_json(EXAMPLE)
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"params": {"alpha": 1}}, {"params": {"alpha": 1.0}}),
        ({"params": {"alpha": -0.0}}, {"params": {"alpha": 0}}),
        ({"params": {"b": 1, "a": 2}}, {"params": {"a": 2, "b": 1}}),
        ({}, {"seed": 0, "exclude": []}),
        ({"models": {"B": None, "A": {"file": "ü.ckpt"}}}, {"models": {"A": {"file": "ü.ckpt"}, "B": None}}),
    ],
)  # fmt: skip
def test_equal_recipes_have_equal_text(left, right):
    one, other = from_json(document(**left)), from_json(document(**right))
    assert one == other
    assert to_json(one) == to_json(other)
    assert "\\u" not in to_json(one)


def test_numbers_survive_with_full_precision():
    for value in (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2**53 + 1):
        assert from_json(to_json(Recipe(params={"alpha": value}))).params["alpha"] == float(value)
    assert from_json(to_json(Recipe(seed=2**64 - 1))).seed == 2**64 - 1


def test_numpy_numbers_count_as_numbers():
    given = Recipe(params={"alpha": np.float32(0.5), "smooth": np.bool_(True)}, seed=np.int64(3))
    assert to_json(given) == to_json(Recipe(params={"alpha": 0.5, "smooth": True}, seed=3))
    assert validated(given).params == {"alpha": 0.5, "smooth": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no lib_merge recipe|not a lib_merge recipe"),
        ("{}", "no field lib_merge"),
        (document(alhpa=0.5), "alhpa"),
        (document(output={"save_dtpye": "fp16"}), "save_dtpye"),
        (document(task="marge"), "task.*marge"),
        (document(seed="1"), "seed"),
        (document(seed=1.5), "seed"),
        (document(seed=True), "seed"),
        (document(include_mode=1), "include_mode"),
        (document(exclude="attn"), "exclude"),
        (document(params={"alpha": "0.5"}), "params"),
        (document(params=[0.5]), "params"),
        (document(models=[]), "models"),
        (document(models={"A": {}}), "either a file or a recipe"),
        (document(models={"A": {"file": "a", "recipe": {"lib_merge": 1}}}), "either a file or a recipe"),
        (document(rules=[{"match": "x"}]), "params"),
        (document(output={"metadata": {"n": 1}}), "metadata"),
        ('{"lib_merge": 1, "seed": 1, "seed": 2}', "'seed' stands in it twice"),
        ('{"lib_merge": 1, "params": {"alpha": NaN}}', "NaN"),
        ('{"lib_merge": 1, "params": {"alpha": -Infinity}}', "Infinity"),
        ('{"lib_merge": 1, "params": {"alpha": 1' + "0" * 400 + "}}", "params.*range"),
        (document(models={"A": {"file": "/home/me/a.safetensors"}}), "without their folders"),
        (document(models={"A": {"file": "..\\a.safetensors"}}), "without their folders"),
        (document(vae={"file": ".."}), "without their folders"),
        (document(models={"A": {"recipe": {"lib_merge": 1, "models": {"A": {"file": "x/y"}}}}}), "their folders"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_and_named(text, said):
    error = refused(text)
    assert re.search(said, error.what), error.what


@pytest.mark.parametrize("version", [0, 2, 99, -1, True, "1", None, [1], 1.5, {}])
def test_unknown_versions_are_refused_at_any_depth(version):
    assert "version" in refused(json.dumps({"lib_merge": version})).what or version == 1.5
    nested = {"lib_merge": 1, "models": {"A": {"recipe": {"lib_merge": version}}}}
    refused(json.dumps(nested))
    told = {"lib_merge": 1, "models": {"A": {"file": "a", "made_by": {"lib_merge": version}}}}
    refused(json.dumps(told))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"params": {"alpha": 1, "beta": "x", "gamma": 2}}, "params.beta"),
        ({"output": {"metadata": {"a": "x", "b": None}}}, "output.metadata.b"),
        ({"blocks": {"IN00": {"alpha": 1}, "IN01": {"alpha": 1, "beta": []}}}, "blocks.IN01.beta"),
        ({"rules": [{"match": "a", "params": {}}, {"match": "b", "params": {"x.y": "z"}}]}, "rules[1].params.x.y"),
        ({"models": {"A": {"file": "a"}, "B": {"recipe": {"lib_merge": 1, "seed": "x"}}}}, "models.B.recipe.seed"),
        ({"models": {"A": {"file": "a"}, "B": {"fiel": "b"}}}, "models.B"),
        ({"vae": {"file": 3}}, "vae.file"),
    ],
)
def test_the_field_that_is_wrong_is_named_in_full(fields, named):
    assert refused(document(**fields)).what.startswith(f"the recipe is not valid: {named}: ")


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do():
    error = refused(document(output={"save_dtype": "fp12"}))
    assert error.hint == "choose one of: auto, keep, fp64, fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2"
    assert refused(document(mismatch="pad")).hint == "choose one of: skip, zeros, error"


def test_the_file_it_came_from_is_named():
    with pytest.raises(RecipeError) as caught:
        from_json("{}", where="mix.json")
    assert "mix.json" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        Recipe(output=Output(save_dtype="fp12")),
        Recipe(mismatch="pad"),
        Recipe(seed="1"),
        Recipe(seed=1.5),
        Recipe(exclude="attn"),
        Recipe(params={"alpha": "x"}),
        Recipe(params={"alpha": np.arange(3)}),
        Recipe(params={"alpha": object()}),
        Recipe(models={"A": "a.safetensors"}),
        Recipe(models={"A": Slot(file=Path("a.safetensors"))}),
        Recipe(rules=[("x", {"alpha": 1})]),
        Recipe(output=Output(metadata={"n": 1})),
        Recipe(lib_merge=2),
        Recipe(lib_merge=True),
        Recipe(models={"A": Slot(file="bad\udcff.safetensors")}),
    ],
)
def test_recipes_made_in_python_are_checked_as_those_that_were_read(wrong):
    with pytest.raises(RecipeError):
        validated(wrong)
    with pytest.raises(RecipeError):
        to_json(wrong)


def test_a_number_that_is_not_finite_cannot_be_written():
    with pytest.raises(RecipeError, match="finite"):
        to_json(Recipe(params={"alpha": float("nan")}))


def test_a_model_is_a_file_or_a_recipe_and_not_both():
    with pytest.raises(ValueError, match="either"):
        Slot()
    with pytest.raises(ValueError, match="either"):
        Slot(file="a", recipe=Recipe())


def test_recipes_are_frozen():
    with pytest.raises(AttributeError):
        Recipe().seed = 1


# Upgrades


def older(document):
    """Version 0 of this test had `ratio` where version 1 has params.alpha."""
    changed = {name: value for name, value in document.items() if name != "ratio"}
    return {**changed, "lib_merge": 1, "params": {"alpha": document["ratio"]}}


def oldest(document):
    return {**document, "lib_merge": 0, "ratio": document["ratio"] / 100}


def test_old_versions_go_through_every_upgrade_at_any_depth(monkeypatch):
    monkeypatch.setattr(recipes, "UPGRADES", {-1: oldest, 0: older})
    inner = {"lib_merge": 0, "ratio": 0.25}
    text = json.dumps({"lib_merge": -1, "ratio": 50, "models": {"A": {"recipe": inner}, "B": {"file": "b"}}})
    read = from_json(text)
    assert (read.lib_merge, read.params) == (1, {"alpha": 0.5})
    assert read.models["A"].recipe.params == {"alpha": 0.25}
    assert json.loads(to_json(read))["lib_merge"] == 1


def test_an_upgrade_is_followed_by_the_usual_checks(monkeypatch):
    monkeypatch.setattr(recipes, "UPGRADES", {0: lambda document: {**document, "lib_merge": 1}})
    assert "ratio" in refused('{"lib_merge": 0, "ratio": 0.5}').what


# Schema


def test_the_schema_in_docs_is_current():
    text = json.dumps(recipes.json_schema(), indent=2, ensure_ascii=False) + "\n"
    assert SCHEMA.read_text("utf-8") == text, "write it anew: json.dumps(lib_merge.recipe.json_schema(), indent=2)"


def test_the_schema_knows_every_field_and_allows_no_other():
    schema = json.loads(SCHEMA.read_text("utf-8"))["$defs"]
    assert set(schema["Recipe"]["properties"]) == set(json.loads(to_json(Recipe())))
    assert all(part["additionalProperties"] is False for part in schema.values())


# Walking over nested recipes


def nested() -> Recipe:
    inner = Recipe(models={"A": Slot(file="x"), "C": Slot(file="z")}, vae=Slot(file="v"))
    return Recipe(models={"B": Slot(recipe=inner), "A": Slot(file="a")}, vae=Slot(file="w"))


def test_files_are_found_at_any_depth_by_slot_path():
    found = {path: slot.file for path, slot in recipes.files(nested())}
    assert found == {"A": "a", "B.A": "x", "B.C": "z", "B.vae": "v", "vae": "w"}


def test_hashes_are_filled_in_by_slot_path():
    filled = recipes.with_hashes(nested(), {"A": "1", "B.C": "2", "vae": "3"})
    found = {path: slot.sha256 for path, slot in recipes.files(filled)}
    assert found == {"A": "1", "B.A": None, "B.C": "2", "B.vae": None, "vae": "3"}
    assert recipes.with_hashes(filled, {}) == filled


def test_how_loras_are_put_together_is_said_in_words_that_are_checked():
    read = from_json(document(task="lora_merge", optimizer={"scope": "global", "refinement": "maximum"}))
    assert (read.optimizer.scope, read.optimizer.refinement, read.optimizer.profile) == ("global", "maximum", "v1.2")
    rest = {"profile": "v1.2", "rules": "ordered", "sparsify": "none"}
    assert json.loads(to_json(read))["optimizer"] == {"scope": "global", "refinement": "maximum", **rest}
    assert to_json(Recipe(optimizer=Optimizer(profile="".join(["v1", ".2"])))) == to_json(Recipe())
    error = refused(document(task="lora_merge", optimizer={"scope": "globally"}))
    assert error.what == "scope cannot be 'globally'"
    assert error.hint == "choose one of: per_prefix, global, additive"
    lora = {"file": "a.safetensors", "key_filter": "shared"}
    assert refused(document(task="lora_merge", loras=[lora])).hint == "choose one of: all, shared_only, unique_only"
    merged_alone = {"task": "bake", "loras": [{"file": "a.safetensors", "key_filter": "shared_only"}]}
    assert "the task bake has no such thing" in refused(document(**merged_alone)).what
    assert "optimizer" in refused(document(task="merge", optimizer={"scope": "global"})).what
