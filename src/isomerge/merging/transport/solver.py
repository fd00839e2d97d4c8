"""Optimal transport between two sets of units, by POT. A plan says how much mass goes from each unit to each other.

    hard   minimise Σ P_ij C_ij                       over P ≥ 0 with row sums a and column sums b
    soft   minimise Σ P_ij C_ij + λ Σ P_ij log P_ij   over the same
    inner  minimise (1 − α) Σ P_ij C_ij + α Σ (A_ik − B_jl)² P_ij P_kl   over the same

with A and B the distances between the units of one model: the Gromov–Wasserstein plan at α = 1, which compares how each
model is built inside and nothing across them, and the fused one below. It is not convex: what is found is the better of
two local optima, from the even plan and from the plan of units that see the others of their model at the same
distances (the third lower bound of Mémoli, 2011). One or two units have no geometry that could tell them apart, and
their plan is hard. C, A and B are divided by their means first, so that λ and α mean the same for every layer. Rows are
the anchor's units and columns the source's; there may be more of one than of the other. With equal masses on as many
units as there are on the other side, the hard plan is a permutation, and an assignment finds it without POT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from isomerge.alignment.solvers.assignment import assign
from isomerge.errors import IsomergeError, RequestError, did_you_mean
from isomerge.packages import why_not_imported

SOLVERS = ("emd", "sinkhorn", "gromov")
MASSES = ("uniform", "importance")
STEPS = 10_000_000  # of the network simplex: POT's own limit is too low for a few thousand units
ROUNDS = 2000  # of Sinkhorn's algorithm; a quarter of them at each step of a descent
STOP, REACHED = 1e-7, 1e-4  # how far the sums of a soft plan are from the masses: when to stop, what is good enough
STEPS_INSIDE = 1000  # of conditional gradients for inner geometries; each solves one hard plan
STEEP = 300.0  # exp(−C/λ) beyond this comes near the smallest numbers, and logarithms have to be used
FLOOR = 1e-3  # of the mean mass: a unit that never fires still has a place


@dataclass
class TransportSolver:
    """How plans are solved, and how many did not come to an end."""

    kind: str = "emd"
    regularisation: float = 0.05
    mass: str = "uniform"
    inner: float = 1.0
    """α of "gromov"."""
    unfinished: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in SOLVERS:
            problems.append(f"'{self.kind}' is not a solver. {did_you_mean(self.kind, SOLVERS)}")
        if self.mass not in MASSES:
            problems.append(f"'{self.mass}' is not a kind of mass. {did_you_mean(self.mass, MASSES)}")
        if not 0 < self.regularisation < float("inf"):
            problems.append(f"regularisation is {self.regularisation}, and must be a positive number.")
        if not 0 < self.inner <= 1:
            problems.append(f"inner is {self.inner}, and must be above 0 and at most 1. For 0, use the solver emd.")
        if problems:
            raise RequestError("Transporting units: " + " ".join(problems))
        if self.kind != "emd" or self.mass != "uniform":
            require_pot()  # before any work

    @property
    def looks_inside(self) -> bool:
        """Plans are made of distances within each model."""
        return self.kind == "gromov"

    def plan(
        self, cost: Tensor, energy_a: Tensor, energy_b: Tensor, within: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The plan for a cost (anchor's units, source's units); energies are what importance is taken from, `within`
        the squared distances inside the anchor and inside the source. Without these, a solver that looks inside is
        hard."""
        within = None if min(cost.shape) <= 2 else within
        masses = [self._masses(energy) for energy in (energy_a, energy_b)]
        if not bool(cost.isfinite().all()):
            raise IsomergeError(f"Transporting {tuple(cost.shape)} units: their distances are not finite.")
        if self.kind != "sinkhorn" and within is None and self.mass == "uniform" and cost.shape[0] == cost.shape[1]:
            return torch.eye(len(cost), dtype=torch.float64)[:, assign(-cost.double().cpu())] / len(cost)
        mean = float(cost.mean())
        scaled = (cost / mean if mean > 0 else cost).double().cpu().contiguous().numpy()
        if self.kind == "sinkhorn":
            return self._soft(masses[0], masses[1], scaled)
        if within is not None:
            return self._inner(masses[0], masses[1], scaled, within)
        return self._hard(masses[0], masses[1], scaled)

    def _masses(self, energy: Tensor) -> Tensor:
        if self.mass == "uniform":
            return torch.full((len(energy),), 1 / len(energy), dtype=torch.float64)
        size = energy.double().cpu().clamp(min=0).sqrt()
        size = size + FLOOR * size.mean() if bool(size.any()) else torch.ones_like(size)
        return size / size.sum()

    def _hard(self, a: Tensor, b: Tensor, cost: Any) -> Tensor:
        matrix, log = require_pot().emd(a.numpy(), b.numpy(), cost, numItermax=STEPS, log=True)
        self.unfinished += log["warning"] is not None
        return torch.from_numpy(matrix)

    def _soft(self, a: Tensor, b: Tensor, cost: Any) -> Tensor:
        if float(cost.max()) / self.regularisation > STEEP:
            matrix, log = self._descended(a, b, cost)
        else:
            matrix, log = require_pot().sinkhorn(
                a.numpy(), b.numpy(), cost, self.regularisation, method="sinkhorn", numItermax=ROUNDS, stopThr=STOP,
                log=True, warn=False,
            )  # fmt: skip
        plan = torch.from_numpy(matrix)
        if not bool(plan.isfinite().all()):
            raise RequestError(
                f"Transporting {tuple(plan.shape)} units with a regularisation of {self.regularisation}: it is too "
                "small to be computed with. Use a larger one, or the solver 'emd', which is its limit at 0."
            )
        self.unfinished += bool(log["err"] and log["err"][-1] > REACHED)
        return plan

    def _inner(self, a: Tensor, b: Tensor, cost: Any, within: tuple[Tensor, Tensor]) -> Tensor:
        """By conditional gradients from two starts, of which the better end counts. The objective is concave for
        distances, so they end in corners: for equal masses on equally many units in permutations, up to rounding."""
        first, second = (geometry(one) for one in within)
        starts = [torch.outer(a, b), self._hard(a, b, _far_as(first, second).numpy())]
        ends = [self._descended_inside(a, b, cost, first, second, start) for start in starts]
        plan = min(ends, key=lambda end: end[1])[0]
        corner = torch.where(plan < 1e-9 * plan.max(), 0, plan)
        return corner if is_permutation(corner / corner.sum(1, keepdim=True)) else plan

    def _descended_inside(
        self, a: Tensor, b: Tensor, cost: Any, first: Tensor, second: Tensor, start: Tensor
    ) -> tuple[Tensor, float]:
        """The plan, and the value of the objective."""
        gromov, sides = require_pot().gromov, (first.numpy(), second.numpy(), a.numpy(), b.numpy())
        given = {"G0": start.numpy(), "max_iter": STEPS_INSIDE, "symmetric": True, "log": True}
        if self.inner == 1:
            matrix, log = gromov.gromov_wasserstein(*sides, **given)
        else:
            matrix, log = gromov.fused_gromov_wasserstein(cost, *sides, alpha=self.inner, **given)
        self.unfinished += len(log["loss"]) > STEPS_INSIDE
        return torch.from_numpy(matrix), float(log["gw_dist" if self.inner == 1 else "fgw_dist"])

    def _descended(self, a: Tensor, b: Tensor, cost: Any) -> tuple[Any, dict[str, Any]]:
        """A small λ by halving a large one: each step starts from the potentials of the last, or none would settle."""
        pot, start, here = require_pot(), None, 1.0
        while True:
            with numpy.errstate(over="ignore"):  # far from the masses at first; the plan itself is looked at
                matrix, log = pot.bregman.sinkhorn_log(
                    a.numpy(), b.numpy(), cost, here, numItermax=ROUNDS // 4, stopThr=STOP, log=True, warn=False,
                    warmstart=start,
                )  # fmt: skip
            if here <= self.regularisation:
                return matrix, log
            there = max(here / 2, self.regularisation)
            start = log["log_u"] * here / there, log["log_v"] * here / there
            here = there


def geometry(within: Tensor) -> Tensor:
    """Distances of mean 1 from squared ones; all 0 where the units cannot be told apart."""
    distances = within.double().cpu().clamp(min=0).sqrt().contiguous()
    mean = float(distances.mean())
    return distances / mean if mean > 0 else distances


def _far_as(first: Tensor, second: Tensor) -> Tensor:
    """How differently two units see the others of their models: the squared difference of their sorted distances."""
    count = max(len(first), len(second))
    levels = (numpy.arange(count) + 0.5) / count
    rows = [torch.from_numpy(numpy.quantile(one.numpy(), levels, axis=1).T.copy()) for one in (first, second)]
    return torch.cdist(rows[0], rows[1]).square() / count


def is_permutation(matrix: Tensor) -> bool:
    """Zeros, and exactly one 1 in every row and column."""
    if matrix.shape[0] != matrix.shape[1]:
        return False
    ones = matrix == 1
    counts = bool((ones.sum(0) == 1).all() and (ones.sum(1) == 1).all())
    return counts and int(matrix.count_nonzero()) == len(matrix)


def require_pot() -> Any:
    try:
        import ot
    except ImportError as error:
        raise RequestError(
            "Transporting units: soft plans, importance and different widths need the package POT, and "
            f"{why_not_imported('ot', error)}."
        ) from error
    return ot
