"""Opening single files by what they hold, and reading any part of any tensor of them."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lib_merge.errors import FileError
from lib_merge.files import calls
from lib_merge.files.header import TensorInfo
from lib_merge.files.open import open_model
from lib_merge.files.source import Part, Source

pytestmark = pytest.mark.portable

RNG = np.random.default_rng(11)
TENSORS = {
    "wide": RNG.integers(0, 2**62, (13, 7)),
    "half": RNG.standard_normal((31, 5, 2)).astype(np.float16),
    "bytes": RNG.integers(0, 256, 1013, dtype=np.uint8),
    "scalar": np.array(2.5, np.float32),
    "none": np.zeros((3, 0), np.float32),
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"who": "me"})
    source = open_model(path)
    yield source
    source.close()


def read(source, key, start=0, count=None):
    buffer = bytearray(source.tensors[key].nbytes - start if count is None else count)
    source.read_into(key, start, memoryview(buffer))
    return bytes(buffer)


def test_a_single_file(model, tmp_path):
    assert (model.kind, model.path, model.name) == ("safetensors", tmp_path / "model.safetensors", "model.safetensors")
    assert model.files == (tmp_path / "model.safetensors",)
    assert model.metadata == {"who": "me"}
    assert model.parts == (Part("model.safetensors", "", tuple(model.tensors), {"who": "me"}),)
    assert (model.side_files, model.notes) == ((), ())
    assert {key: info.shape for key, info in model.tensors.items()} == {k: v.shape for k, v in TENSORS.items()}


def test_a_path_may_be_text(model):
    assert open_model(str(model.path)).tensors == model.tensors


@pytest.mark.parametrize("key", TENSORS)
def test_whole_tensors(file_calls, model, key):
    assert read(model, key) == TENSORS[key].tobytes()


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_part_of_any_tensor(file_calls, model, data):
    key = data.draw(st.sampled_from(sorted(TENSORS)))
    whole = TENSORS[key].tobytes()
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert read(model, key, start, count) == whole[start : start + count]


def test_the_place_for_kernel_copies(model):
    content = model.path.read_bytes()
    for key, values in TENSORS.items():
        fd, offset = model.descriptor(key)
        assert content[offset : offset + values.nbytes] == values.tobytes()
        assert os.fstat(fd).st_ino == model.path.stat().st_ino


# Views: the same bytes in another order, as pickles hold them.

BASE = np.arange(4 * 6 * 5, dtype=np.int32).reshape(4, 6, 5)
VIEWS = {
    "transposed": BASE.T,
    "two axes changed": BASE.transpose(1, 0, 2),
    "one row of each": BASE[:, 2],
    "every second": BASE[::2, 1::3, ::4],
    "a column": BASE[:, :, 3],
    "broadcast": np.broadcast_to(BASE[1, 2], (3, 7, 5)),
    "one number, many times": np.broadcast_to(BASE[3, 5, 4:], (2, 2)),
    "ones": BASE[1:2, :, 2:3],
    "overlapping windows": np.lib.stride_tricks.as_strided(BASE, (10, 4), (4, 8)),
    "big-small": BASE[:1],
}


def view_source(path, view, dtype="I32"):
    """A model of one tensor that is stored as this view of BASE, 3 bytes into its file."""
    path.write_bytes(b"xyz" + BASE.tobytes())
    at = view.__array_interface__["data"][0] - BASE.__array_interface__["data"][0]
    strides = tuple(step // BASE.itemsize for step in view.strides)
    info = TensorInfo(dtype, view.shape, 0, 3 + at, view.size * BASE.itemsize, strides)
    return Source(path, "pickle", (path,), {"v": info}, {}, (Part("x.safetensors", "", ("v",)),))


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_put_in_order(file_calls, tmp_path, name):
    view = VIEWS[name]
    source = view_source(tmp_path / "storage", view)
    whole = np.ascontiguousarray(view).tobytes()
    assert source.descriptor("v") is None
    for start in range(0, len(whole), 7):
        for count in (0, 1, 9, len(whole) - start):
            assert read(source, "v", start, min(count, len(whole) - start)) == whole[start:][:count]
    source.close()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_views(tmp_path, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    strides = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    view = np.lib.stride_tricks.as_strided(BASE, shape, [4 * step for step in strides])
    source = view_source(tmp_path / "storage", view)
    whole = np.ascontiguousarray(view).tobytes()
    start = data.draw(st.integers(0, len(whole)))
    assert read(source, "v", start, len(whole) - start) == whole[start:]
    source.close()


@pytest.mark.parametrize("dtype", ["U8", "F16", "F64"])
def test_views_of_other_element_sizes(tmp_path, dtype):
    kind = {"U8": np.uint8, "F16": np.float16, "F64": np.float64}[dtype]
    base = np.arange(24).reshape(4, 6).astype(kind)
    (tmp_path / "s").write_bytes(base.tobytes())
    info = TensorInfo(dtype, (6, 4), 0, 0, base.nbytes, (1, 6))
    source = Source(tmp_path / "s", "pickle", (tmp_path / "s",), {"v": info}, {}, ())
    assert read(source, "v") == np.ascontiguousarray(base.T).tobytes()
    source.close()


def test_several_views_in_turn(tmp_path):
    sources = [view_source(tmp_path / f"s{n}", view) for n, view in enumerate(VIEWS.values())]
    one = Source(
        tmp_path,
        "folder",
        tuple(source.path for source in sources),
        {
            name: TensorInfo(i.dtype, i.shape, n, i.offset, i.nbytes, i.strides)
            for n, (name, i) in enumerate((name, s.tensors["v"]) for name, s in zip(VIEWS, sources, strict=True))
        },
        {},
        (),
    )
    for start in (0, 4):
        for name, view in VIEWS.items():
            assert read(one, name, start, 12) == np.ascontiguousarray(view).tobytes()[start : start + 12]
    one.close()


def test_threads_read_at_once(file_calls, tmp_path, model):
    view = view_source(tmp_path / "storage", VIEWS["transposed"])
    expected = {**{key: values.tobytes() for key, values in TENSORS.items()}, "v": VIEWS["transposed"].tobytes()}
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(60):
            key = str(rng.choice(list(expected)))
            start = int(rng.integers(0, len(expected[key]) + 1))
            if read(view if key == "v" else model, key, start) != expected[key][start:]:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.close()
    assert not wrong


# Files that change, end or fail while they are read.


@pytest.mark.parametrize("how", ["read", "view"])
def test_a_file_cut_off_while_it_is_read(file_calls, tmp_path, model, how):
    source, key = (model, "wide") if how == "read" else (view_source(tmp_path / "s", VIEWS["transposed"]), "v")
    read(source, key, 0, 1)  # the file is open from here on
    source._gathered = None
    os.truncate(source.path, 30)
    with pytest.raises(FileError, match="shorter") as caught:
        read(source, key)
    assert (caught.value.file, caught.value.tensor) == (str(source.path), key)
    assert caught.value.hint
    source.close()


def test_a_file_that_is_gone(model):
    model.path.unlink()
    with pytest.raises(FileError, match="No such file") as caught:
        read(model, "wide")
    assert caught.value.file == str(model.path)
    with pytest.raises(FileError, match="No such file"):
        model.descriptor("wide")


def test_a_disk_that_fails(file_calls, model, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    model.descriptor("wide")
    monkeypatch.setattr(os, "preadv" if file_calls == "fast" else "read", fail)
    with pytest.raises(FileError, match="Input/output error") as caught:
        read(model, "half")
    assert (caught.value.file, caught.value.tensor) == (str(model.path), "half")


def test_an_error_without_a_number_is_still_told(model, monkeypatch):
    def fail(*args):
        raise OSError("the cloud is asleep")

    monkeypatch.setattr(calls, "CALLS", calls.CALLS._replace(read_at=fail))
    with pytest.raises(FileError, match="the cloud is asleep"):
        read(model, "half")


@pytest.mark.parametrize("change", ["touched", "longer", "replaced", "removed"])
def test_a_changed_file_is_noticed(model, change):
    assert model.changed() is None
    content = model.path.read_bytes()
    before = model.path.stat()
    if change == "touched":
        os.utime(model.path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "longer":
        model.path.write_bytes(content + b"x")
        os.utime(model.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "replaced":
        other = model.path.with_name("other")
        other.write_bytes(content)
        os.utime(other, ns=(0, 0))
        other.replace(model.path)
    else:
        model.path.unlink()
    assert model.changed() == model.path


def test_reading_is_no_change(model):
    read(model, "wide")
    assert model.changed() is None


def test_closing_gives_the_file_back(model, open_files):
    before = open_files()
    read(model, "wide")
    model.close()
    model.close()
    assert open_files() == before
    assert read(model, "half") == TENSORS["half"].tobytes()


# What is no model.


def pointer(size):
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n".encode()


STRANGERS = {
    "GGUF": (b"GGUF" + struct.pack("<IQQ", 3, 291, 24) + bytes(400), "GGUF"),
    "web page": (b"<!DOCTYPE html>\n<html><body>401 Unauthorized</body></html>" * 9, "web page"),
    "web page, later": (b"\xef\xbb\xbf\r\n  <html><head></head></html>" * 9, "web page"),
    "Git LFS pointer": (pointer(6938041050), "Git LFS pointer"),
    "JSON": (json.dumps({"metadata": {"total_size": 1}, "weight_map": {}}).encode(), "JSON"),
    "error as JSON": (b'\n{"error":"Repository not found"}' * 3, "JSON"),
    "empty": (b"", "empty"),
    "zeros": (bytes(5000), "not JSON"),
    "text": (b"this is my model, please merge it" * 50, "not a safetensors file"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a safetensors file"),
    "other zip": (b"PK\3\4" + bytes(100), ""),
    "other pickle": (b"\x80\x04N.", ""),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ""])
@pytest.mark.parametrize(("content", "words"), STRANGERS.values(), ids=STRANGERS)
def test_other_files_are_refused_for_what_they_are(tmp_path, content, words, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        open_model(path)
    assert caught.value.file == str(path)
    assert words in caught.value.what


def test_a_safetensors_file_is_known_under_any_name(tmp_path):
    for name in ("model.ckpt", "model.bin", "model"):
        save_file({"w": np.ones(3)}, tmp_path / name)
        assert open_model(tmp_path / name).kind == "safetensors"


def test_a_missing_file_gets_a_suggestion(tmp_path):
    (tmp_path / "sdxl_base.safetensors").touch()
    with pytest.raises(FileError, match="no such file") as caught:
        open_model(tmp_path / "sdxl_bsae.safetensors")
    assert caught.value.hint == "did you mean sdxl_base.safetensors?"
    with pytest.raises(FileError, match="no such file") as caught:
        open_model(tmp_path / "nowhere" / "x.safetensors")
    assert caught.value.hint is None


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", ""])
def test_odd_names_are_errors_like_others(tmp_path, name):
    with pytest.raises(FileError):
        open_model(f"{tmp_path}/{name}")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="neither a file nor a folder"):
        open_model(tmp_path / "pipe")


def test_links_lead_to_files(tmp_path, model):
    (tmp_path / "link").symlink_to(model.path)
    assert open_model(tmp_path / "link").tensors == model.tensors
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileError) as caught:
        open_model(tmp_path / "broken")
    assert caught.value.file == str(tmp_path / "broken")
