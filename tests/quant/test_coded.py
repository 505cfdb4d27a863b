from __future__ import annotations

import pytest

from lib_merge.quant.coded import coded_tensors
from tests.support import STORAGES

pytestmark = pytest.mark.portable


@pytest.mark.parametrize("name", STORAGES)
def test_every_tensor_of_a_coded_storage_is_told(name):
    tensors, storage = STORAGES[name]
    found = coded_tensors({**tensors, "norm.weight": "F16", "position_ids": "I64"})
    assert set(found) == set(tensors)
    assert all(storage.lower() in told.lower() for told in found.values()), found


def test_one_marker_makes_all_fp8_tensors_coded():
    dtypes = {"scaled_fp8": "F8_E4M3", "a.weight": "F8_E4M3", "b.weight": "F8_E5M2", "c.weight": "BF16"}
    assert set(coded_tensors(dtypes)) == {"scaled_fp8", "a.weight", "b.weight"}
    prefixed = {f"model.diffusion_model.{key}": dtype for key, dtype in dtypes.items()}
    assert len(coded_tensors(prefixed)) == 3


@pytest.mark.parametrize(
    "dtypes",
    [
        {"l.weight": "F8_E4M3"},  # plain fp8 are numbers
        {"l.weight": "F16", "l.scales": "F16", "l.biases": "F16"},  # as any module may call its parameters
        {"l.weight": "F16", "l.weight_scale": "F16"},
        {"l.weight": "F32", "l.scale_weight": "F32"},
        {"gamma.scales": "F32"},
        {"l.weight": "U8"},
        {"a_scales": "F32", "a_blocks": "F32"},
        {"freqs_cis": "C64"},
        {"position_ids": "I64"},
        {},
    ],
)
def test_plain_numbers_are_not_taken_for_codes(dtypes):
    assert coded_tensors(dtypes) == {}
