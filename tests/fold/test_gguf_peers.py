"""A fold into a file that the gguf package wrote, read back and coded anew by that package."""

from __future__ import annotations

import numpy as np
import pytest

import lib_merge
from tests.data.mlx_ref import merged, widened
from tests.fold.making import Pair, Q
from tests.fold.test_gguf_fold import NAMES, interleaved

pytestmark = pytest.mark.peers

HEADS = 5
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16")


def coded(values, kind):
    import gguf

    return gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind])


def in_file(values, module, architecture):
    return interleaved(values, HEADS) if architecture == "llama" and module == Q else values


def write(path, weights, kind, architecture):
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_tensor("output_norm.weight", np.ones(128, np.float32))
    for module, name in NAMES.items():
        values = in_file(widened(weights[module]), module, architecture)
        writer.add_tensor(f"{name}.weight", coded(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_kind_is_what_the_package_makes_of_the_sum(tmp_path, architecture, capsys):
    import gguf

    pair, compared = Pair(tmp_path), 0
    adapter = pair.adapter()
    for kind in KINDS:
        shipped, out = tmp_path / f"{kind}.gguf", tmp_path / f"{kind}.out.gguf"
        write(shipped, pair.weights, kind, architecture)
        made = lib_merge.fold(pair.dense, adapter, out, quantize=shipped)
        assert made.rounding.share == 1, kind
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
        for module, name in NAMES.items():
            down, up = pair.factors[module]
            values = in_file(merged(widened(pair.weights[module]), down, up, 1.5), module, architecture)
            found = tensors[f"{name}.weight"]
            assert found.tensor_type.name == kind
            assert np.asarray(found.data).tobytes() == coded(values, kind).tobytes(), (kind, module)
            compared += values.size
    with capsys.disabled():
        print(f" {compared} weights of {len(KINDS)} kinds", end="")
    assert compared == len(KINDS) * (80 * 128 + 48 * 256)
