"""The matching of PFNM against the formula of the paper, and its assignments against all others."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from isomerge.merging.matching.beta_process import BetaProcess, match_units

Atoms = dict[int | None, list[np.ndarray]]
Choice = tuple[int | None, int]  # a global unit that others have, or the rank of a new one


def gain(
    v: np.ndarray, atom: list[np.ndarray], models: int, rank: int, sigma: float, sigma0: float, gamma: float
) -> float:
    """−C of one unit and one global unit, which others have as `atom`, or which would be the `rank`-th new one: the
    assignment cost of Yurochkin et al. with a prior mean of zero."""
    precision, prior = 1 / sigma**2, 1 / sigma0**2
    together = sum((u * precision for u in atom), v * precision)
    value = float(together @ together) / (prior + (len(atom) + 1) * precision)
    if not atom:
        return value - 2 * math.log(rank / (gamma / models))
    alone = sum(u * precision for u in atom)
    value -= float(alone @ alone) / (prior + len(atom) * precision)
    return value + 2 * math.log(len(atom) / (models - len(atom)))


@pytest.mark.parametrize(("sigma", "sigma0", "gamma"), [(1.0, 1.0, 1.0), (0.5, 2.0, 3.0), (2.0, 0.7, 0.1)])
def test_gains_are_those_of_the_paper(sigma: float, sigma0: float, gamma: float) -> None:
    draw = np.random.default_rng(0)
    atoms = [list(draw.normal(size=(m, 4))) for m in (1, 3, 2)]
    units = draw.normal(size=(5, 4))
    truth = [[gain(v, a, 4, 0, sigma, sigma0, gamma) for a in atoms]
             + [gain(v, [], 4, i, sigma, sigma0, gamma) for i in (1, 2)] for v in units]  # fmt: skip
    found = BetaProcess(sigma, sigma0, gamma).gains(
        torch.tensor(np.array([sum(a) for a in atoms])), torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64),
        torch.tensor(units), 4, 2,
    )  # fmt: skip
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-12)


def scaled(features: list[np.ndarray]) -> list[np.ndarray]:
    size = np.sqrt(np.mean(np.concatenate([f.ravel() for f in features]) ** 2))
    return [f / size for f in features]


@pytest.mark.parametrize("largest", [None, 4])
@pytest.mark.parametrize("models", [2, 3])
def test_no_other_assignment_of_any_one_model_gains_more(models: int, largest: int | None) -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed)
        base = draw.normal(size=(3, 6))
        features = [base[draw.permutation(3)] + 0.8 * draw.normal(size=(3, 6)) for _ in range(models)]
        found = [p.tolist() for p in match_units([torch.tensor(f) for f in features], BetaProcess(), largest)]
        count = max(max(p) for p in found) + 1
        assert found[0] == [0, 1, 2] and count <= (largest or 3 * models)
        units = scaled(features)
        for j in range(models):
            atoms: Atoms = {}
            for m in range(models):
                for place, unit in zip(found[m], units[m], strict=True):
                    if m != j:
                        atoms.setdefault(place, []).append(unit)
            new = min(3, largest - len(atoms)) if largest else 3
            options = [*((place, 0) for place in atoms), *((None, rank) for rank in range(1, new + 1))]

            def total(chosen: tuple[Choice, ...], own: np.ndarray = units[j], atoms: Atoms = atoms) -> float:
                pairs = zip(own, chosen, strict=True)
                return sum(gain(v, atoms.get(place, []), models, rank, 1, 1, 1) for v, (place, rank) in pairs)

            ranks = itertools.count(1)
            mine = tuple((place, 0) if place in atoms else (None, next(ranks)) for place in found[j])
            assert total(mine) == pytest.approx(max(map(total, itertools.permutations(options, 3))), rel=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_two_units_are_one_from_the_cosine_that_the_variances_say(ratio: float) -> None:
    limit = 1 / (1 + ratio)
    for cosine, units in ((limit + 0.01, 1), (limit - 0.01, 2)):
        pair = torch.tensor([[1.0, 0.0]]), torch.tensor([[cosine, math.sqrt(1 - cosine**2)]])
        found = match_units(pair, BetaProcess(sigma=math.sqrt(ratio), sigma0=1.0, gamma=2.0))  # log(1 · J / γ) = 0
        assert max(int(p.max()) for p in found) + 1 == units


def test_units_that_are_zero_in_all_models_are_matched_too() -> None:
    found = match_units([torch.zeros(3, 2), torch.zeros(3, 2)], BetaProcess())
    assert [p.sort().values.tolist() for p in found] == [[0, 1, 2], [0, 1, 2]]


def test_more_expected_units_make_more() -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(12, 4, generator=draw)
    features = [base + 0.6 * torch.randn(12, 4, generator=draw) for _ in range(3)]
    counts = [
        max(int(p.max()) for p in match_units(features, BetaProcess(gamma=gamma))) + 1 for gamma in (1e-6, 1.0, 1e4)
    ]
    assert counts == sorted(counts) and counts[0] < counts[-1]
