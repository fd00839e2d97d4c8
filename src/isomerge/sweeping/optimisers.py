"""Where to look next: points of the unit cube, proposed in batches from the scores of those before.

An optimiser is a generator. It yields a batch of points, is sent their scores (lower is better, infinite where there is
none), and yields the next batch. How large a batch is depends on the space alone, never on how many points are measured
at the same time: the points are the same for the same seed, on one worker or on eight.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isomerge.errors import RequestError
from isomerge.packages import why_not_imported

Unit = tuple[float, ...]
"""One number from 0 to 1 for each dimension."""
Proposals = Generator[list[Unit], list[float], None]
TOGETHER = 4
"""Points that a Gaussian process proposes at once."""


@dataclass(frozen=True)
class Dimension:
    """One number to choose: any, or one of so many levels, which have an order or are names."""

    levels: int = 0
    ordered: bool = True

    def level(self, unit: float) -> int:
        """The level at a place between 0 and 1, which they share equally."""
        return min(int(unit * self.levels), self.levels - 1)

    def place(self, level: int) -> float:
        """The middle of a level's share."""
        return (level + 0.5) / self.levels


def random_points(dimensions: Sequence[Dimension], seed: int) -> Proposals:
    """Evenly distributed random numbers."""
    random = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
    while True:
        yield _points(random.random((2 * TOGETHER, len(dimensions))))


def cma_points(dimensions: Sequence[Dimension], seed: int) -> Proposals:
    """CMA-ES (Hansen, https://arxiv.org/abs/1604.00772), begun again with twice the points when it has converged."""
    cma = _package("cma")
    count = max(2, len(dimensions))  # it does not search along one line: there the second number has no effect
    random = np.random.RandomState(seed % 2**32)
    size = 4 + int(3 * math.log(count))
    while True:
        options = {"bounds": [0, 1], "seed": math.nan, "randn": random.randn, "verbose": -9, "popsize": size}
        strategy = cma.CMAEvolutionStrategy([0.5] * count, 0.3, options)
        while not strategy.stop():
            asked = strategy.ask()
            scores = yield _points(np.array(asked)[:, : len(dimensions)])
            strategy.tell(asked, _finite(scores))
        size *= 2


def bayesian_points(dimensions: Sequence[Dimension], seed: int) -> Proposals:
    """A Gaussian process over all scores so far, and the points of largest expected improvement (optuna)."""
    optuna = _package("optuna")
    names = [f"x{number}" for number in range(len(dimensions))]
    kinds = dict(zip(names, (_distribution(optuna, dimension) for dimension in dimensions), strict=True))
    tried: list[Unit] = []
    scores: list[float] = []

    def enter(points: Sequence[Unit], told: Sequence[float]) -> None:
        tried.extend(points)
        scores.extend(told)

    first = _evenly(len(dimensions), seed)
    enter(first, (yield first))
    with _quiet(optuna):
        sampler = optuna.samplers.GPSampler(seed=seed % 2**32, n_startup_trials=1, deterministic_objective=True)
    while True:
        with _quiet(optuna):
            study = optuna.create_study(sampler=sampler)
            for point, score in zip(tried, _without_outliers(scores), strict=True):
                parameters = {
                    name: dimension.level(x) if dimension.levels else x
                    for name, dimension, x in zip(names, dimensions, point, strict=True)
                }
                trial = optuna.trial.create_trial(params=parameters, distributions=kinds, value=score)
                study.add_trial(trial)
            asked = [study.ask(kinds).params for _ in range(TOGETHER)]
        points = [
            tuple(
                dimension.place(given[name]) if dimension.levels else float(given[name])
                for name, dimension in zip(names, dimensions, strict=True)
            )
            for given in asked
        ]
        enter(points, (yield points))


OPTIMISERS: dict[str, Callable[[Sequence[Dimension], int], Proposals]] = {
    "bayesian": bayesian_points, "cma": cma_points, "random": random_points,
}  # fmt: skip
PACKAGES = {"bayesian": "optuna", "cma": "cma"}


def require_package(algorithm: str) -> None:
    """Refuse an algorithm whose package is missing, before anything is measured."""
    if algorithm in PACKAGES:
        _package(PACKAGES[algorithm])


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    if not dimension.levels:
        return optuna.distributions.FloatDistribution(0.0, 1.0)
    if dimension.ordered:
        return optuna.distributions.IntDistribution(0, dimension.levels - 1)
    return optuna.distributions.CategoricalDistribution(range(dimension.levels))


def _evenly(count: int, seed: int) -> list[Unit]:
    """As many points as a first guess at a surface needs, spread evenly over the cube."""
    from scipy.stats import qmc  # slow to import

    halton = qmc.Halton(count, scramble=True, seed=np.random.default_rng(seed & (2**64 - 1)))
    return _points(halton.random(max(TOGETHER, count + 1)))


def _points(rows: np.ndarray) -> list[Unit]:
    return [tuple(float(x) for x in row) for row in rows]


def _finite(scores: Sequence[float]) -> list[float]:
    """Points without a score as a little worse than the worst."""
    known = [score for score in scores if math.isfinite(score)]
    worst = max(known) + (max(known) - min(known)) if known else 0.0
    return [score if math.isfinite(score) else worst for score in scores]


def _without_outliers(scores: Sequence[float]) -> list[float]:
    """A merge that has broken may be a thousand times worse: by how much is no news, and would hide all others."""
    finite = _finite(scores)
    most = float(np.median(finite)) + 2 * (float(np.median(finite)) - min(finite))
    return [min(score, most) for score in finite]


def _package(name: str) -> Any:
    try:
        if name == "cma":
            import cma

            return cma
        import optuna
    except ImportError as error:
        raise RequestError(f"Searching: {why_not_imported(name, error)}, or search at random.") from error
    return optuna


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without its messages, and with one thread, on which sums do not depend on the machine."""
    threads, level = torch.get_num_threads(), optuna.logging.get_verbosity()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        optuna.logging.set_verbosity(level)
