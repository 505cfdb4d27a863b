"""Independent reference of the merge modes: slow, made from the mode document, shares no code with lib_merge."""

import hashlib
import math

import numpy as np
import torch

SEED_TAG = b"lib_merge/1\0"


# ------------------------------------------------------------------ random numbers
def philox_key(seed: int, name: str) -> int:
    """128-bit Philox key that depends on the user's seed and on the tensor's name (never on order, device, thread)."""
    h = hashlib.sha256(SEED_TAG + str(int(seed)).encode() + b"\0" + name.encode("utf-8")).digest()
    return int.from_bytes(h[:16], "little")


def raw16(n: int, seed: int, name: str) -> np.ndarray:
    """n little-endian uint16 draws; element i is a pure function of (seed, name, i): tiles in any order."""
    raw = np.random.Philox(key=philox_key(seed, name)).random_raw((n + 3) // 4)
    return np.asarray(raw, dtype="<u8").view("<u2")[:n]


def uniforms(shape, seed: int, name: str) -> torch.Tensor:
    """float32 uniforms (raw16 + 1/2) / 65536, strictly inside (0, 1)."""
    r = raw16(int(np.prod(shape, dtype=np.int64)), seed, name)
    return torch.from_numpy((r.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)).reshape(tuple(shape))


# ------------------------------------------------------------------ shared pieces
def _check_unit(**kw):
    for name, v in kw.items():
        if not (isinstance(v, (int, float)) and math.isfinite(v) and 0.0 <= v <= 1.0):
            raise ValueError(f"{name} must be a finite number in [0, 1], got {v!r}")


def _pair(a, b):
    if a.shape != b.shape:
        raise ValueError(f"shape mismatch {tuple(a.shape)} vs {tuple(b.shape)}")
    dt = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.to(dt), b.to(dt)


def blend(a, b, k):
    """out = A at k==0 (bit for bit), B at k==1 (bit for bit), A + k(B-A) between."""
    k = torch.as_tensor(k, dtype=a.dtype, device=a.device).expand(a.shape)
    out = a + k * (b - a)
    out = torch.where(k == 0, a, out)
    return torch.where(k == 1, b, out)


def similarity(a, b):
    """(s, M): s = (M-|A-B|)/M with M = max|A-B|; None when A == B everywhere (or the tensor is empty)."""
    d = (a - b).abs()
    if d.numel() == 0:
        return None, 0.0
    m = d.max()
    if not torch.isfinite(m):
        raise ValueError("non-finite values in a source tensor")
    if m == 0:
        return None, 0.0
    return (m - d) / m, float(m)


def exponent(alpha):
    return 1.0 / alpha - 1.0  # callers have excluded alpha == 0


def mix(m, smooth, seed, key):
    """k = (1-smooth)*Bernoulli(m) + smooth*m.  E[k] == m for every smooth."""
    if smooth == 1:
        return m
    bit = (uniforms(m.shape, seed, key).to(m.dtype) < m).to(m.dtype)
    if smooth == 0:
        return bit
    k = (1 - smooth) * bit + smooth * m
    return torch.where((m == 0) | (m == 1), m, k)  # no rounding at the certain ends


def column_mean(s):
    """Mean over dimension 0, kept for broadcasting (0-d and 1-d: mean of the whole tensor)."""
    return s if s.dim() == 0 else s.double().mean(dim=0, keepdim=True).to(s.dtype)


def band(x, low, high):
    """low < x < high, where low <= 0 means "no lower bound" and high >= 1 "no upper bound"."""
    ok = torch.ones_like(x, dtype=torch.bool)
    if low > 0:
        ok &= x > low
    if high < 1:
        ok &= x < high
    return ok


# ------------------------------------------------------------------ the modes
def weight_sum(a, b, alpha):
    a, b = _pair(a, b)
    return blend(a, b, min(max(float(alpha), 0.0), 1.0))


def comparative(a, b, alpha, beta=0.0, gamma=1.0, seed=0, key=""):
    _check_unit(alpha=alpha, beta=beta, gamma=gamma)
    a, b = _pair(a, b)
    s, _ = similarity(a, b)
    if alpha == 0 or s is None:
        return a.clone()
    e = exponent(alpha)
    if beta == 0:
        m = s**e
    elif beta == 1:
        m = (1 - s) ** e
    else:  # our extension: convex mix of the two curves
        m = (1 - beta) * s**e + beta * (1 - s) ** e
    return blend(a, b, mix(m.clamp(0, 1), gamma, seed, key))


def enhanced_manual(a, b, alpha, beta=0.0, gamma=1.0, delta=1.0, seed=0, key=""):
    _check_unit(alpha=alpha, beta=beta, gamma=gamma, delta=delta)
    a, b = _pair(a, b)
    s, _ = similarity(a, b)
    if alpha == 0 or s is None:
        return a.clone()
    m = (s ** exponent(alpha)).clamp(0, 1) * band(column_mean(s), beta, gamma)
    return blend(a, b, mix(m, delta, seed, key))


def enhanced_auto(a, b, alpha, beta, gamma=1.0, seed=0, key=""):
    _check_unit(alpha=alpha, beta=beta, gamma=gamma)
    a, b = _pair(a, b)
    s, _ = similarity(a, b)
    if alpha == 0 or beta == 0 or s is None:
        return a.clone()
    mean = s.double().mean().to(s.dtype)  # summed in float64, rounded once
    inside = (s > mean * (1 - beta)) & (s < mean * (1 + beta))
    m = (s ** exponent(alpha)).clamp(0, 1) * inside
    return blend(a, b, mix(m, gamma, seed, key))


def weight_sum_cutoff(a, b, alpha, beta=1.0, gamma=0.0):
    """beta = upper, gamma = lower limit of the column mean of s (upstream's `diff`, 1 = identical)."""
    _check_unit(alpha=alpha, beta=beta, gamma=gamma)
    a, b = _pair(a, b)
    s, _ = similarity(a, b)
    if alpha == 0 or s is None:
        return a.clone()
    return blend(a, b, float(alpha) * band(column_mean(s), gamma, beta).to(a.dtype))


def keep_threshold(drop):
    """Survivors are the draws below t of 65536; the probability in effect is t / 65536."""
    return math.ceil(65536 * (1 - float(drop)) - 0.5)


def dare_keep(shape, drop, seed, key):
    """True = this delta survives; P(True) = 1 - drop."""
    if drop == 0:
        return torch.ones(tuple(shape), dtype=torch.bool)
    if drop == 1:
        return torch.zeros(tuple(shape), dtype=torch.bool)
    r = raw16(int(np.prod(shape, dtype=np.int64)), seed, key)
    return torch.from_numpy(r < keep_threshold(drop)).reshape(tuple(shape))


def dare(a, b, alpha, beta=1.0, seed=0, key=""):
    """alpha = drop rate p, beta = multiplier: A + beta * keep * D / (1-p)."""
    _check_unit(alpha=alpha)
    a, b = _pair(a, b)
    if alpha == 1 or beta == 0:
        return a.clone()
    keep = dare_keep(a.shape, alpha, seed, key)
    if keep_threshold(alpha) == 0:
        return a.clone()
    return blend(a, b, keep.to(a.dtype) * (float(beta) * 65536 / keep_threshold(alpha)))


def ties_trim(delta, keep, quantile):
    """Drop the floor(quantile*n) smallest |delta| among the n survivors (those with keep and delta != 0).

    Ties at the limit survive, so fewer may go, never more; quantile 1 drops everything."""
    alive = keep & (delta != 0)
    n = int(alive.sum())
    cut = math.floor(quantile * n + 1e-9)
    if cut == 0:
        return keep
    if cut >= n:
        return torch.zeros_like(keep)
    mags = delta.abs()[alive]
    limit = torch.kthvalue(mags, cut + 1).values  # smallest magnitude that stays
    return keep & (delta.abs() >= limit)


def elect(deltas):
    """TIES sign election and disjoint mean over N task vectors (N = 1: identity)."""
    st = torch.stack(deltas)
    sign = torch.sign(st.sum(0))
    agree = (torch.sign(st) == sign) & (sign != 0)
    return (st * agree).sum(0) / agree.sum(0).clamp(min=1)


def dare_ties(a, b, alpha, beta=0.0, gamma=1.0, seed=0, key=""):
    """alpha = drop rate, beta = trim quantile, gamma = strength.  Rescaling by 1/(1-alpha) is uniform over the
    survivors, so it changes neither the trimming nor (with one donor) the election, and goes into k."""
    _check_unit(alpha=alpha, beta=beta)
    a, b = _pair(a, b)
    if alpha == 1 or gamma == 0:
        return a.clone()
    if keep_threshold(alpha) == 0:
        return a.clone()
    keep = ties_trim(b - a, dare_keep(a.shape, alpha, seed, key), beta)
    return blend(a, b, keep.to(a.dtype) * (float(gamma) * 65536 / keep_threshold(alpha)))


def svd_extract(a, b, linear_rank, conv_rank=None, clamp_q=1.0):
    """A tuned, B base.  -> (up, down, rank) or None where there is nothing to extract.

    up @ down (flattened) is the best rank-r approximation of the clamped A-B; the scale is split evenly."""
    _check_unit(clamp_q=clamp_q)
    a, b = _pair(a, b)
    if a.dim() < 2:
        return None
    d = a - b
    if not torch.isfinite(d).all():
        raise ValueError("non-finite values in a source tensor")
    if d.numel() == 0 or not d.any():
        return None
    conv = a.dim() > 2
    big_kernel = conv and any(n != 1 for n in a.shape[2:])
    want = int(conv_rank if (big_kernel and conv_rank is not None) else linear_rank)
    if want < 1:
        raise ValueError("rank must be at least 1")
    mat = d.reshape(d.shape[0], -1)
    if clamp_q < 1:
        mags = mat.abs().flatten()
        limit = torch.kthvalue(mags, max(1, math.ceil(clamp_q * mags.numel()))).values
        mat = mat.clamp(-limit, limit)
    r = min(want, *mat.shape)
    u, sv, vh = torch.linalg.svd(mat, full_matrices=False)
    u, sv, vh = u[:, :r], sv[:r], vh[:r]
    # fix the free sign of every component: its largest entry of u is positive
    flip = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    flip = torch.where(flip == 0, torch.ones_like(flip), flip)
    root = sv.sqrt()
    up, down = u * flip * root, vh * (flip.T * root[:, None])
    if conv:
        up = up.reshape(d.shape[0], r, *([1] * (d.dim() - 2)))
        down = down.reshape(r, *d.shape[1:])
    return up.contiguous(), down.contiguous(), r
