"""Names of modules in two checkpoints."""

from __future__ import annotations

import pytest

from lib_merge.errors import MergeError
from lib_merge.fold.names import resolve

pytestmark = pytest.mark.portable

HF, MLX = "model.language_model.layers.3.mlp.up_proj", "language_model.model.layers.3.mlp.up_proj"


def keys(*modules):
    return {f"{module}.weight" for module in modules}


@pytest.mark.parametrize("asked", [HF, MLX])
@pytest.mark.parametrize(("dense", "shipped"), [(HF, MLX), (MLX, HF), (HF, HF), (MLX, MLX)])
def test_a_module_may_be_named_in_either_way(asked, dense, shipped):
    assert resolve(asked, keys(dense), keys(shipped)) == (dense, shipped)


def test_other_names_are_taken_as_they_are():
    assert resolve("lm_head", keys("lm_head", "x"), keys("lm_head")) == ("lm_head", "lm_head")


def test_a_name_that_fits_no_pair_lists_every_pair_tried():
    with pytest.raises(MergeError) as caught:
        resolve(HF, keys("other"), keys(MLX))
    for pair in ((HF, HF), (HF, MLX), (MLX, HF), (MLX, MLX)):
        assert f"{pair[0]} in the dense, {pair[1]} in the quantized one" in caught.value.what
    assert "the dense one lacks it" in caught.value.what


def test_a_name_that_fits_several_pairs_is_refused_with_them():
    with pytest.raises(MergeError, match="several pairs") as caught:
        resolve(HF, keys(HF), keys(HF, MLX))
    assert MLX in caught.value.what
