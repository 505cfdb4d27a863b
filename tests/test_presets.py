"""Presets: names that are safe, files that are whole, text that travels, and shipped recipes that the form can show."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib_merge.errors import FileError, OutputError, RecipeError
from lib_merge.presets import (
    LARGEST_BYTES,
    SHARED_MARK,
    Presets,
    checked_name,
    described,
    filled,
    from_file,
    from_text,
    open_slots,
    opened,
    shared_text,
    shipped_folder,
)
from lib_merge.recipe import Lora, Optimizer, Recipe, Slot, from_json, to_json

pytestmark = pytest.mark.portable

MIX = Recipe(
    method="weighted_sum",
    params={"alpha": 0.25},
    models={"A": Slot(file="base.safetensors", sha256="a" * 64), "B": Slot(file="stylé.safetensors")},
    loras=(Lora(file="ink.safetensors", strength=0.5),),
    blocks={"IN00-IN05": {"alpha": 0.2}},
    exclude=("^first_stage_model",),
)


@pytest.fixture
def presets(tmp_path):
    return Presets(tmp_path / "mine", tmp_path / "shipped")


def ship(presets, name, recipe=MIX):
    folder = presets._shipped
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(to_json(recipe), "utf-8")


def test_what_is_saved_is_loaded_and_is_a_file_that_run_takes(presets):
    path = presets.save("My mix (2)", MIX)
    assert path == presets.folder / "My mix (2).json"
    assert presets.load("My mix (2)") == MIX == from_json(path.read_text("utf-8"))
    assert [p.name for p in presets.folder.iterdir()] == ["My mix (2).json"]  # no temporary file is left


def test_nothing_is_replaced_unless_told_whatever_the_case(presets):
    presets.save("mix", MIX)
    other = Recipe(method="slerp")
    for name in ("mix", "MIX"):
        with pytest.raises(OutputError, match="there is a preset 'mix' already"):
            presets.save(name, other)
    assert presets.load("mix") == MIX
    presets.save("Mix", other, overwrite=True)
    assert list(presets.all()) == ["mix"]
    assert presets.load("mix") == other


def test_a_shipped_one_is_covered_and_comes_back(presets):
    ship(presets, "style", Recipe(method="slerp"))
    presets.save("style", MIX)
    assert (presets.get("style").own, presets.load("style")) == (True, MIX)
    presets.delete("style")
    assert (presets.get("style").own, presets.load("style").method) == (False, "slerp")
    with pytest.raises(OutputError, match="comes with the program"):
        presets.delete("style")


def test_the_users_come_first_in_order(presets):
    for name in ("b", "A", "c"):
        presets.save(name, MIX)
    ship(presets, "aa")
    assert list(presets.all()) == ["A", "b", "c", "aa"]


def test_an_unknown_name_has_a_suggestion_and_no_path_is_followed(presets, tmp_path):
    presets.save("portrait_style", MIX)
    with pytest.raises(FileError, match="no preset 'portrait-style'") as caught:
        presets.load("portrait-style")
    assert "portrait_style" in caught.value.hint
    (tmp_path / "secret.json").write_text(to_json(MIX))
    for name in ("../secret", str(tmp_path / "secret")):
        with pytest.raises(FileError, match="no preset"):
            presets.load(name)
        with pytest.raises(FileError, match="no preset"):
            presets.delete(name)
    assert (tmp_path / "secret.json").exists()


@pytest.mark.parametrize(
    "name",
    ["", "  ", "a/b", "a\\b", "..", ".hidden", "end.", " x", "a:b", "a\nb", "a\0b", "CON", "nul.x", "<b>", "x" * 81],
)
def test_names_that_some_system_cannot_keep_are_refused(presets, name):
    with pytest.raises(OutputError):
        presets.save(name, MIX)
    assert not presets.folder.exists()


@pytest.mark.parametrize("name", ["a", "Größe 30 %", "mix_v1.2+ink (soft)", "混合", "x" * 80, "console"])
def test_names_that_people_use_are_taken(presets, name):
    assert checked_name(name) == name
    presets.save(name, MIX)
    assert presets.load(name) == MIX


def test_a_damaged_preset_hides_no_other(presets):
    presets.save("good", MIX)
    (presets.folder / "bad.json").write_text("{", "utf-8")
    (presets.folder / "huge.json").write_text(" " * (LARGEST_BYTES + 1), "utf-8")
    (presets.folder / "note.txt").write_text("x", "utf-8")
    assert list(presets.all()) == ["bad", "good", "huge"]
    with pytest.raises(RecipeError, match="not JSON") as caught:
        presets.load("bad")
    assert "bad.json" in str(caught.value.file)
    with pytest.raises(FileError, match="larger than any recipe"):
        presets.load("huge")


def test_no_folder_is_no_preset(tmp_path):
    assert Presets(tmp_path / "a", tmp_path / "b").all() == {}


# Sharing


texts = st.text(st.characters(codec="utf-8", exclude_characters="/\\"), min_size=1, max_size=20)
names = texts.filter(lambda text: text not in (".", ".."))


@given(names, st.dictionaries(texts, st.floats(-1e6, 1e6), max_size=5), st.lists(texts, max_size=3))
def test_every_recipe_comes_back_from_its_shared_text(file, params, patterns):
    recipe = Recipe(method="x", params=params, models={"A": Slot(file=file), "B": None}, exclude=tuple(patterns))
    word = shared_text(recipe)
    assert set(word) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")  # unreserved in links
    assert to_json(from_text(word)) == to_json(recipe)


def test_shared_text_is_found_in_a_message_and_in_a_link():
    word = shared_text(MIX)
    for text in (f"try this: {word}, it is nice", f"https://example.org/?recipe={word}&x=1", f"\n{word}\n"):
        assert from_text(text) == MIX


def test_pasted_json_may_hold_the_mark():
    recipe = Recipe(exclude=(f"{SHARED_MARK}abc",))
    assert from_text(to_json(recipe)) == recipe


def word_of(data):
    return SHARED_MARK + base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = word_of(zlib.compress(b" " * (200 << 20), 9))
    assert len(bomb) < 300_000
    with pytest.raises(RecipeError, match="more than any recipe"):
        from_text(bomb)
    with pytest.raises(RecipeError, match="larger than any recipe"):
        from_text("x" * (2 * LARGEST_BYTES + 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no text"),
        ("hello", "not JSON"),
        (SHARED_MARK + "abc", "damaged"),
        (shared_text(MIX)[:-20], "cut short"),
        (word_of(zlib.compress(b"[1]")), "not a lib_merge recipe"),
        (word_of(zlib.compress(b"\xff")), "not JSON"),
        ('{"lib_merge": 1, "models": {"A": {"file": "../../etc/passwd"}}}', "without their folders"),
    ],
)
def test_what_is_no_recipe_says_why(text, said):
    with pytest.raises(RecipeError, match=said):
        from_text(text)


def test_a_recipe_comes_out_of_files_of_three_kinds(tmp_path):
    (tmp_path / "a.json").write_text(to_json(MIX), "utf-8")
    (tmp_path / "b.txt").write_text(f"here: {shared_text(MIX)}", "utf-8")
    metadata = {"lib_merge.recipe": to_json(MIX)}
    header = json.dumps(
        {"__metadata__": metadata, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    (tmp_path / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    for name in ("a.json", "b.txt", "c.safetensors"):
        assert from_file(tmp_path / name) == MIX
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not text"):
        from_file(tmp_path / "d.txt")
    with pytest.raises(FileError):
        from_file(tmp_path / "none.json")


# Open slots


def test_an_opened_recipe_says_what_for_any_models():
    preset = opened(MIX)
    assert (open_slots(preset), preset.loras) == (["A", "B"], ())
    assert (preset.params, preset.blocks, preset.exclude) == (MIX.params, MIX.blocks, MIX.exclude)
    again = filled(preset, {"A": "x.safetensors", "B": "y.safetensors"}, MIX.loras)
    assert [again.models[slot].file for slot in "AB"] == ["x.safetensors", "y.safetensors"]
    assert again.loras == MIX.loras
    assert open_slots(again) == []


def test_a_line_tells_what_a_recipe_does():
    line = described(MIX)
    assert line == (
        "merge weighted_sum; alpha 0.25; blocks IN00-IN05=0.2; not ^first_stage_model; "
        "A base.safetensors; B stylé.safetensors; LoRA ink.safetensors 0.5"
    )
    optimized = Recipe(task="lora_merge", method="auto", optimizer=Optimizer(rules="document"))
    assert described(optimized) == "lora_merge auto; rules document"
    assert described(Recipe(task="convert", only="unet", models={"A": None})) == "convert; only unet; A open"


# What comes with the program


SHIPPED = sorted(path.stem for path in shipped_folder().glob("*.json"))


def test_there_are_presets_for_every_task_but_folding():
    tasks = {Presets().load(name).task for name in SHIPPED}
    assert tasks == {"merge", "bake", "convert", "lora_merge", "lora_extract", "lora_resize"}
    assert len(SHIPPED) >= 12


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_preset_leaves_all_models_open(name):
    recipe = Presets().load(name)
    assert checked_name(name) == name
    assert opened(recipe) == recipe
