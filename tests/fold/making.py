"""Small dense checkpoints, quantized ones as MLX writes them, and adapters, made without lib_merge."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.data.mlx_ref import f32_to_bf16, merged, quantized, stored, widened

FORMAT = {"bf16": "BF16", "f16": "F16", "f32": "F32", "u32": "U32"}
Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"
NORM, ROUTER = "model.norm", "model.layers.0.mlp.gate"
MODULES = {Q: (80, 128), DOWN: (48, 256), HEAD: (64, 128)}


def entry(array, dtype=None):
    """(dtype of the format, shape, bytes) of an array; uint16 is bf16."""
    name = dtype or {"u2": "BF16", "f2": "F16", "f4": "F32", "u4": "U32", "f8": "F64", "i1": "I8"}[array.dtype.str[1:]]
    return name, array.shape, np.ascontiguousarray(array).tobytes()


def write_mlx(path, tensors, metadata=None):
    """A file as MLX writes it: keys in order of their names, data in another, no padding, offsets before the dtype."""
    at, places = 0, {}
    for key in sorted(tensors, key=lambda key: hashlib.sha256(key.encode()).hexdigest()):
        places[key] = [at, at + len(tensors[key][2])]
        at += len(tensors[key][2])
    header = {"__metadata__": metadata or {"format": "mlx"}}
    for key in sorted(tensors):
        header[key] = {"data_offsets": places[key], "dtype": tensors[key][0], "shape": list(tensors[key][1])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((3 - len(text)) % 8)  # data never starts where a word could
    data = b"".join(tensors[key][2] for key in sorted(places, key=lambda key: places[key]))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(root, shards, config=None):
    """Shards with an index, and side files."""
    root.mkdir(parents=True, exist_ok=True)
    home = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_mlx(root / name, tensors)
        home |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    (root / "config.json").write_text(json.dumps(config if config is not None else {"model_type": "qwen3"}))
    (root / "tokenizer.json").write_bytes(b'{"made": "up"}')
    (root / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    return root


def leaves(values, bits, group, rounding, dtype):
    """The three tensors of a module, as entries."""
    found = quantized(values, bits, group, rounding, dtype)
    return dict(zip(("weight", "scales", "biases"), (entry(each) for each in found), strict=True))


@dataclass
class Pair:
    """A dense checkpoint, the quantized one that was made from it, and what went into them."""

    root: Path
    bits: int = 4
    group: int = 64
    rounding: str = "even"
    dtype: str = "bf16"
    scales: str = "bf16"
    shapes: dict[str, tuple[int, int]] = field(default_factory=lambda: dict(MODULES))
    rename: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.weights = {
            name: stored((0.02 * rng.standard_normal(shape)).astype(np.float32), self.dtype)
            for name, shape in self.shapes.items()
        }
        self.plain = {
            NORM: stored(rng.standard_normal(128).astype(np.float32), self.dtype),
            ROUTER: stored(rng.standard_normal((16, 128)).astype(np.float32), self.dtype),
        }
        self.dense, self.shipped = self.root / "dense", self.root / "shipped"
        self.write_dense()
        self.write_shipped()

    def name(self, module):
        """What the quantized checkpoint calls a module."""
        return self.rename.get(module, module)

    def write_dense(self, **extra):
        everything = {f"{name}.weight": entry(array) for name, array in (self.weights | self.plain).items()} | extra
        names = list(everything)
        write_folder(self.dense, [{name: everything[name] for name in part} for part in (names[:2], names[2:])])

    def write_shipped(self, config=None, **extra):
        """Each module's weight lies in the first shard, its scales and biases in the second."""
        first, second = dict(extra), {f"{name}.weight": entry(array) for name, array in self.plain.items()}
        for module in self.weights:
            made = leaves(self.seen(module), self.bits, self.group, self.rounding, self.scales)
            first[f"{self.name(module)}.weight"] = made["weight"]
            second |= {f"{self.name(module)}.{leaf}": made[leaf] for leaf in ("scales", "biases")}
        general = {"bits": self.bits, "group_size": self.group, "mode": "affine"}
        write_folder(self.shipped, [first, second], {"quantization": general} if config is None else config)

    def seen(self, module):
        """A dense weight as the converter sees it: cast to the dtype of the scales."""
        return widened(stored(widened(self.weights[module]), self.scales))

    def adapter(self, name="adapter", modules=(Q, DOWN), rank=4, alpha=6.0, size=0.02, dtype="f32", **config):
        """A PEFT adapter of random factors."""
        rng = np.random.default_rng(11)
        tensors, self.factors = {}, {}
        for module in modules:
            out, inner = self.shapes[module]
            down, up = (
                (size * rng.standard_normal(shape)).astype(np.float32) for shape in ((rank, inner), (out, rank))
            )
            self.factors[module] = tuple(widened(stored(each, dtype)) for each in (down, up))
            for side, each in zip("AB", (down, up), strict=True):
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = entry(stored(each, dtype))
        return write_adapter(self.root / name, tensors, {"r": rank, "lora_alpha": alpha, **config})

    def expected(self, module, scale, *, round_dense=False, rounding=None):
        """The leaves that a fold of the last adapter gives, by the plain implementation."""
        down, up = self.factors[module]
        values = merged(widened(self.weights[module]) if round_dense else self.seen(module), down, up, scale)
        for dtype in (self.dtype, self.scales) if round_dense else ():
            values = widened(stored(values, dtype))
        return leaves(values, self.bits, self.group, rounding or self.rounding, self.scales)


def write_adapter(root, tensors, config):
    """An adapter's folder; no configuration where it is None."""
    root.mkdir(parents=True, exist_ok=True)
    write_mlx(root / "adapter_model.safetensors", tensors)
    if config is not None:
        base = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "bias": "none", "use_dora": False}
        (root / "adapter_config.json").write_text(json.dumps({**base, **config}))
    return root


def raw_tensors(root):
    """key -> bytes, of all safetensors files of a folder."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        for key, (file, begin, end) in places(path).items():
            found[key] = file[begin:end]
    return found


def places(path):
    """key -> (bytes of the file, begin, end)."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {key: (content, *(start + at for at in entry["data_offsets"])) for key, entry in header.items()}


def contents(root):
    """name -> bytes of every file."""
    return {path.name: path.read_bytes() for path in root.iterdir()}


def bf16(values):
    return f32_to_bf16(np.asarray(values, np.float32))
