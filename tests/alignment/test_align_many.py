"""More than two models: to an anchor, or to a common mean that the order of the list cannot change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isomerge
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


@pytest.mark.parametrize("many", ["anchor", "universe"])
@pytest.mark.parametrize("family", mostly_slow(["vit", "llama", "bert"], "vit"))
def test_scrambled_copies_of_one_model_all_meet_in_it(family: str, many: str, tmp_path: Path) -> None:
    base = model(family, 0)
    copies = [moved(family, base, seed, tmp_path / f"copy-{seed}") for seed in (1, 2)]
    anchor = {"models": [copies[0], base, copies[1]]} if many == "universe" else {"models": copies, "anchor": base}
    found = isomerge.align_family(**anchor, many=many)
    found.save(tmp_path / "out", verify=False)
    states = [m.state_dict() for m in found.members]
    for state in states[1:]:
        gap = sum(float((state[n] - states[0][n]).square().sum()) for n in state)
        size = sum(float(t.square().sum()) for t in state.values())
        assert (gap / size) ** 0.5 <= 1e-5
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"copy-1", "copy-2"}


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_slow(["vit", "bert"], "vit"))
def test_the_universe_does_not_depend_on_the_order_of_the_list(family: str) -> None:
    models = [model(family, seed) for seed in (0, 1, 2)]
    results = {}
    for order in ((0, 1, 2), (2, 0, 1)):
        chosen = [models[k] for k in order]
        found = isomerge.align_family(chosen, many="universe", sweeps=4)
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


def test_siblings_are_left_alone_by_the_universe_too() -> None:
    base = model("vit", 0, hidden_size=48, num_attention_heads=4, intermediate_size=64)
    family = isomerge.align_family([noisy(base, 0.01, 1), base, noisy(base, 0.01, 2)], many="universe")
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
