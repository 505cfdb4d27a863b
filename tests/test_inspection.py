from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from lib_merge import FileError, inspect
from lib_merge.files.hashes import HashCache
from tests.support import STORAGES, values, write, write_raw

pytestmark = pytest.mark.portable

UNET = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
TEXT = "cond_stage_model.transformer.text_model.final_layer_norm.weight"
POSITIONS = "cond_stage_model.transformer.text_model.embeddings.position_ids"


@pytest.fixture
def model(tmp_path):
    tensors = {UNET: values((4, 3), 1, "<f2"), TEXT: values((5,), 2), POSITIONS: np.arange(77)}
    return write(tmp_path / "a.safetensors", tensors, {"who": "me", "lib_merge.recipe": '{"lib_merge": 1}'})


def test_what_the_header_tells(model):
    found = inspect(model)
    assert (found["format"], found["tensors"], found["parameters"], found["bytes"]) == (
        *("safetensors", 3, 12 + 5 + 77, 24 + 20 + 616),
    )
    assert found["dtype"] == {"F16": 1, "F32": 1, "I64": 1}
    assert found["components"] == {"te1": 2, "unet": 1}
    assert found["metadata"] == {"who": "me"}
    assert found["recipe"] == {"lib_merge": 1}
    assert (found["coded"], found["notes"], found["ranks"], found["trigger_words"]) == ([], [], {}, [])
    assert "damaged" not in found
    json.dumps(found, allow_nan=False)


def test_a_hash_is_told_when_it_is_remembered(model):
    assert inspect(model)["hashes"] == {"sha256": None}
    HashCache().compute(model)
    assert inspect(model)["hashes"] == {"sha256": hashlib.sha256(model.read_bytes()).hexdigest()}


def test_a_recipe_that_cannot_be_read_is_a_note(tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": np.ones(2)}, {"lib_merge.recipe": "{"})
    found = inspect(path)
    assert (found["recipe"], found["notes"]) == (None, ["the recipe in the header is not JSON"])


@pytest.mark.parametrize("name", ["gptq", "mlx", "comfy scaled fp8", "4-bit floats"])
def test_coded_weights_are_named(tmp_path, name):
    tensors, storage = STORAGES[name]
    sizes = {"F4": 4, "F8_E4M3": 8, "F16": 16, "BF16": 16, "F32": 32, "I32": 32, "U32": 32}
    entries = {key: (dtype, (4, 4), bytes(16 * sizes[dtype] // 8)) for key, dtype in tensors.items()}
    (told,) = inspect(write_raw(tmp_path / "a.safetensors", entries))["coded"]
    assert storage.lower() in told.lower()


def test_the_check_reads_the_numbers(tmp_path, model):
    assert inspect(model, check=True)["damaged"] == {}
    long = np.ones(3_000_000, "<f4")
    long[-1] = -np.inf
    tensors = {
        "fine": np.array([0, -0.0, 65504], "<f2"),
        "nan": np.array([1, np.nan], "<f2"),
        "long": long,
        "wide": np.array([np.nan], "<f8"),
        "counts": np.array([-1, 2**63 - 1]),
        POSITIONS: np.arange(77, dtype="<f4"),
    }
    path = write(tmp_path / "b.safetensors", tensors)
    assert inspect(path, check=True)["damaged"] == {
        "nan": "a value is not finite",
        "long": "a value is not finite",
        "wide": "a value is not finite",
        POSITIONS: "floats where whole numbers belong",
    }


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("BF16", b"\x80\x7f"), ("BF16", b"\xc0\xff"), ("F8_E4M3", b"\x7f"), ("F8_E4M3", b"\xff"), ("F8_E5M2", b"\xfc")],
)
def test_small_floats_are_checked_by_their_bits(tmp_path, dtype, bad):
    good = b"\x7f\x7f" if dtype == "BF16" else b"\x7e" if dtype == "F8_E4M3" else b"\x7b"
    entries = {"good": (dtype, (1,), good), "bad": (dtype, (2,), good + bad)}
    assert list(inspect(write_raw(tmp_path / "a.safetensors", entries), check=True)["damaged"]) == ["bad"]


def test_a_file_cut_off_while_it_is_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.safetensors", {"w": np.ones(100_000)})
    from lib_merge import inspection

    real = inspection.open_model

    def cut(path):
        source = real(path)
        with open(path, "r+b") as stream:  # noqa: PTH123
            stream.truncate(1000)
        return source

    monkeypatch.setattr(inspection, "open_model", cut)
    with pytest.raises(FileError, match="shorter"):
        inspect(path, check=True)
