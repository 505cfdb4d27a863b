"""Every command of the page of wishes is run as it stands there, in its order, in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from lib_merge.cli import main
from lib_merge.presets import Presets
from tests.fold.making import Pair
from tests.support import read, values, write
from tests.test_bake import BIAS, CONV, CROSS, OUT, SIZE, Q, V, lora

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text("utf-8")
COMMANDS = [
    line.strip()
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
TEXT = "cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"
VAE = "first_stage_model.decoder.conv_in.weight"


def checkpoint(path, seed, channels=4):
    sizes = {key: size for key, size in SIZE.items() if key in (V, CROSS, OUT, CONV, BIAS)}
    sizes |= {Q: SIZE[Q], CONV: (8, channels, 3, 3), TEXT: (16, 16), VAE: (8, 4, 3, 3)}
    write(path, {key: values(shape, seed + number) for number, (key, shape) in enumerate(sizes.items())})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("base", "style", "mine")):
        checkpoint(tmp_path / f"{name}.safetensors", 100 * number)
    checkpoint(tmp_path / "inpainting.safetensors", 300, channels=9)
    for number, name in enumerate(("ink", "detail", "light")):
        lora(tmp_path / f"{name}.safetensors", Q, V, CROSS, seed=50 * number, rank=4)
    Pair(tmp_path).adapter()
    return tmp_path


def test_every_command_runs_as_printed(folder, capsys):
    assert len(COMMANDS) > 25
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "lib-merge"
        assert main(words) == 0, f"{command}\n{capsys.readouterr().err}"
    # and what the page says of them holds
    for one, other in (
        ("base_30_style", "base_30_style_too"),
        ("base_30_style", "made_again"),
        ("base_30_style", "from_my_preset"),
        ("unet_inked", "unet_inked_too"),
    ):
        first, second = (read(folder / f"{name}.safetensors") for name in (one, other))
        assert all(np.array_equal(first[key], second[key]) for key in first), (one, other)
    base, inpainting = read(folder / "base.safetensors"), read(folder / "mine_inpainting.safetensors")
    assert np.array_equal(read(folder / "own_vae.safetensors")[VAE], base[VAE])
    assert np.array_equal(read(folder / "own_text.safetensors")[TEXT], base[TEXT])
    assert inpainting[CONV].shape == (8, 9, 3, 3)


def test_every_shipped_preset_is_in_the_table_and_no_other():
    rows = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)
    assert rows == list(Presets(Path("nowhere")).all())
