"""Folded checkpoints in mlx-lm: they load, they answer, and more like the unmerged adapter than without it."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

import lib_merge
from tests.fold.making import contents, write_adapter

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        sys.platform != "linux" and not (sys.platform == "darwin" and os.uname().machine == "arm64"),
        reason="MLX has no wheels for this system",
    ),
]

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PROMPTS, LENGTH, RANK, ALPHA = 64, 12, 8, 20.0
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def write_tokenizer(folder):
    """One word for each number of the vocabulary, in the files that every reader of tokenizers knows."""
    words = {f"w{number}": number for number in range(CONFIG["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    whole = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (folder / "tokenizer.json").write_text(json.dumps({**whole, "model": model}))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def write_dense(folder, rng):
    """A bf16 model of random weights; returns them in float32."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    folder.mkdir()
    shapes = {key: each.shape for key, each in tree_flatten(Model(ModelArgs.from_dict(CONFIG)).parameters())}
    weights = {
        key: mx.ones(shape) if len(shape) == 1 else mx.array(rng.standard_normal(shape) * 0.06)
        for key, shape in sorted(shapes.items())
    }
    weights = {key: each.astype(mx.bfloat16) for key, each in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    return {key: np.array(each.astype(mx.float32)) for key, each in weights.items()}


def adapter_of(folder, rng, weights):
    """A PEFT adapter of all projections whose change is a few tenths of a step; returns the changes."""
    tensors, changes = {}, {}
    for key in weights:
        if any(name in key for name in PROJECTIONS):
            module = key.removesuffix(".weight")
            rows, columns = weights[key].shape
            down = (0.03 * rng.standard_normal((RANK, columns))).astype(np.float32)
            up = (0.03 * rng.standard_normal((rows, RANK))).astype(np.float32)
            changes[key] = ALPHA / RANK * (up.astype(np.float64) @ down.astype(np.float64))
            for side, each in (("A", down), ("B", up)):
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = ("F32", each.shape, each.tobytes())
    write_adapter(folder, tensors, {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(PROJECTIONS)})
    return changes


def log_probabilities(model, prompts):
    import mlx.core as mx

    logits = model(mx.array(prompts)).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(np.float64)


def divergence(reference, other):
    """Mean KL(reference ‖ other) over all positions."""
    return float((np.exp(reference) * (reference - other)).sum(-1).mean())


def unmerged(folder, changes):
    """The dense model in float32 with the adapter's change beside its weights."""
    import mlx.core as mx
    from mlx_lm import load

    model, _ = load(str(folder))
    model.set_dtype(mx.float32)
    exact = dict(mx.load(str(folder / "model.safetensors")).items())
    summed = [
        (key, mx.array((np.array(exact[key].astype(mx.float32)) + change).astype(np.float32)))
        for key, change in changes.items()
    ]
    model.load_weights(summed, strict=False)
    return model


def test_a_folded_folder_answers_as_the_unmerged_adapter_does(tmp_path, capsys):
    import mlx.core as mx
    from mlx_lm import convert, generate, load

    mx.set_default_device(mx.cpu)
    found = []
    for seed in (0, 1, 2):
        root = tmp_path / str(seed)
        root.mkdir()
        rng = np.random.default_rng(seed)
        dense, shipped, out = root / "dense", root / "shipped", root / "out"
        changes = adapter_of(root / "adapter", rng, write_dense(dense, rng))
        convert(str(dense), str(shipped), quantize=True, q_group_size=64, q_bits=4)
        made = lib_merge.fold(dense, root / "adapter", out, quantize=shipped)
        assert made.folded == len(PROJECTIONS) * CONFIG["num_hidden_layers"]
        assert (made.rounding.rounding, made.rounding.share) == ("even", 1.0)
        assert lib_merge.fold_check(dense, root / "adapter", out, shipped).ok
        prompts = rng.integers(2, CONFIG["vocab_size"], (PROMPTS, LENGTH))
        folded, tokenizer = load(str(out))
        assert isinstance(generate(folded, tokenizer, prompt="w5 w7 w9", max_tokens=4), str)
        reference = log_probabilities(unmerged(dense, changes), prompts)
        plain = log_probabilities(load(str(shipped))[0], prompts)
        found.append((divergence(reference, log_probabilities(folded, prompts)), divergence(reference, plain)))
    with capsys.disabled():
        pairs = ", ".join(f"{with_it:.2e} against {without:.2e}" for with_it, without in found)
        print(f" KL on {PROMPTS} prompts, folded against without the adapter: {pairs}", end="")
    assert all(0 < with_it < without for with_it, without in found)


def test_without_effect_it_is_what_mlx_lm_converted(tmp_path):
    from mlx_lm import convert

    rng = np.random.default_rng(3)
    dense, shipped = tmp_path / "dense", tmp_path / "shipped"
    adapter_of(tmp_path / "adapter", rng, write_dense(dense, rng))
    for bits, group in ((2, 32), (3, 128), (6, 64), (8, 32)):
        name = f"{bits}.{group}"
        convert(str(dense), str(shipped / name), quantize=True, q_group_size=group, q_bits=bits)
        lib_merge.fold(dense, tmp_path / "adapter", tmp_path / name, quantize=shipped / name, lora_alpha=0)
        assert contents(tmp_path / name) == contents(shipped / name)
