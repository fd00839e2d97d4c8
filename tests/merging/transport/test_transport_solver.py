"""Plans are what POT gives, and what SciPy gives where it can."""

from __future__ import annotations

import sys

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from isomerge.errors import IsomergeError, RequestError
from isomerge.merging.transport.plans import handing_on, writing
from isomerge.merging.transport.solver import TransportSolver, is_permutation
from merging.transport.model_pairs import fuse, model


def costs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (rows, columns))
    return torch.cdist(x, y).square()


def solve(
    solver: TransportSolver, cost: torch.Tensor, energies: tuple[torch.Tensor, torch.Tensor] | None = None
) -> np.ndarray:
    a, b = energies or (torch.ones(cost.shape[0]), torch.ones(cost.shape[1]))
    return solver.plan(cost, a, b).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_equal_masses_give_the_best_assignment(seed: int) -> None:
    cost = costs(13, 13, seed)
    plan = solve(TransportSolver(), cost)
    rows, columns = linear_sum_assignment(cost.numpy())
    truth = np.zeros((13, 13))
    truth[rows, columns] = 1 / 13
    np.testing.assert_array_equal(plan, truth)


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6), (7, 7)])
def test_hard_plans_are_those_of_pot(rows: int, columns: int) -> None:
    cost = costs(rows, columns)
    truth = ot.emd(np.full(rows, 1 / rows), np.full(columns, 1 / columns), cost.numpy())
    np.testing.assert_allclose(solve(TransportSolver(), cost), truth, atol=1e-12)


@pytest.mark.parametrize("regularisation", [0.5, 0.05])
def test_soft_plans_are_those_of_pot_on_costs_of_mean_one(regularisation: float) -> None:
    cost = 37 * costs(6, 9)
    truth = ot.bregman.sinkhorn_log(
        np.full(6, 1 / 6), np.full(9, 1 / 9), (cost / cost.mean()).numpy(), regularisation, numItermax=20_000,
        stopThr=1e-13,
    )  # fmt: skip
    np.testing.assert_allclose(solve(TransportSolver("sinkhorn", regularisation), cost), truth, atol=1e-7)


def test_soft_plans_approach_the_hard_one() -> None:
    cost = costs(8, 8, seed=2)
    hard = solve(TransportSolver(), cost)
    apart = [np.abs(solve(TransportSolver("sinkhorn", r), cost) - hard).max() for r in (1.0, 0.1, 0.01, 0.001)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-9


def test_masses_are_the_sizes_of_the_units_where_importance_is_asked_for() -> None:
    cost = costs(4, 3)
    energies = tuple(torch.tensor(e, dtype=torch.float64) for e in ([1, 4, 9, 0], [1, 1, 4]))
    plan = solve(TransportSolver(mass="importance"), cost, energies)
    sizes = [e.sqrt().numpy() for e in energies]
    masses = [(s + 1e-3 * s.mean()) / (s + 1e-3 * s.mean()).sum() for s in sizes]
    np.testing.assert_allclose(plan, ot.emd(masses[0], masses[1], cost.numpy()), atol=1e-9)
    assert plan[3].sum() > 0  # a unit that never fires still has a place


def test_normalised_plans_are_means_of_units_and_shares_of_units() -> None:
    plan = torch.from_numpy(solve(TransportSolver(), costs(6, 9)))
    torch.testing.assert_close(writing(plan).sum(1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(handing_on(plan).sum(0), torch.ones(9, dtype=torch.float64))
    order = torch.eye(5, dtype=torch.float64)[[3, 1, 0, 4, 2]]
    assert torch.equal(writing(order / 5), order) and torch.equal(handing_on(order / 5), order)


def test_a_permutation_is_told_from_what_is_nearly_one() -> None:
    eye = torch.eye(3)
    assert is_permutation(eye[[2, 0, 1]])
    assert not is_permutation(eye + 1e-12)
    assert not is_permutation(eye[:2])
    assert not is_permutation(eye[[0, 0, 1]])


def test_a_plan_that_did_not_settle_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = TransportSolver("sinkhorn", 0.01)
    solve(solver, costs(20, 20))
    assert solver.unfinished == 0
    monkeypatch.setattr("isomerge.merging.transport.solver.ROUNDS", 20)
    solve(solver, costs(20, 20))
    assert solver.unfinished == 1


def test_costs_that_are_not_finite_are_refused() -> None:
    cost = costs(3, 3)
    cost[1, 1] = float("nan")
    with pytest.raises(IsomergeError, match="not finite"):
        solve(TransportSolver(), cost)


def test_without_pot_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    for options in ({"solver": "sinkhorn"}, {"mass": "importance"}):
        with pytest.raises(RequestError, match=r"POT.*pip install .isomerge\[ot\]"):
            fuse([model("vit"), model("vit", 1)], **options)
    with pytest.raises(RequestError, match=r"different widths.*POT.*pip install .isomerge\[ot\]"):
        solve(TransportSolver(), costs(3, 4))
    assert solve(TransportSolver(), costs(3, 3)).sum() == pytest.approx(1)  # an assignment needs no POT
