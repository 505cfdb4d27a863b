"""Deltas for the tests of kernels that merge several: of LoRAs, in NumPy and torch, with the oracle's tolerance."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64)
SHAPES = ((24, 20), (6, 4, 3, 3), (37,))
# For tests by hypothesis: how long one takes says nothing on a busy machine.
patient = settings(deadline=None, max_examples=40)
STRENGTHS = ((1.0, 1.0), (0.5, -1.25), (1.0, 1.0, 1.0), (1.0, -0.6, 0.3), (-0.7, 0.7, 0.7, 0.2))


def low_rank(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0, rank: int = 3):
    """Deltas as LoRAs make them: rank 3, sizes that differ; of one dimension, plain numbers."""
    rng = np.random.default_rng([seed, count, *shape])
    rest = int(np.prod(shape[1:]))
    made = []
    for number in range(count):
        factors = rng.standard_normal((shape[0], rank)), rng.standard_normal((rank, rest))
        delta = factors[0] @ factors[1] if len(shape) > 1 else rng.standard_normal(shape)
        made.append(torch.from_numpy(delta.reshape(shape) * (1 + 0.3 * number)).to(dtype))
    return made


def arrays(tensors):
    """The same numbers for the oracle, in float64."""
    return [tensor.double().numpy() for tensor in tensors]


def close(found: torch.Tensor, wanted, inputs) -> None:
    """Equal within 1e-9 (float64) or 1e-5 (float32) of the inputs' norm."""
    share = 1e-9 if found.dtype == torch.float64 else 1e-5
    size = max(float(x.double().norm()) for x in inputs)
    assert found.shape == inputs[0].shape
    assert np.linalg.norm(found.double().numpy() - wanted) <= share * size


@st.composite
def stacks(draw, least: int = 2, most: int = 5):
    """(deltas, strengths) of any number, shape and sign; zeros and equal entries among them."""
    count = draw(st.integers(least, most))
    shape = draw(st.sampled_from([(1,), (7,), (1, 1), (5, 3), (3, 2, 3, 3)]))
    size = int(np.prod(shape))
    entry = st.integers(-4, 4).map(lambda n: n / 4)
    deltas = [
        torch.tensor(draw(st.lists(entry, min_size=size, max_size=size)), dtype=torch.float64).reshape(shape)
        for _ in range(count)
    ]
    strengths = draw(st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0, -0.25]), min_size=count, max_size=count))
    return deltas, strengths
