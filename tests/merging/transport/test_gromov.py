"""Plans by inner geometry: against POT called directly, against all permutations, and on models in another order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import ot
import pytest
import torch

import models as tiny
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.transport.barycentres import barycentres
from isomerge.merging.transport.pair_plans import TransportRequest
from isomerge.merging.transport.solver import TransportSolver
from merging.transport.model_pairs import batches, carried, fuse, largest_difference, model, permuted, seen
from models import mostly_slow

PIECES = ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")


def points(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solve(solver: TransportSolver, x: torch.Tensor, y: torch.Tensor, cost: torch.Tensor | None = None) -> np.ndarray:
    within = torch.cdist(x, x).square(), torch.cdist(y, y).square()
    cost = torch.rand(len(x), len(y), generator=torch.Generator().manual_seed(9)) if cost is None else cost
    return solver.plan(cost.double(), torch.ones(len(x)), torch.ones(len(y)), within).numpy()


def distances(x: torch.Tensor) -> np.ndarray:
    found = torch.cdist(x, x).numpy()
    return found / found.mean()


def by_pot(A: np.ndarray, B: np.ndarray, M: np.ndarray | None = None, inner: float = 1.0) -> np.ndarray:
    """The better of what POT finds from two starts: even, and what assigns units with the same distances to others."""
    a, b = (np.full(len(one), 1 / len(one)) for one in (A, B))
    levels = (np.arange(max(len(a), len(b))) + 0.5) / max(len(a), len(b))
    seen_from = [np.quantile(one, levels, axis=1).T for one in (A, B)]
    starts = [np.outer(a, b), ot.emd(a, b, ((seen_from[0][:, None] - seen_from[1]) ** 2).mean(-1))]
    ends = []
    for start in starts:
        if M is None:
            plan, log = ot.gromov.gromov_wasserstein(A, B, a, b, G0=start, log=True)
            ends.append((float(log["gw_dist"]), plan))
        else:
            plan, log = ot.gromov.fused_gromov_wasserstein(M, A, B, a, b, alpha=inner, G0=start, log=True)
            ends.append((float(log["fgw_dist"]), plan))
    return min(ends, key=lambda end: end[0])[1]


@pytest.mark.parametrize("inner", [1.0, 0.3])
@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (9, 6), (7, 7)])
def test_plans_are_those_of_pot(rows: int, columns: int, inner: float) -> None:
    x, y, cost = points(rows, 4, 0), points(columns, 3, 1), torch.cdist(points(rows, 2, 2), points(columns, 2, 3))
    truth = by_pot(distances(x), distances(y), (cost / cost.mean()).numpy() if inner < 1 else None, inner)
    np.testing.assert_allclose(solve(TransportSolver("gromov", inner=inner), x, y, cost), truth, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_of_a_noisy_copy_in_another_basis_and_order_is_the_best_of_all(seed: int) -> None:
    x = points(6, 4, seed)
    basis = torch.linalg.qr(points(5, 5, seed + 10))[0][:4]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    y = (x @ basis + 0.02 * points(6, 5, seed + 20))[order]
    A, B = distances(x), distances(y)

    def gap(chosen: tuple[int, ...]) -> float:
        return float(((A - B[np.ix_(chosen, chosen)]) ** 2).sum())

    best = min(itertools.permutations(range(6)), key=gap)
    np.testing.assert_allclose(solve(TransportSolver("gromov"), x, y), np.eye(6)[list(best)] / 6, atol=1e-15)
    assert best == tuple(order.argsort().tolist())


def test_two_units_cannot_be_told_apart_from_inside_and_go_by_the_distance_across() -> None:
    x = points(2, 3, 0)
    cost = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_array_equal(solve(TransportSolver("gromov"), x, x, cost), [[0, 0.5], [0.5, 0]])


@pytest.mark.parametrize("inner", [1.0, 0.5])
@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "bert", "gpt2"], "vit"))
def test_a_model_in_another_order_comes_back_bit_for_bit(family: str, cost: str, inner: float) -> None:
    folder = model(family)
    found = carried(permuted(folder), folder, batches(folder, count=1), solver="gromov", cost=cost, inner=inner)
    assert found.report()["exact"]
    assert largest_difference(found.state_dict(), tiny.tensors(folder)) == 0


def test_weights_are_compared_without_a_common_stream() -> None:
    """Units are found although the stream they read is in another order; distances across cannot know them."""
    anchor = model("vit")
    source, truth = permuted(anchor), tiny.tensors(anchor)
    names = [n for n in truth if n.endswith("intermediate.dense.bias")]
    for solver, same in (("gromov", True), ("emd", False)):
        state = carried(source, anchor, solver=solver, cost="weights", only="ffn").state_dict()
        assert all(torch.equal(state[n], truth[n]) for n in names) == same, solver


@pytest.mark.parametrize("units", [7, 11])
@pytest.mark.parametrize("cost", ["weights", "activations"])
def test_feed_forwards_are_carried_as_pot_says(cost: str, units: int) -> None:
    anchor, source = model("vit"), tiny.model("vit", 1, intermediate_size=units)
    data = batches(anchor)
    a, b = tiny.arrays(anchor), tiny.arrays(source)
    found = tiny.arrays(carried(source, anchor, data, solver="gromov", cost=cost, only="ffn").state_dict())
    made = [seen(folder, [f"vit.layers.{i}.mlp.fc2" for i in range(2)], data) for folder in (anchor, source)]
    for layer in range(2):
        (Wi, bi, _), (Vi, ci, Vo) = ([m[f"vit.encoder.layer.{layer}.{n}"] for n in PIECES] for m in (a, b))
        rows = [np.c_[Wi, bi], np.c_[Vi, ci]] if cost == "weights" else [made[0][layer].T, made[1][layer].T]
        A, B = (distances(torch.tensor(one)) for one in rows)
        plan = by_pot(A, B)
        T, S = plan / plan.sum(1, keepdims=True), plan / plan.sum(0, keepdims=True)
        for name, truth in zip(PIECES, (T @ Vi, T @ ci, Vo @ S.T), strict=True):
            np.testing.assert_allclose(found[f"vit.encoder.layer.{layer}.{name}"], truth, atol=1e-9)


@pytest.mark.parametrize("options", [{"inner": 0.5}, {"towards": "barycentre"}, {"heads": "fixed"}], ids=str)
def test_models_of_other_widths_fuse_to_the_shape_of_the_first(options: dict[str, Any], tmp_path: Path) -> None:
    narrow, wide = model("vit"), tiny.model("vit", 1, hidden_size=24, intermediate_size=11)
    for anchor, source in ((narrow, wide), (wide, narrow)):
        found = fuse([anchor, source], solver="gromov", cost="weights", **options)
        found.save(tmp_path / anchor.name)
        shapes = {n: t.shape for n, t in tiny.tensors(anchor).items()}
        assert {n: t.shape for n, t in tiny.tensors(tmp_path / anchor.name).items()} == shapes
        assert bool(tiny.logits(tmp_path / anchor.name).isfinite().all())
        assert not found.report()["exact"]


# --- barycentres ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama"], "vit"))
def test_copies_in_other_orders_meet_in_the_first(family: str, cost: str) -> None:
    folder = model(family)
    copies = [permuted(folder, seed) for seed in (3, 4)]
    found = fuse([folder, *copies], batches(folder, count=1), solver="gromov", cost=cost, towards="barycentre")
    assert found.report()["exact"] and found.report()["towards"] == "barycentre"
    assert largest_difference(found.state_dict(), tiny.tensors(folder)) < 1e-12


def spread(centre: np.ndarray, D: list[np.ndarray]) -> float:
    """What the barycentre makes small."""
    masses = [np.full(len(one), 1 / len(one)) for one in (centre, *D)]
    return sum(
        s * float(ot.gromov.gromov_wasserstein2(centre, d, masses[0], m, G0=by_pot(centre, d)))
        for s, d, m in zip((0.75, 0.25), D, masses[1:], strict=True)
    )


def test_all_models_are_carried_to_the_barycentre_of_their_feed_forwards() -> None:
    anchor, source = model("vit"), tiny.model("vit", 1, intermediate_size=11)
    bounds = [describe(open_checkpoint(folder)) for folder in (anchor, source)]
    request = TransportRequest(TransportSolver("gromov"), "weights", only="ffn")
    found = barycentres(bounds, [0.75, 0.25], request)
    fused = tiny.arrays(
        fuse([anchor, source], solver="gromov", towards="barycentre", only="ffn", weights=[3, 1]).state_dict()
    )
    states = [tiny.arrays(folder) for folder in (anchor, source)]
    for layer in range(2):
        names = [f"vit.encoder.layer.{layer}.{n}" for n in PIECES]
        rows = [np.c_[state[names[0]], state[names[1]]] for state in states]
        D = [distances(torch.tensor(one)) for one in rows]
        masses = [np.full(n, 1 / n) for n in (7, 11)]
        centre = found[f"ffn.{layer}"].sqrt().numpy()
        published = ot.gromov.gromov_barycenters(7, D, masses, masses[0], [0.75, 0.25], init_C=D[0], max_iter=100)
        assert spread(centre, D) <= spread(published, D) + 1e-9  # POT starts from even plans only
        plans = [by_pot(centre, d) for d in D]
        again = 49 * sum(s * p @ d @ p.T for s, p, d in zip((0.75, 0.25), plans, D, strict=True))
        np.testing.assert_allclose(again, centre, atol=1e-7)
        mean = [np.zeros_like(states[0][name]) for name in names]
        for share, own, state in zip((0.75, 0.25), D, states, strict=True):
            plan = by_pot(centre / centre.mean(), own)
            T, S = plan / plan.sum(1, keepdims=True), plan / plan.sum(0, keepdims=True)
            moved = T @ state[names[0]], T @ state[names[1]], state[names[2]] @ S.T
            mean = [m + share * part for m, part in zip(mean, moved, strict=True)]
        for name, truth in zip(names, mean, strict=True):
            np.testing.assert_allclose(fused[name], truth, atol=1e-8)


@pytest.mark.parametrize("options", [
    {}, {"solver": "sinkhorn"}, {"solver": "gromov", "inner": 0.5}, {"solver": "gromov", "residual": "averaging"}
], ids=str)  # fmt: skip
def test_a_barycentre_is_refused_where_units_would_be_compared_across_models(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="has no units to compare"):
        fuse([model("vit"), model("vit", 1)], towards="barycentre", **options)


@pytest.mark.parametrize(("options", "words"), [
    ({"inner": 0}, "inner is 0"), ({"inner": 2}, "at most 1"), ({"towards": "centre"}, "towards cannot be 'centre'"),
    ({"solver": "gromow"}, "Did you mean 'gromov'"),
], ids=str)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        fuse([model("vit"), model("vit", 1)], **options)
