"""Every method of exact arithmetic in plain NumPy, one rounding an operation: a function for each, named by its id.

They take float32 or float64 arrays and all parameters; methods with chance draw by seed 0 for the tensor `NAME`.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np

from tests.data.modes_ref import keep_threshold, raw16
from tests.kernels.applying import NAME


def step(a, b, share):
    """A minus a multiple of what lies between A and B; the share is rounded to their dtype."""
    if share in (0, 1):
        return b if share else a
    return a - a.dtype.type(abs(share)) * ((a - b) if share > 0 else (b - a))


def weighted_sum(a, b, alpha):
    return step(a, b, alpha)


def triple_sum(a, b, c, alpha, beta):
    return step(a, step(b, c, beta), alpha)


def sum_twice(a, b, c, alpha, beta, gamma):
    return step(a, step(step(a, b, alpha), c, beta), gamma)


def subtract_weights(a, b, alpha, beta, gamma):
    kind = a.dtype.type
    return step(a, kind(gamma) * (a - kind(beta) * b), alpha)


def multiply_difference(a, b, alpha):
    kind = a.dtype.type
    return a * (kind(1) + kind(alpha) * (b - a))


def train_difference(a, b, c, alpha):
    kind = a.dtype.type
    learned, missing = c - b, abs(b - a)
    total = abs(learned) + missing
    part = np.divide(missing, total, out=np.zeros_like(a), where=total > 0)
    return a - learned * part * kind(1.8 * alpha)


def add_difference(a, b, c, alpha, smooth):
    delta = (c - b) if alpha > 0 else (b - c)
    if smooth:
        delta = smoothed(delta)
    return a - a.dtype.type(abs(alpha)) * delta


def smoothed(delta):
    """Median of 3 along each axis, then nine weights along each axis, added from the first neighbour to the last."""
    matrix = delta.reshape(len(delta), -1)
    axes = (0, 1) if delta.ndim > 1 else (0,)
    for axis in axes:
        matrix = np.sort(neighbours(matrix, axis, 1), axis=0)[1]
    taps = [(-(Decimal(by) ** 2) / 2).exp() for by in range(-4, 5)]
    for axis in axes:
        mean = np.zeros_like(matrix)
        for tap, neighbour in zip(taps, neighbours(matrix, axis, 4), strict=True):
            mean = mean + matrix.dtype.type(tap / sum(taps)) * neighbour
        matrix = mean
    return matrix.reshape(delta.shape)


def neighbours(matrix, axis, reach):
    around = np.pad(matrix, [(reach, reach) if at == axis else (0, 0) for at in (0, 1)], "symmetric")
    size = matrix.shape[axis]
    return [around.take(range(start, start + size), axis) for start in range(2 * reach + 1)]


def kept(a, drop_rate):
    return (raw16(a.size, 0, NAME) < keep_threshold(drop_rate)).reshape(a.shape)


def power_up_dare(a, b, alpha, beta):
    return np.where(kept(a, alpha), step(a, b, beta * 65536 / keep_threshold(alpha)), a)


def power_up_dare_ties(a, b, alpha, beta, gamma):
    size = abs(b - a)
    stays = kept(a, alpha) & (size > 0)
    ordered = np.sort(size[stays])
    trimmed = math.floor(beta * ordered.size + 1e-9)
    stays &= size >= ordered[trimmed]
    return np.where(stays, step(a, b, gamma * 65536 / keep_threshold(alpha)), a)


def tensor_select(a, b, alpha):
    return b if raw16(1, 0, NAME)[0] < keep_threshold(1 - alpha) else a


def weight_sum_cutoff(a, b, alpha, beta, gamma):
    gap = abs(a - b)
    columns = gap.reshape(len(gap), -1).astype(np.float64)
    largest = columns.max()
    similarity = np.array([(largest - math.fsum(column) / len(column)) / largest for column in columns.T])
    is_open = (similarity > gamma) | (gamma == 0)
    is_open &= (similarity < beta) | (beta == 1)
    return np.where(np.broadcast_to(is_open, columns.shape).reshape(a.shape), step(a, b, alpha), a)
