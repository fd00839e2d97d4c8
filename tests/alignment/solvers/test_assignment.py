"""Permutations against brute force, and the exits against the assignment they replace."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from isomerge.alignment.solvers.assignment import assign, assign_batch, assign_signed, identity_is_optimal


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(C: Tensor, perm: Tensor) -> float:
    return float(C[perm, torch.arange(len(perm))].sum())


def brute_force(C: Tensor) -> float:
    return max(sum(float(C[i, j]) for j, i in enumerate(p)) for p in itertools.permutations(range(len(C))))


def scores_of_every_kind() -> list[Tensor]:
    cases = []
    for seed in range(12):
        for n in (1, 2, 3, 5, 6):
            C = random(n, n, seed=seed)
            cases += [C, -C.abs(), C.round(), torch.zeros(n, n).double(), C[:, :1].expand(n, n).contiguous()]
            cases.append(C + 10 * torch.eye(n)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))])
    return cases


def test_assignment_reaches_the_best_of_all_permutations() -> None:
    for C in scores_of_every_kind():
        perm = assign(C)
        assert perm.dtype == torch.int64 and sorted(perm.tolist()) == list(range(len(C)))
        assert score(C, perm) == pytest.approx(brute_force(C), abs=1e-12)
        assert torch.equal(perm, assign(C))


def test_assignment_leaves_scores_untouched_unless_told() -> None:
    C = random(6, 6, seed=3)
    kept = C.clone()
    perm = assign(C)
    assert torch.equal(C, kept)
    assert torch.equal(assign(C.clone(), overwrite=True), perm)
    assert torch.equal(assign(C.float()), assign(C.float().double()))


def test_ties_keep_the_identity() -> None:
    assert assign(torch.zeros(5, 5).double()).tolist() == [0, 1, 2, 3, 4]
    B = random(3, 7, seed=0)[[0, 1, 1, 2]]  # two equal units
    assert assign(B @ B.T).tolist() == [0, 1, 2, 3]


def test_assignment_recovers_a_planted_permutation() -> None:
    A = random(40, 16, seed=1)
    planted = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    B = torch.empty_like(A)
    B[planted] = A  # so that B[planted] = A
    assert torch.equal(assign(B @ A.T), planted)
    assert torch.equal(B[assign((B + 0.05 * random(40, 16, seed=4)) @ A.T)], A)


def test_batch_equals_loop() -> None:
    C = torch.stack([random(6, 6, seed=s) + (10 * torch.eye(6) if s % 3 else 0) for s in range(9)])
    perm, scores = assign_batch(C)
    assert torch.equal(perm, torch.stack([assign(c) for c in C]))
    assert torch.allclose(scores, torch.tensor([score(c, p) for c, p in zip(C, perm, strict=True)]).double())


def test_scores_that_are_not_numbers_or_not_square_are_refused() -> None:
    C = random(4, 4, seed=0)
    C[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        assign(C)
    with pytest.raises(ValueError, match="square"):
        assign(random(3, 4, seed=0))


def test_signed_assignment_reaches_the_best_of_all_signed_permutations() -> None:
    for seed in range(20):
        n = 1 + seed % 5
        C, extra = random(n, n, seed=seed), random(n, n, seed=seed + 100)
        for unsigned in (None, extra):
            perm, signs = assign_signed(C, unsigned)
            value = float((signs * C[perm, torch.arange(n)]).sum()) + (score(extra, perm) if unsigned is extra else 0)
            best = brute_force(C.abs() + (extra if unsigned is extra else 0))
            assert value == pytest.approx(best, abs=1e-12)
    assert assign_signed(torch.zeros(2, 2).double())[1].tolist() == [1.0, 1.0]


def test_identity_exit_is_never_wrong_and_fires_for_siblings() -> None:
    fired = 0
    for seed in range(300):
        n, m = 2 + seed % 9, 3 + seed % 5
        A = random(n, m, seed=seed)
        if seed % 4 == 0:
            A[0] = A[-1] + 1e-3 * random(m, seed=seed)  # nearly equal units
        B = A + 10.0 ** -(seed % 5) * random(n, m, seed=seed + 1000)
        if identity_is_optimal(B, A, directions=1 + seed % 8):
            fired += 1
            C = B @ A.T
            assert float(C.trace()) >= score(C, assign(C)) - 1e-9
    assert fired > 100


def test_identity_exit_is_never_wrong_where_rows_may_change_their_signs() -> None:
    """Against the best order of all with the best signs: what a gated feed-forward may choose."""
    fired = 0
    for seed in range(400):
        n, m = 2 + seed % 7, 3 + seed % 5
        gate, up, down = (random(n, m, seed=3 * seed + k) for k in range(3))
        if seed % 4 == 0:
            gate[0] = gate[-1]  # two units that only what may be mirrored tells apart …
        if seed % 8 == 0:
            up[0], down[0] = -up[-1], -down[-1]  # … and there one is the other's mirror image
        if seed % 5 == 0:
            up *= 1e-2  # a unit's sign hardly matters
            down *= 1e-2
        near = 10.0 ** -(seed % 5)
        moved = [part + near * random(n, m, seed=5000 + 3 * seed + k) for k, part in enumerate((gate, up, down))]
        if seed % 3 == 0:
            moved[1][0], moved[2][0] = -moved[1][0], -moved[2][0]
        if identity_is_optimal(moved, [gate, up, down], [False, True, True], directions=1 + seed % 8):
            fired += 1
            plain, mirrored = moved[0] @ gate.T, moved[1] @ up.T + moved[2] @ down.T
            best = plain + mirrored.abs()
            assert float((plain + mirrored).trace()) >= score(best, assign(best)) - 1e-9
    assert fired > 80


def test_identity_exit_does_not_depend_on_blocks_and_reads_stored_dtypes() -> None:
    parts = [random(100, 30, seed=1).half(), random(100, 1, seed=2).float(), random(40, 100, seed=3).T]
    near = [p + (1e-2 * random(*p.shape, seed=4)).to(p.dtype) for p in parts]
    far = [p + random(*p.shape, seed=4).to(p.dtype) for p in parts]
    for block in (1, 7, 64, 512):
        assert identity_is_optimal(near, parts, block=block)
        assert not identity_is_optimal(far, parts, block=block)
        assert not identity_is_optimal([p.flip(0) for p in parts], parts, block=block)
        assert identity_is_optimal(near, parts, [False, True, True], block=block)
        assert not identity_is_optimal([near[0], *(-p for p in near[1:])], parts, [False, True, True], block=block)


def test_equal_units_pass_only_when_nothing_moved() -> None:
    A = random(5, 8, seed=0)[[0, 1, 1, 2, 3]]
    assert identity_is_optimal(A.clone(), A)
    assert not identity_is_optimal(A + 1e-6 * random(5, 8, seed=1), A)
    assert not identity_is_optimal(A * torch.nan, A)
    assert identity_is_optimal(A[:1] + 1, A[:1])  # one unit has nowhere to go
    with pytest.raises(ValueError, match="matching"):
        identity_is_optimal(A, A[:4])
