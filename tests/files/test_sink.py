"""Writing models: layout, folders, and an error or interrupt at every single call on the way to the final name."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from lib_merge.errors import FileError, MergeError, OutputError
from lib_merge.files import calls
from lib_merge.files.header import TensorInfo
from lib_merge.files.open import open_model
from lib_merge.files.sink import FileSink, OutPart
from lib_merge.files.source import Source
from lib_merge.files.temporary import sweep

pytestmark = pytest.mark.portable

# In the order of model A; values by a fixed rule.
SPEC = {
    "b.half": ("F16", (5, 3)),
    "b.odd": ("U8", (7,)),
    "a.wide": ("F64", (3,)),
    "a.word": ("F32", (2, 2)),
    "c.half": ("BF16", (1, 3)),
    "none": ("F32", (0, 4)),
    "scalar": ("I64", ()),
    "a.bytes": ("BOOL", (3,)),
}
SIZES = {"b.half": 30, "b.odd": 7, "a.wide": 24, "a.word": 16, "c.half": 6, "none": 0, "scalar": 8, "a.bytes": 3}
DATA = {key: bytes(random.Random(key).choices((0, 1), k=size)) for key, size in SIZES.items()}
METADATA = {"format": "pt", "hash": "0" * 64}
FINAL = {"format": "pt", "hash": "f" * 64}


def part(spec=SPEC, metadata=METADATA):
    return OutPart("", "", spec, metadata)


def write_all(sink):
    for key, data in DATA.items():
        sink.write(key, 0, memoryview(data))


def make(target, **options):
    with FileSink(target, [part()], folder=False, **options) as sink:
        write_all(sink)
        return sink.publish([FINAL])


def check(path, metadata=FINAL):
    """The file as the safetensors package reads it is what was meant."""
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert {key: (item["dtype"], tuple(item["shape"])) for key, item in theirs.items()} == SPEC
    assert {key: bytes(item["data"]) for key, item in theirs.items()} == DATA
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata() == metadata


def names(folder):
    return sorted(item.name for item in folder.iterdir())


# What is written.


def test_the_file_is_what_the_safetensors_package_reads(file_calls, tmp_path):
    target = tmp_path / "out.safetensors"
    assert make(target) == target
    check(target)
    assert names(tmp_path) == ["out.safetensors"]


def test_widest_first_then_the_order_of_a_and_no_gaps(tmp_path):
    raw = make(tmp_path / "out.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    order = sorted(header, key=lambda key: header[key]["data_offsets"])
    assert order == ["a.wide", "scalar", "a.word", "none", "b.half", "c.half", "b.odd", "a.bytes"]
    ends = [0, *(header[key]["data_offsets"][1] for key in order)]
    assert [header[key]["data_offsets"][0] for key in order] == ends[:-1]
    assert length % 8 == 0
    assert len(raw) == 8 + length + sum(SIZES.values())
    widths = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
    assert all((8 + length + header[key]["data_offsets"][0]) % widths[header[key]["dtype"]] == 0 for key in order)


def test_places_are_those_of_the_file(tmp_path):
    with FileSink(tmp_path / "out.safetensors", [part()], folder=False) as sink:
        places = {key: sink.place(key) for key in SPEC}
        write_all(sink)
        raw = sink.publish([FINAL]).read_bytes()
    assert {number for number, _ in places.values()} == {0}
    assert all(raw[at : at + SIZES[key]] == DATA[key] for key, (_, at) in places.items())


@pytest.mark.parametrize("final", [{}, {"hash": "1"}, {"format": "pt", "hash": "é" * 32}, FINAL], ids=len)
def test_place_holders_may_become_shorter(tmp_path, final):
    target = tmp_path / "out.safetensors"
    with FileSink(target, [part()], folder=False) as sink:
        write_all(sink)
        sink.publish([final])
    check(target, final or None)


def test_place_holders_may_not_become_longer(tmp_path):
    target = tmp_path / "out.safetensors"
    with pytest.raises(OutputError, match="longer") as caught, FileSink(target, [part()], folder=False) as sink:
        write_all(sink)
        sink.publish([{**FINAL, "more": "x" * 100}])
    assert caught.value.file == str(target)
    assert names(tmp_path) == []


def test_pieces_in_any_order_from_many_threads(file_calls, tmp_path):
    values = np.random.default_rng(3).integers(0, 256, 1_000_003, dtype=np.uint8)
    spec = {"a": ("U8", (1_000_003,)), "b": ("U16", (500_001,))}
    data = {"a": values.tobytes(), "b": values.tobytes()[: 2 * 500_001]}
    pieces = [(key, at) for key in spec for at in range(0, len(data[key]), 10_007)]
    random.Random(2).shuffle(pieces)
    with FileSink(tmp_path / "x.safetensors", [part(spec, {})], folder=False) as sink:

        def work(mine):
            for key, at in mine:
                sink.write(key, at, memoryview(data[key])[at : at + 10_007])

        threads = [threading.Thread(target=work, args=(pieces[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sink.publish([{}])
    loaded = load_file(tmp_path / "x.safetensors")
    assert {key: loaded[key].tobytes() for key in spec} == data


def test_a_model_without_tensors(tmp_path):
    with FileSink(tmp_path / "x.safetensors", [part({}, {})], folder=False) as sink:
        sink.publish([{}])
    assert safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()) == []


@pytest.fixture
def model(tmp_path):
    """A model whose file has the layout that the sink gives it, so that one copy can take several tensors."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.safetensors"
    rng = np.random.default_rng(7)
    save_file({key: rng.integers(0, 2**60, (50, 40)) for key in "pqr"}, path)
    source = open_model(path)
    yield source
    source.close()


def copied(model, target):
    spec = {key: (info.dtype, info.shape) for key, info in model.tensors.items()}
    with FileSink(target, [part(spec, {})], folder=False) as sink:
        first, second, third = model.tensors
        sink.copy(first, 0, model, first, 16_000)
        sink.copy(first, 16_000, model, first, 20_000)  # its neighbour, and a part of the one after
        sink.copy(third, 4_000, model, third, 12_000)
        assert sink.place(second)[1] == sink.place(first)[1] + 16_000
        sink.publish([{}])


def test_ranges_over_several_tensors_are_copied(file_calls, tmp_path, model):
    copied(model, tmp_path / "out.safetensors")
    ours, theirs = load_file(tmp_path / "out.safetensors"), load_file(model.path)
    assert all(np.array_equal(ours[key], theirs[key]) for key in "pqr")


def test_views_are_copied_in_order(file_calls, tmp_path):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "s").write_bytes(base.tobytes())
    info = TensorInfo("F32", (4, 3), 0, 0, 48, (1, 4))
    source = Source(tmp_path / "s", "pickle", (tmp_path / "s",), {"v": info}, {}, ())
    with FileSink(tmp_path / "x.safetensors", [part({"w": ("F32", (4, 3))}, {})], folder=False) as sink:
        sink.copy("w", 0, source, "v", 20)
        sink.copy("w", 20, source, "v", 28)
        sink.publish([{}])
    source.close()
    assert np.array_equal(load_file(tmp_path / "x.safetensors")["w"], base.T)


# Inputs that fail while they are copied.


@pytest.mark.parametrize("view", [False, True])
def test_an_input_that_became_shorter_is_named(file_calls, tmp_path, model, view):
    if view:
        info = model.tensors["q"]
        model.tensors["q"] = TensorInfo(info.dtype, (40, 50), 0, info.offset, info.nbytes, (1, 40))
    key = max(model.tensors, key=lambda key: model.tensors[key].offset) if not view else "q"
    model.descriptor("p")
    os.truncate(model.path, model.tensors[key].offset + 100)
    spec = {key: ("I64", (2_000,))}
    with (
        pytest.raises(FileError, match="shorter") as caught,
        FileSink(tmp_path / "out.safetensors", [part(spec, {})], folder=False) as sink,
    ):
        sink.copy(key, 0, model, key, 16_000)
    assert (caught.value.file, caught.value.tensor) == (str(model.path), key)
    assert names(tmp_path) == ["in"]


def test_an_input_that_cannot_be_read_is_named_and_not_the_output(file_calls, tmp_path, model, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    spec = {"p": ("I64", (2_000,))}
    with (
        pytest.raises(FileError, match="cannot read") as caught,
        FileSink(tmp_path / "out.safetensors", [part(spec, {})], folder=False) as sink,
    ):
        for name in ("preadv", "read", "copy_file_range"):
            monkeypatch.setattr(os, name, fail, raising=False)
        sink.copy("p", 0, model, "p", 16_000)
    assert (caught.value.file, caught.value.tensor) == (str(model.path), "p")


# Folders.


@pytest.fixture
def pipeline(tmp_path):
    """A diffusers folder with a sharded component, as a source."""
    root, rng = tmp_path / "in" / "pipe", np.random.default_rng(1)
    for folder in ("unet", "text_encoder", "tokenizer/deep/er", ".hidden"):
        (root / folder).mkdir(parents=True)
    shards = {}
    for number in (1, 2):
        name = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        tensors = {f"w{number}{x}": rng.standard_normal((3, number)).astype(np.float16) for x in "ba"}
        tensors[f"n{number}"] = rng.integers(0, 9, 5)
        save_file(tensors, root / "unet" / name, {"format": "pt"})
        shards |= dict.fromkeys(tensors, name)
    document = {"metadata": {"total_size": 1}, "weight_map": shards}
    (root / "unet/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(document))
    save_file({"shared": rng.standard_normal(4)}, root / "text_encoder/model.safetensors", {"te": "1"})
    save_file({"shared": rng.standard_normal(4)}, root / "text_encoder/model.fp16.safetensors")
    (root / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (root / "unet/config.json").write_bytes(b'{"\r\n": 1}')
    (root / "tokenizer/deep/er/vocab.bin.txt").write_bytes(random.Random(0).randbytes((1 << 20) + 7))
    (root / "tokenizer/empty.txt").touch()
    (root / ".hidden/secret").write_text("x")
    (root / "tokenizer/.secret").write_text("x")
    return root


def copy_folder(source, target, **options):
    """Write a model folder anew, each tensor copied."""
    source = source if isinstance(source, Source) else open_model(source)
    parts = [
        OutPart(
            p.name,
            p.prefix,
            {key: (source.tensors[key].dtype, source.tensors[key].shape) for key in p.keys},
            p.metadata,
            p.index,
        )
        for p in source.parts
    ]
    try:
        with FileSink(target, parts, folder=True, **options) as sink:
            sink.add_side_files(source.path, source.side_files)
            for key, info in source.tensors.items():
                sink.copy(key, 0, source, key, info.nbytes)
            sink.publish([p.metadata for p in parts])
    finally:
        source.close()


def check_folder(root, target):
    """The same files with the same tensors and bytes; the index written anew; nothing hidden, no other variant."""
    files = {item.relative_to(root).as_posix() for item in root.rglob("*") if item.is_file()}
    left_out = {".hidden/secret", "tokenizer/.secret", "text_encoder/model.fp16.safetensors"}
    assert {item.relative_to(target).as_posix() for item in target.rglob("*") if item.is_file()} == files - left_out
    weights = sorted(name for name in files - left_out if name.endswith(".safetensors"))
    for name in weights:
        ours, theirs = load_file(target / name), load_file(root / name)
        assert {k: (v.dtype, v.tolist()) for k, v in ours.items()} == {
            k: (v.dtype, v.tolist()) for k, v in theirs.items()
        }
        with safetensors.safe_open(target / name, "np") as a, safetensors.safe_open(root / name, "np") as b:
            assert a.metadata() == b.metadata()
    name = "unet/diffusion_pytorch_model.safetensors.index.json"
    ours, theirs = json.loads((target / name).read_text()), json.loads((root / name).read_text())
    assert ours["weight_map"] == theirs["weight_map"]
    tensors = [v for shard in weights if shard.startswith("unet/") for v in load_file(root / shard).values()]
    assert ours["metadata"]["total_size"] == sum(v.nbytes for v in tensors)
    for side in files - left_out - {*weights, name}:
        assert (target / side).read_bytes() == (root / side).read_bytes()


def test_a_folder_is_cut_as_a_is(file_calls, tmp_path, pipeline):
    copy_folder(pipeline, tmp_path / "out")
    check_folder(pipeline, tmp_path / "out")
    assert names(tmp_path) == ["in", "out"]


def test_the_folder_we_write_opens_as_the_one_we_read(tmp_path, pipeline):
    copy_folder(pipeline, tmp_path / "out")
    ours, theirs = open_model(tmp_path / "out"), open_model(pipeline)
    assert set(ours.tensors) == set(theirs.tensors)
    assert [(p.name, p.prefix, p.index) for p in ours.parts] == [(p.name, p.prefix, p.index) for p in theirs.parts]
    assert ours.side_files == theirs.side_files
    assert ours.notes == ()


def test_a_side_file_that_is_gone_is_an_error_of_the_input(tmp_path, pipeline):
    with (
        pytest.raises(FileError, match="No such file") as caught,
        FileSink(tmp_path / "out", [], folder=True) as sink,
    ):
        sink.add_side_files(pipeline, ["gone.json"])
    assert caught.value.file == str(pipeline / "gone.json")
    assert names(tmp_path) == ["in"]


# Names: what stands there before, during and after.


def test_the_temporary_name(tmp_path):
    with FileSink(tmp_path / "out.safetensors", [part()], folder=False):
        (name,) = names(tmp_path)
    assert re.fullmatch(rf"\.out\.safetensors\.lib_merge-{os.getpid()}-[0-9a-f]+\.part", name)


@pytest.mark.parametrize("folder", [False, True])
def test_leaving_without_publishing_leaves_nothing(tmp_path, folder, open_files):
    before = open_files()
    with FileSink(tmp_path / "out", [OutPart("x.safetensors", "", SPEC, {})], folder=folder) as sink:
        write_all(sink)
        assert open_files() > before or not before
    with pytest.raises(KeyError), FileSink(tmp_path / "out", [part()], folder=False):
        raise KeyError
    assert names(tmp_path) == []
    assert open_files() == before


def test_an_existing_file_is_replaced_only_when_told(tmp_path):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"old")
    with pytest.raises(OutputError, match="could not be given its name") as caught:
        make(target)
    assert target.read_bytes() == b"old"
    assert caught.value.file == str(target)
    (temporary,) = (tmp_path / name for name in names(tmp_path) if name != "out.safetensors")
    assert str(temporary) in caught.value.hint
    check(temporary)
    make(target, overwrite=True)
    check(target)


def test_a_file_that_appears_during_the_run_is_not_overwritten(tmp_path):
    target = tmp_path / "out.safetensors"
    with pytest.raises(OutputError, match="File exists"), FileSink(target, [part()], folder=False) as sink:
        write_all(sink)
        target.write_bytes(b"somebody else's")
        sink.publish([FINAL])
    assert target.read_bytes() == b"somebody else's"
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("what", ["file", "folder", "dangling link"])
def test_a_name_that_appears_is_not_replaced_by_a_folder(tmp_path, pipeline, what):
    target = tmp_path / "out"
    if what == "file":
        target.write_bytes(b"somebody else's")
    elif what == "folder":
        target.mkdir()
        (target / "x").write_bytes(b"somebody else's")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="taken") as caught:
        copy_folder(pipeline, target)
    kept = Path(re.search(r"stands at (\S+):", caught.value.hint)[1])
    check_folder(pipeline, kept)
    assert target.is_symlink() or (target if what == "file" else target / "x").read_bytes() == b"somebody else's"


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "no"), OSError(errno.EOPNOTSUPP, "no"), AttributeError()])
def test_file_systems_without_hard_links(tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(os, "link", fail)
    make(tmp_path / "out.safetensors")
    check(tmp_path / "out.safetensors")
    assert names(tmp_path) == ["out.safetensors"]
    (tmp_path / "old.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="taken"):
        make(tmp_path / "old.safetensors")
    assert (tmp_path / "old.safetensors").is_symlink()


def test_overwriting_a_link_leaves_what_it_points_to(tmp_path):
    (tmp_path / "input.safetensors").write_bytes(b"an input")
    for target in ("input.safetensors", "nowhere"):
        link = tmp_path / "out.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        make(link, overwrite=True)
        check(link)
        assert not link.is_symlink()
    assert (tmp_path / "input.safetensors").read_bytes() == b"an input"
    assert names(tmp_path) == ["input.safetensors", "out.safetensors"]


@pytest.mark.parametrize("what", ["folder", "empty folder", "link to a folder", "dangling link"])
def test_overwriting_a_folder(tmp_path, pipeline, what):
    target, old = tmp_path / "out", tmp_path / ("kept" if "link" in what else "out")
    if what != "dangling link":
        old.mkdir()
    if what in ("folder", "link to a folder"):
        (old / "sub").mkdir()
        (old / "sub" / "x").write_bytes(b"old")
    if "link" in what:
        target.symlink_to(old, target_is_directory=True)
    copy_folder(pipeline, target, overwrite=True)
    check_folder(pipeline, target)
    assert not target.is_symlink()
    assert set(names(tmp_path)) - {"kept"} == {"in", "out"}
    if what == "link to a folder":
        assert (old / "sub" / "x").read_bytes() == b"old"


def test_places_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "out.safetensors", tmp_path / "missing" / "out.safetensors"):
        for folder in (False, True):
            with pytest.raises(OutputError, match="cannot write") as caught:
                FileSink(target, [OutPart("x.safetensors", "", SPEC, {})], folder=folder)
            assert Path(caught.value.file).is_relative_to(target)
    assert names(tmp_path) == ["file"]


# What reaches the disk.


def test_everything_is_synced_before_it_gets_its_name(tmp_path, pipeline, monkeypatch):
    done = []

    def record(name, path_of):
        real = getattr(os, name)

        def call(*args):
            done.append((name, path_of(args)))
            return real(*args)

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda args: str(Path(f"/proc/self/fd/{args[0]}").readlink()))
    record("rename", lambda args: str(args[0]))
    copy_folder(pipeline, tmp_path / "out")
    renamed = [number for number, (name, _) in enumerate(done) if name == "rename"]
    temporary = done[renamed[0]][1]
    synced = {str(Path(path).relative_to(temporary)) for _, path in done[: renamed[0]]}
    files = {str(item.relative_to(tmp_path / "out")) for item in (tmp_path / "out").rglob("*")}
    assert synced == files | {"."}
    assert [path for _, path in done[renamed[0] + 1 :]] == [str(tmp_path)]


def test_without_fsync_nothing_waits_for_the_disk(tmp_path, pipeline, monkeypatch):
    def fail(*args):
        raise AssertionError

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(calls, "CALLS", calls.CALLS._replace(start_writeback=fail))
    make(tmp_path / "x.safetensors", fsync=False)
    copy_folder(pipeline, tmp_path / "out", fsync=False)
    check(tmp_path / "x.safetensors")


def test_large_outputs_are_written_back_while_the_run_goes_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        calls, "CALLS", calls.CALLS._replace(start_writeback=lambda fd, at, count: asked.append((at, at + count)))
    )
    spec, piece = {"w": ("U8", (100 << 20,))}, memoryview(bytes(4 << 20))
    with FileSink(tmp_path / "x.safetensors", [part(spec, {})], folder=False) as sink:
        for at in range(0, 100 << 20, len(piece)):
            sink.write("w", at, piece)
        start = sink.place("w")[1]
    assert len(asked) == 3
    assert asked == [(start + n * (32 << 20), start + (n + 1) * (32 << 20)) for n in range(3)]


def lost(offset, fd, view):
    return len(view)


def one_bit(offset, fd, view):
    flipped = bytearray(view)
    flipped[60] ^= 1
    return os.write(fd, flipped)


def zeros(offset, fd, view):
    return os.write(fd, bytes(len(view)))


@pytest.mark.parametrize("damage", [lost, one_bit, zeros])
def test_a_header_that_does_not_read_back_is_not_published(tmp_path, monkeypatch, damage):
    real = os.pwrite
    target = tmp_path / "out.safetensors"
    with pytest.raises(OutputError, match="read back") as caught, FileSink(target, [part()], folder=False) as sink:
        write_all(sink)

        def call(fd, view, offset):
            if offset:
                return real(fd, view, offset)
            os.lseek(fd, 0, os.SEEK_SET)
            return damage(offset, fd, view)

        monkeypatch.setattr(os, "pwrite", call)
        sink.publish([FINAL])
    assert caught.value.file == str(target)
    assert names(tmp_path) == []


def test_a_file_that_came_out_short_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: None)
    with (
        pytest.raises(OutputError, match="cut off") as caught,
        FileSink(tmp_path / "out.safetensors", [part()], folder=False) as sink,
    ):
        sink.write("a.wide", 0, memoryview(DATA["a.wide"]))
        sink.publish([FINAL])
    assert caught.value.tensor
    assert names(tmp_path) == []


# An error or an interrupt at every call.


class Fault:
    """Makes the n-th call of a function of `os` fail, before it does anything or after it did it."""

    def __init__(self, patch, name, number, error, after):
        self.hit, self._count = False, itertools.count(1)
        real = getattr(os, name)

        def call(*args, **options):
            if next(self._count) != number:
                return real(*args, **options)
            self.hit = True
            if after or name == "close":  # a failed close has closed the descriptor all the same
                real(*args, **options)
            raise error

        patch.setattr(os, name, call)


class OneFile:
    """A file written over nothing or over an old file."""

    used = ("open", "ftruncate", "fsync", "close")

    def __init__(self, folder, root, old):
        self.target = folder / "out.safetensors"
        self.old = b"the old file" if old else None
        self.source = open_model(root)
        if old:
            self.target.write_bytes(self.old)

    def run(self):
        source = self.source
        try:
            with FileSink(self.target, [part(self.spec(source))], folder=False, overwrite=self.old is not None) as sink:
                write_all(sink)
                for key in "pqr":
                    sink.copy(key, 0, source, key, 16_000)
                sink.publish([FINAL])
        finally:
            source.close()

    def spec(self, source):
        return {**SPEC, **{key: (info.dtype, info.shape) for key, info in source.tensors.items()}}

    def is_old(self):
        there = self.target.read_bytes() if self.target.exists() else None
        return there == self.old

    def check(self, path):
        ours, theirs = dict(safetensors.deserialize(path.read_bytes())), load_file(self.source.path)
        expected = {**DATA, **{key: theirs[key].tobytes() for key in "pqr"}}
        assert {key: bytes(item["data"]) for key, item in ours.items()} == expected
        with safetensors.safe_open(path, "numpy") as opened:
            assert opened.metadata() == FINAL


class OneFolder:
    """A folder written over nothing or over an old folder."""

    used = ("open", "ftruncate", "fsync", "close", "mkdir", "rename")

    def __init__(self, folder, root, old):
        self.target, self.source, self.old = folder / "out", open_model(root), old
        if old:
            (self.target / "sub").mkdir(parents=True)
            (self.target / "sub" / "x").write_bytes(b"the old file")

    def run(self):
        copy_folder(self.source, self.target, overwrite=self.old)

    def is_old(self):
        if not self.old:
            return not self.target.exists()
        return names(self.target) == ["sub"] and (self.target / "sub" / "x").read_bytes() == b"the old file"

    def check(self, path):
        check_folder(self.source.path, path)


CALLED = {
    "fast": ("open", "mkdir", "pwrite", "ftruncate", "fsync", "close", "copy_file_range", "link", "replace", "rename",
             "unlink"),
    "portable": ("lseek", "read", "write"),
}  # fmt: skip
ERRORS = {
    "disk full": (OSError(errno.ENOSPC, "No space left on device"), False),
    "broken disk": (OSError(errno.EIO, "Input/output error"), False),
    "interrupt before": (KeyboardInterrupt(), False),
    "interrupt after": (KeyboardInterrupt(), True),
}


@pytest.mark.parametrize("old", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", [OneFile, OneFolder])
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_at_any_call(file_calls, tmp_path, model, pipeline, monkeypatch, open_files, kind, old, error):
    raised, after = ERRORS[error]
    root = model.path if kind is OneFile else pipeline
    model.close()
    hits = set()
    for name in CALLED[file_calls]:
        if not hasattr(os, name):
            continue
        for number in itertools.count(1):
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir()
            case = kind(folder, root, old)
            before = open_files()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda fd: None)  # takes long, and many times over
                fault = Fault(patch, name, number, raised, after)
                caught = None
                try:
                    case.run()
                except (MergeError, KeyboardInterrupt) as stopped:
                    caught = stopped
            case.source.close()  # an interrupt may have come while it was closed
            if not (after and name == "open"):  # the interrupt came before anybody could know the descriptor
                assert open_files() == before
            if not fault.hit:
                assert caught is None
                case.check(case.target)
                assert names(folder) == [case.target.name]
                break
            hits.add(name)
            judge(case, folder, caught, raised)
    assert hits.issuperset(kind.used if file_calls == "fast" else CALLED["portable"])


def judge(case, folder, caught, raised):
    """Nothing under the final name that is not whole; nothing left beside it."""
    hint = getattr(caught, "hint", None) or ""
    kept = re.search(r"stands at (\S+):", hint)
    if kept:  # only the last rename failed
        case.check(Path(kept[1]))
        assert case.is_old()
        assert set(names(folder)) - {case.target.name} == {Path(kept[1]).name}
        return
    if isinstance(caught, KeyboardInterrupt):
        sweep(folder)  # an interrupt of the cleaning itself leaves something to the next start
    assert set(names(folder)) <= {case.target.name}
    if caught is None or not case.is_old():
        case.check(case.target)
        assert caught is None or isinstance(caught, KeyboardInterrupt)
    elif isinstance(caught, OutputError) and raised.errno == errno.ENOSPC:
        assert caught.what == "the disk is full"
        assert Path(caught.file).is_relative_to(case.target)
        assert caught.hint


def test_a_full_disk_names_file_and_tensor(file_calls, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "out.safetensors"
    with pytest.raises(OutputError) as caught, FileSink(target, [part()], folder=False) as sink:
        monkeypatch.setattr(os, "pwrite" if file_calls == "fast" else "write", full)
        sink.write("a.word", 0, memoryview(DATA["a.word"]))
    assert (caught.value.what, caught.value.file, caught.value.tensor) == ("the disk is full", str(target), "a.word")
    assert names(tmp_path) == []


def test_a_limit_on_file_sizes(tmp_path):
    # The system itself stops the write here, with no help of ours; the limit holds for the rest of a process.
    script = """
        import resource, sys
        from pathlib import Path
        from lib_merge.errors import OutputError
        from lib_merge.files.sink import FileSink, OutPart

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        parts = [OutPart("a.safetensors", "", {"w": ("U8", (int(sys.argv[2]),))}, {})]
        for target, folder in ((Path(sys.argv[1], "x.safetensors"), False), (Path(sys.argv[1], "x"), True)):
            try:
                with FileSink(target, parts, folder=folder) as sink:
                    for at in range(0, int(sys.argv[2]), 100_000):
                        sink.write("w", at, memoryview(bytes(100_000)))
                    sink.publish([{}])
            except OutputError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    small = subprocess.run([*command, "900000"], capture_output=True, text=True, check=True)
    assert small.stdout == ""
    assert names(tmp_path) == ["x", "x.safetensors"]
    make(tmp_path / "x.safetensors", overwrite=True)
    large = subprocess.run([*command, "2000000"], capture_output=True, text=True, check=True)
    assert large.stdout.count("cannot write: File too large") == 2
    assert names(tmp_path) == ["x", "x.safetensors"]
    check(tmp_path / "x.safetensors")
