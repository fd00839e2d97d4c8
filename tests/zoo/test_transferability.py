"""LEEP and LogME against their definitions, written out: loops, and the density of a dense normal distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

from isomerge.zoo.transferability import certainty, leep, logme


def drawn(seed: int, n: int = 40, classes: int = 4, labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    scores = np.exp(random.normal(size=(n, classes)) * 2)
    return scores / scores.sum(1, keepdims=True), random.integers(0, labels, n)


def leep_by_hand(theta: np.ndarray, labels: np.ndarray) -> float:
    """Equations 1 and 2 of the paper, one number at a time."""
    n, classes = theta.shape
    total = 0.0
    for i in range(n):
        predicted = 0.0
        for z in range(classes):
            joint = sum(theta[j, z] for j in range(n) if labels[j] == labels[i]) / n
            marginal = sum(theta[j, z] for j in range(n)) / n
            predicted += joint / marginal * theta[i, z]
        total += math.log(predicted)
    return total / n


@pytest.mark.parametrize("seed", range(3))
def test_leep_is_the_paper_s(seed: int) -> None:
    theta, labels = drawn(seed)
    assert leep(theta, labels) == pytest.approx(leep_by_hand(theta, labels), abs=1e-12)
    assert leep(theta, labels * 7 + 2) == pytest.approx(leep(theta, labels), abs=1e-12), "labels are names only"


def test_leep_tells_a_model_that_knows_from_one_that_does_not() -> None:
    _, labels = drawn(0)
    knows = np.eye(3)[labels] * 0.9 + 0.1 / 3
    assert leep(knows, labels) > leep(np.full((len(labels), 3), 1 / 3), labels) + 0.3


def evidence_by_hand(features: np.ndarray, target: np.ndarray) -> float:
    """The largest log density of y under N(0, I / β + F Fᵀ / α), per example."""

    def negative(logs: np.ndarray) -> float:
        alpha, beta = np.exp(np.clip(logs, -30, 30))
        covariance = np.eye(len(target)) / beta + features @ features.T / alpha
        return -float(multivariate_normal(np.zeros(len(target)), covariance).logpdf(target)) / len(target)

    starts = [(a, b) for a, b in ((-2.0, 0.0), (1.0, 0.0), (4.0, 2.0))]
    return -min(minimize(negative, start, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12}).fun
                for start in starts)  # fmt: skip


@pytest.mark.parametrize(("seed", "width"), [(0, 5), (1, 12), (2, 60)])
def test_logme_is_the_largest_evidence(seed: int, width: int) -> None:
    """Also where features are more than examples."""
    random = np.random.default_rng(seed)
    _, labels = drawn(seed)
    features = random.normal(size=(len(labels), width)) + 1.5 * (labels[:, None] == np.arange(width) % 3)
    by_hand = np.mean([evidence_by_hand(features, (labels == k).astype(float)) for k in range(3)])
    assert logme(features, labels) == pytest.approx(by_hand, abs=2e-4)
    shuffled = random.permutation(labels)
    assert logme(features, labels) > logme(features, shuffled) + 0.01, "features that tell nothing have less"


def test_certainty_is_the_negative_entropy() -> None:
    theta, _ = drawn(5)
    by_hand = np.mean([sum(p * math.log(p) for p in row) for row in theta])
    assert certainty(theta) == pytest.approx(by_hand, abs=1e-12)
