"""The reduced kernel mean embedding against its definition, a control of as many examples, what it must not show."""

from __future__ import annotations

import numpy as np
import pytest

from isomerge.zoo.embedding import Embedding, kernel, reduced

VARIANCE = 0.5


def clusters(seed: int = 0, n: int = 300, width: int = 6) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(5, width))
    return centres[random.integers(0, 5, n)] + 0.3 * random.normal(size=(n, width))


def by_hand(a: Embedding, b: Embedding) -> float:
    """‖Σ α_i k(x_i, ·) − Σ β_j k(y_j, ·)‖, one pair at a time."""

    def product(one: Embedding, other: Embedding) -> float:
        return sum(
            u * v * np.exp(-((x - y) ** 2).sum() / (2 * VARIANCE))
            for x, u in zip(one.points, one.weights, strict=True)
            for y, v in zip(other.points, other.weights, strict=True)
        )

    return float(np.sqrt(product(a, a) - 2 * product(a, b) + product(b, b)))


def test_the_distance_is_the_maximum_mean_discrepancy() -> None:
    random = np.random.default_rng(3)
    a = Embedding(random.normal(size=(7, 3)), random.normal(size=7))
    b = Embedding(random.normal(size=(5, 3)), random.normal(size=5))
    assert a.distance(b, VARIANCE) == pytest.approx(by_hand(a, b), abs=1e-12)
    assert a.distance(a, VARIANCE) == pytest.approx(0, abs=1e-7)


def test_few_points_are_nearer_to_the_data_than_as_many_examples() -> None:
    rows = clusters()
    whole = Embedding.of_examples(rows)
    points = reduced(rows, 8, VARIANCE, seed=0)
    assert len(points.points) <= 8
    controls = []
    for seed in range(5):  # examples with the best weights for them
        drawn = rows[np.random.default_rng(seed).permutation(len(rows))[:8]]
        weights = np.linalg.solve(kernel(drawn, drawn, VARIANCE), kernel(drawn, rows, VARIANCE).mean(1))
        controls.append(by_hand(Embedding(drawn, weights), whole))
    assert points.distance(whole, VARIANCE) < 0.5 * min(controls)


def test_the_weights_are_the_best_for_the_points() -> None:
    rows = clusters(1)
    found = reduced(rows, 6, VARIANCE, seed=0)
    whole = Embedding.of_examples(rows)
    at = found.distance(whole, VARIANCE)
    for k in range(len(found.weights)):
        for step in (-1e-2, 1e-2):
            moved = found.weights.copy()
            moved[k] += step
            assert Embedding(found.points, moved).distance(whole, VARIANCE) > at


def test_no_point_is_an_example_not_even_of_one_far_away() -> None:
    rows = clusters(2)
    rows[17] += 9.0  # nobody is like this one: a cluster of its own
    found = reduced(rows, 8, VARIANCE, seed=17)
    nearest = np.linalg.norm(rows[:, None] - found.points, axis=2)
    assert nearest.min() > 0.01
    assert nearest[17].min() > 5
    assert len(found.points) >= 4, "the control: there are points, and the far one is not among them"


def test_the_same_data_and_seed_give_the_same_points() -> None:
    rows = clusters(4)
    first, again = (reduced(rows, 5, VARIANCE, seed=1) for _ in range(2))
    assert np.array_equal(first.points, again.points) and np.array_equal(first.weights, again.weights)
