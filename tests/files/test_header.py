"""Headers of safetensors files: made by hand to break the format, by chance, and by the safetensors package."""

from __future__ import annotations

import itertools
import json
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lib_merge.errors import FileError, OutputError
from lib_merge.files import header as header_module
from lib_merge.files.header import encode_header, parse_header, read_header
from lib_merge.files.open import open_model

pytestmark = pytest.mark.portable


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def handmade(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refusal(path, content):
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        open_model(path)
    assert caught.value.file == str(path)
    return caught.value


F32 = entry("F32", [2], 0, 8)

BAD = {
    "duplicate key": (b'{"w":%s,"w":%s}' % (2 * (json.dumps(F32).encode(),)), 8, "w", "twice"),
    "duplicate metadata": (b'{"__metadata__":{},"__metadata__":{}}', 0, "__metadata__", "twice"),
    "duplicate field": (b'{"w":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', 8, "dtype", "twice"),
    "same bytes twice": ({"a": F32, "b": F32}, 8, "b", "overlap"),
    "overlap by one byte": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [5], 3, 8)}, 8, "b", "overlap"),
    "one inside the other": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [2], 2, 4)}, 8, "b", "overlap"),
    "empty one inside another": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [0], 4, 4)}, 8, "b", "overlap"),
    "gap between": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [3], 5, 8)}, 8, "b", "1 bytes before"),
    "gap at the start": ({"w": entry("U8", [6], 2, 8)}, 8, "w", "2 bytes before"),
    "bytes at the end": ({"w": F32}, 11, None, "3 bytes at the end"),
    "data but no tensors": ({}, 5, None, "5 bytes at the end"),
    "offset past the end": ({"a": F32, "b": entry("F32", [2], 8, 16)}, 15, "b", "cut off"),
    "offset far past the end": ({"w": entry("U8", [2**40], 0, 2**40)}, 8, "w", "cut off"),
    "size too small": ({"w": entry("F32", [3], 0, 8)}, 8, "w", "wrong size"),
    "size too large": ({"w": entry("F32", [1], 0, 8)}, 8, "w", "wrong size"),
    "scalar of no size": ({"w": entry("F32", [], 0, 0)}, 0, "w", "wrong size"),
    "end before begin": ({"w": entry("U8", [0], 4, 0)}, 4, "w", "wrong size"),
    "half a byte": ({"w": entry("F4", [3], 0, 2)}, 2, "w", "whole bytes"),
    "unknown dtype": ({"w": entry("F3", [2], 0, 8)}, 8, "w", "unknown dtype 'F3'"),
    "dtype in lower case": ({"w": entry("f32", [2], 0, 8)}, 8, "w", "unknown dtype"),
    "dtype is a number": ({"w": entry(32, [2], 0, 8)}, 8, "w", "unknown dtype"),
    "dtype is a list": ({"w": entry(["F32"], [2], 0, 8)}, 8, "w", "unknown dtype"),
    "negative size": ({"w": entry("F32", [-2], 0, 8)}, 8, "w", "shape"),
    "two negative sizes": ({"w": entry("F32", [-1, -2], 0, 8)}, 8, "w", "shape"),
    "size true": ({"w": entry("F32", [True, 2], 0, 8)}, 8, "w", "shape"),
    "size as float": ({"w": entry("F32", [2.0], 0, 8)}, 8, "w", "shape"),
    "size as text": ({"w": entry("F32", ["2"], 0, 8)}, 8, "w", "shape"),
    "size null": ({"w": entry("F32", [None], 0, 8)}, 8, "w", "shape"),
    "size NaN": (b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8, "w", "shape"),
    "size 1e999": (b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', 8, "w", "shape"),
    "size 2**64": ({"w": entry("F32", [2**64], 0, 8)}, 8, "w", "shape"),
    "sizes that multiply to 2**64": ({"w": entry("U8", [2**32, 2**32], 0, 0)}, 0, "w", "wrong size"),
    "hundreds of huge sizes": ({"w": entry("U8", [2**62] * 300, 0, 8)}, 8, "w", "300 dimensions"),
    "a number of 5000 digits": (b'{"w":{"dtype":"U8","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 5000), 8, None, ""),
    "shape is a number": ({"w": entry("F32", 2, 0, 8)}, 8, "w", "shape"),
    "shape nested deep": (
        b'{"w":{"dtype":"U8","shape":%s,"data_offsets":[0,0]}}' % (b"[" * 99 + b"]" * 99),
        0,
        "w",
        "",
    ),
    "offset negative": ({"w": entry("U8", [8], -8, 0)}, 8, "w", "offsets"),
    "offset true": ({"w": entry("U8", [1], False, True)}, 1, "w", "offsets"),
    "offset as float": ({"w": entry("U8", [8], 0.0, 8.0)}, 8, "w", "offsets"),
    "offset 2**64": ({"w": entry("U8", [0], 2**64, 2**64)}, 0, "w", "offsets"),
    "one offset": ({"w": {**F32, "data_offsets": [8]}}, 8, "w", "offsets"),
    "three offsets": ({"w": {**F32, "data_offsets": [0, 4, 8]}}, 8, "w", "offsets"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, 8, "w", "{dtype, shape, data_offsets}"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "w", "{dtype, shape, data_offsets}"),
    "entry is a list": ({"w": ["F32", [2], [0, 8]]}, 8, "w", "{dtype, shape, data_offsets}"),
    "entry is null": ({"w": None}, 0, "w", "{dtype, shape, data_offsets}"),
    "metadata with a number": ({"__metadata__": {"epoch": 3}, "w": F32}, 8, None, "metadata"),
    "metadata with null": ({"__metadata__": {"epoch": None}, "w": F32}, 8, None, "metadata"),
    "metadata with a table": ({"__metadata__": {"a": {"b": "c"}}, "w": F32}, 8, None, "metadata"),
    "metadata is a list": ({"__metadata__": ["a"], "w": F32}, 8, None, "metadata"),
    "metadata is a tensor": ({"__metadata__": F32}, 8, None, "metadata"),
    "not JSON": (b"{'w': 1}", 0, None, "not JSON"),
    "cut JSON": (b'{"w":{"dtype":"F32"', 0, None, "not JSON"),
    "two objects": (b"{}{}", 0, None, "not JSON"),
    "a control character": (b'{"w\n":1}', 0, None, "not JSON"),
    "not UTF-8": (b'{"\xff":1}', 0, None, "not JSON"),
    "half a surrogate pair": (b'{"\\ud800":%s}' % json.dumps(F32).encode(), 8, None, "not JSON"),
    "half a pair in metadata": (b'{"__metadata__":{"a":"\\udfff"}}', 0, None, "not JSON"),
    "nested without end": (b'{"w":' + b"[" * 200_000, 0, None, "not JSON"),
    "no header": (b"", 0, None, "not JSON"),
    "a list": (b"[]", 0, None, "not a JSON object"),
    "null": (b"null", 0, None, "not a JSON object"),
    "a text": (b'"weights"', 0, None, "not a JSON object"),
}


@pytest.mark.parametrize(("header", "size", "tensor", "words"), BAD.values(), ids=BAD)
def test_a_broken_header_is_refused_by_name(tmp_path, header, size, tensor, words):
    error = refusal(tmp_path / "model.safetensors", handmade(header, bytes(size)))
    assert error.tensor == tensor
    assert words in error.what
    assert len(str(error)) < 1000


@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_a_header_over_100_mb_is_refused_unread(tmp_path, length):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", length) + b"{")
        stream.truncate(100_000_100)
    with pytest.raises(FileError, match="over 100 MB") as caught:
        open_model(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_cut_off_anywhere_is_refused(tmp_path, metadata):
    whole, path = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file({"a": np.arange(5, dtype=np.float32), "b": np.zeros((), np.int64)}, whole, metadata)
    content = whole.read_bytes()
    assert list(open_model(whole).tensors) == ["b", "a"]
    for length in range(len(content)):
        error = refusal(path, content[:length])
        assert ("cut off" in error.what) == (length > 0), (length, error.what)
        assert error.hint


def test_every_length_of_a_header_can_be_told_from_other_kinds_of_files(tmp_path):
    # The length word comes first: 0x80 looks like a pickle, 0x3C like a web page, 0x4B50 like a zip file.
    path = tmp_path / "model.safetensors"
    for length in [*range(100, 100 + 256), 0x4B50, 0x4B50 + 0x10000]:
        path.write_bytes(handmade(json.dumps({"w": F32}).encode().ljust(length), b"datadata"))
        source = open_model(path)
        assert source.kind == "safetensors", length
        assert (source.tensors["w"].offset, source.tensors["w"].nbytes) == (8 + length, 8)


def test_a_good_header_tells_where_everything_lies(tmp_path):
    header = {
        "__metadata__": {"format": "pt", "ss_tag": "käse", "empty": ""},
        "late": entry("F32", [2, 3], 9, 33),
        "odd": entry("BOOL", [9], 0, 9),
        "none": entry("F16", [4, 0, 2], 33, 33),
        "scalar": entry("I64", [], 33, 41),
        "four": entry("F4", [2, 3], 41, 44),
        "six": entry("F6_E3M2", [4], 44, 47),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(handmade(header, bytes(47)))
    start = path.stat().st_size - 47
    found = read_header(path, 7)
    assert found.metadata == header["__metadata__"]
    assert (found.data_start, found.file_size) == (start, start + 47)
    assert list(found.tensors) == ["late", "odd", "none", "scalar", "four", "six"]
    for key, info in found.tensors.items():
        begin, end = header[key]["data_offsets"]
        assert (info.dtype, list(info.shape)) == (header[key]["dtype"], header[key]["shape"])
        assert (info.offset, info.nbytes, info.file, info.strides) == (start + begin, end - begin, 7, None)
    assert [info.numel for info in found.tensors.values()] == [6, 9, 0, 1, 6, 4]


def test_a_file_of_the_safetensors_package_is_read_as_it_reads_it(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": np.float64(1.5) * np.ones((3, 1)),
        "e": np.ones(0),
    }
    save_file(tensors, path, {"who": "me"})
    found = read_header(path)
    content = path.read_bytes()
    assert found.metadata == {"who": "me"}
    assert set(found.tensors) == set(tensors)
    for key, info in found.tensors.items():
        assert info.shape == tensors[key].shape
        assert content[info.offset : info.offset + info.nbytes] == tensors[key].tobytes()


@pytest.mark.parametrize("metadata", [b"null", b"{}"])
def test_no_metadata_is_fine(tmp_path, metadata):
    path = tmp_path / "model.safetensors"
    path.write_bytes(handmade(b'{"__metadata__":%s}   ' % metadata))
    assert read_header(path).metadata == {}


def test_what_cannot_be_opened_is_refused_by_name(tmp_path):
    circle = tmp_path / "circle.safetensors"
    circle.symlink_to(circle)
    for path in (tmp_path, circle, tmp_path / "missing"):
        with pytest.raises(FileError, match="cannot read") as caught:
            read_header(path)
        assert caught.value.file == str(path)


# By chance.

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NEARLY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "F4", "F6_E2M3", "BOOL", "F33"]) | ANYTHING,
        "shape": st.lists(st.integers(0, 4), max_size=3) | ANYTHING,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | ANYTHING,
    }
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), NEARLY | ANYTHING, max_size=4)
GOOD = handmade(
    {
        "__metadata__": {"f": "pt"},
        "a": entry("F32", [1, 2], 0, 8),
        "b": entry("F16", [2], 8, 12),
        "c": entry("U8", [0], 12, 12),
    },
    bytes(range(12)),
)
MUTATIONS = st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 2), st.integers(0, 255)), max_size=4)
STEADY = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def mutated(changes):
    content = bytearray(GOOD)
    for at, kind, byte in changes:
        content[at : at + (kind != 1)] = [byte] if kind < 2 else []  # replaced, put in, taken out
    return bytes(content)


def check_accepted(header, content):
    """What is read must cover the data exactly, and the safetensors package must read the same."""
    ends = [header.data_start, *(info.offset + info.nbytes for info in header.tensors.values())]
    assert max(ends) == len(content)
    assert sum(info.nbytes for info in header.tensors.values()) == len(content) - header.data_start
    theirs = dict(safetensors.deserialize(content))
    assert set(theirs) == set(header.tensors)
    for key, info in header.tensors.items():
        assert (theirs[key]["dtype"], tuple(theirs[key]["shape"])) == (info.dtype, info.shape)
        assert bytes(theirs[key]["data"]) == content[info.offset : info.offset + info.nbytes]


def judge(path, content):
    path.write_bytes(content)
    try:
        header = read_header(path)
    except FileError as error:
        assert error.file == str(path)
        str(error).encode()
    else:
        check_accepted(header, content)
    try:
        open_model(path)
    except FileError as error:
        str(error).encode()


@STEADY
@given(content=st.binary(max_size=60))
def test_random_bytes_never_do_anything_but_refuse(tmp_path_factory, content):
    judge(tmp_path_factory.getbasetemp() / "random.safetensors", content)


@STEADY
@given(changes=MUTATIONS)
def test_a_damaged_file_is_refused_or_read_as_others_read_it(tmp_path_factory, changes):
    judge(tmp_path_factory.getbasetemp() / "mutated.safetensors", mutated(changes))


@STEADY
@given(document=OBJECTS, size=st.integers(0, 12))
def test_a_random_header_is_refused_or_read_as_others_read_it(tmp_path_factory, document, size):
    judge(tmp_path_factory.getbasetemp() / "object.safetensors", handmade(document, bytes(size)))


@STEADY
@given(raw=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()), size=st.integers(0, 200))
def test_parsing_alone_raises_nothing_else(raw, size):
    try:
        parse_header(raw, size, "x")
    except FileError as error:
        assert error.file == "x"


# Writing.


def written(entries, metadata, reserve=0):
    data = max((end for _, _, _, end in entries.values()), default=0)
    return encode_header(entries, metadata, reserve), bytes(itertools.islice(itertools.cycle(range(251)), data))


ENTRIES = {
    "w": ("F64", (2, 3), 0, 48),
    'ключ/🦊 "\\\n': ("F16", (3,), 48, 54),
    "scalar": ("U8", (), 54, 55),
    "none": ("F32", (0, 5), 55, 55),
}


@pytest.mark.parametrize("padding", range(9))
@pytest.mark.parametrize("entries", [{}, ENTRIES], ids=["empty", "four"])
def test_what_is_encoded_is_read_by_the_safetensors_package(entries, padding):
    metadata = {"x": "é" * padding, "json": json.dumps({"a": [1, None]})}
    head, data = written(entries, metadata)
    assert len(head) % 8 == 0
    assert struct.unpack("<Q", head[:8]) == (len(head) - 8,)
    theirs = dict(safetensors.deserialize(head + data))
    assert {key: (item["dtype"], tuple(item["shape"])) for key, item in theirs.items()} == {
        key: item[:2] for key, item in entries.items()
    }
    assert all(bytes(theirs[key]["data"]) == data[begin:end] for key, (_, _, begin, end) in entries.items())
    assert json.loads(head[8:])["__metadata__"] == metadata


def test_metadata_is_what_the_safetensors_package_sees(tmp_path):
    head, data = written(ENTRIES, {"a": "1", "ü": ""})
    (tmp_path / "x.safetensors").write_bytes(head + data)
    with safetensors.safe_open(tmp_path / "x.safetensors", "numpy") as opened:
        assert opened.metadata() == {"a": "1", "ü": ""}


def test_without_metadata_none_is_written():
    assert json.loads(encode_header({}, {})[8:]) == {}


@pytest.mark.parametrize("reserve", [0, 1, 300, 301, 304, 4096])
def test_room_is_kept(reserve):
    short, long = encode_header(ENTRIES, {"a": "b"}, reserve), encode_header(ENTRIES, {"a": "b" * 300}, reserve)
    tensors = {key: entry(dtype, list(shape), begin, end) for key, (dtype, shape, begin, end) in ENTRIES.items()}
    text = json.dumps({"__metadata__": {"a": "b"}, **tensors}, separators=(",", ":"), ensure_ascii=False)
    least = 8 + len(text.encode())
    for head, needed in ((short, least), (long, least + 299)):
        assert max(needed, reserve) <= len(head) < max(needed, reserve) + 8
        assert len(head) % 8 == 0
        assert json.loads(head[8:])["w"] == entry("F64", [2, 3], 0, 48)


@pytest.mark.parametrize(
    ("entries", "metadata", "words"),
    [
        ({"__metadata__": ("F32", (1,), 0, 4)}, {"a": "b"}, "tensor of this name"),
        ({}, {"epoch": 3}, "'epoch' is no text: 3"),
        ({}, {"a": None}, "no text"),
        ({}, {"a": {"b": "c"}}, "no text"),
        ({}, {"a": "\ud800"}, "Unicode"),
        ({"half \udcff": ("F32", (1,), 0, 4)}, {}, "Unicode"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries, metadata, words):
    with pytest.raises(OutputError, match=words) as caught:
        encode_header(entries, metadata)
    str(caught.value).encode()


def test_a_header_that_nobody_would_read_is_not_written(monkeypatch):
    monkeypatch.setattr(header_module, "MAX_HEADER_BYTES", 1000)
    assert len(encode_header({}, {"a": "x" * 900})) <= 1008
    with pytest.raises(OutputError, match="100 MB"):
        encode_header({}, {"a": "x" * 1000})
