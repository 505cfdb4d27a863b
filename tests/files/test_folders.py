"""Model folders: only what belongs to the model is read, the rest is noted, and what is missing is named."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from lib_merge.errors import FileError
from lib_merge.files.open import open_model
from lib_merge.files.source import Part

pytestmark = pytest.mark.portable


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape or (2, 3)).astype(np.float16)


def weights(path, *keys, seed=0, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: values(seed + n) for n, key in enumerate(keys)}
    save_file(tensors, path, metadata)
    return tensors


def index(path, weight_map, total=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def read(source, key):
    buffer = bytearray(source.tensors[key].nbytes)
    source.read_into(key, 0, memoryview(buffer))
    source.close()
    return bytes(buffer)


def refusal(folder, **where):
    with pytest.raises(FileError) as caught:
        open_model(folder)
    for name, value in where.items():
        assert getattr(caught.value, name) == (str(value) if name == "file" else value)
    return caught.value


@pytest.fixture
def llm(tmp_path):
    """A sharded model as transformers saves it."""
    root = tmp_path / "llm"
    one = weights(root / "model-00001-of-00002.safetensors", "embed", "layers.0.up", seed=1, metadata={"format": "pt"})
    two = weights(root / "model-00002-of-00002.safetensors", "layers.1.up", "head", seed=5, metadata={"format": "mlx"})
    names = {**dict.fromkeys(one, "model-00001-of-00002.safetensors")}
    names |= dict.fromkeys(two, "model-00002-of-00002.safetensors")
    index(root / "model.safetensors.index.json", names)
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.model").write_bytes(bytes(range(256)))
    return root


def test_shards_with_an_index(llm):
    source = open_model(llm)
    assert (source.kind, source.path, source.name) == ("folder", llm, "llm")
    assert set(source.tensors) == {"embed", "layers.0.up", "layers.1.up", "head"}
    assert [part.name for part in source.parts] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert [set(part.keys) for part in source.parts] == [{"embed", "layers.0.up"}, {"layers.1.up", "head"}]
    assert {(part.prefix, part.index) for part in source.parts} == {("", "model.safetensors.index.json")}
    assert [part.metadata for part in source.parts] == [{"format": "pt"}, {"format": "mlx"}]
    assert source.metadata == {"format": "pt"}
    assert source.side_files == ("config.json", "tokenizer.model")
    assert source.notes == ()
    assert read(source, "head") == values(6).tobytes()
    assert read(source, "embed") == values(1).tobytes()


def test_only_the_index_counts(llm):
    weights(llm / "model-00003-of-00003.safetensors", "layers.2.up")
    weights(llm / "consolidated.safetensors", "embed", "more")
    weights(llm / "model-00001-of-00002.safetensors", "embed", "layers.0.up", "extra", "extra2", seed=1)
    source = open_model(llm)
    assert set(source.tensors) == {"embed", "layers.0.up", "layers.1.up", "head"}
    assert sorted(source.notes) == [
        "2 tensors of model-00001-of-00002.safetensors are not in the index and were left alone",
        "consolidated.safetensors is not in the index and was left alone",
        "model-00003-of-00003.safetensors is not in the index and was left alone",
    ]


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))
    return path


def test_a_tensor_that_a_shard_lacks(llm):
    path = change_index(llm, lambda names: names.update(ghost="model-00002-of-00002.safetensors"))
    error = refusal(llm, file=path, tensor="ghost")
    assert "model-00002-of-00002.safetensors" in error.what


def test_a_tensor_that_lies_in_another_shard(llm):
    path = change_index(llm, lambda names: names.update(head="model-00001-of-00002.safetensors"))
    refusal(llm, file=path, tensor="head")


def test_a_missing_shard(llm):
    shard = llm / "model-00002-of-00002.safetensors"
    shard.unlink()
    error = refusal(llm, file=shard)
    assert "not there" in error.what


def test_all_shards_missing(llm):
    for shard in llm.glob("*.safetensors"):
        shard.unlink()
    refusal(llm, file=llm / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", ".", "", "./x"])
def test_a_shard_outside_the_folder(llm, name):
    weights(llm.parent / "x.safetensors", "head")
    weights(llm / "sub" / "x.safetensors", "head")
    path = change_index(llm, lambda names: names.update(head=name))
    error = refusal(llm, file=path)
    assert repr(name) in error.what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": ["a"]}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "weight_map"),
        ('{"weight_map": {"a": null}}', "weight_map"),
        ('{"weight_map": {}}', "no tensors"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
        ('{"weight_map": {"\\ud800": "x.safetensors"}}', "not JSON"),
        ('{"weight_map": ' + "[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
    ],
)
def test_a_broken_index(llm, text, words):
    path = llm / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    error = refusal(llm, file=path)
    assert words in error.what


@pytest.mark.parametrize("length", [0, 1, 8, 40, -1])
def test_a_shard_that_is_cut_off(llm, length):
    shard = llm / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:length])
    refusal(llm, file=shard)


def test_a_shard_that_is_a_pointer(llm):
    shard = llm / "model-00001-of-00002.safetensors"
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "Git LFS" in refusal(llm, file=shard).what


def test_shards_that_are_links_as_in_a_download_cache(llm, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, item in enumerate(sorted(llm.iterdir())):
        item.rename(blobs / f"{number:064x}")
        item.symlink_to(blobs / f"{number:064x}")
    source = open_model(llm)
    assert read(source, "head") == values(6).tobytes()
    assert source.side_files == ("config.json", "tokenizer.model")
    assert source.notes == ()


# Folders without an index.


def test_one_file(tmp_path):
    weights(tmp_path / "m" / "model.safetensors", "w", metadata={"a": "b"})
    source = open_model(tmp_path / "m")
    assert source.parts == (Part("model.safetensors", "", ("w",), {"a": "b"}),)
    assert source.metadata == {"a": "b"}


def test_an_mlx_folder(tmp_path):
    root = tmp_path / "mlx"
    root.mkdir()
    codes = np.arange(8, dtype=np.uint32).reshape(2, 4)
    save_file({"q.weight": codes, "q.scales": values(0)}, root / "model.safetensors", {"format": "mlx"})
    index(root / "model.safetensors.index.json", dict.fromkeys(("q.weight", "q.scales"), "model.safetensors"))
    for name in ("config.json", "tokenizer.json", "README.md"):
        (root / name).write_text("{}")
    source = open_model(root)
    assert source.tensors["q.weight"].dtype == "U32"
    assert read(source, "q.weight") == codes.tobytes()
    assert source.metadata == {"format": "mlx"}
    assert source.side_files == ("README.md", "config.json", "tokenizer.json")


@pytest.mark.parametrize(
    "names",
    [
        ["weights.00.safetensors", "weights.01.safetensors"],
        ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"],
    ],
)
def test_numbered_shards(tmp_path, names):
    for n, name in enumerate(names):
        weights(tmp_path / name, f"w{n}", seed=n)
    source = open_model(tmp_path)
    assert [part.name for part in source.parts] == names
    assert {part.index for part in source.parts} == {""}
    assert list(source.tensors) == [f"w{n}" for n in range(len(names))]


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002.safetensors"],
        ["model-00002-of-00002.safetensors"],
        ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
        ["model-00001-of-99999999999.safetensors", "model-00002-of-99999999999.safetensors"],
        ["weights.00.safetensors", "weights.02.safetensors"],
        ["weights.3.safetensors", "weights.4.safetensors"],
    ],
)
def test_missing_numbers(tmp_path, names):
    for n, name in enumerate(names):
        weights(tmp_path / name, f"w{n}")
    error = refusal(tmp_path, file=tmp_path)
    assert "shards are missing" in error.what
    assert names[0] in error.what


@pytest.mark.parametrize(
    "names",
    [
        ["juggernaut.safetensors", "dreamshaper.safetensors"],
        ["juggernaut_v9.safetensors", "dreamshaper_8.safetensors"],
        ["a-00001-of-00002.safetensors", "b-00002-of-00002.safetensors"],
        ["a-00001-of-00002.safetensors", "a-00002-of-00003.safetensors"],
        ["model-1.safetensors", "model-2-of-2.safetensors"],
        ["model.fp16.safetensors", "model.bf16.safetensors"],
    ],
)
def test_several_models_in_one_folder(tmp_path, names):
    for n, name in enumerate(names):
        weights(tmp_path / name, f"w{n}")
    error = refusal(tmp_path, file=tmp_path)
    assert "several weights files and no index" in error.what
    assert all(name in error.what for name in names)
    assert error.hint


def test_the_same_tensor_in_two_shards(tmp_path):
    weights(tmp_path / "model-00001-of-00002.safetensors", "w", "x")
    weights(tmp_path / "model-00002-of-00002.safetensors", "w", "y")
    refusal(tmp_path, file=tmp_path / "model-00002-of-00002.safetensors", tensor="w")


def test_the_usual_name_wins_and_the_rest_is_noted(tmp_path):
    weights(tmp_path / "model.safetensors", "w")
    weights(tmp_path / "model.fp16.safetensors", "w")
    weights(tmp_path / "adapter.safetensors", "v")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.onnx", "onnx/model.onnx_data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    source = open_model(tmp_path)
    assert list(source.tensors) == ["w"]
    assert source.side_files == ()
    assert sorted(source.notes) == [
        "adapter.safetensors is not part of the model and was left alone",
        "model.fp16.safetensors is another variant and was left alone",
        "model.onnx is not part of the model and was left alone",
        "onnx/model.onnx_data is not part of the model and was left alone",
        "optimizer.pt is not part of the model and was left alone",
        "pytorch_model.bin is not part of the model and was left alone",
        "training_args.bin is not part of the model and was left alone",
    ]


def test_a_variant_alone_is_the_model(tmp_path):
    weights(tmp_path / "model.fp16.safetensors", "w")
    source = open_model(tmp_path)
    assert [part.name for part in source.parts] == ["model.fp16.safetensors"]
    assert source.notes == ()


def test_the_index_of_a_variant_is_known_for_one(llm):
    weights(llm / "model.fp16-00001-of-00001.safetensors", "embed", "layers.0.up", "layers.1.up", "head")
    keys = ("embed", "layers.0.up", "layers.1.up", "head")
    index(llm / "model.safetensors.index.fp16.json", dict.fromkeys(keys, "model.fp16-00001-of-00001.safetensors"))
    source = open_model(llm)
    assert len(source.parts) == 2
    assert source.side_files == ("config.json", "tokenizer.model")
    assert sorted(source.notes) == [
        "model.fp16-00001-of-00001.safetensors is not in the index and was left alone",
        "model.safetensors.index.fp16.json was left alone, model.safetensors.index.json was used",
    ]
    for name in ("model.safetensors.index.json", *(part.name for part in source.parts)):
        (llm / name).unlink()
    source = open_model(llm)
    assert source.parts[0].index == "model.safetensors.index.fp16.json"
    assert [part.name for part in source.parts] == ["model.fp16-00001-of-00001.safetensors"]
    assert source.notes == ()


def test_a_folder_of_nothing(tmp_path):
    error = refusal(tmp_path, file=tmp_path)
    assert "no weights" in error.what
    (tmp_path / "notes.txt").write_text("?")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / ".hidden.safetensors").write_bytes(b"?")
    (tmp_path / ".model.safetensors.lib_merge-1-ab.part").write_bytes(b"?")
    assert "no weights" in refusal(tmp_path, file=tmp_path).what


def test_an_empty_model_file(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    assert "no weights" in refusal(tmp_path).what


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    weights(tmp_path / "model.safetensors", "w")

    def denied(path="."):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    assert "Permission denied" in refusal(tmp_path, file=tmp_path).what


# Diffusers pipelines.


@pytest.fixture
def pipeline(tmp_path):
    root = tmp_path / "sdxl"
    weights(root / "unet/diffusion_pytorch_model.safetensors", "conv_in.weight", "shared", seed=10)
    weights(root / "unet/diffusion_pytorch_model.fp16.safetensors", "conv_in.weight", "shared", seed=11)
    weights(root / "text_encoder/model.safetensors", "text_model.embed", "shared", seed=20)
    weights(root / "text_encoder_2/model.safetensors", "text_model.embed", "shared", seed=30)
    weights(root / "vae/diffusion_pytorch_model.safetensors", "decoder.conv", seed=40)
    weights(root / "sd_xl_base_1.0.safetensors", "model.diffusion_model.x", seed=50)
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        (root / name / "config.json").write_text(json.dumps({"name": name}))
    for name in ("scheduler/scheduler_config.json", "tokenizer/vocab.json", "model_index.json", ".cache/huggingface/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitattributes").write_text("x")
    (root / "tokenizer" / ".lock").write_text("x")
    return root


def test_a_pipeline(pipeline):
    source = open_model(pipeline)
    assert [(part.name, part.prefix) for part in source.parts] == [
        ("text_encoder/model.safetensors", "text_encoder/"),
        ("text_encoder_2/model.safetensors", "text_encoder_2/"),
        ("unet/diffusion_pytorch_model.safetensors", "unet/"),
        ("vae/diffusion_pytorch_model.safetensors", "vae/"),
    ]
    assert set(source.tensors) == {
        "text_encoder/text_model.embed", "text_encoder/shared",
        "text_encoder_2/text_model.embed", "text_encoder_2/shared",
        "unet/conv_in.weight", "unet/shared", "vae/decoder.conv",
    }  # fmt: skip
    assert read(source, "text_encoder/text_model.embed") == values(20).tobytes()
    assert read(source, "text_encoder_2/text_model.embed") == values(30).tobytes()
    assert read(source, "text_encoder_2/shared") == values(31).tobytes()
    assert read(source, "unet/shared") == values(11).tobytes()
    assert source.side_files == (
        "model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json",
        "text_encoder_2/config.json", "tokenizer/vocab.json", "unet/config.json", "vae/config.json",
    )  # fmt: skip
    assert sorted(source.notes) == [
        "sd_xl_base_1.0.safetensors is not part of the model and was left alone",
        "unet/diffusion_pytorch_model.fp16.safetensors is another variant and was left alone",
    ]


def test_a_pipeline_with_shards(pipeline):
    names = {}
    (pipeline / "unet/diffusion_pytorch_model.safetensors").unlink()
    for n in (1, 2):
        name = f"diffusion_pytorch_model-0000{n}-of-00002.safetensors"
        weights(pipeline / "unet" / name, f"w{n}", seed=60 + n)
        names[f"w{n}"] = name
    index(pipeline / "unet/diffusion_pytorch_model.safetensors.index.json", names)
    source = open_model(pipeline)
    shards = [part for part in source.parts if part.prefix == "unet/"]
    assert [part.keys for part in shards] == [("unet/w1",), ("unet/w2",)]
    assert {part.index for part in shards} == {"unet/diffusion_pytorch_model.safetensors.index.json"}
    assert {part.index for part in source.parts if part.prefix != "unet/"} == {""}
    assert read(source, "unet/w2") == values(62).tobytes()


def test_a_component_whose_shards_are_all_missing_is_not_passed_over(pipeline):
    for path in (pipeline / "unet").glob("*.safetensors"):
        path.unlink()
    index(pipeline / "unet/diffusion_pytorch_model.safetensors.index.json", {"w": "gone.safetensors"})
    refusal(pipeline, file=pipeline / "unet/gone.safetensors")


def test_a_component_without_weights_is_noted(pipeline):
    (pipeline / "vae/diffusion_pytorch_model.safetensors").unlink()
    source = open_model(pipeline)
    assert "vae/ has a config.json but no weights" in source.notes
    assert not any(key.startswith("vae/") for key in source.tensors)


def test_hidden_folders_are_no_components(pipeline):
    weights(pipeline / ".cache/model.safetensors", "w")
    assert not any(key.startswith(".") for key in open_model(pipeline).tensors)


def test_components_that_are_links(pipeline, tmp_path):
    (pipeline / "vae").rename(tmp_path / "shared_vae")
    for name in ("vae", "vae_2"):
        (pipeline / name).symlink_to(tmp_path / "shared_vae", target_is_directory=True)
    (pipeline / "scheduler" / "up").symlink_to(pipeline, target_is_directory=True)
    source = open_model(pipeline)
    assert read(source, "vae/decoder.conv") == read(source, "vae_2/decoder.conv") == values(40).tobytes()
    assert {"vae/config.json", "vae_2/config.json", "scheduler/scheduler_config.json"} <= set(source.side_files)
    assert not any(name.startswith("scheduler/up") for name in source.side_files)


def test_a_broken_link_is_noted(pipeline):
    (pipeline / "tokenizer/merges.txt").symlink_to(pipeline / "nowhere")
    source = open_model(pipeline)
    assert "tokenizer/merges.txt is a broken link or no plain file and was left alone" in source.notes
    assert "tokenizer/merges.txt" not in source.side_files


def test_one_component_alone_is_a_model(pipeline):
    source = open_model(pipeline / "text_encoder")
    assert set(source.tensors) == {"text_model.embed", "shared"}
    assert source.side_files == ("config.json",)
