"""Soft assignment and annealing against brute force and scipy: orders, near the best, the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isomerge import choices
from isomerge.alignment.solvers.annealing import annealed_orders
from isomerge.alignment.solvers.by_group import ORDER_SOLVERS, SOLVERS, solve
from isomerge.alignment.solvers.sinkhorn import sinkhorn_orders
from isomerge.symmetry.groups import Permutation, Rotation, SignedPermutation

WAYS = [sinkhorn_orders, annealed_orders]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def earned(C: Tensor, perm: Tensor) -> float:
    return float(C[perm, torch.arange(len(perm))].sum())


def test_the_words_of_the_command_line_are_those_of_the_table() -> None:
    assert tuple(ORDER_SOLVERS) == choices.ORDER_SOLVERS
    assert {name for name, solver in SOLVERS.items() if solver.any_order} == {"permutation", "signed permutation"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_few_units_reach_the_best_of_all_orders(way: Callable[[Tensor], Tensor], n: int) -> None:
    C = torch.stack([random(n, n, seed=seed) for seed in range(12)])
    found = way(C)
    best = [max(sum(float(c[i, j]) for j, i in enumerate(p)) for p in itertools.permutations(range(n))) for c in C]
    reached = [earned(c, perm) for c, perm in zip(C, found, strict=True)]
    assert all(sorted(perm) == list(range(n)) for perm in found.tolist())
    assert all(mine <= most + 1e-12 for mine, most in zip(reached, best, strict=True))
    assert sum(reached) == pytest.approx(sum(best), rel=0.02)


@pytest.mark.parametrize(("way", "share"), [(sinkhorn_orders, 0.98), (annealed_orders, 0.85)])
def test_many_units_come_near_the_optimum_of_scipy_on_noise(way: Callable[[Tensor], Tensor], share: float) -> None:
    C = random(1, 60, 60, seed=3)
    rows, columns = linear_sum_assignment(C[0].numpy(), maximize=True)
    best = float(C[0].numpy()[rows, columns].sum())
    assert share * best <= earned(C[0], way(C)[0]) <= best + 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_a_planted_order_is_found_and_found_again(way: Callable[[Tensor], Tensor]) -> None:
    A = random(40, 64, seed=1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    B = A[order.argsort()] + 0.2 * random(40, 64, seed=5)  # B[order] is A
    C = (B @ A.T)[None]
    assert torch.equal(way(C)[0], order) and torch.equal(way(C), way(C))


@pytest.mark.parametrize("way", WAYS)
def test_where_every_order_is_as_good_the_identity_stays(way: Callable[[Tensor], Tensor]) -> None:
    assert way(torch.zeros(2, 5, 5)).tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("word", ["sinkhorn", "annealing"])
@pytest.mark.parametrize("seed", range(4))
def test_signs_and_what_has_none_are_part_of_the_best_element(word: str, seed: int) -> None:
    C, unsigned = random(1, 4, 4, seed=seed), random(1, 4, 4, seed=50 + seed)
    group = SignedPermutation(4)
    element, score = solve(group, C, unsigned, by=word)
    every = [
        sum(s[j] * C[0, i, j] + unsigned[0, i, j] for j, i in enumerate(p))
        for p in itertools.permutations(range(4))
        for s in itertools.product((1, -1), repeat=4)
    ]
    moved = group.act(element[0], C[0]).diagonal().sum() + group.act(element[0], unsigned[0], unsigned=True).trace()
    assert group.contains(element) and float(moved) == pytest.approx(float(score[0]), abs=1e-12)
    assert float(score[0]) == pytest.approx(float(max(every)), rel=0.03)


def test_groups_without_orders_are_solved_as_ever() -> None:
    C = random(2, 5, 5, seed=0)
    for word in ORDER_SOLVERS:
        assert torch.equal(solve(Rotation(5), C, by=word)[0], solve(Rotation(5), C)[0])
    assert np.allclose(solve(Permutation(5), C, by="graph")[1], solve(Permutation(5), C)[1])


@pytest.mark.parametrize("word", ["sinkhorn", "annealing"])
def test_scores_that_are_not_finite_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        solve(Permutation(3), torch.full((1, 3, 3), float("nan")), by=word)
