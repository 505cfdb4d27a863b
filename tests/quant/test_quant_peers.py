"""Codes held against the packages whose they are, on numbers drawn afresh for every run."""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import pytest
import torch

from lib_merge.quant import ggml
from lib_merge.quant.affine import BITS, GROUPS, quantize

pytestmark = pytest.mark.peers

SHAPE = (48, 384)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def scattered(rng, shape):
    """Magnitudes of all kinds in one group."""
    return rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, shape)


def half_steps(rng, shape):
    """Groups whose edge is 8.5 steps: rounding it the other way moves the whole grid."""
    values = rng.integers(-8, 8, shape) / 16.0
    values[:, ::32], values[:, 1::32] = 8.5 / 16, -6.5 / 16
    return values * 2.0 ** rng.integers(-6, 2, (shape[0], 1))


FAMILIES = {
    "gauss": lambda rng, shape: 0.02 * rng.standard_normal(shape),
    "heavy": lambda rng, shape: 0.02 * rng.standard_t(3, shape),
    "ties": lambda rng, shape: np.round(4 * rng.standard_normal(shape)) / 128,
    "half steps": half_steps,
    "negative": lambda rng, shape: -np.abs(0.02 * rng.standard_normal(shape)),
    "positive": lambda rng, shape: np.abs(0.02 * rng.standard_normal(shape)),
    "flat": lambda rng, shape: np.repeat(0.37 * rng.standard_normal((shape[0], 1)), shape[1], 1),
    "around the smallest scale": lambda rng, shape: 1e-7 * rng.standard_normal(shape),
    "subnormal": lambda rng, shape: 1e-39 * rng.standard_normal(shape),
    "zeros of both signs": lambda rng, shape: np.zeros(shape) * rng.choice([-1.0, 1.0], shape),
    "sparse": lambda rng, shape: np.where(rng.random(shape) < 0.95, 0.0, rng.standard_normal(shape)),
    "outliers": lambda rng, shape: np.where(rng.random(shape) < 0.01, 30.0, 0.02) * rng.standard_normal(shape),
    "scattered": scattered,
}


@pytest.fixture
def rng():
    """Another one in each run; a failure shows the seed."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def mlx_is_expected():
    return sys.platform == "linux" or (sys.platform == "darwin" and os.uname().machine == "arm64")


@pytest.mark.skipif(not mlx_is_expected(), reason="MLX has no wheels for this system")
def test_mlx_makes_the_same_codes_scales_and_biases(rng, capsys):
    """MLX runs on the CPU here, where it rounds halves to even."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    groups = different = 0
    for (family, draw), (name, dtype) in itertools.product(FAMILIES.items(), DTYPES.items()):
        weights = torch.from_numpy(draw(rng, SHAPE).astype(np.float32)).to(dtype).float()
        theirs_in = mx.array(weights.numpy()).astype(getattr(mx, name))
        for bits, group in itertools.product(BITS, GROUPS):
            theirs = mx.quantize(theirs_in, group_size=group, bits=bits, mode="affine")
            ours = quantize(weights.clone(), bits=bits, group=group, rounding="even", dtype=dtype)
            words = np.ascontiguousarray(np.array(theirs[0])).view(np.uint8)
            pairs = [(ours.words.numpy(), words)]
            for one, other in ((ours.scales, theirs[1]), (ours.biases, theirs[2])):
                pairs.append((one.float().numpy().view(np.uint32), np.array(other.astype(mx.float32)).view(np.uint32)))
            count = SHAPE[0] * SHAPE[1] // group
            equal = np.ones(count, bool)
            for one, other in pairs:
                equal &= (one.reshape(count, -1) == other.reshape(count, -1)).all(1)
            groups, different = groups + count, different + int((~equal).sum())
            assert equal.all(), (family, name, bits, group)
    with capsys.disabled():
        print(f" {groups} groups compared with MLX {mx.__version__}, {different} differ", end="")
    assert groups == len(FAMILIES) * len(DTYPES) * len(BITS) * SHAPE[0] * sum(SHAPE[1] // group for group in GROUPS)


def test_the_gguf_package_makes_the_same_blocks_and_numbers(rng, capsys):
    import gguf

    blocks = 0
    drawn = {family: draw for family, draw in FAMILIES.items() if family != "subnormal"}  # not defined there: 1/d = ∞
    for (family, draw), kind in itertools.product(drawn.items(), ggml.KINDS):
        weights = draw(rng, SHAPE).astype(np.float32)
        theirs = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind]).view(np.uint8)
        ours = ggml.encode(weights.copy(), kind)
        assert np.array_equal(ours, theirs), (family, kind)
        decoded = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(ggml.decode(ours, kind), decoded), (family, kind)
        blocks += ours.size // ggml.KINDS[kind].bytes
    with capsys.disabled():
        print(f" {blocks} blocks compared with the gguf package", end="")
    assert blocks == len(drawn) * len(ggml.KINDS) * SHAPE[0] * SHAPE[1] // ggml.BLOCK
