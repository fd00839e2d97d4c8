r"""A few weighted points that stand for many examples: the reduced kernel mean embedding.

The mean of data is the function μ = 1/n Σ k(x_i, ·). Points z_j and weights β_j are chosen so that Σ β_j k(z_j, ·) is
near it: the weights in closed form, β = K_zz⁻¹ K_zx 1/n, the points by gradient steps from the means of clusters. The
distance of two such functions is the maximum mean discrepancy (MMD). Reference: Wu, Xu, Liu & Zhou, "Model Reuse with
Reduced Kernel Mean Embedding Specification" (TKDE 2023, https://arxiv.org/abs/2001.07135).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from isomerge.running.gradient_descent import descend

MEMBERS = 5
"""Examples that a point is the mean of, at least, before its gradient steps."""
ROUNDS, STEPS, RATE = 20, 100, 0.05
RIDGE = 1e-6
BLOCK = 1024


@dataclass(frozen=True)
class Embedding:
    """Σ weights[j] k(points[j], ·)."""

    points: np.ndarray
    weights: np.ndarray

    @classmethod
    def of_examples(cls, rows: np.ndarray) -> Embedding:
        """All of them, with equal weights."""
        return cls(rows, np.full(len(rows), 1 / len(rows)))

    def product(self, other: Embedding, variance: float) -> float:
        """The inner product of two functions, in blocks of rows."""
        total = 0.0
        for start in range(0, len(self.points), BLOCK):
            part = slice(start, start + BLOCK)
            total += float(self.weights[part] @ kernel(self.points[part], other.points, variance) @ other.weights)
        return total

    def distance(self, other: Embedding, variance: float) -> float:
        """
        >>> near = Embedding(np.array([[0.0], [1.0]]), np.array([0.5, 0.5]))
        >>> near.distance(near, 1.0), round(near.distance(Embedding(np.array([[9.0]]), np.ones(1)), 1.0), 3)
        (0.0, 1.343)
        """
        own, others = self.product(self, variance), other.product(other, variance)
        return float(np.sqrt(max(0.0, own - 2 * self.product(other, variance) + others)))


def kernel(a: np.ndarray, b: np.ndarray, variance: float) -> np.ndarray:
    """k(x, y) = exp(−‖x − y‖² / 2σ²) of every two rows."""
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
    shared: np.ndarray = np.exp(-np.maximum(squares, 0) / (2 * variance))
    return shared


def reduced(rows: np.ndarray, count: int, variance: float, seed: int) -> Embedding:
    """At most `count` points; fewer where a cluster would have fewer than five members."""
    data = torch.from_numpy(rows)
    points = torch.from_numpy(_cluster_means(rows, count, seed))

    def loss(_: None) -> Tensor:  # where the weights are the best, they add nothing to the gradient of the points
        return _distance(points, _weights(points.detach(), data, variance), data, variance)

    descend([points], loss, repeat(None), STEPS, RATE, sizes=[float(data.std(unbiased=False)) or 1e-12])
    return Embedding(points.numpy(), _weights(points, data, variance).numpy())


def _distance(points: Tensor, weights: Tensor, data: Tensor, variance: float) -> Tensor:
    """The squared distance, less what does not depend on the points."""
    return (
        weights @ _kernel(points, points, variance) @ weights - 2 * (weights @ _kernel(points, data, variance)).mean()
    )


def _weights(points: Tensor, data: Tensor, variance: float) -> Tensor:
    own = _kernel(points, points, variance) + RIDGE * torch.eye(len(points), dtype=points.dtype)
    best: Tensor = torch.linalg.solve(own, _kernel(points, data, variance).mean(1))
    return best


def _kernel(a: Tensor, b: Tensor, variance: float) -> Tensor:
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return (-squares.clamp_min(0) / (2 * variance)).exp()


def _cluster_means(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Lloyd's algorithm; a cluster of few members is given up, as its mean would show them."""
    random = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
    means = rows[random.permutation(len(rows))[:count]]
    for _ in range(ROUNDS):
        squares = (means * means).sum(1) - 2 * rows @ means.T
        nearest = squares.argmin(1)
        sizes = np.bincount(nearest, minlength=len(means))
        kept = [j for j in range(len(means)) if sizes[j] >= min(MEMBERS, len(rows))] or [int(sizes.argmax())]
        means = np.stack([rows[nearest == j].mean(0) for j in kept])
    return means
