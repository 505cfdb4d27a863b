from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
import pytest

import lib_merge
from lib_merge import Recipe, RecipeError, make_plan
from lib_merge.metadata import text_metadata
from lib_merge.recipe import Output, Slot, from_json
from tests.support import header_size, read_raw, values, write

portable = pytest.mark.portable

# The table as the web UIs write it
HOST_FIELDS = {
    *("type", "primary_model_hash", "secondary_model_hash", "tertiary_model_hash", "interp_method", "multiplier"),
    *("save_as_half", "custom_name", "config_source", "bake_in_vae", "discard_weights", "is_inpainting"),
    "is_instruct_pix2pix",
}
STALE = {"sshs_model_hash": "1", "sshs_legacy_hash": "2", "modelspec.hash_sha256": "0x3"}


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model(path, seed=0, metadata=None, shape=(8, 8)):
    return write(path, {"w": values(shape, seed), "position_ids": np.arange(77)}, metadata)


@pytest.fixture
def pair(tmp_path):
    a = model(tmp_path / "first model.safetensors", 1, {"modelspec.title": "T", "who": "A", **STALE})
    b = model(tmp_path / "second.safetensors", 2, {"modelspec.title": "B's", "only_b": "x", "who": "B"})
    return a, b


def merge(*paths, out, **options):
    return lib_merge.merge(*paths, out=out, **options).output


def told(path):
    return read_raw(path)[0]


# What is kept


def test_the_metadata_of_a_is_kept_without_its_stale_hashes(pair, tmp_path):
    found = told(merge(*pair, out=tmp_path / "out.safetensors"))
    assert found["modelspec.title"] == "T"
    assert found["who"] == "A"
    assert found["format"] == "pt"
    assert not set(found) & set(STALE)
    assert "only_b" not in found
    assert found["lib_merge.version"] == lib_merge.__version__
    assert set(found) == {
        *("modelspec.title", "who", "format", "lib_merge.version", "lib_merge.recipe"),
        *("sd_merge_recipe", "sd_merge_models"),
    }


@portable
def test_what_the_user_gives_wins(pair):
    made = Recipe(
        method="weighted_sum", models={"A": None, "B": None}, output=Output(metadata={"who": "me", "format": "mlx"})
    )
    (part,) = make_plan(made, dict(zip("AB", pair, strict=True))).parts
    assert (part.metadata["who"], part.metadata["format"]) == ("me", "mlx")


@portable
def test_a_model_that_says_its_format_keeps_it(tmp_path):
    paths = [model(tmp_path / f"{name}.safetensors", metadata={"format": "mlx"}) for name in "ab"]
    made = Recipe(method="weighted_sum", models={"A": None, "B": None})
    (part,) = make_plan(made, dict(zip("AB", paths, strict=True))).parts
    assert part.metadata["format"] == "mlx"


# Recipe and the hosts' notes


def test_recipe_and_notes_hold_real_hashes(pair, tmp_path):
    a, b = pair
    found = told(merge(a, b, out=tmp_path / "out.safetensors", alpha=0.3, discard=["a.b", "c"]))
    made = from_json(found["lib_merge.recipe"])
    assert made.models == {
        "A": Slot(file="first model.safetensors", sha256=sha256(a)),
        "B": Slot(file="second.safetensors", sha256=sha256(b)),
    }
    assert made.params == {"alpha": 0.3}
    note = json.loads(found["sd_merge_recipe"])
    assert set(note) == HOST_FIELDS
    assert (note["type"], note["custom_name"]) == ("lib_merge", "")
    assert (note["primary_model_hash"], note["secondary_model_hash"]) == (sha256(a), sha256(b))
    assert note["tertiary_model_hash"] is None
    assert (note["interp_method"], note["multiplier"], note["save_as_half"]) == ("weighted_sum", 0.3, False)
    assert note["discard_weights"] == "a.b|c"  # one regular expression, as there
    models = json.loads(found["sd_merge_models"])
    assert set(models) == {sha256(a), sha256(b)}
    assert {entry["name"] for entry in models.values()} == {"first model.safetensors", "second.safetensors"}
    assert all(set(entry) == {"name", "legacy_hash", "sd_merge_recipe"} for entry in models.values())


def test_the_legacy_hash_is_that_of_the_web_uis(tmp_path):
    # first 8 hex digits of sha256 over 64 KiB at 1 MiB
    a = model(tmp_path / "a.safetensors", 1, shape=(600, 600))
    b = model(tmp_path / "b.safetensors", 2, shape=(600, 600))
    found = json.loads(told(merge(a, b, out=tmp_path / "out.safetensors"))["sd_merge_models"])
    for path in (a, b):
        piece = path.read_bytes()[0x100000:0x110000]
        assert len(piece) == 0x10000
        assert found[sha256(path)]["legacy_hash"] == hashlib.sha256(piece).hexdigest()[:8]


def test_parents_are_told_with_their_own_story(pair, tmp_path):
    a, b = pair
    child = merge(a, b, out=tmp_path / "child.safetensors", alpha=0.25)
    found = told(merge(child, b, out=tmp_path / "grandchild.safetensors", alpha=0.75))
    made = from_json(found["lib_merge.recipe"])
    assert made.models["A"].file == "child.safetensors"
    assert made.models["A"].made_by == from_json(told(child)["lib_merge.recipe"])
    assert made.models["B"].made_by is None
    models = json.loads(found["sd_merge_models"])
    assert set(models) == {sha256(child), sha256(b), sha256(a)}
    assert models[sha256(child)]["sd_merge_recipe"] == json.loads(told(child)["sd_merge_recipe"])
    # A's own notes are those of this merge, not of its parent's
    assert json.loads(found["sd_merge_recipe"])["primary_model_hash"] == sha256(child)


@portable
@pytest.mark.parametrize(
    "recipe",
    ["no json", '{"lib_merge": 99}', "[1]", json.dumps({"lib_merge": 1, "discard": ["x" * 300_000]})],
    ids=["no json", "newer", "other", "huge"],
)
def test_a_parent_whose_story_cannot_be_carried_along_is_a_plain_file(tmp_path, recipe):
    odd = {"lib_merge.recipe": recipe, "sd_merge_recipe": "{", "sd_merge_models": "[1, 2]"}
    a = model(tmp_path / "a.safetensors", metadata=odd)
    b = model(tmp_path / "b.safetensors")
    made = Recipe(method="weighted_sum", models={"A": None, "B": None})
    (part,) = make_plan(made, {"A": a, "B": b}).parts
    assert from_json(part.metadata["lib_merge.recipe"]).models["A"].made_by is None
    models = json.loads(part.metadata["sd_merge_models"])
    assert [entry["sd_merge_recipe"] for entry in models.values()] == [None, None]


def test_only_the_first_file_of_a_folder_holds_the_recipe(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        names = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
        for key, file in names.items():
            write(folder / file, {key: values((4, 4), 1)}, {"format": "pt", "of": name})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    out = merge(tmp_path / "one", tmp_path / "two", out=tmp_path / "out")
    first, second = (told(out / f"model-0000{n}-of-00002.safetensors") for n in (1, 2))
    assert "lib_merge.recipe" in first
    assert second == {"format": "pt", "of": "one"}
    # the hash of a folder: over the sorted lines of its files' hashes
    lines = [f"{sha256(item)}  {item.name}\n" for item in (tmp_path / "two").glob("*.safetensors")]
    digest = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert from_json(first["lib_merge.recipe"]).models["B"] == Slot(file="two", sha256=digest)


# What must not be told


def test_no_folder_is_named_anywhere(pair, tmp_path):
    out = merge(*pair, out=tmp_path / "my output.safetensors")
    header = out.read_bytes()[: header_size(out)]
    for secret in (str(tmp_path), tmp_path.name, "my output"):
        assert secret.encode() not in header


def test_without_a_recipe_no_input_is_named(pair, tmp_path):
    a, b = pair
    parent = merge(a, b, out=tmp_path / "parent.safetensors", metadata={"modelspec.title": "parent", "who": "me"})
    made = merge(
        *(parent, b),
        out=tmp_path / "out.safetensors",
        keep_recipe=False,
        metadata={"mine": "kept"},
    )
    header = made.read_bytes()[: header_size(made)]
    for name in ("first model", "second", "parent", "sd_merge", "lib_merge", sha256(a), sha256(b), sha256(parent)):
        assert name.encode() not in header, name
    assert told(made) == {"format": "pt", "mine": "kept", "who": "me"}


@portable
@pytest.mark.parametrize(
    ("title", "kept"),
    [("model", False), ("model.safetensors", False), ("my model (v2)", False), ("remodelled", True), ("art", True)],
)
def test_inherited_text_that_names_an_input_goes_with_the_recipe(tmp_path, title, kept):
    a = model(tmp_path / "model.safetensors", metadata={"modelspec.title": title})
    b = model(tmp_path / "other.safetensors")
    made = Recipe(method="weighted_sum", models={"A": None, "B": None})
    (part,) = make_plan(made, {"A": a, "B": b}, keep_recipe=False).parts
    assert ("modelspec.title" in part.metadata) is kept
    (part,) = make_plan(made, {"A": a, "B": b}).parts
    assert part.metadata["modelspec.title"] == title


# Strings only


@portable
def test_values_that_are_no_text_become_json():
    given = {"text": "x", "json": '{"a": 1}', "dict": {"a": {"b": [1, None]}}, "n": 3, "x": 0.5, "none": None, 5: True}
    assert text_metadata(given) == {
        "text": "x",
        "json": '{"a": 1}',
        "dict": '{"a": {"b": [1, null]}}',
        "n": "3",
        "x": "0.5",
        "none": "null",
        "5": "true",
    }
    assert text_metadata({"ü": "ß"}) == {"ü": "ß"}


@portable
def test_what_cannot_be_text_is_refused_by_name():
    circle = []
    circle.append(circle)
    for bad in (object(), {1, 2}, circle, b"x", "\ud800"):
        with pytest.raises(RecipeError, match="'odd'"):
            text_metadata({"odd": bad})


# The size of the header


def forgotten(folder):
    """Empty the hash cache."""
    for item in folder.iterdir():
        item.unlink()


@pytest.mark.parametrize("case", ["different", "same file", "copies", "ancestor"])
def test_the_file_is_the_same_whether_hashes_are_remembered_or_not(pair, tmp_path, own_hash_cache, case):
    a, b = pair
    if case == "same file":
        b = a
    elif case == "copies":
        b = shutil.copyfile(a, tmp_path / "a copy under another, longer name.safetensors")
    elif case == "ancestor":
        b = merge(a, b, out=tmp_path / "child.safetensors")
    forgotten(own_hash_cache)
    fresh = merge(a, b, out=tmp_path / "fresh.safetensors")
    remembered = merge(a, b, out=tmp_path / "remembered.safetensors")
    assert fresh.read_bytes() == remembered.read_bytes()
    found = told(fresh)
    assert sha256(a) in json.loads(found["sd_merge_models"])
    assert from_json(found["lib_merge.recipe"]).models["B"].sha256 == sha256(b)


@portable
def test_the_planned_text_does_not_depend_on_what_is_remembered(pair):
    files = dict(zip("AB", pair, strict=True))
    made = Recipe(method="weighted_sum", models={"A": None, "B": None})
    known = {slot: sha256(path) for slot, path in files.items()}
    assert make_plan(made, files).parts == make_plan(made, files, known_hashes=known).parts
