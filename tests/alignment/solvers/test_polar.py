"""Rotations against SciPy, planted elements and random search."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from isomerge.alignment.solvers.rotation import (
    nuclear_norm,
    partial_isometry,
    partial_isometry_fixing_ones,
    polar,
    rotation,
    rotation_fixing_ones,
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(*shape: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(*shape, seed=seed))[0]


def with_condition(P: int, e: int, condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """C with known polar factor R = C H⁻¹."""
    R, V = orthogonal(P, e, e, seed=seed), orthogonal(P, e, e, seed=seed + 1)
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), e, dtype=torch.float64)
    return R @ (V * values) @ V.mT, R


@pytest.mark.parametrize("method", ["auto", "svd", "qdwh"])
@pytest.mark.parametrize("e", [1, 2, 17, 64, 130])
def test_polar_is_exact_to_1e_12_for_well_conditioned_matrices(method: str, e: int) -> None:
    C, R = with_condition(5, e, 100.0 if e > 1 else 1.0, seed=e)
    assert (polar(C, method=method) - R).abs().max() < 1e-12
    assert (polar(1e-180 * C, method=method) - R).abs().max() < 1e-12
    assert (polar(1e180 * C, method=method) - R).abs().max() < 1e-12


@pytest.mark.parametrize("condition", [1e3, 1e4, 1e6, 1e10, 1e15])
def test_polar_stays_orthogonal_and_positive_when_ill_conditioned(condition: float) -> None:
    C, R = with_condition(7, 32, condition, seed=3)
    found = polar(C, method="qdwh")
    H = found.mT @ C
    assert (found.mT @ found - torch.eye(32)).abs().max() < 1e-13
    assert (H - H.mT).abs().max() < 1e-12
    assert torch.linalg.eigvalsh((H + H.mT) / 2).min() > -1e-12
    assert (found - R).abs().max() < 20 * condition * 1e-15 + 1e-12


def test_members_that_fail_fall_back_without_hurting_the_others() -> None:
    C, R = with_condition(6, 16, 10.0, seed=5)
    C[1] = 0
    C[4, :, 3] = 0
    C[5] = random(16, 1, seed=0) @ random(1, 16, seed=1)
    found = polar(C, method="qdwh")
    assert (found.mT @ found - torch.eye(16)).abs().max() < 1e-13
    assert (found[[0, 2, 3]] - R[[0, 2, 3]]).abs().max() < 1e-12
    assert torch.equal(found[1], torch.eye(16).double())
    assert (found[4:] * C[4:]).sum((-2, -1)).allclose(torch.linalg.svdvals(C[4:]).sum(-1))


@pytest.mark.parametrize("method", ["auto", "svd", "qdwh"])
@pytest.mark.parametrize(("rank", "condition"), [(40, 1e3), (40, 1e8), (31, 1e3), (31, 1e8), (1, 1.0)])
def test_polar_is_that_of_numpy_wherever_the_matrix_decides(method: str, rank: int, condition: float) -> None:
    """Rank-deficient and ill-conditioned: on the directions above the rounding, and in what it earns."""
    U, V = (np.linalg.qr(random(40, 40, seed=seed).numpy())[0][:, :rank] for seed in (rank, rank + 1))
    C = U * np.geomspace(1.0, 1.0 / condition, rank) @ V.T
    found = polar(torch.from_numpy(C), method=method).numpy()
    assert np.abs(found.T @ found - np.eye(40)).max() < 1e-12
    left, values, right = np.linalg.svd(C)
    seen = values > 1e-9 * values[0]
    assert seen.sum() == rank
    np.testing.assert_allclose(found @ right[seen].T, left[:, seen], atol=1e-6)
    assert np.vdot(found, C) == pytest.approx(values.sum(), rel=1e-12)


def test_batch_equals_loop_and_repeats_bit_for_bit() -> None:
    C = random(3, 11, 24, 24, seed=0)
    found = polar(C)
    assert found.shape == C.shape and torch.equal(found, polar(C))
    loop = torch.stack([polar(c) for c in C.reshape(-1, 24, 24)]).reshape(C.shape)
    assert (found - loop).abs().max() < 1e-10


def test_input_that_is_not_finite_or_not_square_is_refused() -> None:
    for bad in (torch.nan, torch.inf):
        C = torch.eye(3)
        C[0, 0] = bad
        for solver in (polar, rotation, nuclear_norm, rotation_fixing_ones, partial_isometry):
            with pytest.raises(ValueError, match="NaN or infinite"):
                solver(C)
    with pytest.raises(ValueError, match="square"):
        polar(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="Known values"):
        polar(torch.eye(2), method="newton")


def test_rotation_agrees_with_scipy() -> None:
    for seed in range(10):
        B, A = random(12, 30, seed=seed), random(12, 30, seed=seed + 50)
        R, total = scipy.linalg.orthogonal_procrustes(B.T.numpy(), A.T.numpy())  # ‖Bᵀ R − Aᵀ‖
        C = B @ A.T
        assert (rotation(C) - torch.from_numpy(R).T).abs().max() < 1e-11
        assert float((rotation(C) @ C).trace()) == pytest.approx(total)
        assert float(nuclear_norm(C)) == pytest.approx(total)


def test_rotation_recovers_a_planted_rotation() -> None:
    A, g = random(4, 20, 50, seed=0), orthogonal(4, 20, 20, seed=1)
    B = g.mT @ A
    assert (rotation(B @ A.mT) @ B - A).abs().max() < 1e-11


def fixing_ones(d: int, angle: float, seed: int) -> Tensor:
    """exp of a random skew matrix that annihilates 1: a small rotation that keeps 1, made independently."""
    K = random(d, d, seed=seed)
    K = (K - K.T) / 2
    P = torch.eye(d, dtype=torch.float64) - 1.0 / d
    return torch.linalg.matrix_exp(angle * P @ K @ P)


def test_rotation_fixing_ones_keeps_ones_and_cannot_be_improved() -> None:
    for seed in range(4):
        d = 3 + 4 * seed
        C = random(d, d, seed=seed) + seed * torch.eye(d)
        g = rotation_fixing_ones(C)
        ones = torch.ones(d, dtype=torch.float64)
        assert (g @ g.T - torch.eye(d)).abs().max() < 1e-12
        assert (g @ ones - ones).abs().max() < 1e-12 and (g.T @ ones - ones).abs().max() < 1e-12
        best = float((g @ C).trace())
        for trial in range(40):
            for angle in (1e-3, 0.1, 1.0, 10.0):
                assert float((fixing_ones(d, angle, seed=trial) @ g @ C).trace()) <= best + 1e-10
        reflection = g - 2 * torch.outer(v := _unit_without_mean(d, seed), v @ g)
        assert float((reflection @ C).trace()) <= best + 1e-10


def _unit_without_mean(d: int, seed: int) -> Tensor:
    v = random(d, seed=seed)
    v = v - v.mean()
    return v / v.norm()


def test_rotation_fixing_ones_recovers_a_planted_element() -> None:
    A = random(10, 40, seed=0)
    g = fixing_ones(10, 2.0, seed=1)
    B = g.T @ A
    assert (rotation_fixing_ones(B @ A.T) - g).abs().max() < 1e-11
    assert rotation_fixing_ones(torch.zeros(4, 4)).sum(1).allclose(torch.ones(4).double())


def test_partial_isometry_is_unique_where_the_polar_factor_is_not() -> None:
    d, r = 20, 6
    left, right, values = orthogonal(d, d, seed=0)[:, :r], orthogonal(d, d, seed=1)[:, :r], torch.arange(1, r + 1)
    C = (left * values) @ right.T
    expected = right @ left.T  # by construction, from no SVD
    for seed in range(5):
        noise = 1e-14 * random(d, d, seed=seed)  # turns the null space freely
        assert (partial_isometry(C + noise) - expected).abs().max() < 1e-11
    assert float(partial_isometry(C).square().sum()) == pytest.approx(r)
    assert float((partial_isometry(C) @ C).trace()) == pytest.approx(float(nuclear_norm(C)))
    full = random(d, d, seed=4)
    assert (partial_isometry(full) - rotation(full)).abs().max() < 1e-11
    assert not partial_isometry(torch.zeros(3, 3)).any()


def test_partial_isometry_fixing_ones_keeps_ones_and_is_unique() -> None:
    d, r = 15, 4
    ones = torch.ones(d, dtype=torch.float64)
    A = random(d, r, seed=0)
    true = fixing_ones(d, 2.0, seed=3)
    C = (true.T @ A) @ A.T
    g = partial_isometry_fixing_ones(C)
    assert (g @ ones - ones).abs().max() < 1e-12 and (g.T @ ones - ones).abs().max() < 1e-12
    assert float(g.square().sum()) == pytest.approx(r + 1)
    assert (partial_isometry_fixing_ones(C + 1e-13 * random(d, d, seed=5)) - g).abs().max() < 1e-10
    centred = A - A.mean(0)
    assert (g @ true.T @ centred - centred).abs().max() < 1e-10  # moves what it saw as the planted element does
    full = random(d, d, seed=6)
    assert (partial_isometry_fixing_ones(full) - rotation_fixing_ones(full)).abs().max() < 1e-10
