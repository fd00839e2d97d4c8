"""`isomerge.curve`: a path or simplex of low loss between two models, trained, measured, and written as models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import Checkpoint
from isomerge.choices import LEARN_TOWARDS
from isomerge.connectivity.barrier import broken_points, height, require_few, require_one_measure
from isomerge.connectivity.curve_result import MeasuredPath, SampledPoints, TrainedCurve
from isomerge.connectivity.curves.goals import FunctionGoal, Goal, LabelGoal, PredictionGoal
from isomerge.connectivity.curves.methods import METHODS, CurveMethod
from isomerge.connectivity.curves.parts import DataReading, Parts, open_parts
from isomerge.connectivity.curves.perturbation import Perturbation
from isomerge.connectivity.curves.problem import CurveProblem, Trained, generator
from isomerge.connectivity.curves.shapes import PolygonalChain, Shape, Shares, SimplicialComplex
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.connectivity.curves.written import CurvePoints
from isomerge.connectivity.endpoints import mixture_of, open_models
from isomerge.data.base import DataSource
from isomerge.errors import RequestError
from isomerge.progress_bars import Report, Shown, callback, shows_progress
from isomerge.reporting.plots import plot_curve, require_drawable

RATE = 0.02
STEPS = 500


@shows_progress
def curve(
    model_a: Any,
    model_b: Any,
    *,
    method: str = "bezier",
    loss: Callable[[Any], Any] | None = None,
    data: DataSource = None,
    test: DataSource = None,
    task: str | None = None,
    towards: str | None = None,
    align: bool = False,
    level: str = "full",
    steps: int = STEPS,
    rate: float = RATE,
    pivots: int | None = None,
    spread: float | None = None,
    noise: float = 0.0,
    attack: float = 0.0,
    samples: int | None = None,
    points: int = 11,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    plot: str | Path | None = None,
    progress: Shown = None,
) -> TrainedCurve:
    """Train a path or simplex between two models on which the loss stays low, and measure it beside the straight line.

    `method` is bezier, chain, autoneb, simplex, subspace or geodesic. It learns for `steps` batches of `data`, towards
    its labels or the parents' predictions, and is measured on `test`: by default the part of the data called test, or
    every fourth example, which is held out. Or all of it by `loss`, a function of the module with a gradient. `pivots`
    vertices learn beside A and B; `spread` weighs what keeps those of a simplex apart. With `noise` or `attack`, as a
    share of the inputs' standard deviation, inputs are perturbed as the path learns, and it is measured both ways.
    `samples` points (5) are drawn from a simplex or subspace. With `align`, B moves next to A first.

    >>> found = isomerge.curve("model-a", "model-b", data="cifar10.tar.xz", steps=20, points=3)
    >>> found.barrier <= found.straight.barrier
    True
    >>> written = found.save(0.5, "halfway")
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(
        method=(method, str), towards=(towards, str, None), align=(align, bool), level=(level, str), steps=(steps, int),
        rate=(rate, float), pivots=(pivots, int, None), spread=(spread, float, None), noise=(noise, float),
        attack=(attack, float), samples=(samples, int, None), points=(points, int),
    )  # fmt: skip
    require_shared_types(
        task=task, batch_size=batch_size, limit=limit, seed=seed, device=device, plot=plot, progress=progress
    )
    request = CurveRequest(method, towards, steps, rate, pivots, spread, noise, attack, samples, points, seed, progress)
    request.require_sound(with_function=loss is not None)
    require_one_measure(loss, data)
    if test is not None and data is None:
        raise RequestError("Training a curve: test is other data, and there is no data. Name it, or leave test out.")
    if plot is not None:
        require_drawable(plot)
    given = [model_a, model_b]
    checkpoints = open_models(given, device)
    parts = open_parts(checkpoints, loss, data, test, DataReading(task, tokenizer, batch_size, limit, seed, device))
    mixture, notes = mixture_of(checkpoints, given, level if align else None, device)
    space = WeightSpace(mixture)
    if not space.size() > 0:
        raise RequestError(
            f"Training a curve from {checkpoints[0].name} to {checkpoints[1].name}: their weights are the same, so "
            "nothing lies between them. Name two different models."
        )
    result = Work(request, checkpoints, space, parts, loss).result(notes)
    result.level = level if align else None
    result.seconds = time.perf_counter() - start
    if plot is not None:
        plot_curve(result.to_dict(), plot)
    return result


SAMPLES = 5


@dataclass(frozen=True)
class CurveRequest:
    """What the user asked for."""

    name: str
    towards: str | None
    steps: int
    rate: float
    pivots: int | None
    spread: float | None
    noise: float
    attack: float
    samples: int | None
    points: int
    seed: int
    progress: Report | None

    @property
    def method(self) -> CurveMethod:
        return METHODS[self.name]

    @property
    def drawn(self) -> int:
        """How many points are sampled."""
        return SAMPLES if self.samples is None and self.method.spread is not None else self.samples or 0

    def require_sound(self, *, with_function: bool) -> None:
        require_choice("method", self.name, METHODS)
        if self.towards is not None:
            require_choice("towards", self.towards, LEARN_TOWARDS)
        act = f"Training a curve by {self.name}"
        if self.points < 3:
            raise RequestError(f"{act}: {self.points} points are too few to measure. Try 11.", keys=("points",))
        require_few(self.points, self.points)
        if self.steps < 1:
            raise RequestError(f"{act}: steps must be at least 1.", keys=("steps",))
        if self.samples is not None and (self.method.spread is None or self.samples < 0):
            raise RequestError(
                f"{act}: samples are points drawn from a simplex, 0 or more. Leave them out, or choose simplex or "
                "subspace.",
                keys=("samples", "method"),
            )
        if not 0 < self.rate < 10:
            raise RequestError(
                f"{act}: a rate of {self.rate:g} is a first step relative to each weight. Try 0.02.", keys=("rate",)
            )
        if self.pivots is not None and self.pivots < self.method.fewest:
            raise RequestError(f"{act}: at least {self.method.fewest} pivots have to learn.", keys=("pivots",))
        if self.spread is not None and (self.method.spread is None or not 0 <= self.spread < math.inf):
            raise RequestError(
                f"{act}: spread weighs what keeps the vertices of a simplex or subspace apart, and is 0 or more. Leave "
                "it out, or choose one of these methods.",
                keys=("spread", "method"),
            )
        if not all(0 <= size < math.inf for size in (self.noise, self.attack)) or (self.noise and self.attack):
            raise RequestError(
                f"{act}: inputs are perturbed by noise or by an attack, of a size above 0. Name one of the two.",
                keys=("noise", "attack"),
            )
        if not self.method.has_goal and (self.towards or self.noise or self.attack or with_function):
            raise RequestError(
                f"{act}: it is the shortest path between predictions on data and has no other goal. Leave out towards, "
                "noise, attack and loss, or choose another method.",
                keys=("towards", "noise", "attack", "loss", "method"),
            )
        if with_function and (self.towards or self.noise or self.attack):
            raise RequestError(
                f"{act}: towards, noise and attack are about data, and loss=function replaces it. Use data.",
                keys=("loss", "towards", "noise", "attack"),
            )

    def perturbation(self) -> Perturbation | None:
        if not self.noise and not self.attack:
            return None
        return Perturbation("noise" if self.noise else "attack", self.noise or self.attack, self.seed)


@dataclass
class Work:
    """Train, then measure."""

    request: CurveRequest
    checkpoints: Sequence[Checkpoint]
    space: WeightSpace
    parts: Parts
    loss: Callable[[Any], Any] | None
    _measured: int = 0

    def result(self, notes: list[str]) -> TrainedCurve:
        request, measure = self.request, self.parts.measure
        towards = None if not request.method.has_goal else "function" if self.loss else request.towards or "labels"
        problem = self._problem(towards)
        trained = request.method.train(problem)
        parents = [
            {"model": c.name, **measure.at(self.space.put(self._corner(n)))} for n, c in enumerate(self.checkpoints)
        ]
        path = self._path(trained.shape, parents)
        straight = self._path(PolygonalChain.even(0), parents)
        ensemble = measure.combined([partial(self.space.put, self._corner(n)) for n in range(2)])
        return TrainedCurve(
            **vars(path), method=request.name, models=[c.name for c in self.checkpoints], task=measure.task,
            towards=towards, straight=straight, parents=parents, ensemble=ensemble, samples=self._samples(trained),
            training=self._training(problem, trained),
            notes=[*measure.notes, *self.parts.notes, *notes, *broken_points(path.points)],
            _points=CurvePoints(self.space, trained.shape, self.checkpoints), **measure.facts,
        )  # fmt: skip

    def _problem(self, towards: str | None) -> CurveProblem:
        request, method, module = self.request, self.request.method, self.space.mixture.module
        perturbation = request.perturbation()
        goal: Goal
        if self.loss is not None:
            goal = FunctionGoal(module, self.loss)
        elif towards == "predictions":
            goal = PredictionGoal(module, self.space.vertices[:2], perturbation)
        else:
            goal = LabelGoal(module, perturbation)
        pivots = method.pivots if request.pivots is None else request.pivots
        spread = (method.spread or 0.0) if request.spread is None else request.spread
        return CurveProblem(
            self.space, goal, self.parts.batches, request.steps, request.rate, request.seed, pivots, spread,
            request.progress,
        )  # fmt: skip

    def _training(self, problem: CurveProblem, trained: Trained) -> dict[str, Any]:
        losses = problem.losses
        few = max(1, len(losses) // 10)
        return {
            "steps": len(losses), "rate": problem.rate, "pivots": problem.pivots, "seed": problem.seed,
            "first_loss": sum(losses[:few]) / few, "last_loss": sum(losses[-few:]) / few, **trained.details,
        }  # fmt: skip

    def _path(self, shape: Shape, parents: Sequence[dict[str, Any]]) -> MeasuredPath:
        places = [n / (self.request.points - 1) for n in range(self.request.points)]
        measured = [{"t": t, **self._at(self._padded(shape.shares(t)))} for t in places]
        perturbation = self.request.perturbation()
        under = None
        if perturbation is not None:
            under = [{"t": t, **self._at(self._padded(shape.shares(t)), perturbation)} for t in places]
        losses = [point["loss"] for point in measured]
        sign = 1.0 if self.parts.measure.facts.get("higher_is_better") is False else -1.0
        qualities = [None if point["metric"] is None else sign * point["metric"] for point in measured]
        ends = [(one["loss"], None if one["metric"] is None else sign * one["metric"]) for one in parents]
        (loss_a, quality_a), (loss_b, quality_b) = ends
        known = [loss for loss in losses if loss is not None]
        return MeasuredPath(
            measured, max(known, default=None), height(losses, (loss_a, loss_b)),
            height(qualities, (quality_a, quality_b)), under,
        )  # fmt: skip

    def _samples(self, trained: Trained) -> SampledPoints | None:
        shape = trained.shape
        if not isinstance(shape, SimplicialComplex) or not self.request.drawn:
            return None
        draw = generator(self.request.seed + 1)
        drawn = [shape.sample(draw) for _ in range(self.request.drawn)]
        points = [{"weights": [shares[v] for v in shape.used], **self._at(shares)} for shares in drawn]
        return SampledPoints(points, self.parts.measure.combined([partial(self.space.put, one) for one in drawn]))

    def _at(self, shares: Shares, perturbation: Perturbation | None = None) -> dict[str, float | None]:
        module = self.space.put(shares)
        numbers = self.parts.measure.at(module if perturbation is None else perturbation.of(module))
        self._measured += 1
        if self.request.progress:
            self.request.progress(self._measured, self._total(), "measuring")
        return dict(numbers)

    def _total(self) -> int:
        each = 2 if self.request.perturbation() else 1
        return 2 * each * self.request.points + self.request.drawn

    def _padded(self, shares: Shares) -> Shares:
        return shares + [0.0] * (len(self.space.vertices) - len(shares))

    def _corner(self, number: int) -> Shares:
        return self._padded([float(k == number) for k in range(2)])
