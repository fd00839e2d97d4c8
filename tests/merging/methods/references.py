"""Every method again, whole and in float64 numpy, written from its formula: what the library is compared with.

`W` is (models, rows, columns), `B` the base (rows, columns), `T` the task vectors W − B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize

Array = np.ndarray
Reference = Callable[..., Array]


def flat(tensor: Array) -> Array:
    return tensor.reshape(len(tensor), -1)


def column(values: Any, models: int) -> Array:
    return np.broadcast_to(np.asarray(values, dtype=float), (models,)).reshape(-1, 1, 1)


# Averages


def linear(W: Array, B: Array, weight: Any = 1.0, normalize: bool = True) -> Array:
    w = column(weight, len(W))
    return (w * W).sum(0) / (w.sum() if normalize else 1)


def uniform_soup(W: Array, B: Array) -> Array:
    return W.mean(0)


def sparse_soup(W: Array, B: Array, weight: Any = 1.0, density: float = 1.0) -> Array:
    soup = np.where(B == 0, 0, np.average(W, axis=0, weights=column(weight, len(W)).ravel()))
    least = np.sort(np.abs(soup), axis=None)[-round(density * soup.size)]
    return np.where(np.abs(soup) < least, 0, soup)


def wise_ft(W: Array, B: Array, alpha: float = 0.5, weight: Any = 1.0) -> Array:
    return (1 - alpha) * B + alpha * np.average(W, axis=0, weights=column(weight, len(W)).ravel())


def ema(W: Array, B: Array, decay: float = 0.9) -> Array:
    mean = W[0]
    for w in W[1:]:
        mean = decay * mean + (1 - decay) * w
    return mean


def swa(W: Array, B: Array, start: int = 0, every: int = 1) -> Array:
    return W[start:][::-1][::every].mean(0)


def lawa(W: Array, B: Array, window: int = 6) -> Array:
    return W[-window:].mean(0)


def tail(W: Array, B: Array, fraction: float = 0.5) -> Array:
    return W[-max(1, int(np.ceil(len(W) * fraction))) :].mean(0)


def geometric(W: Array, B: Array, decay: float = 0.5) -> Array:
    return np.average(W, axis=0, weights=[decay**age for age in range(len(W))][::-1])


# On the sphere


def angle(a: Array, b: Array) -> float:
    return float(np.arccos(np.clip((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b), -1, 1)))


def arc(a: Array, b: Array, t: float) -> Array:
    theta = angle(a, b)
    return (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)


def slerp(W: Array, B: Array, t: float = 0.5) -> Array:
    return arc(B, W[0], t)


def nuslerp(
    W: Array, B: Array, weight: Any = 1.0, nuslerp_flatten: bool = True, nuslerp_row_wise: bool = False
) -> Array:
    w = column(weight, 2).ravel()
    t, T = w[1] / w.sum(), W - B
    if nuslerp_flatten:
        return B + arc(T[0], T[1], t)
    if nuslerp_row_wise:
        return B + np.stack([arc(a, b, t) for a, b in zip(T[0].T, T[1].T, strict=True)]).T
    return B + np.stack([arc(a, b, t) for a, b in zip(T[0], T[1], strict=True)])


def multislerp(W: Array, B: Array, weight: Any = 1.0, normalize_weights: bool = True) -> Array:
    w = column(weight, len(W)).ravel()
    w = w / w.sum() if normalize_weights else w
    T = flat(W - B)
    norms = np.linalg.norm(T, axis=1)
    units = T / norms[:, None]
    mean = w @ units
    mean /= np.linalg.norm(mean)
    tangent = w @ (units - np.outer(units @ mean, mean))
    length = np.linalg.norm(tangent)
    point = mean * np.cos(length) + (tangent / length * np.sin(length) if length > 1e-12 else 0)
    return B + (point * (w @ norms)).reshape(B.shape)


def karcher(W: Array, B: Array, max_iter: int = 10, tol: float = 1e-5) -> Array:
    """The minimum of Σ angle², by many small steps instead of few long ones."""
    units = flat(W) / np.linalg.norm(flat(W), axis=1)[:, None]
    mean = units.mean(0)
    for _ in range(400):
        mean = mean / np.linalg.norm(mean)
        cosines = units @ mean
        angles = np.arccos(cosines)
        mean = mean + 0.2 * ((angles / np.sin(angles)) @ (units - np.outer(cosines, mean))) / len(W)
    mean /= np.linalg.norm(mean)
    return (mean * np.linalg.norm(flat(W), axis=1).mean()).reshape(B.shape)


def model_stock(W: Array, B: Array, filter_wise: bool = False) -> Array:
    T, count = W - B, len(W)

    def share(vectors: Array) -> float:
        pairs = [(i, j) for i in range(count) for j in range(i)]
        cosine = np.mean([np.cos(angle(vectors[i], vectors[j])) for i, j in pairs])
        return count * cosine / (1 + (count - 1) * cosine)

    if filter_wise:
        return B + np.stack([share(T[:, row]) * T[:, row].mean(0) for row in range(B.shape[0])])
    return B + share(T) * T.mean(0)


# Task vectors


def trimmed(T: Array, density: Any) -> Array:
    result = np.zeros_like(T)
    for k, d in enumerate(column(density, len(T)).ravel()):
        order = np.argsort(-np.abs(T[k]), axis=None)[: max(1, int(d * T[k].size))]
        result[k].flat[order] = T[k].flat[order]
    return result


def inner(T: Array, density: Any, gamma: Any) -> Array:
    result = np.zeros_like(T)
    for k in range(len(T)):
        d, g = column(density, len(T)).ravel()[k], column(gamma, len(T)).ravel()[k]
        order = np.argsort(-np.abs(T[k]), axis=None)
        kept, top = int(d * T[k].size), int(g * T[k].size)
        top = min(top, T[k].size - kept)
        result[k].flat[order[top : top + kept]] = T[k].flat[order[top : top + kept]]
    return result


def rescaled(before: Array, after: Array) -> Array:
    return after * (np.abs(flat(before)).sum(1) / np.abs(flat(after)).sum(1)).reshape(-1, 1, 1)


def elected(T: Array, weight: Any, normalize: bool) -> Array:
    w = column(weight, len(T))
    sign = np.where((w * T).sum(0) >= 0, 1, -1)
    agree = np.sign(w * T) == sign
    divisor = (w * agree).sum(0)
    return (w * T * agree).sum(0) / (np.where(divisor == 0, 1, divisor) if normalize else 1)


def task_arithmetic(W: Array, B: Array, weight: Any = 1.0, normalize: bool = False, lambda_: float = 1.0) -> Array:
    w = column(weight, len(W))
    return B + lambda_ * (w * (W - B)).sum(0) / (w.sum() if normalize else 1)


def ties(
    W: Array,
    B: Array,
    weight: Any = 1.0,
    density: Any = 1.0,
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
    paper: bool = False,
) -> Array:
    T = trimmed(W - B, density)
    T = rescaled(W - B, T) if rescale else T
    if paper:
        sign = np.sign(T.sum(0))
        agree = (np.sign(T) == sign) & (T != 0)
        return B + lambda_ * (T * agree).sum(0) / np.maximum(agree.sum(0), 1)
    return B + lambda_ * elected(T, weight, normalize)


def breadcrumbs(
    W: Array, B: Array, weight: Any = 1.0, density: Any = 1.0, gamma: Any = 0.01, rescale: bool = False
) -> Array:
    T = inner(W - B, density, gamma)
    return B + (column(weight, len(W)) * (rescaled(W - B, T) if rescale else T)).sum(0)


def breadcrumbs_ties(
    W: Array, B: Array, weight: Any = 1.0, density: Any = 1.0, gamma: Any = 0.01, normalize: bool = False
) -> Array:
    return B + elected(inner(W - B, density, gamma), weight, normalize)


def dare_linear(W: Array, B: Array, weight: Any = 1.0) -> Array:
    return task_arithmetic(W, B, weight)


def dare_ties(W: Array, B: Array, weight: Any = 1.0) -> Array:
    return B + elected(W - B, weight, False)


def della(W: Array, B: Array, weight: Any = 1.0) -> Array:
    return B + elected(W - B, weight, True)


def sce(W: Array, B: Array, select_topk: float = 1.0, paper: bool = False) -> Array:
    T = W - B
    if select_topk < 1:
        order = np.argsort(-T.var(axis=0), axis=None)[: int(B.size * select_topk)]
        mask = np.zeros(B.size)
        mask[order] = 1
        T = T * mask.reshape(B.shape)
    share = (T**2).sum((1, 2)) / (T**2).sum()
    agree = np.sign(T) == np.where(T.sum(0) >= 0, 1, -1)
    w = share.reshape(-1, 1, 1) * agree
    return B + (w * T).sum(0) / (1 if paper else np.maximum(w.sum(0), 1e-6))


def ram(W: Array, B: Array, epsilon: float = 1e-5) -> Array:
    T = W - B
    changed = np.abs(T) > epsilon
    return B + (T * changed).sum(0) / np.maximum(changed.sum(0), 1)


def ramplus_tl(W: Array, B: Array, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5) -> Array:
    T = W - B
    changed = np.abs(T) > epsilon
    by = changed.sum(0)
    result = B.copy()
    for k in range(len(W)):
        shared, unique = (changed[k] & (by > 1)).sum(), (changed[k] & (by == 1)).sum()
        grown = 1 + r * min(shared / max(unique, epsilon), alpha)
        for place in zip(*np.nonzero(changed[k]), strict=True):
            result[place] += T[k][place] * (grown if by[place] == 1 else 1 / by[place])
    return result


def nearswap(W: Array, B: Array, t: float) -> Array:
    distance = W[0] - B
    return B + np.clip(distance, -t, t)


def arcee_fusion(W: Array, B: Array) -> Array:
    def probabilities(x: Array) -> Array:
        e = np.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True) + 1e-8

    p, q = probabilities(W[0]), probabilities(B)
    importance = np.abs(W[0] - B) * (p * np.log(p / q)).sum(axis=1, keepdims=True)
    first, median, third = (np.quantile(importance, share, method="lower") for share in (0.25, 0.5, 0.75))
    return np.where(importance >= median + 1.5 * (third - first), W[0], B)


def passthrough(W: Array, B: Array, scale: float | None = None) -> Array:
    return W[0] if scale is None else W[0] * scale


def magmax(W: Array, B: Array, lambda_: float = 1.0) -> Array:
    T = W - B
    return B + lambda_ * np.take_along_axis(T, np.abs(T).argmax(0)[None], 0)[0]


def consensus_ties(
    W: Array,
    B: Array,
    weight: Any = 1.0,
    density: Any = 1.0,
    k: int = 2,
    tall_lambda: float = 0.4,
    elect: bool = True,
    normalize: bool = False,
    task: int | None = None,
    lambda_: float = 1.0,
) -> Array:
    T = trimmed(W - B, density)
    if elect:
        merged = elected(T, weight, normalize)
    else:
        merged = np.average(T, axis=0, weights=column(weight, len(T)).ravel())
        merged = merged if normalize else merged * column(weight, len(T)).sum()
    tall = np.abs(W - B) >= tall_lambda * np.abs(merged - (W - B))
    if task is not None:
        return B + lambda_ * merged * tall[task - 1]
    return B + lambda_ * merged * (tall.sum(0) >= k)


def emr(W: Array, B: Array, task: int | None = None, lambda_: float = 1.0) -> Array:
    T = W - B
    elected = np.zeros_like(B)
    for place in np.ndindex(B.shape):
        votes = T[(slice(None), *place)]
        elected[place] = votes.max() if votes.sum() > 0 else votes.min()
    if task is None:
        return B + lambda_ * elected
    own = T[task - 1]
    masked = np.where(own * elected > 0, elected, 0)
    return B + lambda_ * masked * np.abs(own).mean() / np.abs(masked).mean()


def localize_and_stitch(W: Array, B: Array, density: Any = 0.05, lambda_: float = 1.0) -> Array:
    T = trimmed(W - B, density)
    masks = (T != 0).astype(float)
    shares = masks / np.maximum(masks.sum(0), 1)
    return B + lambda_ * (shares * T).sum(0)


def pcb(W: Array, B: Array, ratio: float = 0.1, lambda_: float = 1.0) -> Array:
    T = flat(W - B)
    ordered = np.sort(np.abs(T), axis=1)
    d = T.shape[1]
    low, high = ordered[:, [int(d * 1e-4)]], ordered[:, [int(d * (1 - 1e-4) - 1)]]
    size = np.clip(np.abs(T), low, high)
    score = np.exp(len(T) * ((size - low) / (high - low)) ** 2) * np.tanh(T * T.sum(0))
    least, most = np.sort(score, axis=1)[:, [int(d * (1 - ratio))]], score.max(1, keepdims=True)
    share = (np.maximum(score, least) - least) / (most - least)
    merged = (np.sign(T) * size * share).sum(0) / np.maximum(share.sum(0), 1e-12)
    return B + lambda_ * merged.reshape(B.shape)


# Whole matrices


def procrustes(matrix: Array) -> Array:
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    return u @ v


def tsv(W: Array, B: Array, share: float | None = None, lambda_: float = 1.0) -> Array:
    r = int(min(B.shape) * (1 / len(W) if share is None else share))
    U, S, V = zip(*[np.linalg.svd(t, full_matrices=False) for t in W - B], strict=True)
    left = procrustes(np.hstack([u[:, :r] for u in U]))
    right = procrustes(np.hstack([v[:r].T for v in V]))
    return B + lambda_ * left @ np.diag(np.hstack([s[:r] for s in S])) @ right.T


def iso_c(W: Array, B: Array, lambda_: float = 1.0) -> Array:
    total = (W - B).sum(0)
    return B + lambda_ * np.linalg.svd(total)[1].mean() * procrustes(total)


def iso_cts(W: Array, B: Array, common: float = 0.8, lambda_: float = 1.0) -> Array:
    T, rank = W - B, min(B.shape)
    own = round((rank - int(rank * common)) / len(T))
    k = rank - own * len(T)
    u, s, v = np.linalg.svd(T.sum(0), full_matrices=False)
    U, S, V = [u[:, :k]], [s[:k]], [v[:k].T]
    for t in T:
        a, b, c = np.linalg.svd((np.eye(len(u)) - u[:, :k] @ u[:, :k].T) @ t, full_matrices=False)
        U, S, V = [*U, a[:, :own]], [*S, b[:own]], [*V, c[:own].T]
    return B + lambda_ * np.hstack(S).mean() * procrustes(np.hstack(U)) @ procrustes(np.hstack(V)).T


def wsm(W: Array, B: Array, power: float = 0.5, cosine: bool = False, rate: Any = None) -> Array:
    """Step by step: from the first checkpoint on, each step scaled by the rate that the decay would have had."""
    u = np.arange(len(W)) / len(W)
    rates = np.cos(np.pi * u / 2) ** 2 if cosine else 1 - u**power
    if rate is not None:
        rates = np.array(rate) / rate[0]
    return W[0] + sum(rates[j] * (W[j] - W[j - 1]) for j in range(1, len(W)))


def geometric_median(W: Array, B: Array, weight: Any = 1.0) -> Array:
    """By a general optimiser, from the mean."""
    w, points = column(weight, len(W)).ravel(), flat(W)

    def total(shares: Array) -> float:
        return float(w @ np.linalg.norm(points - (shares / shares.sum()) @ points, axis=1))

    best = minimize(total, np.ones(len(W)), method="Nelder-Mead", options={"xatol": 1e-13, "fatol": 1e-15})
    return np.tensordot(best.x / best.x.sum(), W, 1)


def svc(W: Array, B: Array, alpha: float = 1.0, lambda_: float = 1.0) -> Array:
    T = W - B
    merged = np.zeros_like(B)
    for u, s, v in zip(*[m.T if i == 0 else m for i, m in enumerate(thin(T.sum(0)))], strict=True):
        parts = [u @ t for t in T]
        counted = [max(alpha, (s * v) @ part / (part @ part)) for part in parts]
        merged += len(T) / sum(counted) * s * np.outer(u, v)
    return B + lambda_ * merged


def dc_merge(W: Array, B: Array, smooth: bool = True, density: float | None = None, lambda_: float = 1.0) -> Array:
    r = min(B.shape) // len(W)
    parts = [(u[:, :r], np.full(r, s[:r].mean()) if smooth else s[:r], v[:r]) for u, s, v in map(thin, W - B)]
    left, right = (
        procrustes(np.hstack([u for u, _, _ in parts])), procrustes(np.hstack([v.T for _, _, v in parts]))
    )  # fmt: skip
    small = np.stack([left.T @ u @ np.diag(s) @ v @ right for u, s, v in parts])
    kept = left.shape[1] if density is None else int(density * small[0].size)
    for m in small:
        m[np.abs(m) < np.sort(np.abs(m), axis=None)[-kept]] = 0
    agree = np.sign(small) == np.sign(small.sum(0))
    merged = (small * agree).sum(0) / np.maximum(agree.sum(0), 1)
    blocks = np.kron(np.eye(len(W)), np.ones((r, r)))
    return B + lambda_ * left @ (merged * blocks) @ right.T


def ortho_merge(W: Array, B: Array, lambda_: float = 1.0) -> Array:
    if B.shape[0] > B.shape[1]:
        return ortho_merge(W.transpose(0, 2, 1), B.T, lambda_).T
    one = np.eye(len(B))
    products = [w @ B.T for w in W]
    R = [kabsch(product / np.linalg.norm(product) + 1e-9 * one) for product in products]  # held at none by so much
    A = [(r - one) @ np.linalg.inv(r + one) for r in R]
    turn = np.mean([np.linalg.norm(a) for a in A]) * sum(A) / np.linalg.norm(sum(A))
    residual = np.mean([w - r @ B for w, r in zip(W, R, strict=True)], axis=0)
    return (one + turn) @ np.linalg.inv(one - turn) @ B + lambda_ * residual


def kabsch(matrix: Array) -> Array:
    """max ⟨R, matrix⟩ over rotations, by Kabsch's algorithm."""
    u, _, v = np.linalg.svd(matrix)
    return u @ np.diag([1.0] * (len(u) - 1) + [np.linalg.det(u @ v)]) @ v


def thin(matrix: Array) -> tuple[Array, Array, Array]:
    return np.linalg.svd(matrix, full_matrices=False)


def ace(
    W: Array, B: Array, epsilon: float = 0.01, threshold: float = 0.3, share: float = 0.3, lambda_: float = 1.0
) -> Array:
    T, one = W - B, np.eye(B.shape[1])
    sizes = [np.trace(t.T @ t) for t in T]
    uneven = np.var(np.log(sizes), ddof=1) / np.mean(np.log(sizes)) ** 2 > threshold
    left, right, raw, regular = np.zeros_like(B), np.zeros_like(one), [], []
    for t in T:
        centred = t - np.ones((len(t), 1)) @ t.mean(0, keepdims=True)
        S = centred.T @ centred
        raw.append(S / np.trace(S) if uneven else S)
        regular.append(raw[-1] + epsilon * one / (np.trace(S) if uneven else 1))
        left, right = left + centred @ regular[-1], right + regular[-1]
    row = sum(raw).sum(0) / B.shape[1] / (np.mean(sizes) if uneven else 1)
    merged = left @ np.linalg.inv(right + np.outer(np.ones(B.shape[1]), row))
    if uneven:
        u, s, v = thin(merged + sum(t @ (S - right / len(T)) for t, S in zip(T, raw, strict=True)))
        k = int(len(s) * share)
        merged = merged + s[:k].mean() * u[:, :k] @ v[:k]
    return B + lambda_ * merged


def knots(
    W: Array, B: Array, inner: str = "ties", weight: Any = 1.0, density: Any = 1.0, lambda_: float = 1.0
) -> Array:
    T = W - B
    u, s, v = thin(np.hstack(list(T)))
    cores = np.stack(np.split(np.diag(s) @ v, len(T), axis=1))
    return B + lambda_ * u @ merged_cores(inner, cores, weight, density)


def core_space(
    W: Array, B: Array, inner: str = "ties", weight: Any = 1.0, density: Any = 1.0, lambda_: float = 1.0
) -> Array:
    T = W - B
    parts = [thin(t) for t in T]
    left = thin(np.hstack([u @ np.diag(s**0.5) for u, s, _ in parts]))[0]
    right = thin(np.vstack([np.diag(s**0.5) @ v for _, s, v in parts]))[2]
    cores = np.stack([left.T @ t @ right.T for t in T])
    return B + lambda_ * left @ merged_cores(inner, cores, weight, density) @ right


def merged_cores(inner: str, cores: Array, weight: Any, density: Any) -> Array:
    options = {"weight": weight} | ({"density": density} if inner == "ties" else {})
    return globals()[inner](cores, np.zeros_like(cores[0]), **(options if inner not in ("tsv", "iso_c") else {}))


def wudi(W: Array, B: Array, normalize: bool = True, lambda_: float = 1.0) -> Array:
    """As one least-squares problem: (τ − τ_k) τ_kᵀ / ‖τ_k‖ is to be small for all k."""
    T = W - B
    norms = [np.linalg.norm(t) if normalize else 1.0 for t in T]
    factors = np.hstack([t.T / norm for t, norm in zip(T, norms, strict=True)])
    wanted = np.hstack([t @ t.T / norm for t, norm in zip(T, norms, strict=True)])
    return B + lambda_ * np.linalg.lstsq(factors.T, wanted.T, rcond=None)[0].T
