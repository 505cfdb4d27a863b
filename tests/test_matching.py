from __future__ import annotations

import pytest

from lib_merge.families import PREFIXES
from lib_merge.matching import finder

pytestmark = pytest.mark.portable

LDM = "model.diffusion_model."


def found(base, other):
    find = finder(base, other, PREFIXES)
    return {key: find(key) for key in base}


def test_the_same_name_is_the_same_tensor():
    assert found(["a", "b"], ["b", "c"]) == {"a": None, "b": "b"}


@pytest.mark.parametrize(("mine", "theirs"), [(LDM, ""), ("", LDM), (LDM, "diffusion_model."), ("model.", LDM)])
def test_a_denoiser_prefix_may_differ(mine, theirs):
    names = ["double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_attn.qkv.bias", "img_in.weight"]
    base, other = [mine + name for name in names], [theirs + name for name in names]
    assert found(base, other) == dict(zip(base, other, strict=True))


def test_only_the_tensors_below_the_prefix_change_their_name():
    base = [f"{LDM}out.weight", "first_stage_model.decoder.weight", "cond_stage_model.weight"]
    other = ["out.weight", "first_stage_model.decoder.weight", "decoder.weight"]
    assert found(base, other) == {
        f"{LDM}out.weight": "out.weight",
        "first_stage_model.decoder.weight": "first_stage_model.decoder.weight",
        "cond_stage_model.weight": None,
    }


def test_a_tensor_of_the_other_model_is_found_once():
    # A has both names: the bare one is B's counterpart, the other one has none
    base = ["x.weight", f"{LDM}x.weight", f"{LDM}y.weight"]
    assert found(base, ["x.weight", "y.weight"]) == {
        "x.weight": "x.weight",
        f"{LDM}x.weight": None,
        f"{LDM}y.weight": "y.weight",
    }


def test_the_prefix_that_finds_most_is_taken():
    base = [f"{LDM}a", f"{LDM}b", f"{LDM}c"]
    assert found(base, ["a", "diffusion_model.b", "diffusion_model.c"]) == {
        f"{LDM}a": None,
        f"{LDM}b": "diffusion_model.b",
        f"{LDM}c": "diffusion_model.c",
    }


def test_nothing_in_common_is_nothing_found():
    assert set(found(["a.weight"], ["b.weight"]).values()) == {None}
    assert found([], ["b"]) == {}
    assert found(["a"], []) == {"a": None}
