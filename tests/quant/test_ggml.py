"""Block codes of GGUF: those that the gguf package makes, bit for bit (tests/data/gguf/make.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lib_merge.errors import NumberError
from lib_merge.quant.ggml import KINDS, codes, decode, encode, scales

pytestmark = pytest.mark.portable

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "gguf" / "codes.npz")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_gguf_package(kind):
    assert np.array_equal(encode(GOLDEN["weights"], kind), GOLDEN[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_they_stand_for_the_same_weights(kind):
    assert np.array_equal(decode(GOLDEN[kind], kind), GOLDEN[f"{kind}.decoded"])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_scale_times_code(kind):
    raw = GOLDEN[kind][:4]
    numbers, scale = codes(raw, kind).astype(int), np.repeat(scales(raw, kind), 32, 1)
    if KINDS[kind].form == "signed":
        numbers = (numbers + 128) % 256 - 128
    elif KINDS[kind].form == "offset":
        numbers -= 1 << (KINDS[kind].bits - 1)
    steps = (decode(raw, kind) - decode(raw, kind).min()) / scale
    assert np.allclose(np.diff(steps[0, :32]), np.diff(numbers[0, :32]), atol=1e-2)
    assert numbers.max() < 1 << KINDS[kind].bits


@pytest.mark.parametrize(("value", "said"), [(np.nan, "not finite"), (np.inf, "not finite"), (1e9, "beyond float16")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_stored_names_row_and_block(kind, value, said):
    weights = np.ones((3, 64), np.float32)
    weights[1, 40] = value
    with pytest.raises(NumberError, match=said) as caught:
        encode(weights, kind, first_row=10)
    assert "block 1 of row 11" in caught.value.what


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_too_small_for_any_scale_stand_for_zeros(kind):
    weights = np.full((1, 64), 1e-39, np.float32)
    weights[0, ::2] = -3e-39
    raw = encode(weights, kind)
    assert not decode(raw, kind).any()
    assert np.array_equal(codes(raw, kind), codes(encode(np.zeros((1, 64), np.float32), kind), kind))
