"""Feed-forwards against POT and numpy: costs, plans and moved weights by their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import ot
import pytest

import models as tiny
from merging.transport.model_pairs import batches, carried, model, seen, squared_distances

SOLVE: dict[str, Any] = {
    "emd": lambda a, b, cost: ot.emd(a, b, cost),
    "sinkhorn": lambda a, b, cost: ot.bregman.sinkhorn_log(
        a, b, cost / cost.mean(), 0.05, numItermax=50_000, stopThr=1e-12
    ),
}


def feed_forward(state: dict[str, np.ndarray], layer: int) -> list[np.ndarray]:
    at = f"vit.encoder.layer.{layer}."
    names = ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    return [state[at + name] for name in names]


def expected(source: dict[str, np.ndarray], layer: int, plan: np.ndarray) -> list[np.ndarray]:
    """T_out W and W T_inᵀ, with a plan whose rows are the anchor's units."""
    Wi, bi, Wo = feed_forward(source, layer)
    T, S = plan / plan.sum(1, keepdims=True), plan / plan.sum(0, keepdims=True)
    return [T @ Wi, T @ bi, Wo @ S.T]


@pytest.mark.parametrize("units", [7, 11])
@pytest.mark.parametrize("solver", ["emd", "sinkhorn"])
@pytest.mark.parametrize("cost", ["post", "pre", "weights"])
def test_feed_forward_units_are_carried_as_pot_says(cost: str, solver: str, units: int) -> None:
    anchor, source = model("vit"), tiny.model("vit", 1, intermediate_size=units)
    data = batches(anchor)
    a, b = tiny.arrays(anchor), tiny.arrays(source)
    options = {"cost": "weights"} if cost == "weights" else {"site": cost}
    found = tiny.arrays(carried(source, anchor, data, solver=solver, only="ffn", **options).state_dict())
    names = [f"vit.layers.{i}.mlp.{'fc1' if cost == 'pre' else 'fc2'}" for i in range(2)]  # in memory
    activations = [seen(folder, names, data, output=cost == "pre") for folder in (anchor, source)]
    for layer in range(2):
        if cost == "weights":
            rows = [np.concatenate([w, v[:, None]], 1).T for w, v, _ in (feed_forward(m, layer) for m in (a, b))]
        else:
            rows = [activations[0][layer], activations[1][layer]]
        distances = squared_distances(rows[0], rows[1])
        plan = SOLVE[solver](np.full(7, 1 / 7), np.full(units, 1 / units), distances)
        for got, truth in zip(feed_forward(found, layer), expected(b, layer, plan), strict=True):
            np.testing.assert_allclose(got, truth, atol=1e-10 if solver == "emd" else 1e-5)
    untouched = [n for n in a if "intermediate" not in n and not n.endswith("output.dense.weight")]
    assert all(np.array_equal(found[n], b[n]) for n in untouched if n in b)
