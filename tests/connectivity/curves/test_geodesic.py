"""Geodesics against the great circle, which is the shortest path between distributions over classes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from torch import nn

from connectivity.curves.landscapes import space_of
from isomerge.connectivity.curves.geodesic import geodesic, squared_distance
from isomerge.connectivity.curves.goals import LabelGoal
from isomerge.connectivity.curves.problem import CurveProblem


class Distribution(nn.Module):
    """Says the same of every input; its weights are logits."""

    config = SimpleNamespace(problem_type=None, is_encoder_decoder=False)

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.w.expand(len(x), -1)}


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def test_the_path_becomes_as_short_as_the_great_circle() -> None:
    a, b = np.array([6.0, 0.0, 4.5]), np.array([0.0, 6.0, 4.5])
    space = space_of(Distribution(*a), Distribution(*b))
    batches: Any = itertools.repeat({"x": torch.zeros(1)})
    problem = CurveProblem(space, LabelGoal(space.mixture.module), batches, 800, 0.05, 0, 7, 0.0)
    details = geodesic(problem).details
    shortest = 2 * np.arccos(np.sqrt(softmax(a) * softmax(b)).sum())

    def speed(t: float) -> float:
        p = softmax((1 - t) * a + t * b)
        return float(np.sqrt((b - a) @ (np.diag(p) - np.outer(p, p)) @ (b - a)))

    assert details["straight_length"] == pytest.approx(quad(speed, 0, 1)[0], rel=5e-3)
    assert details["straight_length"] > 1.15 * shortest
    assert shortest * 0.995 < details["length"] < shortest * 1.015


def test_distances_are_those_of_jensen_and_shannon() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=(2, 5, 4))
    module = Distribution(0.0)
    truth = np.mean([8 * jensenshannon(softmax(p), softmax(q)) ** 2 for p, q in zip(one, other, strict=True)])
    tensors = torch.tensor(one), torch.tensor(other)
    assert float(squared_distance(module, "logits", *tensors)) == pytest.approx(truth, rel=1e-9)
    assert float(squared_distance(module, "hidden", *tensors)) == pytest.approx(np.mean((one - other) ** 2))
    labels = SimpleNamespace(config=SimpleNamespace(problem_type="multi_label_classification"))
    chances = [1 / (1 + np.exp(-x)).reshape(-1) for x in (one, other)]
    pairs = [jensenshannon([p, 1 - p], [q, 1 - q]) ** 2 for p, q in zip(*chances, strict=True)]
    assert float(squared_distance(labels, "logits", *tensors)) == pytest.approx(8 * np.mean(pairs), rel=1e-9)
