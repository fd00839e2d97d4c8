"""More than two models: to an anchor, or to a common mean or each other, which the order of the list cannot change."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import isomerge
from alignment.layers import read_layer
from isomerge.architectures import describe
from isomerge.errors import RequestError
from isomerge.symmetry.moved import scrambled
from models import difference, logits, model, mostly_slow, noisy, tensors


def moved(family: str, folder: Path, seed: int, out: Path) -> Path:
    """The model behind random symmetries, as a folder of its own."""
    from isomerge.checkpoint import write_checkpoint

    checkpoint = isomerge.open_checkpoint(folder)
    move = scrambled(describe(checkpoint), seed)
    plan = move.plan(None)
    write_checkpoint(out, plan, move.produce(plan, lambda *_: None), donor=checkpoint)
    return out


def test_the_default_anchor_is_the_model_nearest_to_the_mean_of_all() -> None:
    base = model("vit", 0)
    models = [noisy(base, 0.05, 1), base, noisy(base, 0.05, 2)]
    weights = [tensors(m) for m in models]
    mean = {n: sum(w[n] for w in weights) / 3 for n in weights[0]}
    distances = [sum(float((w[n] - mean[n]).square().sum()) for n in mean) for w in weights]
    family = isomerge.align_family(models)
    assert family.anchor.name == str(models[distances.index(min(distances))])
    assert len(family.members) == 2


@pytest.mark.parametrize("many", ["anchor", "universe", "cycle"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama", "bert"], "vit"))
def test_scrambled_copies_of_one_model_all_meet_in_it(family: str, many: str, tmp_path: Path) -> None:
    base = model(family, 0)
    copies = [moved(family, base, seed, tmp_path / f"copy-{seed}") for seed in (1, 2)]
    anchor = {"models": [copies[0], base, copies[1]]} if many != "anchor" else {"models": copies, "anchor": base}
    found = isomerge.align_family(**anchor, many=many)
    found.save(tmp_path / "out", verify=False)
    states = [m.state_dict() for m in found.members]
    for state in states[1:]:
        gap = sum(float((state[n] - states[0][n]).square().sum()) for n in state)
        size = sum(float(t.square().sum()) for t in state.values())
        assert (gap / size) ** 0.5 <= 1e-5
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"copy-1", "copy-2"}


@pytest.mark.slow
@pytest.mark.parametrize("many", ["universe", "cycle"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "bert"], "vit"))
def test_the_result_does_not_depend_on_the_order_of_the_list(family: str, many: str) -> None:
    models = [model(family, seed) for seed in (0, 1, 2)]
    results = {}
    for order in ((0, 1, 2), (2, 0, 1)):
        chosen = [models[k] for k in order]
        found = isomerge.align_family(chosen, many=many, sweeps=4)
        results[order] = {m.source.name: m.state_dict() for m in found.members}
    first, second = results.values()
    assert first.keys() == second.keys()
    for name in first:
        assert all(torch.equal(first[name][t], second[name][t]) for t in first[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama"], "vit"))
def test_the_universe_brings_strangers_closer_together_and_keeps_their_functions(family: str) -> None:
    models = [model(family, seed) for seed in (0, 1, 2)]
    found = isomerge.align_family(models, many="universe")

    def spread(states: list[dict[str, torch.Tensor]]) -> float:
        mean = {n: sum(s[n] for s in states) / len(states) for n in states[0]}
        return sum(float((s[n] - mean[n]).square().sum()) for s in states for n in mean)

    states = [m.state_dict() for m in found.members]
    assert spread(states) < 0.9 * spread([tensors(m) for m in models])
    for member, state, folder in zip(found.members, states, models, strict=True):
        assert member.source.name == str(folder)
        assert difference(logits(folder), logits(folder, state)) <= 1e-10


@pytest.mark.parametrize("many", ["universe", "cycle"])
def test_siblings_are_left_alone_without_an_anchor_too(many: str) -> None:
    base = model("vit", 0, hidden_size=48, num_attention_heads=4, intermediate_size=64)
    family = isomerge.align_family([noisy(base, 0.01, 1), base, noisy(base, 0.01, 2)], many=many)
    assert all(not m.transform.elements for m in family.members)


def test_a_way_to_align_many_that_does_not_exist_is_refused_with_a_hint() -> None:
    with pytest.raises(RequestError, match="Did you mean 'universe'"):
        isomerge.align_family([model("vit", 0), model("vit", 1)], many="univers")


def test_one_model_alone_has_nothing_to_be_aligned_to() -> None:
    with pytest.raises(RequestError, match="Name an anchor"):
        isomerge.align(model("vit", 0))


@pytest.mark.slow
def test_the_universe_reports_the_distance_to_the_mean_of_its_members() -> None:
    models = [model("bert", seed) for seed in (0, 1, 2)]
    report = isomerge.align_family(models, many="universe", sweeps=2).report()
    weights = [tensors(m) for m in models]
    mean = {n: sum(w[n] for w in weights) / 3 for n in weights[0]}
    mean = {n: t for n, t in mean.items() if t.ndim > 1 and ".layer." in n}
    apart = sum(float((w[n] - mean[n]).square().sum()) for w in weights for n in mean)
    expected = (apart / (3 * sum(float(t.square().sum()) for t in mean.values()))) ** 0.5
    assert report["distance"]["before"] == pytest.approx(expected, rel=1e-9)
    assert report["distance"]["after"] < report["distance"]["before"]


# --- to each other ----------------------------------------------------------------------------------------------------
def units_of(states: list[dict[str, torch.Tensor]], layer: int) -> list[np.ndarray]:
    """The feed-forward of a layer of ViT, one row per unit: what it reads, its bias, what it writes."""
    layers = [read_layer("vit", {n: t.numpy() for n, t in state.items()}, layer) for state in states]
    return [np.column_stack([own["Wi"], own["bi"], own["Wo"].T]) for own in layers]


def agreement(units: list[np.ndarray]) -> float:
    """Σ_{p<q} ⟨B_p, B_q⟩"""
    return sum(float((x * y).sum()) for x, y in itertools.combinations(units, 2))


def test_three_models_meet_in_the_best_of_all_orders_of_their_units() -> None:
    """Brute force, four units: nearly always the best there is, and the common mean in fewer than half of the cases."""
    orders = [list(p) for p in itertools.permutations(range(4))]
    shares: dict[str, list[float]] = {"cycle": [], "universe": []}
    for seed in range(8):
        models = [model("vit", 100 + 3 * seed + k, intermediate_size=4) for k in range(3)]
        for many, reached in shares.items():
            found = isomerge.align_family(models, many=many, level="permutation", only="ffn")
            for layer in range(2):
                a, b, c = units_of([tensors(m) for m in models], layer)
                best = max(agreement([a, b[p], c[q]]) for p in orders for q in orders)
                reached.append(agreement(units_of([m.state_dict() for m in found.members], layer)) / best)
    assert max(shares["cycle"]) <= 1 + 1e-9 and min(shares["cycle"]) >= 0.9
    best_of = {many: sum(share >= 1 - 1e-9 for share in reached) for many, reached in shares.items()}
    assert best_of["cycle"] >= 14 and best_of["universe"] < 8


@pytest.mark.parametrize("many", ["universe", "cycle"])
def test_going_round_a_cycle_of_models_ends_where_it_began(many: str) -> None:
    """From A to B to C and back to A, read off the written weights. Where each pair is matched alone it does not."""
    weight = "vit.encoder.layer.0.intermediate.dense.weight"
    models = [model("vit", seed) for seed in (0, 1, 2)]
    rows = [tensors(m)[weight] for m in models]

    def order(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Where each row of `after` comes from."""
        same = (before[:, None] == after[None]).all(-1)
        assert bool((same.sum(0) == 1).all())
        return same.int().argmax(0)

    def round_trip(steps: list[torch.Tensor]) -> list[int]:
        return steps[0][steps[1]][steps[2]].tolist()

    options = {"level": "permutation", "only": "ffn"}
    family = isomerge.align_family(models, many=many, **options)
    common = [order(own, m.state_dict()[weight]) for own, m in zip(rows, family.members, strict=True)]
    assert round_trip([common[p][common[(p + 1) % 3].argsort()] for p in range(3)]) == list(range(7))
    pairs = [isomerge.align(models[p], models[(p + 1) % 3], **options) for p in range(3)]
    alone = [order(own, pair.state_dict()[weight]) for own, pair in zip(rows, pairs, strict=True)]
    assert round_trip(alone) != list(range(7))


@pytest.mark.parametrize("level", ["permutation", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama", "bert"], "vit"))
def test_models_that_move_to_each_other_compute_what_they_did_and_lie_nearer(family: str, level: str) -> None:
    models = [model(family, seed) for seed in (0, 1, 2)]
    found = isomerge.align_family(models, many="cycle", level=level, sweeps=4)
    for member, folder in zip(found.members, models, strict=True):
        untied = {"tie_word_embeddings": False} if member.untied else {}
        assert difference(logits(folder), logits(folder, member.state_dict(), **untied)) <= 1e-10
    assert found.report().distance.after < found.report().distance.before


@pytest.mark.slow
@pytest.mark.parametrize("many", ["anchor", "universe", "cycle"])
def test_every_way_takes_every_solver(many: str) -> None:
    models = [model("vit", seed) for seed in (0, 1, 2)]
    for solver in ("graph", "sinkhorn", "annealing"):
        found = isomerge.align_family(models, many=many, level="permutation", solver=solver, sweeps=2)
        for member in found.members:
            folder = Path(member.source.name)
            assert difference(logits(folder), logits(folder, member.state_dict())) <= 1e-10
