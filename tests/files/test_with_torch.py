"""Files of torch and through torch: every dtype that it has, `.bin` folders, and views that a pickle holds."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib_merge.errors import FileError
from lib_merge.files.dtypes import DTYPES
from lib_merge.files.open import open_model
from lib_merge.files.sink import FileSink, OutPart

WITH_TORCH = {name: dtype for name, dtype in DTYPES.items() if dtype.torch}


def raw(tensor):
    """Row-major bytes."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def read(source, key, start=0):
    buffer = bytearray(source.tensors[key].nbytes - start)
    source.read_into(key, start, memoryview(buffer))
    return bytes(buffer)


def example(name):
    """A tensor of shape (3, 4) with every byte of its own."""
    count = 12 * DTYPES[name].bits // 8
    codes = torch.arange(count, dtype=torch.uint8) * 37
    return (codes % 2 if name == "BOOL" else codes).view(getattr(torch, DTYPES[name].torch)).reshape(3, 4)


def copied(root, target):
    """Write a model anew as the engine does: parts as they are cut, tensors copied or put in order."""
    source = open_model(root)
    parts = [
        OutPart(
            part.name,
            part.prefix,
            {key: (source.tensors[key].dtype, source.tensors[key].shape) for key in part.keys},
            {},
            part.index,
        )
        for part in source.parts
    ]
    with FileSink(target, parts, folder=source.kind == "folder") as sink:
        sink.add_side_files(source.path, source.side_files)
        for key, info in source.tensors.items():
            half = info.nbytes // 2
            sink.copy(key, 0, source, key, half)
            sink.copy(key, half, source, key, info.nbytes - half)
        sink.publish([{} for _ in parts])
    source.close()
    return source


@pytest.mark.parametrize("name", WITH_TORCH)
def test_sizes_and_kinds_are_those_of_torch(name):
    dtype = getattr(torch, DTYPES[name].torch)
    assert dtype.itemsize * 8 == DTYPES[name].bits
    if DTYPES[name].kind == "float":
        assert dtype.is_floating_point
    elif DTYPES[name].kind == "integer":
        assert not dtype.is_floating_point
        assert not dtype.is_complex


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPES[name].kind == "float"])
def test_the_largest_value_and_the_first_pattern_that_is_not_finite(name):
    dtype, size = DTYPES[name], DTYPES[name].bits // 8
    kind = getattr(torch, dtype.torch)

    def value(pattern):
        return float(torch.tensor(list(pattern.to_bytes(size, "little")), dtype=torch.uint8).view(kind).double())

    assert torch.finfo(kind).max == dtype.largest == value(dtype.unbounded - 1)
    assert not math.isfinite(value(dtype.unbounded))
    if size <= 2:
        finite = [math.isfinite(value(pattern)) for pattern in range(1 << (dtype.bits - 1))]
        assert finite == [pattern < dtype.unbounded for pattern in range(1 << (dtype.bits - 1))]


@pytest.mark.parametrize("name", WITH_TORCH)
def test_every_dtype_is_read_from_the_safetensors_package(tmp_path, name):
    tensor = example(name)
    save_file({"w": tensor, "scalar": tensor[1, 2].clone(), "none": tensor[:0].clone()}, tmp_path / "a.safetensors")
    source = open_model(tmp_path / "a.safetensors")
    assert {key: (info.dtype, info.shape) for key, info in source.tensors.items()} == {
        "w": (name, (3, 4)), "scalar": (name, ()), "none": (name, (0, 4)),
    }  # fmt: skip
    assert (read(source, "w"), read(source, "scalar")) == (raw(tensor), raw(tensor[1, 2]))
    source.close()


@pytest.mark.parametrize("name", WITH_TORCH)
def test_every_dtype_is_written_for_the_safetensors_package(tmp_path, name):
    tensor = example(name)
    part = OutPart("", "", {"w": (name, (3, 4)), "scalar": (name, ())}, {})
    with FileSink(tmp_path / "a.safetensors", [part], folder=False) as sink:
        sink.write("w", 0, memoryview(raw(tensor)))
        sink.write("scalar", 0, memoryview(raw(tensor[2, 3])))
        sink.publish([{}])
    loaded = load_file(tmp_path / "a.safetensors")
    for key, expected in (("w", tensor), ("scalar", tensor[2, 3])):
        assert (loaded[key].dtype, loaded[key].shape) == (expected.dtype, expected.shape)
        assert raw(loaded[key]) == raw(expected)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_views_in_a_pickle_are_written_as_they_look(tmp_path):
    # A view is neither refused nor does it drag its storage along.
    big = numbers(40, 30)
    tensors = {
        "big": big,
        "turned": big.t(),
        "row": big[:1],
        "column": big[:, 3],
        "steps": big[::3, 1::7],
        "same": big,
        "expanded": big[2:3].expand(5, 30),
        "half": numbers(6, 4).half().t(),
    }
    torch.save(tensors, tmp_path / "a.ckpt")
    copied(tmp_path / "a.ckpt", tmp_path / "b.safetensors")
    loaded = load_file(tmp_path / "b.safetensors")
    assert set(loaded) == set(tensors)
    for key, tensor in tensors.items():
        assert (loaded[key].shape, raw(loaded[key])) == (tensor.shape, raw(tensor)), key
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert (tmp_path / "b.safetensors").stat().st_size < size + 1000


def test_a_pickle_is_named_and_cut_as_a_safetensors_file(tmp_path):
    torch.save({"state_dict": {"b": numbers(3), "a": numbers(2, 2)}}, tmp_path / "sd-v1-5.pruned.ckpt")
    source = open_model(tmp_path / "sd-v1-5.pruned.ckpt")
    assert (source.kind, source.metadata) == ("pickle", {})
    assert [(part.name, part.keys) for part in source.parts] == [("sd-v1-5.pruned.safetensors", ("b", "a"))]


# Folders of pickles: written as safetensors under the names that loaders look for.


def check(tensors, *paths):
    loaded = {key: value for path in paths for key, value in load_file(path).items()}
    assert {key: raw(value) for key, value in loaded.items()} == {key: raw(value) for key, value in tensors.items()}


def test_a_bin_folder(tmp_path):
    tensors = {"embed": numbers(4, 3), "head": numbers(5).bfloat16()}
    root = tmp_path / "in"
    root.mkdir()
    torch.save(tensors, root / "pytorch_model.bin")
    torch.save({"lr": 1}, root / "training_args.bin")
    (root / "config.json").write_text("{}")
    source = copied(root, tmp_path / "out")
    assert source.notes == ("training_args.bin is not part of the model and was left alone",)
    assert sorted(item.name for item in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    check(tensors, tmp_path / "out" / "model.safetensors")


def test_a_bin_folder_with_shards(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    shards = {f"pytorch_model-0000{n}-of-00002.bin": {f"w{n}": numbers(n, 3), f"v{n}": numbers(n)} for n in (1, 2)}
    for name, tensors in shards.items():
        torch.save(tensors, root / name)
    names = {key: name for name, tensors in shards.items() for key in tensors}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    copied(root, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: f"model-0000{key[1]}-of-00002.safetensors" for key in names}
    tensors = {key: value for shard in shards.values() for key, value in shard.items()}
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in tensors.values())
    check(tensors, *(tmp_path / "out" / name for name in set(index["weight_map"].values())))
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert set(open_model(tmp_path / "out").tensors) == set(tensors)


def test_a_pipeline_of_pickles(tmp_path):
    # diffusers looks for diffusion_pytorch_model.safetensors, transformers for model.safetensors.
    unet, encoder = {"conv": numbers(3, 2)}, {"embed": numbers(2)}
    for folder in ("my.bin.files/unet", "my.bin.files/text_encoder"):
        (tmp_path / folder).mkdir(parents=True)
    root = tmp_path / "my.bin.files"
    torch.save(unet, root / "unet" / "diffusion_pytorch_model.bin")
    torch.save(encoder, root / "text_encoder" / "pytorch_model.bin")
    (root / "model_index.json").write_text("{}")
    copied(root, tmp_path / "out")
    check(unet, tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    check(encoder, tmp_path / "out" / "text_encoder" / "model.safetensors")


def test_a_variant_in_pickles(tmp_path):
    (tmp_path / "in").mkdir()
    torch.save({"w": numbers(2)}, tmp_path / "in" / "pytorch_model.fp16.bin")
    assert [part.name for part in open_model(tmp_path / "in").parts] == ["model.fp16.safetensors"]


def test_a_bin_that_is_cut_off_is_named(tmp_path):
    torch.save({"w": numbers(200, 200)}, tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[:5000])
    with pytest.raises(FileError) as caught:
        open_model(tmp_path)
    assert caught.value.file == str(tmp_path / "pytorch_model.bin")


def test_safetensors_are_preferred_to_pickles(tmp_path):
    torch.save({"w": numbers(2)}, tmp_path / "pytorch_model.bin")
    save_file({"w": numbers(3)}, tmp_path / "model.safetensors")
    source = open_model(tmp_path)
    assert source.tensors["w"].shape == (3,)
    assert source.notes == ("pytorch_model.bin is not part of the model and was left alone",)
