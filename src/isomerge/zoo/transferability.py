r"""How well what a classifier computes tells the labels of other data: without any training, from one pass.

- LEEP (Nguyen et al., ICML 2020, https://arxiv.org/abs/2002.12462): the mean log-likelihood of a label y under
  Σ_z P̂(y|z) θ(x)_z, with the model's own probabilities θ and their joint frequencies with y.
- LogME (You et al., ICML 2021, https://arxiv.org/abs/2102.11005): the log evidence of a Bayesian linear regression of
  each label's indicator on the features before the head, per example and label. Its prior's and noise's precisions α
  and β are at the maximum of the evidence.
- the certainty: the mean of −Σ θ log θ, negated, which needs no labels.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 100
TINY = 1e-300


def leep(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Of (examples, classes) and whole numbers; higher is better, and at most 0.

    >>> leep(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 0]))
    0.0
    """
    theta = probabilities.astype(np.float64)
    _, labels = np.unique(labels, return_inverse=True)
    joint = np.zeros((labels.max() + 1, theta.shape[1]))
    np.add.at(joint, labels, theta / len(labels))
    given = joint / np.maximum(joint.sum(0), TINY)
    likelihood = (given[labels] * theta).sum(1)
    return float(np.log(np.maximum(likelihood, TINY)).mean())


def logme(features: np.ndarray, labels: np.ndarray) -> float:
    """Of (examples, width) and whole numbers; higher is better."""
    features = features.astype(np.float64)
    u, singular, _ = np.linalg.svd(features, full_matrices=False)
    evidence = [
        _evidence(u, singular**2, (labels == label).astype(float), features.shape[1]) for label in np.unique(labels)
    ]
    return float(np.mean(evidence))


def _evidence(u: np.ndarray, squares: np.ndarray, target: np.ndarray, width: int) -> float:
    """Per example, at the α and β where it is largest (MacKay's fixed point)."""
    n = len(target)
    along = (u.T @ target) ** 2
    rest = max(float(target @ target - along.sum()), 0.0)
    alpha = beta = 1.0
    for _ in range(ROUNDS):
        ratio = alpha / beta
        gamma = float((squares / (squares + ratio)).sum())
        length = float((squares * along / (squares + ratio) ** 2).sum())
        residual = float((along * (ratio / (squares + ratio)) ** 2).sum()) + rest
        alpha, beta = gamma / (length + 1e-12), (n - gamma) / (residual + 1e-12)
        if abs(alpha / beta - ratio) <= 1e-5 * ratio:
            break
    ratio = alpha / beta
    length = float((squares * along / (squares + ratio) ** 2).sum())
    residual = float((along * (ratio / (squares + ratio)) ** 2).sum()) + rest
    determinant = float(np.log(alpha + beta * squares).sum()) + (width - len(squares)) * np.log(alpha)
    whole = width * np.log(alpha) + n * np.log(beta) - determinant - beta * residual - alpha * length
    return float((whole - n * np.log(2 * np.pi)) / (2 * n))


def certainty(probabilities: np.ndarray) -> float:
    """The negative of the mean entropy in nats.

    >>> certainty(np.array([[1.0, 0.0]])), round(certainty(np.array([[0.5, 0.5]])), 4)
    (0.0, -0.6931)
    """
    theta = probabilities.astype(np.float64)
    return float((theta * np.log(np.maximum(theta, TINY))).sum(1).mean())
