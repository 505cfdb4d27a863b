"""Merges of the web UIs, as A1111 1.10 and Neo write them into a file's metadata."""

from __future__ import annotations

import json

import pytest

import lib_merge
from lib_merge.errors import RecipeError
from lib_merge.files.hashes import HashCache, sha256_file
from lib_merge.foreign import host_recipe
from lib_merge.presets import from_file
from lib_merge.recipe import Output, Slot
from tests.support import read, values, write

TOLD = {
    "type": "webui", "primary_model_hash": "a" * 64, "secondary_model_hash": "b" * 64, "tertiary_model_hash": None,
    "interp_method": "Weighted sum", "multiplier": 0.3, "save_as_half": False, "custom_name": "x", "config_source": 0,
    "bake_in_vae": "None", "discard_weights": "", "is_inpainting": False, "is_instruct_pix2pix": False,
}  # fmt: skip
MODELS = {"a" * 64: {"name": "sub/base.safetensors"}, "b" * 64: {"name": "style.safetensors"}}


def metadata(models=None, **changed):
    return {
        "sd_merge_recipe": json.dumps({**TOLD, **changed}),
        "sd_merge_models": json.dumps(MODELS if models is None else models),
    }


def test_a_weighted_sum():
    recipe, notes = host_recipe(metadata())
    assert recipe == lib_merge.Recipe(
        method="weighted_sum", params={"alpha": 0.3}, output=Output(save_dtype="keep"),
        models={"A": Slot(file="base.safetensors", sha256="a" * 64),
                "B": Slot(file="style.safetensors", sha256="b" * 64)},
    )  # fmt: skip
    assert notes == ()


def test_everything_else_is_taken_over_or_told():
    recipe, notes = host_recipe(
        metadata(
            interp_method="Add difference", save_as_half=True, bake_in_vae="good.vae.pt", config_source=2,
            discard_weights="^model_ema", new_thing=1,
        )
    )  # fmt: skip
    assert (recipe.method, recipe.models["C"], recipe.vae) == ("add_difference", None, Slot(file="good.vae.pt"))
    assert recipe.discard == ("^model_ema",)
    assert recipe.output == Output(save_dtype="fp16", override_dtype=True)
    for word in ("model C is left open", "config_source", "save_as_half", "new_thing"):
        assert any(word in note for note in notes), word


def test_what_cannot_be_taken_over_is_told():
    for pattern in ("a b", "("):
        recipe, notes = host_recipe(metadata(discard_weights=pattern))
        assert (recipe.discard, len(notes)) == ((), 1)
    assert "hash alone" in host_recipe(metadata(models={}))[1][0]
    assert host_recipe(metadata(interp_method="No interpolation"))[0].task == "convert"
    for changed, said in [
        ({"type": "other"}, "other"),
        ({"interp_method": "magic"}, "magic"),
        ({"multiplier": "x"}, "x"),
    ]:
        with pytest.raises(RecipeError, match=said):
            host_recipe(metadata(**changed))
    assert host_recipe({}) is None
    assert host_recipe({"sd_merge_recipe": "[1]"}) is None


def test_the_models_are_found_by_their_hashes_under_other_names(tmp_path):
    for number, name in enumerate(("renamed_a", "renamed_b")):
        write(tmp_path / f"{name}.safetensors", {"w": values((4, 4), number)})
    cache = HashCache(tmp_path / "cache")
    hashes = [cache.compute(tmp_path / f"renamed_{letter}.safetensors") for letter in "ab"]
    assert hashes[0] == sha256_file(tmp_path / "renamed_a.safetensors")
    told = metadata(models={}, primary_model_hash=hashes[0], secondary_model_hash=hashes[1])
    write(tmp_path / "merged.safetensors", {"w": values((4, 4), 9)}, metadata=told)
    recipe = from_file(tmp_path / "merged.safetensors")
    out = lib_merge.run(recipe, out=tmp_path / "again.safetensors", models=[tmp_path], cache=cache).output
    a, b = values((4, 4), 0), values((4, 4), 1)
    assert abs(read(out)["w"] - (0.7 * a + 0.3 * b)).max() < 1e-6
