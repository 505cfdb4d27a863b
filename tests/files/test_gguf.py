"""Headers of GGUF files: one that the gguf package wrote (tests/data/gguf/make.py), and broken ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lib_merge.errors import FileError
from lib_merge.files.gguf import is_gguf, open_gguf

pytestmark = pytest.mark.portable

DATA = Path(__file__).parents[1] / "data" / "gguf"
SMALL = DATA / "small.gguf"


def test_tensors_and_fields_of_a_file_of_the_gguf_package():
    found = open_gguf(SMALL)
    assert found.types == {
        "blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_down.weight": "Q4_1", "output.weight": "F16",
        "output_norm.weight": "F32",
    }  # fmt: skip
    assert found.shapes["blk.0.attn_q.weight"] == (10, 128)
    assert found.shapes["output_norm.weight"] == (128,)
    assert found.fields["general.architecture"] == "qwen3"
    assert found.fields["qwen3.block_count"] == 1


def test_data_lies_where_the_header_says():
    found = open_gguf(SMALL)
    golden = np.load(DATA / "codes.npz")
    for key, kind in (("blk.0.attn_q.weight", "Q8_0"), ("blk.0.ffn_down.weight", "Q4_1")):
        raw = bytearray(found.source.tensors[key].nbytes)
        found.source.read_into(key, 0, memoryview(raw))
        assert bytes(raw) == golden[kind][:10].tobytes()
    found.source.close()


def test_a_file_is_told_by_its_first_bytes(tmp_path):
    assert is_gguf(SMALL)
    (tmp_path / "x.gguf").write_bytes(b"other")
    assert not is_gguf(tmp_path / "x.gguf")
    assert not is_gguf(tmp_path / "missing")


@pytest.mark.parametrize("length", [4, 8, 20, 30, 100, 300, 460, 1000, 5800])
def test_a_file_that_is_cut_off_is_refused(tmp_path, length):
    path = tmp_path / "cut.gguf"
    path.write_bytes(SMALL.read_bytes()[:length])
    with pytest.raises(FileError, match="cut off") as caught:
        open_gguf(path)
    assert caught.value.file == str(path)


def test_any_byte_of_the_header_may_be_wrong_and_is_an_error_or_another_file(tmp_path):
    whole = SMALL.read_bytes()
    path = tmp_path / "damaged.gguf"
    for at in range(450):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            found = open_gguf(path)
        except FileError:
            continue
        size = path.stat().st_size
        assert all(info.offset + info.nbytes <= size for info in found.source.tensors.values())


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_versions_are_refused(tmp_path, version):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + SMALL.read_bytes()[8:])
    with pytest.raises(FileError, match="version"):
        open_gguf(path)
