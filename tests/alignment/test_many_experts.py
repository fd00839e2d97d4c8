"""Experts that are too many to try each beside every other: the likeliest pairs are solved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import isomerge
from isomerge.alignment import shortlist
from isomerge.alignment.evidence import Pair
from isomerge.alignment.shortlist import AxisRows, _likeness, solve_likeliest
from isomerge.alignment.units import Unit
from isomerge.symmetry.architecture import Architecture
from isomerge.symmetry.groups import Permutation
from isomerge.symmetry.patterns import bind
from isomerge.symmetry.transform import Transform
from models import difference, logits, model, mostly_slow


def experts(seed: int, number: int) -> Path:
    return model("mixtral", seed, num_local_experts=number, num_hidden_layers=1)


def few_pairs(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(shortlist, "MOST", 0)
    monkeypatch.setattr(shortlist, "CANDIDATES", candidates)
    monkeypatch.setattr(shortlist, "AT_ONCE", 500)  # several pieces


@pytest.mark.parametrize("level", ["permutation", "full"])
def test_with_as_many_candidates_as_experts_the_result_is_that_of_all_pairs(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = model("mixtral", 1), model("mixtral", 0)
    all_pairs = isomerge.align(*models, level=level)
    few_pairs(monkeypatch, candidates=3)
    found = isomerge.align(*models, level=level)
    assert found.transform.elements.keys() == all_pairs.transform.elements.keys()
    for space, element in all_pairs.transform.elements.items():
        torch.testing.assert_close(found.transform.elements[space], element)
    assert found.objective == pytest.approx(all_pairs.objective, rel=1e-12)


@pytest.mark.parametrize("level", ["permutation", "full"])
def test_one_candidate_is_enough_to_recover_a_scrambled_model(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_pairs(monkeypatch, candidates=1)
    found = isomerge.selftest(experts(0, 12), level=level)
    assert found.unchanged is True and found.scrambled_distance > 0.1  # type: ignore[operator]
    assert found.recovered_distance <= 1e-5  # type: ignore[operator]


@pytest.mark.parametrize("number", mostly_slow([6, 9], 6))
def test_between_strangers_little_is_lost_and_the_function_stays(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, anchor = experts(1, number), experts(0, number)
    best = isomerge.align(source, anchor, level="permutation").objective[-1]
    few_pairs(monkeypatch, candidates=2)
    found = isomerge.align(source, anchor, level="permutation")
    assert found.objective[-1] >= 0.97 * best
    assert difference(logits(source), logits(source, found.state_dict())) <= 1e-10


def layer(seed: int, number: int = 6, units: int = 7, width: int = 9) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate": (number, width), "up": (number * units, width), "down": (width, number * units)}
    return {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def solved(source: dict[str, torch.Tensor], anchor: dict[str, torch.Tensor]) -> tuple[np.ndarray, float]:
    number, units = len(source["gate"]), source["up"].shape[0] // len(source["gate"])
    spaces = {"expert": Permutation(number), "ffn": Permutation(units, per=("expert",))}
    patterns = {"gate": "expert _d", "up": "(expert ffn) _d", "down": "_d (expert ffn)"}
    layouts = {name: bind(pattern, source[name].shape, spaces) for name, pattern in patterns.items()}
    pair = Pair(source.__getitem__, anchor.__getitem__, layouts, Architecture(spaces, patterns))
    elements, earned = solve_likeliest(Unit("expert", spaces), pair, Transform(spaces))
    return elements["expert"].numpy(), float(earned)


def by_scipy(source: dict[str, torch.Tensor], anchor: dict[str, torch.Tensor]) -> tuple[np.ndarray, float]:
    """Every pair of experts, then the experts."""
    number, width = source["gate"].shape
    table = (source["gate"] @ anchor["gate"].T).numpy()
    for e, f in itertools.product(range(number), repeat=2):
        up = [x["up"].reshape(number, -1, width)[k] for x, k in ((source, e), (anchor, f))]
        down = [x["down"].reshape(width, number, -1)[:, k] for x, k in ((source, e), (anchor, f))]
        scores = (up[0] @ up[1].T + down[0].T @ down[1]).numpy()
        table[e, f] += scores[linear_sum_assignment(scores, maximize=True)].sum()
    rows, columns = linear_sum_assignment(table, maximize=True)
    return rows[np.argsort(columns)], float(table[rows, columns].sum())


def test_with_all_candidates_it_earns_what_a_search_over_all_pairs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    few_pairs(monkeypatch, candidates=6)
    models = layer(1), layer(0)
    order, earned = solved(*models)
    expected, best = by_scipy(*models)
    assert order.tolist() == expected.tolist() and earned == pytest.approx(best, rel=1e-12)


def test_with_two_candidates_of_six_little_is_lost_where_nothing_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    few_pairs(monkeypatch, candidates=2)
    pairs = [(layer(seed + 1), layer(seed)) for seed in range(0, 10, 2)]
    shares = [solved(*models)[1] / by_scipy(*models)[1] for models in pairs]
    assert all(0.9 <= share <= 1 + 1e-12 for share in shares) and sum(shares) / len(shares) >= 0.95, shares


def test_one_candidate_is_enough_for_experts_in_another_order_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    few_pairs(monkeypatch, candidates=1)
    anchor, noise, order = layer(0), layer(2), torch.tensor([4, 2, 0, 5, 1, 3])
    inside = torch.tensor([6, 1, 3, 0, 5, 2, 4])
    source = {
        "gate": anchor["gate"][order],
        "up": anchor["up"].reshape(6, 7, 9)[order][:, inside].reshape(42, 9),
        "down": anchor["down"].reshape(9, 6, 7)[:, order][:, :, inside].reshape(9, 42),
    }
    source = {name: tensor + 0.3 * noise[name] for name, tensor in source.items()}
    found, earned = solved(source, anchor)
    expected, best = by_scipy(source, anchor)
    assert found.tolist() == expected.tolist() == order.argsort().tolist()
    assert earned == pytest.approx(best, rel=1e-12)


def test_likeness_does_not_see_the_order_the_signs_or_a_rotation_inside_a_unit() -> None:
    draw = torch.Generator().manual_seed(0)
    units = torch.randn(5, 7, 4, generator=draw, dtype=torch.float64)
    signs = torch.randn(5, 7, 1, generator=draw, dtype=torch.float64).sign()
    turned = torch.linalg.qr(torch.randn(5, 7, 7, generator=draw, dtype=torch.float64))[0] @ units
    for moved in (units.flip(1), units * signs, turned):
        order = torch.tensor([3, 0, 4, 1, 2])
        alike = _likeness(AxisRows(("ffn",), False, moved[order], units))
        torch.testing.assert_close(alike[torch.arange(5), order], torch.ones(5, dtype=torch.float64))
        assert bool((alike.argmax(1) == order).all())


@pytest.mark.slow
def test_a_hundred_experts_are_matched_by_a_part_of_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs would be 16,384 assignments of 96 units in every sweep, and 1.2 GB of evidence a layer."""
    lengths = []

    def counted(tables: list[torch.Tensor], shorten: Any = shortlist._shortlist) -> torch.Tensor:
        pairs = shorten(tables)
        lengths.append(len(pairs))
        return pairs

    monkeypatch.setattr(shortlist, "_shortlist", counted)
    shape = {"num_local_experts": 128, "num_hidden_layers": 1, "intermediate_size": 96, "hidden_size": 32}
    source = model("mixtral", 1, torch.float32, **shape)
    found = isomerge.align(source, model("mixtral", 0, torch.float32, **shape), sweeps=2)
    assert lengths and max(lengths) <= 128 * 128 / 8
    assert "expert.0" in found.transform.elements
    assert difference(logits(source), logits(source, found.state_dict())) <= 1e-6
