#!/usr/bin/env python3
"""optimizer_ref.py - small, slow, independent NumPy float64 reference for LoRA merging.

Written from the formulas (a description of the optimizer + papers), not from any implementation.
Purpose: an oracle that a torch implementation can be tested against. Nothing here
is random: every stochastic step takes its mask / uniforms as an argument.

Conventions
  diffs      list of arrays, one per LoRA, same shape, RAW: up @ down * alpha / rank,
             *without* strength. Conv weights are (out, in, kh, kw); "mat()" flattens
             them to (out, in*kh*kw).
  strengths  list of signed floats s_k.  w_k = |s_k|,  g_k = sign(s_k) * d_k ("oriented").
  Entries with s_k == 0 are dropped by prepare() before anything else.

Where the document is ambiguous the choice is a keyword argument; the docstring names
the alternatives.

Run:  python optimizer_ref.py      (self-check, < 10 s, one core)
"""

import numpy as np

F = np.float64
EPS = 1e-12


# ------------------------------------------------------------------ basics
def mat(x):
    """2-D view: (out, everything else); 1-D tensors become one row."""
    x = np.asarray(x, F)
    return x.reshape(1, -1) if x.ndim < 2 else x.reshape(x.shape[0], -1)


def delta(up, down, alpha=None):
    """Dense LoRA update. alpha None means alpha = rank (scale 1)."""
    up, down = mat(up), mat(down)
    r = down.shape[0]
    return up @ down * (1.0 if alpha is None else float(alpha) / r)


def prepare(diffs, strengths):
    """Drop zero strengths; return oriented diffs g_k and positive weights w_k."""
    keep = [(np.asarray(d, F), float(s)) for d, s in zip(diffs, strengths, strict=False) if s != 0]
    return [d if s > 0 else -d for d, s in keep], [abs(s) for _, s in keep]


def dot(a, b):
    return float(np.dot(np.ravel(a), np.ravel(b)))


def norm(a):
    return float(np.sqrt(dot(a, a)))


def cosine(a, b):
    d = norm(a) * norm(b)
    return max(-1.0, min(1.0, dot(a, b) / d)) if d > 0 else 0.0


def mean_norm(gs, ws):
    """sum(w*||g||)/sum(w): target norm of SLERP and of the consensus calibration."""
    return sum(w * norm(g) for g, w in zip(gs, ws, strict=False)) / sum(ws)


# ------------------------------------------------------------------ 1-2 linear
def weighted_sum(diffs, strengths):
    return sum(s * np.asarray(d, F) for d, s in zip(diffs, strengths, strict=False))


def weighted_average(diffs, strengths):
    """sum(s d)/sum|s|. Note: invariant to a common rescaling of all strengths."""
    t = sum(abs(s) for s in strengths)
    z = weighted_sum(diffs, strengths)
    return z / t if t > 0 else z * 0.0


# ------------------------------------------------------------------ 3 TIES
def ties_trim(d, density):
    """Keep |d| >= (k-th largest |d|), k = floor(density*(n-1))+1, i.e. the document's
    quantile rule; every entry tied with the threshold is kept, zeros never count."""
    d = np.asarray(d, F)
    n = d.size
    if density >= 1.0 or n == 0:
        return d.copy()
    if density <= 0.0:
        return np.zeros_like(d)
    k = int(np.floor(density * (n - 1) + 1e-9)) + 1
    thr = np.sort(np.abs(d).ravel())[n - k]
    return np.where(np.abs(d) >= thr, d, 0.0)


def ties_elect(gs, ws=None, method="frequency", vote="weighted"):
    """Elected sign in {-1, 0, +1} from oriented, trimmed diffs.
    total:     sign(sum w*g)   (vote='raw' uses sign(sum g), the document's letter)
    frequency: sign(sum sign(g)); a tie falls back to the total vote. (With two LoRAs
               EVERY conflict is a tie; resolving ties to +1 adds a DC bias.)
    A remaining exact tie elects 0, so the position outputs 0."""
    ws = [1.0] * len(gs) if ws is None or vote == "raw" else ws
    tot = np.sign(sum(w * g for g, w in zip(gs, ws, strict=False)))
    if method == "total":
        return tot
    if method != "frequency":
        raise ValueError(method)
    fr = np.sign(sum(np.sign(g) for g in gs))
    return np.where(fr == 0, tot, fr)


def ties_disjoint(gs, ws, elected, denom="weight"):
    """Average of the contributors whose sign equals the elected sign.
    denom='weight': divide by sum of agreeing w (document, mergekit normalize=true)
    denom='count' : divide by number of agreeing contributors (paper, PEFT)."""
    num = np.zeros_like(gs[0])
    den = np.zeros_like(gs[0])
    for g, w in zip(gs, ws, strict=False):
        m = (np.sign(g) == elected) & (g != 0)
        num += np.where(m, w * g, 0.0)
        den += np.where(m, w if denom == "weight" else 1.0, 0.0)
    return np.divide(num, den, out=np.zeros_like(num), where=den > 0)


def ties(
    diffs, strengths, density=0.5, method="frequency", vote="weighted", denom="weight", trimmed=None, columnwise=False
):
    """Full TIES. `trimmed` (oriented, already sparsified diffs) replaces step 1."""
    gs, ws = prepare(diffs, strengths)
    if not gs:
        return np.zeros_like(np.asarray(diffs[0], F))
    ts = [ties_trim(g, density) for g in gs] if trimmed is None else trimmed
    if columnwise and ts[0].ndim >= 2:
        return columnwise_merge(ts, ws, method, denom)
    return ties_disjoint(ts, ws, ties_elect(ts, ws, method, vote), denom)


# ------------------------------------------------------------------ column-wise
def columnwise_elect(ts, ws, method="frequency", score="rowsum"):
    """One sign per output row plus the per-LoRA row score used for the vote.
    score='rowsum'    : x_k[j] = sum_c t_k[j,c]            (document)
    score='projection': x_k[j] = <t_k[j], sum_m w_m t_m[j]> (does not depend on the
                        sign convention of the input units; recommended alternative)"""
    rows = [mat(t) for t in ts]
    if score == "rowsum":
        x = [r.sum(1) for r in rows]
    else:
        ref = sum(w * r for r, w in zip(rows, ws, strict=False))
        x = [(r * ref).sum(1) for r in rows]
    tot = np.sign(sum(w * v for v, w in zip(x, ws, strict=False)))
    if method == "total":
        return tot, x
    fr = np.sign(sum(np.sign(v) for v in x))
    return np.where(fr == 0, tot, fr), x


def columnwise_merge(ts, ws, method="frequency", denom="weight", score="rowsum"):
    """A LoRA's row enters WHOLE iff the sign of its row score equals the elected row
    sign. 1-D tensors fall back to element-wise TIES."""
    if ts[0].ndim < 2:
        return ties_disjoint(ts, ws, ties_elect(ts, ws, method), denom)
    el, x = columnwise_elect(ts, ws, method, score)
    shape = ts[0].shape
    num = np.zeros_like(mat(ts[0]))
    den = np.zeros(num.shape[0])
    for t, w, v in zip(ts, ws, x, strict=False):
        m = (np.sign(v) == el) & (el != 0)
        num += np.where(m[:, None], w * mat(t), 0.0)
        den += np.where(m, w if denom == "weight" else 1.0, 0.0)
    out = np.divide(num, den[:, None], out=np.zeros_like(num), where=den[:, None] > 0)
    return out.reshape(shape)


# ------------------------------------------------------------------ 4 SLERP
def slerp2(a, b, t, unit=False):
    """sin((1-t)O)/sinO a + sin(tO)/sinO b, angle O between a and b.
    unit=True interpolates unit directions and the two norms separately.
    sin O < 1e-6 (parallel OR anti-parallel) or a zero input: plain lerp."""
    na, nb = norm(a), norm(b)
    if na == 0 or nb == 0:
        return (1 - t) * a + t * b
    om = np.arccos(cosine(a, b))
    if np.sin(om) < 1e-6:
        return (1 - t) * a + t * b
    ca, cb = np.sin((1 - t) * om) / np.sin(om), np.sin(t * om) / np.sin(om)
    if unit:
        v = ca * a / na + cb * b / nb
        return v / norm(v) * ((1 - t) * na + t * nb)
    return ca * a + cb * b


def slerp(diffs, strengths, unit=False, correct=True):
    """Iterative pairwise SLERP, descending |s| (stable), t_k = w_k/(W_acc + w_k);
    then the norm is set to sum(w||g||)/sum(w) (also for two LoRAs)."""
    gs, ws = prepare(diffs, strengths)
    if not gs:
        return np.zeros_like(np.asarray(diffs[0], F))
    order = sorted(range(len(gs)), key=lambda k: -ws[k])
    acc, W = gs[order[0]], ws[order[0]]
    for k in order[1:]:
        acc = slerp2(acc, gs[k], ws[k] / (W + ws[k]), unit)
        W += ws[k]
    n = norm(acc)
    target = mean_norm(gs, ws)
    return acc * (target / n) if correct and n > 1e-9 * target else acc


# ------------------------------------------------------------------ 5 consensus
def effective_rank(s):
    """exp(entropy) of singular values normalised to sum 1 (Roy & Vetterli)."""
    s = np.asarray(s, F)
    if s.sum() <= 0:
        return 0.0
    p = s / s.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def spectral_cleanup(x, rounding="ceil"):
    """Keep the top ceil(exp(H)) singular values (MonoSoup's k); 1-D: unchanged."""
    if np.ndim(x) < 2:
        return np.array(x, F)
    u, s, vt = np.linalg.svd(mat(x), full_matrices=False)
    e = effective_rank(s)
    r = int(np.ceil(e - 1e-9)) if rounding == "ceil" else int(e + 0.5)
    r = max(1, min(r, len(s)))
    return (u[:, :r] * s[:r] @ vt[:r]).reshape(np.shape(x))


def consensus(diffs, strengths, cleanup=True, recalibrate=True):
    """1. sum(s d d^2)/sum(|s| d^2)  2. norm -> sum(w||d||)/sum(w)  3. spectral cleanup.
    recalibrate=True repeats stage 2 after stage 3 (truncation shrinks the norm)."""
    gs, ws = prepare(diffs, strengths)
    if not gs:
        return np.zeros_like(np.asarray(diffs[0], F))
    m = np.max([np.abs(g) for g in gs], axis=0)  # per-position scale:
    m = np.where(m > 0, m, 1.0)  # no under/overflow
    num = sum(w * (g / m) ** 3 for g, w in zip(gs, ws, strict=False)) * m
    den = sum(w * (g / m) ** 2 for g, w in zip(gs, ws, strict=False))
    out = np.divide(num, den, out=np.zeros_like(num), where=den > 0)
    target = mean_norm(gs, ws)

    def calibrate(z):
        n = norm(z)
        return z * (target / n) if n > 1e-9 * target else z

    out = calibrate(out)
    if cleanup:
        out = spectral_cleanup(out)
        if recalibrate:
            out = calibrate(out)
    return out


# ------------------------------------------------------------------ sparsification
def dare_scale(density, damp=0.0, law="power"):
    """Rescale factor. power: density**-(1-damp) (document); linear: 1/(rho+damp(1-rho))
    (an implementation). Both are 1/rho at damp=0 and 1 at damp=1."""
    return density ** -(1.0 - damp) if law == "power" else 1.0 / (density + damp * (1.0 - density))


def dare(d, keep, density, damp=0.0, law="power"):
    """keep: boolean array, drawn elsewhere with P(keep) = density."""
    return np.asarray(d, F) * keep * (dare_scale(density, damp, law) if density < 1 else 1.0)


def della_keep_prob(d, density, half_width=0.15, mode="window"):
    """Per-row keep probability.
    window      : rho + e*(2*asc/(n-1) - 1), e = min(half_width, rho, 1-rho); asc = 0 for
                  the smallest |d| in its row. Mean is exactly rho for every rho; larger
                  |d| is never less likely to be kept. (= DELLA's own code for e fixed)
    paper       : drop = p_min + (eps/n)*desc, p_min = max(1-rho-eps/2, 0), eps = 2*half_width
    document_reversed  : drop = (1-rho)*(desc+1)/n  -> mean drop is only ~ (1-rho)/2
    document: drop = (1-rho)*(asc+1)/n   -> drops LARGE values most (documented error)"""
    m = np.abs(mat(d))
    n = m.shape[1]
    asc = np.argsort(np.argsort(m, axis=1, kind="stable"), axis=1, kind="stable").astype(F)
    desc = n - 1 - asc
    if mode == "window":
        e = min(half_width, density, 1 - density)
        p = density + e * (2 * asc / max(n - 1, 1) - 1) if n > 1 else np.full_like(m, density)
    elif mode == "paper":
        eps = 2 * half_width
        p = 1 - np.clip(max(1 - density - eps / 2, 0) + eps / n * desc, 0, 1)
    elif mode == "document_reversed":
        p = 1 - (1 - density) * (desc + 1) / n
    elif mode == "document":
        p = 1 - (1 - density) * (asc + 1) / n
    else:
        raise ValueError(mode)
    return np.clip(p, 0.0, 1.0).reshape(np.shape(d))


def della(d, uniform, density, half_width=0.15, mode="window"):
    """uniform: array of U[0,1) numbers; keep where uniform < keep prob; rescale 1/prob."""
    d = np.asarray(d, F)
    if density >= 1:
        return d.copy()
    p = della_keep_prob(d, density, half_width, mode)
    return np.where(uniform < p, d / np.where(p > 0, p, 1.0), 0.0)


def conflict_mask(diffs, strengths):
    """True where at least one oriented diff is > 0 and at least one is < 0."""
    gs, _ = prepare(diffs, strengths)
    return np.any([g > 0 for g in gs], 0) & np.any([g < 0 for g in gs], 0)


def only_where(mask, sparsified, d):
    """Conflict-aware variant: sparsified inside the mask, untouched outside."""
    return np.where(mask, sparsified, d)


# ------------------------------------------------------------------ TALL masks
def tall_split(diffs, strengths, lam=1.0, rule="abs"):
    """Returns (consensus diffs, selfish addition sum(s d) on selfish positions, owner).
    owner[i] = index of the dominant LoRA or -1.
    abs   : k = argmax|c|, |c_k| >= lam * sum_{m!=k}|c_m|         (document)
    signed: |c_k| >= lam * |sum_{m!=k} c_m| for exactly one k     (the paper's form)
    Shared maxima and all-zero positions are never selfish (else two identical LoRAs would
    hand everything to the first one). abs == signed for N <= 3 at lam = 1."""
    cs = np.stack([s * np.asarray(d, F) for d, s in zip(diffs, strengths, strict=False)])
    a = np.abs(cs)
    if rule == "abs":
        top = a.max(0)
        hit = (a == top) & (top >= lam * (a.sum(0) - top)) & (top > 0)
    else:
        hit = (a >= lam * np.abs(cs.sum(0) - cs)) & (a > 0)
    owner = np.where(hit.sum(0) == 1, hit.argmax(0), -1)
    selfish = np.zeros_like(cs[0])
    rest = []
    for k, d in enumerate(diffs):
        own = owner == k
        selfish += np.where(own, cs[k], 0.0)
        rest.append(np.where(own, 0.0, np.asarray(d, F)))
    return rest, selfish, owner


def tall_consensus_mask(diffs, strengths, lam=0.4, k=2):
    """The paper's Consensus Merging mask: positions used by >= k tasks. Multiplying the
    merged delta by it REMOVES selfish and catastrophic weights (opposite of add-back)."""
    cs = np.stack([s * np.asarray(d, F) for d, s in zip(diffs, strengths, strict=False)])
    return (np.abs(cs) > lam * np.abs(cs.sum(0) - cs)).sum(0) >= k


# ------------------------------------------------------------------ DO / MGS
def do_orthogonalize(diffs, order="norm", max_gain=None):
    """Modified Gram-Schmidt on flattened unit directions, original norms restored.
    order='norm': descending norm, ties by index; 'given': list order.
    max_gain caps norm_restored/residual_norm: with residual rho (after projecting out
    earlier directions) the new norm is ||d|| * min(1, max_gain*rho). None = the document's
    letter, which blows rounding noise of near-duplicates up to full strength."""
    v = [np.ravel(np.asarray(d, F)) for d in diffs]
    n = [norm(x) for x in v]
    idx = sorted(range(len(v)), key=lambda k: -n[k]) if order == "norm" else list(range(len(v)))
    basis, out = [], [None] * len(v)
    for k in idx:
        if n[k] == 0:
            out[k] = np.zeros_like(np.asarray(diffs[k], F))
            continue
        q = v[k] / n[k]
        for b in basis:
            q = q - np.dot(b, q) * b
        r = norm(q)
        if r < 1e-7:  # duplicate: nothing of its own
            out[k] = np.zeros_like(np.asarray(diffs[k], F))
            continue
        q = q / r
        basis.append(q)
        scale = n[k] if max_gain is None else n[k] * min(1.0, max_gain * r)
        out[k] = (q * scale).reshape(np.shape(diffs[k]))
    return out


# ------------------------------------------------------------------ KnOTS
def knots(diffs, max_rank=256, rtol=1e-7):
    """SVD of [d_1 | ... | d_N] -> (U, [C_k]), C_k = U^T d_k = S V_k^T.
    U @ C_k == d_k whenever rank(M) <= max_rank, so re-assembling BEFORE the merge (the
    document's step 3) changes nothing: the merge has to act on the C_k."""
    m = np.concatenate([mat(d) for d in diffs], 1)
    u, s, _ = np.linalg.svd(m, full_matrices=False)
    r = max(1, min(max_rank, int((s > rtol * max(s[0], EPS)).sum())))
    u = u[:, :r]
    return u, [u.T @ mat(d) for d in diffs]


def knots_merge(diffs, strengths, fn, max_rank=256):
    """Paper form: merge in the shared basis, map back. Rank <= rank(M) <= sum of ranks,
    hence exactly storable as a LoRA (up = U, down = merged C) even for TIES."""
    u, cs = knots(diffs, max_rank)
    c = fn(cs, strengths)
    return (u @ c).reshape(np.shape(diffs[0])), u, c


def knots_factors(factors):
    """Same basis straight from LoRA factors [(up, down, alpha), ...]; no dense diff."""
    B = np.concatenate([mat(u) for u, _, _ in factors], 1)
    q, r = np.linalg.qr(B)
    cs, at = [], 0
    for u, d, al in factors:
        k = mat(u).shape[1]
        cs.append(r[:, at : at + k] @ mat(d) * (1.0 if al is None else al / mat(d).shape[0]))
        at += k
    uu, s, _ = np.linalg.svd(np.concatenate(cs, 1), full_matrices=False)
    keep = s > 1e-7 * s[0]
    return q @ uu[:, keep], [uu[:, keep].T @ c for c in cs]


# ------------------------------------------------------------------ conflict metrics
def gram_from_factors(factors):
    """Exact <d_i, d_j> without dense diffs: tr((B_i^T B_j)(A_j A_i^T))."""
    n = len(factors)
    g = np.zeros((n, n))
    sc = [(1.0 if al is None else al / mat(d).shape[0]) for _, d, al in factors]
    for i in range(n):
        for j in range(i, n):
            bi, ai, bj, aj = mat(factors[i][0]), mat(factors[i][1]), mat(factors[j][0]), mat(factors[j][1])
            g[i, j] = g[j, i] = sc[i] * sc[j] * float(((bi.T @ bj) * (ai @ aj.T)).sum())
    return g


def pair_metrics(a, b, floor=0.05, top=8):
    """a, b oriented diffs of one group.
    conflict : # opposite signs / # positions where both are non-zero
    weighted : same, weighted by min(|a|,|b|), both > floor*max(rms)
    expected : arccos(cos)/pi  (share of opposite signs of a Gaussian pair with that cos)
    excess   : max(weighted - expected, 0) (an implementation);  excess_raw: conflict - expected
    overlap  : mean of left/right ||Qa^T Qb||_F^2 / min(ra, rb), top singular vectors"""
    x, y = np.ravel(a), np.ravel(b)
    both = (x != 0) & (y != 0)
    n = int(both.sum())
    c = cosine(a, b)
    out = {
        "n": n,
        "cos": c,
        "norm_a": norm(a),
        "norm_b": norm(b),
        "dot": dot(a, b),
        "conflict": 0.0,
        "weighted": 0.0,
        "expected": float(np.arccos(c) / np.pi),
        "excess": 0.0,
        "excess_raw": 0.0,
    }
    if n:
        xo, yo = x[both], y[both]
        out["conflict"] = float((np.sign(xo) != np.sign(yo)).mean())
        nf = floor * max(np.sqrt((xo**2).mean()), np.sqrt((yo**2).mean()))
        st = (np.abs(xo) > nf) & (np.abs(yo) > nf)
        xs, ys = (xo[st], yo[st]) if st.any() else (xo, yo)
        w = np.minimum(np.abs(xs), np.abs(ys))
        out["weighted"] = float(w[np.sign(xs) != np.sign(ys)].sum() / w.sum())
        out["excess"] = max(out["weighted"] - out["expected"], 0.0)
        out["excess_raw"] = out["conflict"] - out["expected"]
    ua, sa, va = np.linalg.svd(mat(a), full_matrices=False)
    ub, sb, vb = np.linalg.svd(mat(b), full_matrices=False)
    ra = min(top, int((sa > 1e-9 * max(sa[0], EPS)).sum()) or 1)
    rb = min(top, int((sb > 1e-9 * max(sb[0], EPS)).sum()) or 1)
    left = ((ua[:, :ra].T @ ub[:, :rb]) ** 2).sum() / min(ra, rb)
    right = ((va[:ra] @ vb[:rb].T) ** 2).sum() / min(ra, rb)
    out["overlap"] = float((left + right) / 2)
    return out


def group_metrics(diffs, strengths):
    """Per-group numbers the strategy choice needs. Pair values are pooled: counts for the
    conflict ratio, plain mean for cosine; magnitude ratio on strength-scaled norms."""
    gs, ws = prepare(diffs, strengths)
    if len(gs) < 2:
        return {"n": len(gs), "conflict": 0.0, "cos": 0.0, "ratio": 1.0}
    ps = [pair_metrics(gs[i], gs[j]) for i in range(len(gs)) for j in range(i + 1, len(gs))]
    tot = sum(p["n"] for p in ps)
    nn = [w * norm(g) for g, w in zip(gs, ws, strict=False) if norm(g) > 0]
    return {
        "n": len(gs),
        "conflict": sum(p["conflict"] * p["n"] for p in ps) / tot if tot else 0.0,
        "cos": float(np.mean([p["cos"] for p in ps])),
        "excess": float(np.mean([p["excess"] for p in ps])),
        "overlap": float(np.mean([p["overlap"] for p in ps])),
        "ratio": max(nn) / min(nn) if nn else 1.0,
    }


def choose(m, profile="v1.2", rules="ordered"):
    """Strategy of one group. profile: v1.2 | no_slerp | classic.
    rules='ordered': consensus -> orthogonal -> TIES -> average, raw conflict
                     (the order of the code that the document describes; recommended)
    rules='document'   : the document's conditions read literally."""
    if m["n"] <= 1:
        return "weighted_sum"
    up = "slerp" if profile == "v1.2" else "weighted_average"
    if rules == "document":
        if m["conflict"] > 0.25:
            return "ties"
        if profile != "classic" and m["cos"] > 0.7:
            return "consensus"
        return up if abs(m["cos"]) < 0.3 else "weighted_average"
    if profile == "v1.2" and m["cos"] > 0.5 and m["conflict"] < 0.15:
        return "consensus"
    if profile != "classic" and abs(m["cos"]) < 0.25 and m["conflict"] < 0.60:
        return up
    return "ties" if m["conflict"] > 0.25 else up


def density_auto(samples, floor_ratio=0.10, lo=0.1, hi=0.9):
    """TIES density: share of |s*d| samples above floor_ratio * max, clamped."""
    x = np.abs(np.concatenate([np.ravel(s) for s in samples]))
    return float(np.clip((x > floor_ratio * x.max()).mean(), lo, hi)) if x.size and x.max() > 0 else 0.5


def auto_strength(gram, strengths, ortho_floor=None, ortho_cos=0.1):
    """Common scale making ||sum s d|| equal the largest single ||s d|| (never > 1).
    gram holds RAW <d_i, d_j>; the strengths' signs enter once, here."""
    s = np.asarray(strengths, F)
    e = np.sqrt(max(float(s @ gram @ s), 0.0))
    single = np.abs(s) * np.sqrt(np.diag(gram))
    if (single > 0).sum() <= 1 or e == 0:
        return 1.0
    scale = min(float(single.max()) / e, 1.0)
    n = len(s)
    cs = [
        np.sign(s[i] * s[j]) * gram[i, j] / np.sqrt(gram[i, i] * gram[j, j])
        for i in range(n)
        for j in range(i + 1, n)
        if single[i] > 0 and single[j] > 0
    ]
    if ortho_floor is not None and cs and abs(np.mean(cs)) <= ortho_cos:
        scale = max(scale, ortho_floor)
    return scale


def smooth(values, weights, lam):
    """Block smoothing: (1-lam)*m + lam*(weighted block mean)."""
    v, w = np.asarray(values, F), np.asarray(weights, F)
    return (1 - lam) * v + lam * float((v * w).sum() / w.sum())


# ------------------------------------------------------------------ LoRA output
def concat_factors(factors, coeffs):
    """Exact LoRA of sum_k coeff_k * d_k: ranks add, no SVD. Covers weighted sum/average,
    SLERP and DO (all are linear combinations of the d_k with scalar coefficients)."""
    up = np.concatenate(
        [
            mat(u) * (c * (1.0 if al is None else al / mat(d).shape[0]))
            for (u, d, al), c in zip(factors, coeffs, strict=False)
        ],
        1,
    )
    return up, np.concatenate([mat(d) for _, d, _ in factors], 0)


def svd_lora(x, rank):
    """Best rank-r LoRA of a dense delta and its relative Frobenius error."""
    u, s, vt = np.linalg.svd(mat(x), full_matrices=False)
    r = min(rank, len(s))
    q = np.sqrt(s[:r])
    err = float(np.sqrt((s[r:] ** 2).sum() / max((s**2).sum(), EPS)))
    return u[:, :r] * q, q[:, None] * vt[:r], err


def rank_for(x, rel_err):
    s = np.linalg.svd(mat(x), compute_uv=False)
    tail = np.sqrt(np.maximum((s**2).sum() - np.cumsum(s**2), 0) / max((s**2).sum(), EPS))
    return int(np.argmax(tail <= rel_err)) + 1


# ================================================================== self-check
def _lora(rng, o, i, r, alpha=None):
    return rng.standard_normal((o, r)), rng.standard_normal((r, i)) / np.sqrt(r), alpha


def self_check():
    rng = np.random.default_rng(0)
    ok = np.testing.assert_allclose
    fa, fb, fc = (_lora(rng, 24, 20, 3, al) for al in (None, 1.5, 6.0))
    a, b, c = (delta(*f) for f in (fa, fb, fc))

    # linear; exact low-rank output; strength semantics
    ok(weighted_sum([a, b], [2, -1]), 2 * a - b)
    ok(weighted_average([a, b], [2, -1]), (2 * a - b) / 3)
    ok(weighted_average([a, b], [0.2, 0.4]), weighted_average([a, b], [1, 2]))
    up, dn = concat_factors([fa, fb, fc], [1, -0.5, 0.25])
    ok(up @ dn, a - 0.5 * b + 0.25 * c)
    assert up.shape[1] == 9
    ok(gram_from_factors([fa, fb, fc]), [[dot(x, y) for y in (a, b, c)] for x in (a, b, c)])

    # TIES by hand (3 LoRAs, 4 positions, no trim)
    t = [np.array([1.0, -4, 2, 0]), np.array([2.0, 1, -3, 0]), np.array([-5.0, 2, 0, 0])]
    ok(ties_elect(t, method="frequency"), [1, 1, -1, 0])  # pos 2 ties 1:1 -> total
    ok(ties_elect(t, method="total"), [-1, -1, -1, 0])
    ok(ties_disjoint(t, [1, 1, 1], ties_elect(t)), [1.5, 1.5, -3, 0])
    ok(ties_disjoint(t, [1, 3, 1], ties_elect(t)), [(1 + 6) / 4, (3 + 2) / 4, -3, 0])
    ok(ties_disjoint(t, [1, 3, 1], ties_elect(t), "count"), [3.5, 2.5, -9, 0])
    ok(ties_trim(np.array([0.1, -3, 2, 0.5]), 0.5), [0, -3, 2, 0])
    ok(ties_trim(np.array([1.0, -1, 1, 0.5]), 0.25), [1, -1, 1, 0])  # ties at the threshold stay
    x = rng.standard_normal(1000)
    assert (ties_trim(x, 0.3) != 0).sum() == 300 and np.array_equal(ties_trim(x, 1), x)
    ok(ties_trim(x, 0.3), np.where(np.abs(x) >= np.quantile(np.abs(x), 0.7), x, 0))
    ok(ties([a], [1.0], density=1), a)
    ok(ties([a, a], [1, 1], density=1), a)
    ok(ties([a, b], [1, -1], 1.0), ties([a, -b], [1, 1], 1.0))  # negative strength = flipped vote
    p, q = rng.standard_normal((64, 64)), rng.standard_normal((64, 64))
    z = ties([p, q], [1, 1], 1.0)
    naive = ties_disjoint([p, q], [1, 1], np.where(np.sign(p) + np.sign(q) >= 0, 1.0, -1.0))
    assert abs(z.mean()) < 0.05 and naive.mean() > 0.3  # tie -> +1 adds a DC bias

    # column-wise
    r1 = [np.array([[4.0, -1], [1, 1]]), np.array([[-1.0, -1], [2, -1]])]
    ok(columnwise_merge(r1, [1, 1]), [[4, -1], [1.5, 0]])  # row 0: LoRA 1 alone, incl. its -1
    ok(columnwise_merge(r1, [1, 3]), [[-1, -1], [1.75, -0.5]])  # tie -> weighted total flips it
    ok(columnwise_merge([x, x], [1, 1]), x)  # 1-D falls back
    assert columnwise_merge([rng.standard_normal((4, 3, 3, 3))] * 2, [1, 1]).shape == (4, 3, 3, 3)

    # SLERP
    e1, e2 = np.array([1.0, 0]), np.array([0.0, 1])
    ok(slerp([e1, e2], [1, 1]), [np.sqrt(0.5)] * 2)
    ok(slerp([e1, e2], [2, 1]), [np.cos(np.pi / 6), np.sin(np.pi / 6)])
    ok(norm(slerp([a, b, c], [1, 0.5, 0.7])), (norm(a) + 0.5 * norm(b) + 0.7 * norm(c)) / 2.2)
    ok(slerp([a, a], [1, 1]), a)
    ok(slerp([a, b], [1, -1]), slerp([a, -b], [1, 1]))
    ok(slerp([a, -a], [1, 1]), a * 0)  # exact cancellation
    assert cosine(slerp([a, -0.5 * a], [1, 1]), a) > 0.999  # the stronger one wins
    sol = np.linalg.lstsq(
        np.stack([a.ravel(), b.ravel(), c.ravel()], 1), slerp([a, b, c], [1, 0.5, 0.7]).ravel(), rcond=None
    )
    assert sol[1][0] < 1e-18  # SLERP is a linear combination

    # consensus
    ok(consensus([a, a], [1, 0.3], cleanup=False), a)
    ok(consensus([np.array([1.0, 2])], [-1], cleanup=False), [-1, -2])
    v = consensus([np.array([1.0, 0]), np.array([3.0, 0])], [1, 1], cleanup=False)
    ok(v, [2, 0])  # (1+27)/(1+9)=2.8, norm -> 2
    ok(effective_rank([1, 1, 1, 1]), 4)
    ok(effective_rank([5, 0, 0]), 1)
    full = consensus([a, b], [1, 1])
    assert np.linalg.matrix_rank(full, tol=1e-8) == int(
        np.ceil(effective_rank(np.linalg.svd(consensus([a, b], [1, 1], cleanup=False), compute_uv=False)) - 1e-9)
    )
    ok(norm(full), (norm(a) + norm(b)) / 2)
    tiny = consensus([a * 1e-120, b * 1e-120], [1, 1], cleanup=False)
    ok(tiny * 1e120, consensus([a, b], [1, 1], cleanup=False))  # no underflow

    # DARE / DELLA
    n = 200000
    d = rng.standard_normal((50, n // 50))
    u = rng.random(d.shape)
    for rho in (0.1, 0.5, 0.9):
        k = u < rho
        ok((dare(d, k, rho) * d).sum() / (d * d).sum(), 1, atol=0.03)
        ok(dare_scale(rho), 1 / rho)
        ok([dare_scale(rho, 1), dare_scale(rho, 1, "linear"), dare_scale(rho, 0, "linear")], [1, 1, 1 / rho])
        assert dare_scale(rho, 0.5) != dare_scale(rho, 0.5, "linear")
        pr = della_keep_prob(d, rho)
        ok(pr.mean(), rho, atol=1e-9)
        mm = np.take_along_axis(pr, np.argsort(np.abs(d), 1), 1)
        assert (np.diff(mm, axis=1) >= -1e-12).all()  # bigger |d| kept more often
        ok((della(d, u, rho) * d).sum() / (d * d).sum(), 1, atol=0.06)
    lit, fix = della_keep_prob(d, 0.7, mode="document"), della_keep_prob(d, 0.7, mode="document_reversed")
    big = np.abs(d) == np.abs(d).max(1, keepdims=True)
    assert lit[big].max() < 0.71 < 0.99 < fix[big].min() and abs(fix.mean() - 0.85) < 0.01
    ok(della_keep_prob(d, 0.9, mode="paper").mean(), 0.85, atol=1e-3)  # p_min clamp misses rho
    cm = conflict_mask([np.array([1.0, -1, 2, 0]), np.array([-1.0, -1, 1, 3])], [1, 1])
    assert cm.tolist() == [True, False, False, False]
    assert conflict_mask([np.array([1.0]), np.array([1.0])], [1, -1])[0]
    ok(only_where(cm, np.zeros(4), np.array([1.0, -1, 2, 0])), [0, -1, 2, 0])

    # TALL
    for rule in ("abs", "signed"):
        rest, add, own = tall_split([a, b], [1, 1], rule=rule)
        assert (own >= 0).all()  # N=2, lam=1: everything is selfish
        ok(sum(rest) + add, a + b)
    ra, oa = tall_split([a, b, c], [1, 0.7, 1.2])[1:], tall_split([a, b, c], [1, 0.7, 1.2], rule="signed")[1:]
    ok(ra[1], oa[1])  # identical for N=3, lam=1
    rest, add, own = tall_split([a, b, c], [1, 0.7, 1.2], lam=2)
    ok(rest[0] + 0.7 * rest[1] + 1.2 * rest[2] + add, a + 0.7 * b + 1.2 * c)
    assert 0 < (own >= 0).mean() < 1
    assert (tall_split([a * 0, b * 0], [1, 1])[2] == -1).all()
    assert (tall_split([a, a], [1, 1])[2] == -1).all() and (tall_split([a, a], [1, 1], rule="signed")[2] == -1).all()
    own4 = [tall_split([a, b, c, a + b], [1, 1, 1, 1], rule=r)[2] for r in ("abs", "signed")]
    assert ((own4[0] >= 0) <= (own4[1] >= 0)).all() and (own4[0] != own4[1]).any()  # N>=4: abs is stricter
    assert tall_consensus_mask([a, a], [1, 1], 0.4).all()

    # DO
    o = do_orthogonalize([a, b, c])
    for i in range(3):
        ok(norm(o[i]), norm((a, b, c)[i]))
        for j in range(i):
            ok(cosine(o[i], o[j]), 0, atol=1e-10)
    big = max((a, b, c), key=norm)
    assert any(np.allclose(x, big) for x in o)  # strongest is untouched
    near = a + 1e-6 * b
    assert (
        abs(cosine(do_orthogonalize([a, near])[0], near)) < 0.1
        or abs(cosine(do_orthogonalize([a, near])[1], near)) < 0.1
    )
    assert min(norm(x) for x in do_orthogonalize([a, near], max_gain=2)) < 1e-4 * norm(a)
    assert min(norm(x) for x in do_orthogonalize([a, a])) == 0

    # KnOTS
    U, C = knots([a, b, c])
    ok(U @ C[1], b, atol=1e-9)  # re-assembly is the identity
    assert U.shape[1] == 9
    mz, U, _ = knots_merge([a, b, c], [1, 1, 1], lambda xs, s: ties(xs, s, 0.5, "total"))
    assert np.linalg.matrix_rank(mz) <= 9 and svd_lora(mz, 9)[2] < 1e-9
    dense = ties([a, b, c], [1, 1, 1], 0.5, "total")
    assert svd_lora(dense, 9)[2] > 0.1  # plain TIES is not low-rank
    ok(knots_merge([a, b, c], [1, -2, 0.5], weighted_sum)[0], a - 2 * b + 0.5 * c, atol=1e-9)
    ok(knots_merge([a, b, c], [1, 0.5, 0.7], slerp)[0], slerp([a, b, c], [1, 0.5, 0.7]), atol=1e-9)  # isometry:
    ok(
        knots_merge([a, b, c], [1, 1, 1], lambda xs, s: sum(do_orthogonalize(xs)))[0], sum(o), atol=1e-9
    )  # only element-wise steps differ

    def tall_avg(xs, s):
        rest, add, _ = tall_split(xs, s)
        return weighted_average(rest, s) + add

    assert np.linalg.matrix_rank(knots_merge([a, b, c], [1, 1, 1], tall_avg)[0], tol=1e-8) <= 9
    Uf, Cf = knots_factors([fa, fb, fc])
    ok(Uf @ Cf[2], c, atol=1e-9)
    ok(np.abs(Cf[0]), np.abs(C[0]), atol=1e-8)  # same basis up to signs

    # metrics: Gaussian law conflict = arccos(cos)/pi, decision regimes
    X, Y = rng.standard_normal((300, 300)), rng.standard_normal((300, 300))
    table = []
    for rho in (-0.6, 0.0, 0.2, 0.5, 0.8, 0.95):
        m = pair_metrics(X, rho * X + np.sqrt(1 - rho * rho) * Y)
        ok(m["conflict"], np.arccos(rho) / np.pi, atol=0.01)
        assert m["excess"] < 0.15
        gm = {"n": 2, "conflict": m["conflict"], "cos": m["cos"]}
        table.append((rho, round(m["conflict"], 3), round(m["excess"], 3), choose(gm, rules="document"), choose(gm)))
    assert [r[3] for r in table] == ["ties"] * 4 + ["consensus"] * 2
    assert [r[4] for r in table] == ["ties", "slerp", "slerp", "ties", "slerp", "consensus"]
    assert (
        choose({"n": 2, "conflict": 0.1, "cos": 0.9}, "classic")
        == choose({"n": 2, "conflict": 0.1, "cos": 0.9}, "no_slerp")
        == "weighted_average"
    )
    assert choose({"n": 2, "conflict": 0.5, "cos": 0.0}, "classic") == "ties" and choose({"n": 1}) == "weighted_sum"
    m = pair_metrics(a, a)
    ok([m["cos"], m["conflict"], m["overlap"], m["expected"]], [1, 0, 1, 0], atol=1e-6)
    assert group_metrics([a, 3 * b], [1, 1])["ratio"] > 1
    ok(density_auto([np.array([1.0, 0.05, 0.2, 0.01])]), 0.5)
    ok(smooth([0, 1], [1, 3], 0.5), [0.375, 0.875])

    # auto strength
    g2 = np.array([[4.0, 4], [4, 4]])
    ok(auto_strength(g2, [1, 1]), 0.5)
    ok(auto_strength(np.diag([4.0, 4]), [1, 1]), np.sqrt(0.5))
    ok(auto_strength(np.diag([4.0, 4]), [1, 1], 0.85), 0.85)
    ok(auto_strength(g2, [1, -1]), 1)  # cancels: no reduction
    ok(auto_strength(-g2 + 2 * np.diag([4.0, 4]), [1, -1]), 0.5)  # opposing diffs, opposite signs: aligned
    ok(auto_strength(g2, [1, 0]), 1)

    # SVD output
    up, dn, err = svd_lora(a, 3)
    ok(up @ dn, a, atol=1e-9)
    assert err < 1e-7 and rank_for(a, 1e-6) == 3
    print("self-check passed; Gaussian regimes (cos, conflict, excess, by the document, ordered):")
    for r in table:
        print("  ", *r)


if __name__ == "__main__":
    self_check()
