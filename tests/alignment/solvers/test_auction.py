"""The auction and what it is for: shorter exact assignments, and rough ones, against SciPy alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isomerge.alignment.solvers.assignment import assign, assign_roughly, assign_spoiling
from isomerge.alignment.solvers.auction import FEW, auction, prices_for

N = FEW + 64


def scores(kind: str, n: int = N) -> Tensor:
    """(n, n) of a shape that the feed-forwards of two models have, or that an auction finds hard."""
    generator = torch.Generator().manual_seed(0)
    B, A = torch.randn(2, n, n // 4, generator=generator, dtype=torch.float64)
    if kind == "planted":
        A = B[torch.randperm(n, generator=generator)] + 0.5 * A
    C = B @ A.mT
    if kind == "few values":
        return (C > 0).double()
    if kind == "equal rows":
        return C[:1].expand(n, n).contiguous()
    if kind == "rank one":
        return torch.outer(B[:, 0], A[:, 0])
    if kind == "zeros":
        return torch.zeros(n, n, dtype=torch.float64)
    return C


KINDS = ("strangers", "planted", "few values", "equal rows", "rank one", "zeros")


def earned(C: Tensor, perm: Tensor) -> float:
    assert sorted(perm.tolist()) == list(range(len(C)))
    return float(C[perm, torch.arange(len(C))].sum())


def best(C: Tensor) -> float:
    rows, columns = linear_sum_assignment(C.numpy(), maximize=True)
    return float(C.numpy()[rows, columns].sum())


def dual_gap(C: Tensor, perm: Tensor) -> float:
    """What the cheapest prices that support an assignment leave between it and their bound: zero at an optimum."""
    cost = -C.numpy()[perm.numpy()]  # row j is the unit that goes to column j
    own = np.diagonal(cost).copy()
    potential = np.zeros(len(cost))
    for _ in range(len(cost)):
        following = np.minimum(potential, (cost - own[:, None] + potential[:, None]).min(0))
        if np.allclose(following, potential, rtol=0, atol=1e-12):
            break
        potential = following
    rows = (cost - potential[None]).min(1)
    return float(own.sum() - rows.sum() - potential.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_prices_leave_the_optimum_what_it_is(kind: str) -> None:
    C = scores(kind)
    size = float(C.abs().sum(0).max()) + 1
    for perm in (assign(C), assign_spoiling(C.clone())[0]):
        assert abs(earned(C, perm) - best(C)) <= 1e-12 * size
        assert dual_gap(C, perm) <= 1e-10 * size
    assert float(assign_spoiling(C.clone())[1]) == pytest.approx(best(C), abs=1e-10 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rough_assignment_is_a_permutation_that_earns_nearly_the_most(kind: str) -> None:
    C = scores(kind)
    for wide in (C, C.float()):
        assert earned(C, assign_roughly(wide)) >= best(C) - 0.03 * abs(best(C))


def test_no_partner_is_further_than_epsilon_from_the_best_at_the_final_prices() -> None:
    C = scores("strangers")
    partner, prices = auction(C, 1.0, 10)
    bidding = (partner >= 0).nonzero().flatten()
    gain = C - prices
    assert len(bidding) >= len(C) - 10 and len(set(partner[bidding].tolist())) == len(bidding)
    assert bool((gain[bidding, partner[bidding]] >= gain[bidding].max(1)[0] - 1.0 - 1e-9).all())


def test_assignments_do_not_depend_on_the_number_of_threads() -> None:
    C, before = scores("strangers"), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((assign(C), assign_roughly(C.float()), prices_for(C)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_scores_that_are_not_finite_are_refused() -> None:
    C = scores("strangers")
    C[0, 0] = torch.nan
    for solve in (assign, assign_roughly):
        with pytest.raises(ValueError, match="NaN or infinite"):
            solve(C)
