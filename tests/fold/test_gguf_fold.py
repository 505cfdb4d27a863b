"""Folding into GGUF files: names, order of rows, kinds, and not a byte elsewhere."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import lib_merge
from lib_merge.errors import NumberError, PlanError
from lib_merge.fold.gguf import IN_ORDER, INTERLEAVED, resolve
from lib_merge.quant import ggml
from tests.data.mlx_ref import f32_to_bf16, merged, widened
from tests.fold.making import DOWN, Pair, Q

NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "IQ4_NL": 20,
    "BF16": 30,
}
NAMES = {Q: "blk.0.attn_q", DOWN: "blk.0.ffn_down"}
K = "model.layers.0.self_attn.k_proj"


def coded(values, kind):
    """Bytes of float32 weights; block codes are proven elsewhere against the gguf package."""
    if kind in ggml.KINDS:
        return ggml.encode(values.copy(), kind).tobytes()
    return {"F32": values, "F16": values.astype(np.float16), "BF16": f32_to_bf16(values)}[kind].tobytes()


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path, tensors, fields):
    """A file of version 3: fields are texts or u32 numbers, data is aligned to 32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for name, value in fields.items():
        kind = struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
        head += text(name) + kind
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def interleaved(values, heads):
    """What converters do to q and k of this architecture, as they do it."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path, shapes={Q: (80, 128), DOWN: (48, 256)})


def ship(pair, kind, architecture="qwen3", down=None):
    """The GGUF file of a pair, in two kinds, with tensors that no adapter touches."""
    wide = {module: widened(array) for module, array in pair.weights.items()}
    first = interleaved(wide[Q], 5) if architecture in INTERLEAVED else wide[Q]
    down = down or kind
    norm = np.ones(128, np.float32)
    tensors = {
        "output_norm.weight": ("F32", (128,), norm.tobytes()),
        f"{NAMES[Q]}.weight": (kind, (80, 128), coded(np.ascontiguousarray(first), kind)),
        "token_embd.weight": ("Q4_K", (4, 256), bytes(range(144)) * 4),
        f"{NAMES[DOWN]}.weight": (down, (48, 256), coded(wide[DOWN], down) if down in ggml.KINDS or "F" in down else
                                  bytes(48 * {"Q4_K": 144, "IQ4_NL": 144}[down])),
    }  # fmt: skip
    fields = {"general.architecture": architecture, f"{architecture}.attention.head_count": 5, "general.name": "x"}
    pair.file = pair.root / "shipped.gguf"
    write_gguf(pair.file, tensors, fields)


def fold(pair, adapter, name="out.gguf", **options):
    return lib_merge.fold(pair.dense, adapter, pair.root / name, quantize=pair.file, **options)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("kind", [*ggml.KINDS, "F16", "BF16"])
def test_named_modules_are_coded_anew_and_every_other_byte_is_kept(pair, kind, architecture):
    ship(pair, kind, architecture)
    made = fold(pair, pair.adapter(), tile=1000)
    assert (made.folded, made.copied, made.rounding.share) == (2, 2, 1)
    for module in (Q, DOWN):
        down, up = pair.factors[module]
        pair.weights[module] = merged(widened(pair.weights[module]), down, up, 1.5)
    whole = pair.file.read_bytes()
    ship(pair, kind, architecture)
    expected = pair.file.read_bytes()
    assert (pair.root / "out.gguf").read_bytes() == expected
    assert expected != whole


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_an_adapter_without_effect_gives_back_every_byte_and_the_check_passes(pair, architecture):
    ship(pair, "Q8_0", architecture)
    fold(pair, pair.adapter(alpha=0))
    assert (pair.root / "out.gguf").read_bytes() == pair.file.read_bytes()
    fold(pair, pair.adapter(), "other.gguf")
    found = lib_merge.fold_check(pair.dense, pair.root / "adapter", pair.root / "other.gguf", pair.file)
    assert found.ok
    assert found.groups == (80 * 128 + 48 * 256) // 32
    content = bytearray((pair.root / "other.gguf").read_bytes())
    content[-1] ^= 1
    (pair.root / "other.gguf").write_bytes(content)
    found = lib_merge.fold_check(pair.dense, pair.root / "adapter", pair.root / "other.gguf", pair.file)
    assert (found.ok, found.differing) == (False, 1)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_NL"])
def test_kinds_that_cannot_be_written_are_refused_by_name_with_one_that_can(pair, kind):
    ship(pair, "Q8_0", down=kind)
    with pytest.raises(PlanError, match=f"stored as {kind}") as caught:
        fold(pair, pair.adapter())
    assert "Q8_0" in caught.value.hint
    fold(pair, pair.adapter("only", modules=[Q]))
    assert lib_merge.fold_check(pair.dense, pair.root / "only", pair.root / "out.gguf", pair.file).ok


def test_a_report_tells_kinds_and_steps(pair):
    ship(pair, "Q8_0", down="Q4_0")
    made = fold(pair, pair.adapter(), report=True)
    rows = {row["key"]: row for row in made.rows}
    assert rows["blk.0.attn_q.weight"]["dtype_out"] == "GGUF Q8_0"
    assert rows["token_embd.weight"]["dtype_out"] == "Q4_K"
    raw = np.frombuffer(coded(widened(pair.weights[Q]), "Q8_0"), np.uint8).reshape(80, -1)
    assert rows["blk.0.attn_q.weight"]["step"] == pytest.approx(
        float(np.abs(ggml.scales(raw, "Q8_0")).mean()), rel=1e-6
    )


def test_a_rounding_of_mlx_does_not_apply(pair):
    ship(pair, "Q8_0")
    fold(pair, pair.adapter(), "plain.gguf")
    made = fold(pair, pair.root / "adapter", rounding="away")
    assert (made.rounding.rounding, made.rounding.asked) == ("", False)
    assert (pair.root / "out.gguf").read_bytes() == (pair.root / "plain.gguf").read_bytes()


def test_the_output_is_named_as_a_gguf_file(pair):
    ship(pair, "Q8_0")
    with pytest.raises(PlanError, match=r"must end in \.gguf"):
        fold(pair, pair.adapter(), "out.safetensors")
    fold(pair, pair.root / "adapter")
    assert fold(pair, pair.root / "adapter", number=True).output.name == "out_1.gguf"


def test_a_shape_that_is_not_that_of_the_dense_weight_is_refused(pair):
    ship(pair, "Q8_0")
    pair.weights[Q] = np.zeros((80, 64), np.uint16)
    pair.write_dense()
    adapter = pair.adapter()
    with pytest.raises(PlanError, match="has the shape"):
        fold(pair, adapter)


def test_a_sum_beyond_the_scale_names_module_and_block(pair):
    ship(pair, "Q8_0")
    with pytest.raises(NumberError, match=r"block \d+ of row \d+") as caught:
        fold(pair, pair.adapter(alpha=1e12))
    assert caught.value.tensor.startswith("blk.0.")
    assert not (pair.root / "out.gguf").exists()


@pytest.mark.parametrize(
    ("module", "dense", "shipped"),
    [
        ("model.layers.3.self_attn.k_proj", "model.layers.3.self_attn.k_proj", "blk.3.attn_k"),
        ("model.layers.3.mlp.gate_proj", "model.language_model.layers.3.mlp.gate_proj", "blk.3.ffn_gate"),
        ("lm_head", "lm_head", "output"),
        (
            "double_blocks.0.img_attn.qkv",
            "model.diffusion_model.double_blocks.0.img_attn.qkv",
            "double_blocks.0.img_attn.qkv",
        ),
        ("blocks.0.self_attn.q", "blocks.0.self_attn.q", "blocks.0.self_attn.q"),
    ],
)
def test_names_of_gguf_files(module, dense, shipped):
    asked = dense if "language_model" in dense else module
    assert resolve(asked, {f"{dense}.weight"}, {f"{shipped}.weight"}) == (dense, shipped)


def test_the_quantizer_check_reads_gguf_files_too(pair):
    ship(pair, "Q4_1")
    (found,) = lib_merge.quantizer_check(pair.dense, pair.file, Q)
    assert (found.shipped, found.storage, found.identical) == ("blk.0.attn_q", "GGUF Q4_1", True)


# The order of rows.


def ship_heads(pair, architecture, fields):
    """A GGUF file of q and k alone, in float32, as its converter orders them: 4 heads of q, 2 of k."""
    tensors = {}
    for module, name, heads in ((Q, "attn_q", 4), (K, "attn_k", 2)):
        values = widened(pair.weights[module])
        values = interleaved(values, heads) if architecture in INTERLEAVED else values
        tensors[f"blk.0.{name}.weight"] = ("F32", values.shape, np.ascontiguousarray(values).tobytes())
    pair.file = pair.root / "shipped.gguf"
    named = {f"{architecture}.{name}": value for name, value in fields.items()}
    write_gguf(pair.file, tensors, {"general.architecture": architecture} | named)


HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}


@pytest.mark.parametrize("architecture", [*INTERLEAVED, *IN_ORDER])
def test_rows_are_in_the_order_of_the_architecture(tmp_path, architecture):
    pair = Pair(tmp_path, shapes={Q: (64, 128), K: (32, 128)})
    ship_heads(pair, architecture, HEADS)
    made = fold(pair, pair.adapter(modules=(Q, K)))
    assert made.rounding.share == 1  # of the dense weights as they are
    for module in (Q, K):
        down, up = pair.factors[module]
        pair.weights[module] = merged(widened(pair.weights[module]), down, up, 1.5)
    ship_heads(pair, architecture, HEADS)
    assert (pair.root / "out.gguf").read_bytes() == pair.file.read_bytes()


def test_llama_and_mistral_are_interleaved_and_qwen_gemma_and_phi_are_not():
    assert {"llama", "mistral3"} <= {*INTERLEAVED}
    assert {"qwen2", "qwen3", "gemma2", "gemma3", "phi3", "llama4"} <= {*IN_ORDER}
    assert not {*INTERLEAVED} & {*IN_ORDER}


def test_without_a_number_of_heads_for_k_it_is_that_of_q(tmp_path):
    pair = Pair(tmp_path, shapes={Q: (64, 128), K: (32, 128)})
    pair.weights[K] = pair.weights[Q][:32]
    pair.write_dense()
    ship_heads(pair, "llama", {"attention.head_count": 2})
    assert fold(pair, pair.adapter(modules=[K])).rounding.share == 1


@pytest.mark.parametrize("fields", [{}, {"attention.head_count": 0}, {"attention.head_count": 3}])
def test_heads_that_are_not_known_are_refused(tmp_path, fields):
    pair = Pair(tmp_path, shapes={Q: (64, 128), K: (32, 128)})
    ship_heads(pair, "llama", fields)
    with pytest.raises(PlanError, match=r"llama\.attention\.head_count is") as caught:
        fold(pair, pair.adapter(modules=[Q]))
    assert caught.value.tensor == "blk.0.attn_q.weight"


@pytest.mark.parametrize("architecture", ["qwen35", "deci", "never-heard-of"])
def test_a_language_model_whose_converter_is_not_known_is_refused_by_name(tmp_path, architecture):
    pair = Pair(tmp_path, shapes={Q: (64, 128), K: (32, 128)})
    ship_heads(pair, architecture, HEADS)
    with pytest.raises(PlanError, match=f"architecture is '{architecture}'") as caught:
        fold(pair, pair.adapter(modules=[Q]))
    assert "qwen3" in caught.value.hint


def test_an_image_model_keeps_its_rows_whatever_its_architecture_is_called(tmp_path):
    module = "double_blocks.0.img_mlp.0"
    pair = Pair(tmp_path, shapes={module: (64, 128)})
    values = widened(pair.weights[module])
    write_gguf(tmp_path / "shipped.gguf", {f"{module}.weight": ("F32", values.shape, values.tobytes())},
               {"general.architecture": "flux"})  # fmt: skip
    pair.file = tmp_path / "shipped.gguf"
    assert fold(pair, pair.adapter(modules=[module])).rounding.share == 1


@pytest.mark.parametrize(("module", "name"), [("self_attn.qkv_proj", "attn_qkv"), ("mlp.gate_up_proj", "ffn_up")])
def test_fused_projections_are_one_module(module, name):
    dense = f"model.layers.7.{module}"
    assert resolve(dense, {f"{dense}.weight"}, {f"blk.7.{name}.weight"}) == (dense, f"blk.7.{name}")
