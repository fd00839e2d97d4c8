"""Rotary numbers, scales and balancing against a fine grid, SciPy and the equations they must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from torch import Tensor

from isomerge.alignment.solvers.by_group import SOLVERS
from isomerge.alignment.solvers.rotary import rotary_phase, rotary_scaled, rotary_sign
from isomerge.alignment.solvers.scale import balance, balance_scale, head_scale
from isomerge.symmetry.groups import GROUPS


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_complex(*shape: int, seed: int) -> Tensor:
    return torch.complex(random(*shape, seed=seed), random(*shape, seed=seed + 10_000))


def inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y.conj()).sum(-1)


def least_by_grid(cost: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """The least value of a function of one variable: fine grid, then SciPy in the best bracket."""
    x = np.linspace(low, high, 20_001)
    i = int(np.argmin(cost(x)))
    span = (x[max(i - 1, 0)], x[min(i + 1, len(x) - 1)])
    return float(scipy.optimize.minimize_scalar(cost, bounds=span, method="bounded", options={"xatol": 1e-12}).fun)


def test_rotary_phase_recovers_a_planted_phase_and_beats_a_grid_of_phases() -> None:
    qa, ka = random_complex(6, 9, seed=0), random_complex(6, 9, seed=1)
    c = torch.polar(torch.ones(6).double(), random(6, seed=2))
    qb, kb = qa / c[:, None], ka * c.conj()[:, None]
    assert (rotary_phase(inner(qb, qa), inner(kb, ka)) - c).abs().max() < 1e-12
    a, b = random_complex(50, seed=3), random_complex(50, seed=4)
    found = rotary_phase(a, b)
    grid = torch.exp(1j * torch.linspace(0, 6.29, 5000).double())
    assert ((found * (a + b)).real >= ((a + b)[:, None] * grid).real.amax(1) - 1e-12).all()
    assert (found.abs() - 1).abs().max() < 1e-15
    assert rotary_phase(a, -a).equal(torch.ones(50, dtype=torch.complex128))


def test_rotary_sign_is_one_for_zero() -> None:
    assert rotary_sign(torch.tensor([-0.5, 0.0, 2.0])).tolist() == [-1.0, 1.0, 1.0]


def rotary_cost(c: Tensor, qb: Tensor, qa: Tensor, kb: Tensor, ka: Tensor) -> Tensor:
    c = c[..., None]
    return (c * qb - qa).abs().square().sum(-1) + (kb / c.conj() - ka).abs().square().sum(-1)


def test_rotary_scaled_is_the_global_minimum() -> None:
    sizes = 10.0 ** random(4, 300, seed=9)[..., None]
    qb, qa, kb, ka = (random_complex(300, 2, seed=s) * size for s, size in zip(range(4), sizes, strict=True))
    a, b = inner(qb, qa), inner(kb, ka)
    N, M = inner(qb, qb).real, inner(kb, kb).real
    c = rotary_scaled(a, b, N, M)
    found = rotary_cost(c, qb, qa, kb, ka)
    fixed = (inner(qa, qa) + inner(ka, ka)).real
    for i in range(300):

        def cost(x: np.ndarray, i: int = i) -> np.ndarray:
            r = np.exp(x)
            return float(N[i]) * r**2 + float(M[i]) / r**2 - 2 * abs(r * complex(a[i]) + complex(b[i]) / r)

        best = least_by_grid(cost, -12, 12) + float(fixed[i])
        assert float(found[i]) <= best + 1e-9 * (1 + abs(float(fixed[i])))
    turned = rotary_cost(c * torch.exp(torch.tensor(1e-5j)), qb, qa, kb, ka)
    assert (turned >= found - 1e-9 * fixed).all()


def test_rotary_scaled_recovers_a_planted_number_to_float64() -> None:
    c = random_complex(30, seed=0)
    qa, ka = random_complex(30, 5, seed=1), random_complex(30, 5, seed=2)
    qb, kb = qa / c[:, None], ka * c.conj()[:, None]
    found = rotary_scaled(inner(qb, qa), inner(kb, ka), inner(qb, qb).real, inner(kb, kb).real)
    assert ((found - c).abs() / c.abs()).max() < 1e-11


def test_rotary_scaled_keeps_modulus_one_where_a_side_is_zero() -> None:
    zero, one = torch.zeros(1).double(), torch.ones(1).double()
    assert rotary_scaled(zero + 0j, 1j * one, zero, one).tolist() == [-1j]
    assert rotary_scaled(zero + 0j, zero + 0j, one, one).tolist() == [1 + 0j]
    alone = rotary_scaled(zero + 0j, 3 * one + 0j, one, one)  # only one side has evidence: still the minimum
    x = np.linspace(0.05, 3, 100_001)
    assert abs(float(alone.real) - x[np.argmin(x**2 + 1 / x**2 - 6 / x)]) < 1e-4


@pytest.mark.parametrize("signed", [False, True])
def test_head_scale_is_the_global_minimum(signed: bool) -> None:
    sizes = 10.0 ** random(4, 300, seed=5)[..., None]
    qb, qa, kb, ka = (random(300, 3, seed=s) * size for s, size in zip(range(4), sizes, strict=True))
    N, p, q, M = (qb * qb).sum(-1), (qb * qa).sum(-1), (kb * ka).sum(-1), (kb * kb).sum(-1)
    a = head_scale(N, p, q, M, signed=signed)
    assert signed or (a > 0).all()
    scale = (qa * qa + ka * ka).sum(-1)
    for i in range(300):

        def cost(x: np.ndarray, i: int = i, sign: float = 1.0) -> np.ndarray:
            v = sign * np.exp(x)
            return float(N[i]) * v**2 - 2 * float(p[i]) * v + float(M[i]) / v**2 - 2 * float(q[i]) / v

        best = least_by_grid(cost, -12, 12)
        if signed:
            best = min(best, least_by_grid(partial(cost, sign=-1.0), -12, 12))
        mine = cost(np.log(abs(float(a[i]))), i, float(a[i].sign()))
        assert mine <= best + 1e-9 * (1 + float(scale[i]))
        roots = np.roots([float(N[i]), -float(p[i]), 0.0, float(q[i]), -float(M[i])])
        assert np.abs(roots - float(a[i])).min() < 1e-10 * abs(float(a[i]))


def test_head_scale_recovers_a_planted_scale_and_leaves_zeros_alone() -> None:
    qa, ka = random(8, 5, seed=0), random(8, 5, seed=1)
    a = torch.tensor([3.0, 0.2, 1.0, -2.0, -0.1, 50.0, 1e-3, -1e3]).double()
    qb, kb = qa / a[:, None], ka * a[:, None]
    args = ((qb * qb).sum(-1), (qb * qa).sum(-1), (kb * ka).sum(-1), (kb * kb).sum(-1))
    assert ((head_scale(*args, signed=True) - a).abs() / a.abs()).max() < 1e-10
    assert ((head_scale(*(v[:3] for v in args), signed=False) - a[:3]).abs() / a[:3]).max() < 1e-10
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert head_scale(zero, zero, one, one, signed=True).equal(torch.ones(2, 3).double())
    assert head_scale(one, one, zero, zero, signed=False).equal(torch.ones(2, 3).double())


def test_balance_makes_the_grams_equal_and_is_symmetric_positive() -> None:
    for condition in (1.0, 1e3, 1e6):
        spread = torch.logspace(0, -np.log10(condition), 12, dtype=torch.float64)[:, None]
        X = random(5, 12, 12, seed=3) @ (spread * random(5, 12, 40, seed=0))
        Y = 100 * random(5, 12, 30, seed=1)
        S, skipped = balance(X, Y)
        assert not skipped.any() and S.equal(S.mT) and (torch.linalg.eigvalsh(S) > 0).all()
        forward, dual = S @ X, torch.linalg.solve(S, Y)
        difference = forward @ forward.mT - dual @ dual.mT
        assert (difference.abs().amax((1, 2)) / (forward @ forward.mT).abs().amax((1, 2))).max() < 1e-9


def test_balance_is_the_geometric_mean_of_scipy() -> None:
    X, Y = random(1, 6, 20, seed=0), random(1, 6, 15, seed=1)
    S, _ = balance(X, Y)
    inverse, gram = np.linalg.inv((X[0] @ X[0].T).numpy()), (Y[0] @ Y[0].T).numpy()
    root = scipy.linalg.sqrtm(inverse).real
    back = np.linalg.inv(root)
    mean = root @ scipy.linalg.sqrtm(back @ gram @ back).real @ root
    assert np.abs((S[0] @ S[0]).numpy() - mean).max() < 1e-11


def test_balance_forgets_any_scrambling_up_to_a_rotation() -> None:
    X, Y, G = random(3, 8, 30, seed=0), random(3, 8, 30, seed=1), random(3, 8, 8, seed=2)
    before, after = balance(X, Y)[0] @ X, balance(G @ X, torch.linalg.inv(G).mT @ Y)[0] @ (G @ X)
    assert (before.mT @ before - after.mT @ after).abs().max() < 1e-8


def test_balance_keeps_siblings_siblings_where_the_raw_factor_would_jump() -> None:
    X = torch.eye(6).double()[None] + 1e-9 * random(1, 6, 6, seed=0)  # all values of Σ nearly equal
    near = X + 1e-9 * random(1, 6, 6, seed=1)
    Y = torch.eye(6).double()[None]
    assert (balance(X, Y)[0] - balance(near, Y)[0]).abs().max() < 1e-8


def test_balance_skips_heads_without_full_rank() -> None:
    X, Y = random(4, 5, 9, seed=0), random(4, 5, 9, seed=1)
    X[1, 2] = X[1, 3]
    Y[2, 4] = 0
    Y[3] = 0
    S, skipped = balance(X, Y)
    assert skipped.tolist() == [False, True, True, True]
    assert S[1:].equal(torch.eye(5).double().expand(3, 5, 5))
    assert (S[0] - balance(X[:1], Y[:1])[0][0]).abs().max() < 1e-13
    S, skipped = balance(random(2, 5, 4, seed=0), random(2, 5, 9, seed=1))
    assert skipped.all() and S.equal(torch.eye(5).double().expand(2, 5, 5))


def test_balance_scale_equalises_norms() -> None:
    x, y = random(7, 5, seed=0), 30 * random(7, 4, seed=1)
    s = balance_scale(x.square().sum(-1), y.square().sum(-1))
    assert ((s[:, None] * x).norm(dim=-1) - (y / s[:, None]).norm(dim=-1)).abs().max() < 1e-12
    zero, one = torch.zeros(1), torch.ones(1)
    assert balance_scale(zero, one).item() == balance_scale(one, zero).item() == balance_scale(zero, zero).item() == 1


def test_every_group_has_one_solver() -> None:
    assert SOLVERS.keys() == GROUPS.keys()
    assert all("\n" not in solver.summary for solver in SOLVERS.values())
    assert all((SOLVERS[group.name].balance is not None) >= group(2).balanced for group in GROUPS.values())
