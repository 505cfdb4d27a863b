from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from lib_merge import inspect
from lib_merge.adapter_facts import trigger_words
from lib_merge.cli import main
from lib_merge.files.hashes import HashCache
from tests.support import bf16, write, write_raw

pytestmark = pytest.mark.portable

UNET = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
MID = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
TEXT = "lora_te_text_model_encoder_layers_0_mlp_fc1"


def lora(path, metadata=None, alphas=True):
    """Two modules of rank 4 and one of rank 8 of an SD1 LoRA."""
    tensors = {}
    for stem, rank, width, alpha in ((UNET, 4, 768, 2.0), (MID, 4, 768, 2.0), (TEXT, 8, 768, 8.0)):
        tensors[f"{stem}.lora_down.weight"] = np.zeros((rank, width), "<f2")
        tensors[f"{stem}.lora_up.weight"] = np.zeros((16, rank), "<f2")
        if alphas:
            tensors[f"{stem}.alpha"] = np.array(alpha, "<f4")
    return write(path, tensors, metadata)


def test_what_is_in_an_adapter(tmp_path):
    found = inspect(lora(tmp_path / "a.safetensors", {"ss_base_model_version": "sd_v1"}))
    told = (found["kind"], found["family"], found["format"], found["container"])
    assert told == ("adapter", "SD 1.x", "LoRA", "safetensors")
    assert found["ranks"] == {"4": 2, "8": 1}
    assert found["alphas"] == {"2": 2, "8": 1}
    assert found["modules"] == 3
    assert found["modules_per_block"] == {"BASE": 1, "IN04": 1, "M00": 1}
    assert list(found["modules_per_block"]) == ["BASE", "IN04", "M00"]
    assert found["metadata"] == {"ss_base_model_version": "sd_v1"}
    assert found["hashes"] == {"sha256": None}
    json.dumps(found, allow_nan=False)


def test_without_alphas(tmp_path):
    found = inspect(lora(tmp_path / "a.safetensors", alphas=False))
    assert found["alphas"] == {"none": 3}
    assert any("alpha" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("BF16", (), bf16([6.0])), ("F16", (1,), np.float16(6).tobytes()), ("I64", (), np.int64(6).tobytes())],
)
def test_alphas_of_any_dtype(tmp_path, dtype, shape, data):
    tensors = {
        f"{UNET}.lora_down.weight": ("F16", (4, 768), bytes(4 * 768 * 2)),
        f"{UNET}.lora_up.weight": ("F16", (16, 4), bytes(16 * 4 * 2)),
        f"{UNET}.alpha": (dtype, shape, data),
    }
    assert inspect(write_raw(tmp_path / "a.safetensors", tensors))["alphas"] == {"6": 1}


def test_a_peft_folder_and_its_file_tell_the_same(tmp_path):
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{stem}.lora_A.weight": np.zeros((8, 64), "<f4"), f"{stem}.lora_B.weight": np.zeros((64, 8), "<f4")}
    write(tmp_path / "adapter_model.safetensors", parts)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 32}))
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        found = inspect(path)
        assert (found["kind"], found["ranks"], found["alphas"]) == ("adapter", {"8": 1}, {"32": 1})
        assert found["modules_per_block"] == {"L00": 1}


def test_what_cannot_be_used_is_told_not_refused(tmp_path):
    tensors = {
        "base_model.model.layers.0.q_proj.vera_lambda_b": np.zeros(4, "<f4"),
        "base_model.model.layers.0.q_proj.vera_lambda_d": np.zeros(4, "<f4"),
    }
    found = inspect(write(tmp_path / "a.safetensors", tensors))
    assert found["kind"] == "adapter"
    assert any("VeRA" in note for note in found["notes"])
    assert (found["ranks"], found["trigger_words"]) == ({}, [])


TAGS = {"10_cat": {"1cat": 10, "sitting": 3}, "2_more": {"1cat": 2, "grass": 4, "": 9}}
MANY = {"a": {f"t{n}": n for n in range(1, 60)}}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, []),
        ({"modelspec.trigger_phrase": "ohwx man, portrait"}, ["ohwx man", "portrait"]),
        ({"ss_tag_frequency": json.dumps(TAGS)}, ["1cat", "grass", "sitting"]),
        ({"ss_tag_frequency": json.dumps(TAGS), "trained_words": '["z", "1cat"]'}, ["z", "1cat", "grass", "sitting"]),
        ({"ss_tag_frequency": "{broken"}, []),
        ({"ss_tag_frequency": "[1, 2]"}, []),
        ({"ss_tag_frequency": '{"a": 3, "b": {"x": "many"}}'}, []),
        ({"ss_tag_frequency": json.dumps(MANY)}, [f"t{n}" for n in range(59, 39, -1)]),
    ],
)
def test_trigger_words(metadata, words):
    assert trigger_words(metadata) == words


def test_hashes_of_the_file_and_of_its_header(tmp_path):
    path = lora(tmp_path / "a.safetensors", {"sshs_model_hash": "ab" * 32, "sshs_legacy_hash": "12345678"})
    sha256 = HashCache().compute(path)
    assert inspect(path)["hashes"] == {
        "sha256": sha256,
        "autov2": sha256[:10],
        "sshs_model_hash": "ab" * 32,
        "sshs_legacy_hash": "12345678",
    }


def test_the_text_of_the_command_line(tmp_path, capsys):
    path = lora(tmp_path / "a.safetensors", {"sshs_legacy_hash": "12345678", "modelspec.trigger_phrase": "ohwx"})
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    lines = {line.strip() for line in text.splitlines()}
    assert lines >= {
        "adapter, SD 1.x, LoRA, safetensors",
        "3 modules: BASE 1, IN04 1, M00 1",
        "ranks: 4 (2 modules), 8 (1)",
        "alphas: 2 (2 modules), 8 (1)",
        "trigger words: ohwx",
        "sshs_legacy_hash: 12345678",
    }
    assert text.count("12345678") == 1
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trigger_words"] == ["ohwx"]


def test_torch_is_not_needed(tmp_path):
    path = lora(tmp_path / "a.safetensors")
    code = f"import sys; from lib_merge import inspect; inspect({str(path)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
