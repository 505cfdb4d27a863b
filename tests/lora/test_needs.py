"""Options that would change nothing are refused, those that change something are not."""

from __future__ import annotations

import pytest

from lib_merge.cli import main
from lib_merge.errors import RecipeError
from lib_merge.lora import merge_loras, resize_lora
from lib_merge.lora._needs import NEEDS
from lib_merge.recipe import Lora, Optimizer, Recipe, Slot
from tests.lora.files import make

# Options of `lora merge` -> the option that goes unheeded.
REFUSED = {
    "--method slerp --scope additive": "scope",
    "--method ties --scope additive": "scope",
    "--method weighted_average --scope global": "scope",
    "--method slerp --profile classic": "profile",
    "--method auto --scope additive --rules document": "rules",
    "--method auto --scope global --smoothing 0.5": "smoothing",
    "--method slerp --smoothing 0.5": "smoothing",
    "--refinement maximum": "refinement",
    "--sparsify dare": "sparsify",
    "--method kohya_merge --sparsify dare": "sparsify",
    "--density 0.2": "density",
    "--method slerp --density 0.2": "density",
    "--method consensus --density 0.2": "density",
    "--method weighted_average --density auto": "density auto",
    "--method auto --scope additive --density 0.2": "density",
    "--method ties --dampening 0.5": "dampening",
    "--method ties --sparsify della --dampening 0.5": "dampening",
    "--method ties --sparsify dare -p linear_dampening=true": "linear_dampening",
    "--method ties --sparsify dare -p document_della=true": "document_della",
    "--method slerp -p count_divisor=true": "count_divisor",
    "--method ties -p projection_vote=true": "projection_vote",
    "--method ties --refinement maximum -p projection_vote=true": "projection_vote",
    "--method ties -p drop_selfish=true": "drop_selfish",
    "--auto-strength": "auto-strength",
    "--output-strength 2": "output-strength",
    "--output-strength auto": "output-strength auto",
    "--no-normalize": "no-normalize",
    "--method weighted_sum --no-normalize": "no-normalize",
    "--method auto --scope additive --no-normalize": "no-normalize",
    "--lossless": "lossless",
    "--method ties --lossless --rank 8": "lossless",
    "--method auto --lossless --max-error 0.1": "lossless",
    "--rank 4 --max-rank 2": "max-rank",
    "--rank 4 --max-error 0.1": "max-error",
    "--method kohya_merge --base a.safetensors": "base",
}
HEEDED = [
    "--method auto --scope additive",
    "--method auto --profile classic --rules document --smoothing 0",
    "--method ties --density 0.2 --no-normalize --lossless",
    "--method ties --scope global --smoothing 0 --dampening 0",
    "--method ties --smoothing 0.5",
    "--method slerp --sparsify dare --density 0.2 --dampening 0.5 --seed 3",
    "--method weighted_average --sparsify della_conflict --lossless",
    "--method weighted_sum --auto-strength --output-strength 2",
    "--method slerp --refinement enhanced --lossless --output-strength auto",
    "--rank auto --max-error 0.1 --max-rank 3",
    "--method slerp --sparsify dare --dampening 0.5 -p linear_dampening=true",
    "--method auto --refinement enhanced --sparsify della -p document_della=true -p drop_selfish=true",
    "--method ties --refinement enhanced -p count_divisor=true -p projection_vote=true",
    "--method ties --rank 4 --max-rank 8",
    "--method peft_dare_linear_svd --rank 4 -p density=0.5 --seed 3",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make(tmp_path / "a.safetensors", 4, 2.0, 1)
    make(tmp_path / "b.safetensors", 4, 2.0, 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def merged(*words, inputs=("a.safetensors", "b.safetensors")):
    return main(["lora", "merge", *inputs, "-o", "out.safetensors", "--dry-run", *words])


def test_what_would_go_unheeded_is_refused(folder, capsys):
    for words, option in REFUSED.items():
        assert merged(*words.split()) == 1, words
        told = capsys.readouterr().err
        assert told.startswith(f"error: {option} takes effect only with"), f"{words}: {told}"
        assert f"hint: leave {option} out" in told


def test_what_takes_effect_is_not(folder, capsys):
    for words in HEEDED:
        assert merged(*words.split()) == 0, f"{words}: {capsys.readouterr().err}"
        assert "takes effect only" not in capsys.readouterr().out


MEANS = ("--no-normalize", "-p", "count_divisor=true")


def test_means_by_their_number_have_a_size_already(folder, capsys):
    assert merged(*MEANS, "--method", "ties") == 1
    assert "no-normalize takes effect only without count_divisor" in capsys.readouterr().err
    assert merged(*MEANS, "--method", "auto") == 0


def test_every_option_of_the_table_is_tried():
    tried = {*REFUSED.values(), "seed", "conflict_modes and key_filters", "rank"}
    assert {need.option for need in NEEDS["lora_merge"]} == tried


def test_what_does_no_harm_is_noted(folder, capsys):
    assert merged("--seed", "7") == 0
    assert "note: seed takes effect only with sparsify" in capsys.readouterr().out
    assert merged("--method", "ties", "--refinement", "maximum", "--lossless") == 0
    assert "note: lossless takes effect only where factors are not exact" in capsys.readouterr().out


def test_the_same_holds_in_python_and_in_recipes(folder):
    with pytest.raises(RecipeError, match="density takes effect only"):
        merge_loras("a.safetensors", "b.safetensors", out="out.safetensors", method="slerp", density=0.2)
    with pytest.raises(RecipeError, match="conflict_modes and key_filters take"):
        merge_loras("a.safetensors", "b.safetensors", out="out.safetensors", method="kohya_merge",
                    key_filters=["all", "shared_only"])  # fmt: skip
    recipe = Recipe(task="lora_merge", method="ties", params={"rank": 4.0, "auto": True}, loras=(Lora(file="a"),))
    (broken,) = [need for need in NEEDS["lora_merge"] if need.given(recipe) and not need.met(recipe)]
    assert broken.option == "rank"
    plain = Recipe(task="lora_merge", optimizer=Optimizer(), models={"A": Slot(file="base")}, loras=recipe.loras)
    assert not [need for need in NEEDS["lora_merge"] if need.given(plain) and not need.met(plain)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rank 4 --keep 0.9", "rank takes effect only without keep"),
        ("--rank 4 --max-rank 2", "max-rank takes effect only with keep"),
        ("--rule ratio --rank 2", "rank takes effect only without keep"),
        ("--rule ratio", "the share is missing"),
        ("--max-rank 2", "max-rank takes effect only with keep"),
    ],
)
def test_a_resize_refuses_too(folder, capsys, words, told):
    assert main(["lora", "resize", "a.safetensors", "-o", "out.safetensors", *words.split()]) == 1
    assert told in capsys.readouterr().err
    assert not (folder / "out.safetensors").exists()


def test_a_resize_to_a_share_takes_the_norm_s_without_a_rule(folder):
    one = resize_lora("a.safetensors", out="one.safetensors", keep=0.8)
    other = resize_lora("a.safetensors", out="other.safetensors", keep=0.8, rule="frobenius")
    assert one.ranks == other.ranks
