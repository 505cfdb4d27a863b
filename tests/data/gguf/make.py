"""Made tests/data/gguf with the gguf package 0.19.0: its codes of some weights, and a small file."""

import sys
from pathlib import Path

import gguf
import numpy as np

root = Path(sys.argv[1])
root.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
rows = [
    0.02 * rng.standard_normal((24, 128)),
    np.round(4 * rng.standard_normal((8, 128))) / 128,
    -np.abs(rng.standard_normal((4, 128))),
    np.abs(rng.standard_normal((4, 128))),
    np.broadcast_to(rng.standard_normal((4, 1)), (4, 128)),
    np.zeros((2, 128)),
    np.where(rng.random((6, 128)) < 0.9, 0, rng.standard_normal((6, 128))),
    1e-6 * rng.standard_normal((4, 128)),
]
weights = np.concatenate(rows).astype(np.float32)
made = {"weights": weights}
for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16"):
    kind = gguf.GGMLQuantizationType[name]
    made[name] = gguf.quants.quantize(weights, kind).view(np.uint8)
    made[f"{name}.decoded"] = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind).astype(np.float32)
np.savez_compressed(root / "codes.npz", **made)
writer = gguf.GGUFWriter(root / "small.gguf", "qwen3")
writer.add_name("small")
writer.add_uint32("qwen3.block_count", 1)
writer.add_array("some.array", ["a", "bc"])
writer.add_array("more", [1.5, 2.5])
writer.add_custom_alignment(64)
for name, kind in (("blk.0.attn_q.weight", "Q8_0"), ("blk.0.ffn_down.weight", "Q4_1"), ("output.weight", "F16")):
    w = weights[:10]
    t = gguf.GGMLQuantizationType[name and kind]
    writer.add_tensor(name, gguf.quants.quantize(w, t), raw_dtype=t)
writer.add_tensor("output_norm.weight", weights[0])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
