"""The greedy zip against a transcription that works every similarity out anew from the tree of zips."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from isomerge.merging.matching.zipping import zip_units

Tree = tuple[Any, ...]  # (time, first, second) of a zip, or (0, unit)


def members(tree: Tree) -> list[int]:
    return [tree[1]] if tree[0] == 0 else members(tree[1]) + members(tree[2])


def score(S: np.ndarray, p: Tree, q: Tree, repeats: float, spent: set[frozenset[Tree]]) -> float:
    """Of two units by their correlation; of a zipped one by its parts: α times the smaller of the two. What had no
    budget, and what is made of it, is never zipped."""
    if frozenset((p, q)) in spent:
        return -np.inf
    if p[0] == q[0] == 0:
        return float(S[p[1], q[1]])
    later, other = (p, q) if p[0] > q[0] else (q, p)
    parts = [score(S, part, other, repeats, spent) for part in later[1:]]
    return -np.inf if repeats == 0 or -np.inf in parts else repeats * min(parts)


def linkage(S: np.ndarray, p: Tree, q: Tree) -> float:
    return min(float(S[i, j]) for i in members(p) for j in members(q))


def zipped(S: np.ndarray, owners: list[int], keep: int, repeats: float, within: float) -> list[list[int]]:
    models = max(owners) + 1
    budget = [int(within * ((len(S) - keep) // models) + 1e-9)] * models
    trees: list[Tree] = [(0, k) for k in range(len(S))]
    spent: set[frozenset[Tree]] = set()

    def owner(tree: Tree) -> int:
        return owners[min(members(tree))]

    def forbid(model: int) -> None:
        own = [tree for tree in trees if owner(tree) == model]
        spent.update(frozenset(pair) for pair in itertools.combinations(own, 2))

    for model in range(models):
        if budget[model] <= 0:
            forbid(model)
    for time in range(1, len(S) - keep + 1):
        pairs = list(itertools.combinations(range(len(trees)), 2))
        scores = [score(S, trees[a], trees[b], repeats, spent) for a, b in pairs]
        if max(scores) == -np.inf:
            scores = [linkage(S, trees[a], trees[b]) for a, b in pairs]
        a, b = pairs[int(np.argmax(scores))]
        own = owner(trees[a]), owner(trees[b])
        trees = [t for k, t in enumerate(trees) if k not in (a, b)] + [(time, trees[a], trees[b])]
        if own[0] == own[1]:
            budget[own[0]] -= 1
            if budget[own[0]] <= 0:
                forbid(own[0])
    return sorted(sorted(members(tree)) for tree in trees)


@pytest.mark.parametrize("within", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("repeats", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("models", [2, 3])
def test_groups_are_those_of_the_definition(models: int, repeats: float, within: float) -> None:
    units = 4
    owners = [m for m in range(models) for _ in range(units)]
    for seed in range(3):
        draw = np.random.default_rng(seed)
        S = np.corrcoef(draw.normal(size=(models * units, 4)))  # few samples: high correlations everywhere
        found = zip_units(torch.tensor(S), torch.tensor(owners), units, repeats=repeats, within=within)
        assert found == zipped(S, owners, units, repeats, within), seed
        assert sorted(unit for group in found for unit in group) == list(range(models * units)) and len(found) == units


def test_without_a_budget_and_repeats_two_models_are_paired_one_to_one() -> None:
    draw = np.random.default_rng(0)
    S = np.corrcoef(draw.normal(size=(12, 5)))
    found = zip_units(torch.tensor(S), torch.arange(12) // 6, 6, repeats=0.0, within=0.0)
    assert all(len(group) == 2 and group[0] < 6 <= group[1] for group in found)


def test_what_a_model_has_twice_is_zipped_within_it() -> None:
    draw = np.random.default_rng(1)
    first, second = draw.normal(size=(3, 50)), draw.normal(size=(3, 50))
    S = np.corrcoef(np.concatenate([first, first[:1], second, second[1:2]]))
    found = zip_units(torch.tensor(S), torch.arange(8) // 4, 6, repeats=0.0, within=1.0)
    assert found == [[0, 3], [1], [2], [4], [5, 7], [6]]
