"""Every golden bake through the command line: right numbers, nothing else changed, no key of the adapter unused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lib_merge.cli import main
from tests.support import read_raw

GOLDEN = Path(__file__).parent / "data" / "golden" / "adapters"
CASES = {folder.name: folder for folder in sorted(GOLDEN.iterdir()) if (folder / "expected.safetensors").is_file()}
# Cases that the peer itself computed in float32, and how far it may be off.
LOOSE = {
    **dict.fromkeys(("flux_bfl_control", "flux_diffusers_peft", "flux_kohya_fused", "sdxl_te2_openclip"), 2e-7),
    **dict.fromkeys(("diag_oft", "diag_oft_rescaled"), 5e-7),
    **dict.fromkeys(("peft_oft", "peft_oft_block_share", "peft_oft_exact"), 5e-7),
    **dict.fromkeys(("peft_boft", "peft_boft_two_stage"), 5e-7),
}
# Partial DoRA is defined otherwise here: W + s(W' − W), which is checked in the tests of its format.
ONLY_FULL_STRENGTH = ("dora_loha", "dora_lora_in")


def strengths() -> list[tuple[str, float]]:
    listed = {name: json.loads((folder / "case.json").read_text())["strengths"] for name, folder in CASES.items()}
    return [(name, s) for name, values in listed.items() for s in values if s == 1.0 or name not in ONLY_FULL_STRENGTH]


def adapter_of(folder: Path) -> Path:
    return folder if (folder / "adapter_config.json").is_file() else folder / "adapter.safetensors"


@pytest.mark.parametrize(("name", "strength"), strengths())
def test_golden_case(name, strength, tmp_path, capsys):
    folder, out = CASES[name], tmp_path / "out.safetensors"
    base = GOLDEN / json.loads((folder / "case.json").read_text())["base"]
    assert main(["bake", str(base), f"{adapter_of(folder)}@{strength}", "-o", str(out), "--json", "--no-fsync"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unused"] == []
    expected = {
        key.partition("|")[2]: value
        for key, value in load_file(folder / "expected.safetensors").items()
        if float(key.partition("|")[0]) == strength
    }
    before, after = read_raw(base)[1], read_raw(out)[1]
    assert set(after) == set(before)
    assert {key for key in after if after[key] != before[key]} == set(expected)
    got = load_file(out)
    for key, want in expected.items():
        assert got[key].dtype == np.float32
        assert got[key].shape == want.shape
        ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
        error = np.abs(got[key].astype(np.float64) - want.astype(np.float64))
        assert (error <= np.maximum(ulp, LOOSE.get(name, 0.0))).all(), (key, float((error / ulp).max()))
