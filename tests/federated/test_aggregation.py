"""`aggregate` beside numpy and brute force: what counts, what is refused, and what is sent."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.federated import ClientUpdate, aggregate, compress, expand

SHAPES = {"body.weight": (6, 5), "body.bias": (6,), "classifier.weight": (3, 6)}


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return state | {"steps": torch.tensor(7)}


def clients(count: int, start: int = 1) -> list[ClientUpdate]:
    return [ClientUpdate(str(n), drawn(start + n), 1.0 + n) for n in range(count)]


def as_arrays(members: list[ClientUpdate], model: dict[str, Tensor]) -> list[dict[str, np.ndarray]]:
    """Each client's update in float64."""
    return [{k: c.state[k].double().numpy() - model[k].double().numpy() for k in SHAPES} for c in members]


def same(found: dict[str, Tensor], truth: dict[str, np.ndarray]) -> None:
    for name, expected in truth.items():
        np.testing.assert_allclose(found[name].double().numpy(), expected, rtol=0, atol=2e-6)


def test_fedavg_is_the_mean_by_examples_as_numpy_has_it() -> None:
    model, members = drawn(0), clients(4)
    result = aggregate(model, members)
    counts = [c.examples for c in members]
    same(result.state, {k: np.average([c.state[k].numpy() for c in members], axis=0, weights=counts) for k in SHAPES})
    assert result.state["steps"] == 7 and result.step == 1 and result.clients == ["0", "1", "2", "3"]


def test_fedexp_takes_the_papers_step() -> None:
    model, members = {k: torch.zeros_like(v) for k, v in drawn(0).items()}, clients(3)
    updates, p = as_arrays(members, model), np.array([1, 2, 3]) / 6
    mean = {k: sum(w * u[k] for w, u in zip(p, updates, strict=True)) for k in SHAPES}
    norm = lambda u: sum(float((v**2).sum()) for v in u.values())  # noqa: E731
    step = max(1.0, sum(w * norm(u) for w, u in zip(p, updates, strict=True)) / (2 * norm(mean)))
    result = aggregate(model, members, step="fedexp")
    assert step > 1.01 and result.step == pytest.approx(step, rel=1e-6)
    same(result.state, {k: model[k].numpy() + step * mean[k] for k in SHAPES})
    alike = [ClientUpdate(str(n), members[0].state, 1) for n in range(3)]
    assert aggregate(model, alike, step="fedexp").step == 1.0  # they agree, so nothing is gained by going further


def test_frozen_tensors_stay_and_the_body_is_averaged() -> None:
    model, members = drawn(0), clients(3)
    result = aggregate(model, members, frozen="head", step="fedexp")
    plain = aggregate(model, members)
    assert torch.equal(result.state["classifier.weight"], model["classifier.weight"])
    assert not torch.equal(plain.state["classifier.weight"], model["classifier.weight"])
    assert not torch.equal(result.state["body.weight"], model["body.weight"])
    with pytest.raises(RequestError, match="no pattern of names") as refused:
        aggregate(model, members, frozen="(")
    assert refused.value.keys == ("frozen",)


def test_the_median_is_that_of_numpy_for_odd_and_even_numbers_of_clients() -> None:
    for count in (4, 5):
        model, members = drawn(0), clients(count)
        result = aggregate(model, members, guard="median")
        truth = {k: np.median([c.state[k].double().numpy() for c in members], axis=0) for k in SHAPES}
        same(result.state, truth)


def test_clipping_scales_each_update_to_the_median_norm_and_says_so() -> None:
    model, members = drawn(0), clients(5)
    far = {k: v + 100 if k in SHAPES else v for k, v in members[2].state.items()}
    members[2] = ClientUpdate("far", far, 3.0)
    updates = as_arrays(members, model)
    norms = [math.sqrt(sum(float((v**2).sum()) for v in u.values())) for u in updates]
    bound = float(np.median(norms))
    p = np.array([c.examples for c in members]) / sum(c.examples for c in members)
    scale = [min(1.0, bound / n) for n in norms]
    truth = {k: model[k].numpy() + sum(w * s * u[k] for w, s, u in zip(p, scale, updates, strict=True)) for k in SHAPES}
    result = aggregate(model, members, guard="clip")
    same(result.state, truth)
    assert [note.split(" is clipped")[0] for note in result.notes] == ["client far"]


def test_krum_keeps_what_brute_force_keeps() -> None:
    model, members = drawn(0), clients(7)
    hostile = {k: -20 * v if k in SHAPES else v for k, v in members[4].state.items()}
    members[4] = ClientUpdate("hostile", hostile, 50.0)
    flat = [np.concatenate([u[k].ravel() for k in SHAPES]) for u in as_arrays(members, model)]
    scores = []
    for i, one in enumerate(flat):
        others = [j for j in range(7) if j != i]
        sets = itertools.combinations(
            others, 7 - 1 - 2
        )  # the nearest n - f - 2 are the least sum over all sets of them
        scores.append(min(sum(float(((one - flat[j]) ** 2).sum()) for j in chosen) for chosen in sets))
    kept = sorted(sorted(range(7), key=lambda n: scores[n])[:6])
    result = aggregate(model, members, guard="krum", hostile=1)
    assert result.clients == [members[n].name for n in kept] and "hostile" not in result.clients
    counts = [members[n].examples for n in kept]
    same(
        result.state,
        {k: np.average([members[n].state[k].numpy() for n in kept], axis=0, weights=counts) for k in SHAPES},
    )
    with pytest.raises(RequestError, match="krum needs 9 clients") as refused:
        aggregate(model, members, guard="krum", hostile=3)
    assert refused.value.keys == ("hostile",)


BROKEN: dict[str, Any] = {
    "NaN": lambda s: {**s, "body.bias": torch.full((6,), float("nan"))},
    "an infinity": lambda s: {**s, "body.bias": torch.full((6,), float("inf"))},
    "another shape": lambda s: {**s, "body.bias": torch.zeros(7)},
    "a missing tensor": lambda s: {k: v for k, v in s.items() if k != "body.bias"},
    "one too many": lambda s: {**s, "more": torch.zeros(1)},
    "whole numbers": lambda s: {**s, "body.bias": torch.zeros(6, dtype=torch.long)},
    "text": lambda s: {**s, "body.bias": "weights"},
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("guard", ["none", "clip", "median"])
def test_a_broken_client_is_left_out_and_the_round_goes_on(what: str, guard: str) -> None:
    model, members = drawn(0), clients(3)
    broken = ClientUpdate("bad", BROKEN[what](drawn(9)), 100.0)
    result = aggregate(model, [*members, broken], guard=guard)
    truth = aggregate(model, members, guard=guard)
    assert all(torch.equal(result.state[k], truth.state[k]) for k in model)
    assert [one.client for one in result.refused] == ["bad"] and "client bad is left out" in result.notes[0]
    with pytest.raises(RequestError, match="none of 1 clients"):
        aggregate(model, [broken])


@pytest.mark.parametrize("examples", [0, -1, float("nan"), float("inf"), "many", True])
def test_a_client_without_a_count_of_examples_is_left_out(examples: Any) -> None:
    members = clients(2)
    result = aggregate(drawn(0), [*members, ClientUpdate("odd", drawn(5), examples)])
    assert [one.client for one in result.refused] == ["odd"] and result.clients == ["0", "1"]


def test_any_method_is_an_aggregator() -> None:
    model, members = drawn(0), clients(3)
    updates = [{k: c.state[k] - model[k] for k in SHAPES} for c in members]
    ties = aggregate(model, members, method="ties", options={"density": 1.0, "weight": 1.0})
    for name in SHAPES:
        stacked = torch.stack([u[name] for u in updates])
        agree = stacked.sign() == stacked.sum(0).sign()
        expected = model[name] + (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)
        assert torch.allclose(ties.state[name], expected, atol=1e-6)
    slow = aggregate(model, members, method="task_arithmetic", options={"lambda": 0.5, "weight": [1.0, 0.0, 0.0]})
    assert torch.allclose(slow.state["body.bias"], model["body.bias"] + 0.5 * updates[0]["body.bias"], atol=1e-6)


def test_options_with_a_value_for_each_client_leave_out_those_of_clients_that_do_not_count() -> None:
    model, members = drawn(0), clients(4)
    members.insert(1, ClientUpdate("bad", {}, 1.0))
    options = {"weight": [1.0, 50.0, 2.0, 3.0, 4.0]}
    result = aggregate(model, members, options=options)
    parts = [members[n].state for n in (0, 2, 3, 4)]
    same(result.state, {k: np.average([p[k].numpy() for p in parts], axis=0, weights=[1, 2, 3, 4]) for k in SHAPES})
    far = ClientUpdate("far", {k: v + 100 if k in SHAPES else v for k, v in drawn(9).items()}, 1.0)
    guarded = aggregate(
        model, [members[0], members[1], far, *members[2:]], guard="krum", hostile=1,
        options={"weight": [1.0, 50.0, 90.0, 2.0, 3.0, 4.0]},
    )  # fmt: skip
    assert guarded.clients == ["0", "1", "2", "3"]
    same(guarded.state, {k: result.state[k].double().numpy() for k in SHAPES})
    with pytest.raises(RequestError, match="weight cannot have a value for each") as refused:
        aggregate(model, members, guard="median", options=options)
    assert refused.value.keys == ("guard", "options")


def test_wrong_words_are_refused_by_their_argument() -> None:
    for argument, word in [("method", "linaer"), ("align", "globl"), ("guard", "krumm"), ("step", "fedex")]:
        with pytest.raises(RequestError, match="Did you mean") as refused:
            aggregate(drawn(0), clients(2), **{argument: word})
        assert argument in refused.value.keys
    with pytest.raises(RequestError, match="align needs config") as refused:
        aggregate(drawn(0), clients(2), align="global")
    assert refused.value.keys == ("config",)
    with pytest.raises(RequestError, match="may add units") as refused:
        aggregate(drawn(0), clients(2), method="pfnm", step="fedexp")
    assert refused.value.keys == ("method", "step")
    with pytest.raises(RequestError, match="hostile is -1") as refused:
        aggregate(drawn(0), clients(5), guard="krum", hostile=-1)
    assert refused.value.keys == ("hostile",)


@pytest.mark.parametrize("asked", [{"step": "fedexp"}, {"frozen": "head"}])
def test_what_goes_by_the_global_model_is_refused_where_clients_meet_at_their_own_mean(asked: Any) -> None:
    """The mean of updates from their own mean is a rounding error, and FedExp would divide by its square."""
    with pytest.raises(RequestError, match="goes by the global model") as refused:
        aggregate(drawn(0), clients(3), align="common", config={}, **asked)
    assert refused.value.keys == ("align", *asked)


def test_a_low_rank_update_is_rebuilt_and_its_error_is_the_least() -> None:
    before, after = drawn(0), drawn(1)
    sent, lost = compress(before, after, 2)
    rebuilt = expand(before, sent)
    update = (after["body.weight"] - before["body.weight"]).double()
    tail = torch.linalg.svdvals(update)[2:].square().sum()
    total = sum(float((after[k] - before[k]).double().square().sum()) for k in SHAPES)
    assert torch.allclose(rebuilt["body.bias"], after["body.bias"], atol=1e-6)
    found = sum(float((rebuilt[k] - after[k]).double().square().sum()) for k in SHAPES)
    assert math.sqrt(found / total) == pytest.approx(lost, rel=1e-4)
    assert float((rebuilt["body.weight"] - after["body.weight"]).double().square().sum()) == pytest.approx(
        float(tail), rel=1e-4
    )
    assert sum(t.numel() for t in sent.values()) < sum(t.numel() for k, t in after.items() if k in SHAPES)
    for broken, message in [
        ({"left:body.weight": torch.zeros(6, 1)}, "a factor of 'body.weight' is missing"),
        ({"whole:other": torch.zeros(1)}, "the model has no 'other'"),
        ({"whole:body.bias": torch.zeros(7)}, "has 7 numbers instead of 6"),
        ({"left:body.weight": torch.zeros(6, 2), "right:body.weight": torch.zeros(1, 5)}, "the factors of"),
        # Multiplied, these would take 4 PB.
        ({"left:body.weight": torch.zeros(2**25, 1), "right:body.weight": torch.zeros(1, 2**25)}, "the factors of"),
        ({"left:body.bias": torch.zeros(6, 1), "right:body.bias": torch.zeros(1, 1)}, "the factors of"),
    ]:
        with pytest.raises(RequestError, match=message):
            expand(before, broken)
    with pytest.raises(RequestError, match="rank is 0"):
        compress(before, after, 0)
