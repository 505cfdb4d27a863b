"""Torch files as an index: each tensor's bytes where it says, nothing executed, no other error than FileError."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lib_merge.errors import FileError
from lib_merge.files import pickles, unpickle
from lib_merge.files.header import TensorInfo
from lib_merge.files.pickles import PickleIndex, read_pickle_index

KINDS = ("zip", "legacy")
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(path: Path, value: Any, kind: str, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind == "zip")
    return path


def zipped(path: Path, program: bytes, data: bytes = bytes(64), **other: bytes) -> Path:
    """A torch file with a pickle written by hand and one storage, `0`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", data)
        for name, content in other.items():
            archive.writestr(f"archive/{name}", content)
    return path


def row_major(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path, info: TensorInfo, itemsize: int) -> bytes:
    """The tensor's row-major bytes, taken from the file at the offset and strides of the index alone."""
    count = info.shape[::-1]
    rows = [int(np.prod(count[:axis], dtype=np.int64)) for axis in range(len(count))][::-1]
    steps = [step * itemsize for step in (rows if info.strides is None else info.strides)]
    raw = np.frombuffer(path.read_bytes()[info.offset :], np.uint8)
    if 0 in info.shape:
        return b""
    return np.lib.stride_tricks.as_strided(raw, (*info.shape, itemsize), (*steps, 1)).tobytes()


def check(path: Path, index: PickleIndex, expected: dict[str, torch.Tensor]) -> None:
    size = path.stat().st_size
    assert list(index.tensors) == list(expected)
    for key, tensor in expected.items():
        info = index.tensors[key]
        assert (info.dtype, info.shape) == (NAMES[tensor.dtype], tuple(tensor.shape)), key
        assert info.nbytes == tensor.numel() * tensor.element_size(), key
        assert info.strides == (None if tensor.is_contiguous() else tensor.stride()), key
        assert 0 < info.offset <= size, key
        assert stored(path, info, tensor.element_size()) == row_major(tensor), key


def refusal(path: Path) -> FileError:
    with pytest.raises(FileError) as caught:
        read_pickle_index(path)
    assert caught.value.file == str(path)
    assert caught.value.hint
    return caught.value


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


# What is read.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_every_dtype(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    whole = (numbers(3, 5) * 9).abs().to(dtype)
    tensors = {"w": whole, "row": whole[1:2], "scalar": whole[2, 3], "turned": whole.t(), "none": whole[:0]}
    path = save(tmp_path / "a.ckpt", tensors, kind)
    check(path, read_pickle_index(path), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_views_keep_their_own_bytes(tmp_path: Path, kind: str) -> None:
    big, cube = numbers(40, 6), numbers(4, 5, 6)
    tensors = {
        "first": big[:1],
        "middle": big[7:9],
        "column": big[:, 2],
        "steps": big[::3, ::2],
        "turned": big.t(),
        "permuted": cube.permute(2, 0, 1),
        "channels_last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wide": big[3:4, :1].expand(5, 7),
        "overlapping": big.as_strided((4, 3), (1, 1), 2),
        "one": cube[1:2, :, :].transpose(0, 1)[:, :, :1],
        "empty": cube[4:],
        "no_elements": torch.empty(0, 7, 3).transpose(0, 2),
        "scalar": torch.tensor(2.5),
        "whole": big,
    }
    path = save(tmp_path / "a.pt", tensors, kind)
    index = read_pickle_index(path)
    check(path, index, tensors)
    assert index.tensors["first"].nbytes == 24
    assert index.tensors["wide"].strides == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_tensors_share_their_bytes(tmp_path: Path, kind: str) -> None:
    embedding = numbers(8, 4)
    tensors = {"embed.weight": embedding, "norm": numbers(4), "lm_head.weight": embedding}
    path = save(tmp_path / "pytorch_model.bin", tensors, kind)
    index = read_pickle_index(path)
    check(path, index, tensors)
    assert index.tensors["embed.weight"] == index.tensors["lm_head.weight"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_pickle_protocol_of_torch(tmp_path: Path, kind: str, protocol: int) -> None:
    tensors = {"a": numbers(3, 4).half(), "b": numbers(2).to(torch.float8_e4m3fn), "a2": numbers(3, 4).half()}
    checkpoint = {"state_dict": tensors, "epoch": 3, "on": True, "tags": {"x"}, "raw": b"\xff", "big": 2**80}
    path = save(tmp_path / "a.ckpt", checkpoint, kind, protocol)
    check(path, read_pickle_index(path), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_modules_and_attributes(tmp_path: Path, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    marked, plain = torch.nn.Parameter(numbers(2, 3)), numbers(5)
    marked.mark, plain.mark = "x", 1  # type: ignore[attr-defined]
    tensors = {
        **module.state_dict(),
        **{f"p.{name}": value for name, value in module.named_parameters()},
        "marked": marked,
        "plain": plain,
        "buffer": torch.nn.Buffer(numbers(3)),
    }
    path = save(tmp_path / "a.pth", tensors, kind)
    check(path, read_pickle_index(path), tensors)
    path = save(tmp_path / "b.pth", module.state_dict(), kind)  # an OrderedDict with attributes
    check(path, read_pickle_index(path), dict(module.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_legacy_is_told(tmp_path: Path, kind: str) -> None:
    index = read_pickle_index(save(tmp_path / "a.ckpt", {"a": numbers(2)}, kind))
    assert index.legacy is (kind == "legacy")
    assert len(index.notes) == (kind == "legacy")


def test_file_number_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", {"a": numbers(2)}, "zip")
    assert read_pickle_index(path, 3).tensors["a"].file == 3


def test_names_of_any_language(tmp_path: Path) -> None:
    tensors = {"имя": numbers(2), "名前.weight": numbers(3), "": numbers(1), "x" * 300: numbers(1)}
    path = save(tmp_path / "a.bin", tensors, "zip")
    check(path, read_pickle_index(path), tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "params_ema", "params"])
def test_wrapped_tables(tmp_path: Path, kind: str, wrapper: str) -> None:
    tensors = collections.OrderedDict(a=numbers(2, 2), b=numbers(3))
    checkpoint = {"epoch": 4, wrapper: tensors, "optimizer_states": [{"state": {0: {"exp_avg": numbers(2)}}}]}
    path = save(tmp_path / "a.ckpt", checkpoint, kind)
    index = read_pickle_index(path)
    check(path, index, dict(tensors))
    assert index.notes[-1] == "left out: epoch (int), optimizer_states (list)"


def test_the_first_wrapper_counts_and_others_are_noted(tmp_path: Path) -> None:
    ema, plain = {"a": numbers(2)}, {"a": numbers(2) + 1, "b": numbers(1)}
    path = save(tmp_path / "a.pth", {"params": plain, "params_ema": ema, "loss": torch.tensor(1.0)}, "zip")
    index = read_pickle_index(path)
    check(path, index, ema)
    assert index.notes == ["left out: params (2 tensors), loss (tensor)"]


def test_a_wrapper_name_without_tensors_is_no_wrapper(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pth", {"model": "sd15", "a": numbers(2), 5: numbers(1), ("x",): 1}, "zip")
    index = read_pickle_index(path)
    check(path, index, {"a": numbers(2)})
    assert index.notes == ["left out: model (str), (no text) (tensor), (no text) (int)"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lightning_adds_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The SD 1.x releases have the callback's class as a key, and numpy numbers in its state."""
    name = "pytorch_lightning.callbacks.model_checkpoint"
    callback = type("ModelCheckpoint", (), {"__module__": name})
    for part in ("pytorch_lightning", "pytorch_lightning.callbacks", name):
        monkeypatch.setitem(sys.modules, part, type(sys)(part))
    sys.modules[name].ModelCheckpoint = callback  # type: ignore[attr-defined]
    tensors = {"model.w": numbers(4, 2).half()}
    checkpoint = {
        "epoch": np.int64(3),
        "callbacks": {callback: {"best": np.float64(0.1), "at": torch.device("cpu"), "kth": torch.tensor(1)}},
        "lr_schedulers": [{"milestones": collections.Counter([1, 2]), "last": {1, 2}, "d": torch.float16}],
        "optimizer_states": [{"state": {0: {"step": 1, "exp_avg": numbers(3)}}, "lists": [[], (), None]}],
        "random": {"numpy": np.random.default_rng(0).integers(0, 9, 5), "shape": torch.Size([1, 2])},
        "groups": collections.defaultdict(list, {"a": [1]}),
        "state_dict": tensors,
    }
    path = save(tmp_path / "sd-v1-4.ckpt", checkpoint, kind)
    index = read_pickle_index(path)
    check(path, index, tensors)
    for word in ("epoch (opaque)", "callbacks (dict)", "lr_schedulers (list)", "groups (opaque)"):
        assert word in index.notes[-1]


# How it is read.


def test_no_torch_is_imported(tmp_path: Path) -> None:
    paths = [str(save(tmp_path / f"{kind}.ckpt", {"a": numbers(2)}, kind)) for kind in KINDS]
    script = (
        "import sys; from pathlib import Path; from lib_merge.files.pickles import read_pickle_index\n"
        "for path in sys.argv[1:]: assert list(read_pickle_index(Path(path)).tensors) == ['a']\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    )
    root = Path(pickles.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", script, *paths], cwd=root, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_not_loaded(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "a.ckpt", {"a": torch.zeros(6_000_000), "b": torch.zeros(6_000_000)}, kind)
    tracemalloc.start()
    try:
        index = read_pickle_index(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index.tensors["b"].nbytes == 24_000_000
    assert peak < 3_000_000


# What is refused.


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"\n <!DOCTYPE html><html></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
        (struct.pack("<Q", 2) + b"{}", "safetensors"),
        (b"PK\3\4 and no more", "cut off"),
        (b"hello, world", "neither a zip nor a pickle"),
        (bytes(4000), "neither a zip nor a pickle"),
        (pickle.dumps({"a": [1.0, 2.0]}), "not one of torch.save"),
        (pickle.dumps({"a": 1}, protocol=0), "pickle"),
        (b"\x80\x02.", "pickle"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    assert word in str(refusal(path))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.ckpt", tmp_path):
        with pytest.raises(FileError, match="cannot read"):
            read_pickle_index(path)


def test_tar_files(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    with tarfile.open(path, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert "tar archive" in str(refusal(path))


def test_zips_that_are_no_torch_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "x")
    assert "0 records */data.pkl" in str(refusal(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", "x")
        archive.writestr("b/data.pkl", "x")
    assert "2 records */data.pkl" in str(refusal(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    assert "__torch__" in str(refusal(path))


def rewritten(path: Path, change: dict[str, bytes], **options: Any) -> Path:
    out = path.with_name("rewritten.ckpt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", **options) as new:
        for name in old.namelist():
            content = change.get(name.split("/", 1)[1], old.read(name))
            if content != b"gone":
                new.writestr(name, content)
    return out


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip_details(tmp_path: Path) -> None:
    tensors = {"a": numbers(6, 6), "b": numbers(3)}
    path = save(tmp_path / "a.ckpt", tensors, "zip")
    check(rewritten(path, {}), read_pickle_index(rewritten(path, {})), tensors)  # any alignment is fine
    assert "compressed" in str(refusal(rewritten(path, {}, compression=zipfile.ZIP_DEFLATED)))
    assert "big-endian" in str(refusal(rewritten(path, {"byteorder": b"big"})))
    for content, word in ((b"gone", "is missing"), (b"short", "too short")):
        error = refusal(rewritten(path, {"data/1": content}))
        assert word in str(error)
        assert error.tensor == "b"
    assert "twice" in str(refusal(zipped(tmp_path / "twice.ckpt", b"N.", **{"data/0": b""})))


def test_bytes_before_the_zip_are_no_torch_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", {"a": numbers(2)}, "zip")
    path.write_bytes(b"\x80\x02junk" + path.read_bytes())
    refusal(path)


def test_legacy_details(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", {"a": numbers(2), "b": numbers(3).half()}, "legacy")
    good = path.read_bytes()
    path.write_bytes(good + b"\0")
    assert "1 bytes at the end" in str(refusal(path))
    order = good.index(b"little_endian")
    at = good.index(b"\x88", order)
    path.write_bytes(good[:at] + b"\x89" + good[at + 1 :])
    assert "byte order" in str(refusal(path))
    count = good.rindex(struct.pack("<q", 3))
    path.write_bytes(good[:count] + struct.pack("<q", 4) + good[count + 8 :])
    assert "wrong size" in str(refusal(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: numbers(3, 3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(numbers(4), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: numbers(3).to(torch.complex128), "complex128"),
        (lambda: numbers(3).to(torch.complex64).conj(), "conjugated"),
        (lambda: torch._neg_view(numbers(3)), "negated"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_cannot_be_read(tmp_path: Path, kind: str, make: Any, word: str) -> None:
    path = save(tmp_path / "a.ckpt", {"good": numbers(2), "bad.weight": make()}, kind)
    error = refusal(path)
    assert word in str(error)
    assert error.tensor == "bad.weight"
    path = save(tmp_path / "b.ckpt", {"state_dict": {"good": numbers(2)}, "beside": [make()]}, kind)
    assert list(read_pickle_index(path).tensors) == ["good"]


@pytest.mark.parametrize("value", [{}, [], 3, {"a": 1}, {"unet": {"a": torch.ones(1)}}, [torch.ones(2)], torch.ones(2)])
@pytest.mark.parametrize("kind", KINDS)
def test_files_without_a_table_of_tensors(tmp_path: Path, kind: str, value: Any) -> None:
    assert "no tensors at the top" in str(refusal(save(tmp_path / "a.pt", value, kind)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"string_to_token": {"*": 265}, "string_to_param": {"*": torch.ones(2, 8)}, "name": "x"}, "textual inversion"),
        ({320: [{"linear.0.weight": torch.ones(2, 2)}], "layer_structure": [1, 2, 1], "name": "x"}, "hypernetwork"),
    ],
)
def test_files_of_another_kind_are_refused_by_name(tmp_path: Path, value: Any, said: str) -> None:
    assert said in str(refusal(save(tmp_path / "a.pt", value, KINDS[0])))


def tensor_program(offset: bytes, size: bytes, stride: bytes, numel: bytes = b"K\x10", key: bytes = b"U\1w") -> bytes:
    """`{"w": a tensor of storage 0}`, 16 floats; the arguments are pickle operations."""
    storage = b"(U\7storagectorch\nFloatStorage\nU\0010U\3cpu" + numel + b"tQ"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89}tR"
    return b"\x80\2}" + key + rebuild + b"s."


def test_a_program_by_hand(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.pt", tensor_program(b"K\2", b"K\3K\4\x86", b"K\4K\1\x86"))
    info = read_pickle_index(path).tensors["w"]
    assert (info.dtype, info.shape, info.nbytes, info.strides) == ("F32", (3, 4), 48, None)
    assert info.offset == path.read_bytes().index(bytes(64)) + 8


@pytest.mark.parametrize(
    "program",
    [
        tensor_program(b"K\5", b"K\3K\4\x86", b"K\4K\1\x86"),  # 17 elements of 16
        tensor_program(b"K\0", b"K\2K\2\x86", b"M\xff\xffK\1\x86"),
        tensor_program(b"K\x11", b"K\0\x85", b"K\1\x85"),
        tensor_program(b"J\xff\xff\xff\xff", b"K\1\x85", b"K\1\x85"),
        tensor_program(b"K\4", b"K\2\x85", b"J\xff\xff\xff\xff\x85"),
        tensor_program(b"K\0", b"K\2K\2\x86", b"K\1\x85"),
        tensor_program(b"K\0", b"N\x85", b"K\1\x85"),
        tensor_program(b"K\0", b"\x88\x85", b"K\1\x85"),
        tensor_program(b"K\0", b"]", b"]"),
        tensor_program(b"K\0", b"(" + b"K\1" * 65 + b"t", b"(" + b"K\1" * 65 + b"t"),
        tensor_program(b"K\0", b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85", b"K\0\x85"),  # 2**63 - 1 elements
    ],
)
def test_tensors_outside_of_their_storage(tmp_path: Path, program: bytes) -> None:
    assert refusal(zipped(tmp_path / "a.pt", program)).tensor == "w"


def test_storages_that_lie(tmp_path: Path) -> None:
    for numel in (b"K\x11", b"J\xff\xff\xff\xff", b"N", b"\x8a\x08" + b"\xff" * 7 + b"\x7f"):
        refusal(zipped(tmp_path / "a.pt", tensor_program(b"K\0", b"K\1\x85", b"K\1\x85", numel)))
    refusal(zipped(tmp_path / "a.pt", tensor_program(b"K\0", b"K\1\x85", b"K\1\x85", key=b"X\3\0\0\0\xed\xa0\x80")))


# Nothing is executed.


class Calls:
    """Pickles as a call of `function(*args)`, with a state and items if asked."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self.parts


def harm(marker: Path) -> dict[str, bytes]:
    """Programs that write `marker` when they are executed, by what they are made with."""
    command = f"touch {marker}"
    quoted = command.encode()
    text = b"X" + struct.pack("<I", len(quoted)) + quoted
    short = b"\x8c\x02os\x8c\x06system\x93"
    return {
        "reduce": pickle.dumps(Calls(os.system, command), 2),
        "stack_global": pickle.dumps(Calls(os.system, command), 4),
        "protocol_0": pickle.dumps(Calls(os.system, command), 0),
        "subprocess": pickle.dumps(Calls(subprocess.check_output, ["touch", str(marker)]), 2),
        "eval": pickle.dumps(Calls(eval, f"open({str(marker)!r}, 'w')"), 2),
        "global": b"cos\nsystem\n(" + text + b"tR.",
        "instance": b"(" + text + b"ios\nsystem\n.",
        "object": b"(cos\nsystem\n" + text + b"o.",
        "newobj": b"\x80\2cos\nsystem\n" + text + b"\x85\x81.",
        "newobj_ex": b"\x80\4" + short + text + b"\x85}\x92.",
        "dotted": b"\x80\4\x8c\x0ctorch._utils\x8c\x09os.system\x93" + text + b"\x85R.",
        "escaped": b"c\\x6fs\nsystem\n(" + text + b"tR.",
        "extension": b"\x80\2\x82\1.",
        "build_on_inert": b"\x80\2cnumpy\ndtype\n)R}U\x0c__setstate__cos\nsystem\nsb" + text + b"b.",
        "getattr": b"cbuiltins\ngetattr\n(cos\n__dict__\nU\6systemtR(" + text + b"tR.",
        "load_from_bytes": b"ctorch.storage\n_load_from_bytes\n(" + text + b"tR.",
        "hub": b"ctorch.hub\nload\n(" + text + b"tR.",
        "call_of_a_text": b"\x80\2U\x09os.system" + text + b"\x85R.",
        "call_of_a_word": b"\x80\2ctorch\nfloat16\n" + text + b"\x85R.",
        "build_on_a_text": b"\x80\2U\1x}b.",
        "namespace": pickle.dumps(argparse.Namespace(a=1), 2),
    }


@pytest.mark.parametrize("name", harm(Path("x")))
@pytest.mark.parametrize("place", ["zip", "beside tensors", "plain", "legacy"])
def test_malicious_programs(tmp_path: Path, name: str, place: str) -> None:
    marker = tmp_path / "executed"
    program = harm(marker)[name]
    path = tmp_path / "a.ckpt"
    if place == "zip":
        zipped(path, program)
    elif place == "plain":
        path.write_bytes(program)
    elif place == "beside tensors":
        body = program[2:-1] if program[:1] == b"\x80" else program[:-1]
        good = tensor_program(b"K\0", b"K\1\x85", b"K\1\x85")
        zipped(path, b"\x80\4" + good[2:-1] + b"U\4evil" + body + b"s.")
    else:
        path.write_bytes(b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\2M\xe9\3.}U\rlittle_endian\x88s." + program)
    error = refusal(path)
    assert not marker.exists()
    known = {"call_of_a_text", "call_of_a_word", "build_on_a_text", "extension", "getattr"}
    if name not in known:
        words = ("system", "check_output", "eval", "_load_from_bytes", "load", "Namespace", "OBJ")
        assert any(word in str(error) for word in words)
        assert "nothing was executed" in str(error)


def test_the_harm_is_real(tmp_path: Path) -> None:
    """The programs above would do it: the plain unpickler runs one."""
    marker = tmp_path / "executed"
    pickle.loads(harm(marker)["global"])
    assert marker.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\2Nr\xff\xff\xff\xff.",  # a memo of 2**32 places
        b"X\xff\xff\xff\xffabc.",
        b"\x80\4\x8d" + b"\xff" * 7 + b"\x3fabc.",
        b"\x80\4\x8e" + b"\xff" * 7 + b"\x3fabc.",
        b"\x80\5\x96" + b"\xff" * 7 + b"\x3fabc.",
        b"\x80\4\x95" + b"\xff" * 8 + b"N.",
        b"\x80\2\x8b\xff\xff\xff\x7fabc.",
        b"}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key that is nested too deep to be hashed
        b"}" + b")" + b"2\x86" * 200 + b"Ns.",  # a key with 2**200 leaves
        b"}(" + b"".join(b"L%dL\nN" % (i * (2**61 - 1)) for i in range(20_000)) + b"u.",  # keys of one hash
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x85" * 10,
        b"(" * 1000,
        b"N" * 60_000 + b".",
        b"c" + b"x" * 100_000,
        b"ctorch._tensor\n_rebuild_from_type_v2\n(h\0" + b"." * 9,
        b"ctorch._tensor\n_rebuild_from_type_v2\nq\0)" + b"q\1h\0NNh\1Nt0(h\0Nh\1Nt" * 1 + b"R.",
        b")" + b"q\1(ctorch._tensor\n_rebuild_from_type_v2\nNh\1Nt" * 3000 + b"h\0R.",
        b"I" + b"9" * 100_000 + b"\n.",
    ],
    ids=lambda program: repr(program[:12]),
)
def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: bytes) -> None:
    monkeypatch.setattr(unpickle, "MAX_OPERATIONS", 400_000 if len(program) != 60_001 else 60_000)
    for path in (zipped(tmp_path / "zip.ckpt", program), tmp_path / "plain.ckpt"):
        if path.name == "plain.ckpt":
            path.write_bytes(program)
        begin = time.monotonic()
        refusal(path)
        assert time.monotonic() - begin < 10


def test_calls_that_nest_without_end(tmp_path: Path) -> None:
    inner = b"(ctorch._tensor\n_rebuild_from_type_v2\nN"
    program = b"ctorch._tensor\n_rebuild_from_type_v2\n" + b"(ctorch._tensor\n_rebuild_from_type_v2\nN" * 5000
    program += b")" + b"Nt" * 5000 + b"R."
    assert inner in program
    assert "damaged" in str(refusal(zipped(tmp_path / "a.pt", program)))


# Damage.


def sample(path: Path, kind: str) -> Path:
    tensors = {"a.weight": numbers(5, 3), "b": numbers(4).to(torch.bfloat16), "c": numbers(3).to(torch.float8_e5m2)}
    return save(path, {"state_dict": {**tensors, "d": tensors["a.weight"].t()[:2]}, "epoch": 3}, kind)


def outcome(path: Path) -> PickleIndex | None:
    """The index, checked to stay inside the file, or None for a FileError; any other error passes through."""
    try:
        index = read_pickle_index(path)
    except FileError as error:
        assert error.file == str(path)
        assert error.hint
        str(error).encode()
        return None
    size = path.stat().st_size
    for info in index.tensors.values():
        itemsize = info.nbytes // info.numel if info.numel else 0
        if info.strides is None:
            end = info.offset + info.nbytes
        else:
            end = info.offset + itemsize * (1 + sum((n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)))
        assert 0 <= info.offset <= size
        assert end <= size
    return index


@pytest.mark.parametrize("kind", KINDS)
def test_files_cut_off_anywhere(tmp_path: Path, kind: str) -> None:
    good = sample(tmp_path / "a.ckpt", kind).read_bytes()
    path = tmp_path / "cut.ckpt"
    for length in range(0, len(good), 1 if kind == "legacy" else 3):
        path.write_bytes(good[:length])
        error = refusal(path)
        assert error.file == str(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_damage(tmp_path: Path, kind: str, seed: int) -> None:
    """Bytes of the whole file replaced, removed and put in: an index inside the file, or a FileError."""
    draw = random.Random(seed)
    good = sample(tmp_path / "a.ckpt", kind).read_bytes()
    path = tmp_path / "damaged.ckpt"
    found = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(len(damaged))
            kind_of_damage = draw.randrange(4)
            if kind_of_damage == 0:
                del damaged[at]
            elif kind_of_damage == 1:
                damaged.insert(at, draw.randrange(256))
            else:
                damaged[at] = draw.randrange(256)
        path.write_bytes(damaged)
        found += outcome(path) is not None
    assert found < 400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("seed", range(6))
def test_random_damage_of_the_pickle(tmp_path: Path, seed: int) -> None:
    """As above, in the pickle alone: the zip around it stays whole."""
    draw = random.Random(seed)
    with zipfile.ZipFile(sample(tmp_path / "a.ckpt", "zip")) as archive:
        program = archive.read("a/data.pkl")
    results = []
    for _ in range(400):
        damaged = bytearray(program)
        for _ in range(draw.choice([1, 1, 2, 4])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        results.append(outcome(zipped(tmp_path / "b.ckpt", bytes(damaged), **{"data/1": bytes(8), "data/2": bytes(3)})))
    assert any(results)
    assert not all(results)
