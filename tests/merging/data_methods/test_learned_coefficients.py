"""Learned coefficients: gradients against finite differences, optima against scipy, objectives again in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.optimize import minimize
from torch import Tensor, nn

import isomerge
from calibration.hooks import Batch, batches, data, stock
from isomerge.errors import RequestError
from isomerge.evaluation.tasks import ClassificationTask, MultiLabelTask, RegressionTask, TaggingTask, Task
from isomerge.merging.coefficient_objectives import LabelLoss, entropy, prediction_distance
from isomerge.merging.data_methods import DATA_METHODS
from isomerge.merging.learned_coefficients import ModelSpan
from models import model, read_config, tensors

FAMILIES = ["vit", "llama", "bert"]


def folders(name: str, count: int = 3) -> list[Path]:
    return [model(name, seed) for seed in range(count)]


def logits(folder: Path, state: dict[str, Tensor], batch: Batch) -> np.ndarray:
    """Of the stock class in float64, without padding: (rows, classes)."""
    module = stock(folder)
    module = type(module).from_pretrained(None, config=module.config, state_dict=state, dtype=torch.float64).eval()
    with torch.no_grad():
        found = module(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if "attention_mask" in batch:
        return found[batch["attention_mask"].bool()].numpy()
    return found.reshape(-1, found.shape[-1]).numpy()


def probabilities(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def mixed(states: list[dict[str, Tensor]], base: dict[str, Tensor], weights: Any) -> dict[str, Tensor]:
    """`weights(tensor name)`: one for each model."""
    return {
        name: base[name] + sum(w * (state[name] - base[name]) for w, state in zip(weights(name), states, strict=True))
        for name in base
    }


def merged(method: str, some: list[Path], base: Path | None = None, **options: Any) -> Any:
    return isomerge.merge(some, base=base, method=method, **options)


# --- objectives -------------------------------------------------------------------------------------------------------
def written_again(kind: str, parents: list[Path], state: dict[str, Tensor], own: list[Batch]) -> float:
    """The objective over the data of each model, in numpy."""
    total = 0.0
    for parent, batch in zip(parents, own, strict=True):
        p = probabilities(logits(parent, state, batch))
        if kind == "entropy":
            total += float(-(p * np.log(p)).sum(-1).mean())
        else:
            q = probabilities(logits(parent, tensors(parent), batch))
            total += float((q * np.log(q / p)).sum(-1).mean())
    return total / len(own)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["entropy", "predictions"])
def test_the_objectives_of_adamerging_are_those_of_the_paper(name: str, kind: str) -> None:
    base, *parents = folders(name)
    own = [data(base, seed) for seed in (1, 2)]
    result = merged(
        "adamerging", parents, base, data=[batches(one) for one in own], objective=kind, by="model", steps=8
    )
    objective, coefficients = result.report()["objective"], result.report()["coefficients"]
    start = mixed([tensors(p) for p in parents], tensors(base), lambda name: [0.3, 0.3])
    assert objective["before"] == pytest.approx(written_again(kind, parents, start, own), rel=1e-6)
    (row,) = coefficients
    end = mixed([tensors(p) for p in parents], tensors(base), lambda name: list(row["models"].values()))
    assert objective["after"] == pytest.approx(written_again(kind, parents, end, own), rel=1e-6)
    assert objective["after"] < objective["before"]
    found = result.state_dict()
    assert all(torch.allclose(found[tensor], end[tensor].to(found[tensor]), atol=1e-9) for tensor in end)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_a_learned_soup_is_that_of_the_stock_class(name: str) -> None:
    parents = folders(name)
    batch = data(parents[0], labels=True)
    result = merged("learned_soup", parents, data=batches(batch), steps=8, weights=[1, 1, 2])
    for when, weights in (("before", [0.25, 0.25, 0.5]), ("after", None)):
        weights = weights or list(result.report()["coefficients"][0]["models"].values())
        assert sum(weights) == pytest.approx(1)
        state = {n: sum(w * tensors(p)[n] for w, p in zip(weights, parents, strict=True)) for n in tensors(parents[0])}
        module = stock(parents[0])
        module.load_state_dict({n: t for n, t in state.items() if n in module.state_dict()}, strict=False)
        loaded = type(module).from_pretrained(None, config=module.config, state_dict=state, dtype=torch.float64).eval()
        with torch.no_grad():
            expected = float(loaded(**batch).loss)
        assert result.report()["objective"][when] == pytest.approx(expected, rel=1e-6)


# --- gradients --------------------------------------------------------------------------------------------------------
class Linear(nn.Module):
    """A stand-in for a stock class, in float64."""

    def __init__(self, task: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 3, dtype=torch.float64)
        self.config = SimpleNamespace(problem_type=task)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.second(torch.tanh(self.first(pixel_values)))}


def span(by: str, task: str | None = None) -> tuple[ModelSpan, Batch]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    module = Linear(task).requires_grad_(False)
    named = dict(module.named_parameters())
    base = {name: random(*tensor.shape) for name, tensor in named.items()}
    parts = {name: random(2, *tensor.shape) for name, tensor in named.items()}
    group_of = {
        name: {"model": 0, "layer": int("second" in name), "tensor": place}[by] for place, name in enumerate(named)
    }
    groups = [str(number) for number in range(max(group_of.values()) + 1)]
    batch = {"pixel_values": random(7, 3), "labels": torch.randint(0, 3, (7,), generator=draw)}
    return ModelSpan(module, base, parts, groups, group_of), batch


def label_loss(**options: float) -> LabelLoss:
    return LabelLoss(ClassificationTask("image"), SimpleNamespace(name="x"), **options)  # type: ignore[arg-type]


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "labels": label_loss(), "entropy": entropy, "predictions": prediction_distance,
}  # fmt: skip


@pytest.mark.parametrize("by", ["model", "layer", "tensor"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_those_of_finite_differences(objective: str, by: str) -> None:
    some, batch = span(by)
    coefficients = torch.tensor([[0.3], [0.6]], dtype=torch.float64).repeat(1, len(some.groups)).requires_grad_()

    def value(at: Tensor) -> Tensor:
        return OBJECTIVES[objective](some, some.weights(at), batch, [0.25, 0.75])

    value(coefficients).backward()
    with torch.no_grad():
        for place in np.ndindex(*coefficients.shape):
            step = torch.zeros_like(coefficients)
            step[place] = 1e-5
            slope = (value(coefficients + step) - value(coefficients - step)) / 2e-5
            assert float(coefficients.grad[place]) == pytest.approx(float(slope), abs=1e-9)


def test_the_entropy_of_labels_that_may_all_hold_is_that_of_each() -> None:
    some, batch = span("model", "multi_label_classification")
    at = torch.tensor([[0.3], [0.6]], dtype=torch.float64, requires_grad=True)
    found = entropy(some, some.weights(at), batch, [])
    p = 1 / (1 + np.exp(-some.run(some.weights(at), batch)["logits"].detach().numpy()))
    assert found.item() == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(), rel=1e-12)
    found.backward()
    step = torch.tensor([[1e-5], [0.0]], dtype=torch.float64)
    ahead, back = (entropy(some, some.weights((at + sign * step).detach()), batch, []) for sign in (1, -1))
    assert float(at.grad[0]) == pytest.approx(float(ahead - back) / 2e-5, abs=1e-9)


def test_every_task_has_the_loss_that_it_counts() -> None:
    draw = torch.Generator().manual_seed(1)
    scores, several = torch.randn(6, 4, generator=draw), torch.randint(0, 2, (6, 4), generator=draw)
    tags = torch.tensor([[0, 1, -100], [3, -100, 2]])
    cases: list[tuple[Task, Tensor, Tensor]] = [
        (ClassificationTask("image"), scores, torch.tensor([0, 1, 2, 3, 0, 1])),
        (TaggingTask(["O", "B-x", "I-x", "B-y"]), scores.reshape(2, 3, 4), tags),
        (MultiLabelTask(), scores, several),
        (RegressionTask(), scores[:, :1], torch.randn(6, generator=draw)),
    ]
    for task, logits_given, labels in cases:
        predictions, targets = task.predict({"logits": logits_given}, labels)
        task.add(predictions, targets)
        assert float(task.loss(predictions, targets)) == pytest.approx(task.result().loss, rel=1e-6), task


def test_a_perturbation_stays_within_its_radius_and_hurts() -> None:
    some, batch = span("model")
    weights = some.weights(torch.tensor([[0.3], [0.6]], dtype=torch.float64))
    loss = label_loss(perturbed=0.25, radius=0.1, attack=5)
    worse = loss.perturb(some, weights, batch)
    assert float((worse["pixel_values"] - batch["pixel_values"]).abs().max()) == pytest.approx(0.1)
    clean, moved = (float(loss.loss(some, weights, one)) for one in (batch, worse))
    assert moved > clean
    assert float(loss(some, weights, batch, [])) == pytest.approx(0.75 * clean + 0.25 * moved, rel=1e-12)
    one_step = label_loss(perturbed=1.0, radius=0.1)
    inputs = batch["pixel_values"].clone().requires_grad_()
    one_step.loss(some, weights, {**batch, "pixel_values": inputs}).backward()
    expected = batch["pixel_values"] + 0.1 * inputs.grad.sign()
    torch.testing.assert_close(one_step.perturb(some, weights, batch)["pixel_values"], expected)


# --- optima -----------------------------------------------------------------------------------------------------------
def linear_classifiers() -> tuple[list[Path], Batch]:
    """ViTs that differ in their last layer only: the loss is convex in the coefficients."""
    first = model("vit", 0)
    states = [{**tensors(first)} for _ in range(3)]
    for number, state in enumerate(states):
        draw = torch.Generator().manual_seed(number)
        for name in ("classifier.weight", "classifier.bias"):
            state[name] = torch.randn(state[name].shape, generator=draw, dtype=torch.float64)
    made = []
    for number, state in enumerate(states):
        module = stock(first)
        module = type(module).from_pretrained(None, config=module.config, state_dict=state, dtype=torch.float64)
        made.append(first.parent / f"linear-{number}")
        module.save_pretrained(made[-1])
    return made, data(first, labels=True, examples=24)


def features(folder: Path, batch: Batch) -> np.ndarray:
    module = stock(folder)
    with torch.no_grad():
        return module.vit(batch["pixel_values"]).last_hidden_state[:, 0].numpy()


@pytest.mark.parametrize("with_base", [False, True])
def test_on_a_convex_loss_the_coefficients_are_the_optimum_that_scipy_finds(with_base: bool) -> None:
    parents, batch = linear_classifiers()
    seen, labels = features(parents[0], batch), batch["labels"].numpy()
    heads = [(tensors(p)["classifier.weight"].numpy(), tensors(p)["classifier.bias"].numpy()) for p in parents]
    base, heads = (heads[0], heads[1:]) if with_base else ((0 * heads[0][0], 0 * heads[0][1]), heads)

    def loss(weights: np.ndarray) -> float:
        weight = base[0] + sum(w * (h[0] - base[0]) for w, h in zip(weights, heads, strict=True))
        bias = base[1] + sum(w * (h[1] - base[1]) for w, h in zip(weights, heads, strict=True))
        p = probabilities(seen @ weight.T + bias)
        return float(-np.log(p[np.arange(len(labels)), labels]).mean())

    rules: dict[str, Any] = {}
    if not with_base:
        rules = {"bounds": [(0, 1)] * 3, "constraints": {"type": "eq", "fun": lambda w: w.sum() - 1}}
    best = minimize(loss, np.full(len(heads), 1 / len(heads)), tol=1e-12, **rules)
    result = merged(
        "learned_soup", parents[1:] if with_base else parents, parents[0] if with_base else None, data=batches(batch),
        steps=150, rate=0.2,
    )  # fmt: skip
    found = list(result.report()["coefficients"][0]["models"].values())
    np.testing.assert_allclose(found, best.x, atol=2e-3)
    assert result.report()["objective"]["after"] == pytest.approx(best.fun, abs=1e-5)


# --- the methods ------------------------------------------------------------------------------------------------------
def test_layers_and_tensors_have_coefficients_of_their_own() -> None:
    base, *parents = folders("vit")
    own = [batches(data(base, seed)) for seed in (1, 2)]
    counts = {}
    for by in ("model", "layer", "tensor"):
        rows = merged("adamerging", parents, base, data=own, by=by, steps=3).report()["coefficients"]
        counts[by] = len(rows)
        assert by == "model" or len({tuple(row["models"].values()) for row in rows}) > 1
    named = {name for name, _ in stock(base).named_parameters()}
    assert counts["model"] == 1 and counts["tensor"] == len(named) and 2 < counts["layer"] < len(named)


def test_a_learned_soup_loads_in_the_stock_class_and_follows_its_record(tmp_path: Path) -> None:
    parents = folders("vit")
    batch = data(parents[0], labels=True, examples=12)
    result = merged("learned_soup", parents, data=batches(batch, 6, 6), by="tensor", steps=5)
    result.save(tmp_path / "soup")
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "soup", dtype=torch.float64)
    found = dict(loaded.named_parameters())
    states = [dict(stock(parent).named_parameters()) for parent in parents]
    rows = result.report()["coefficients"]
    assert {row["group"] for row in rows} == set(found)
    for row in rows:
        weights = list(row["models"].values())
        expected = sum(w * state[row["group"]] for w, state in zip(weights, states, strict=True))
        torch.testing.assert_close(found[row["group"]], expected, atol=1e-9, rtol=1e-9)


def test_coefficients_are_never_worse_than_where_they_began() -> None:
    base, *parents = folders("vit")
    one = merged("adamerging", parents, base, data=batches(data(base, 1)), by="model", objective="predictions",
                 steps=1, rate=1e6)  # fmt: skip
    objective = one.report()["objective"]
    assert objective["after"] == objective["before"]
    assert list(one.report()["coefficients"][0]["models"].values()) == pytest.approx([0.3, 0.3])


def test_models_are_aligned_to_the_base_where_that_is_asked_for() -> None:
    base, first, _ = folders("vit")
    options: dict[str, Any] = {
        "data": batches(data(base, 1)),
        "by": "model",
        "weights": [0.5],
        "steps": 1,
        "rate": 1e-9,
    }
    aligned = merged("adamerging", [first], base, align={"evidence": "weights"}, **options)
    assert aligned.report()["alignment"]["anchor"] == str(base)
    mean = isomerge.merge([base, first], align={"evidence": "weights"}).state_dict()
    found = aligned.state_dict()
    assert all(torch.allclose(found[name], mean[name], atol=1e-6) for name in mean)


# --- what is refused --------------------------------------------------------------------------------------------------
def refused(method: str, message: str, **options: Any) -> None:
    base, *parents = folders("vit")
    with_labels = DATA_METHODS[method].labels
    given = {"data": batches(data(base, labels=with_labels)), "steps": 2, **options}
    given.setdefault("base", base if method == "adamerging" else None)
    with pytest.raises(RequestError, match=message):
        isomerge.merge(given.pop("models", parents), method=method, **given).state_dict()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("adamerging", {"objective": "labels"}, "objective cannot be 'labels'"),
        ("adamerging", {"by": "block"}, "by cannot be 'block'"),
        ("adamerging", {"steps": 0}, "steps is a whole number from 1"),
        ("adamerging", {"rate": -1.0}, "rate a number above 0"),
        ("adamerging", {"base": None}, "needs 'base_model'"),
        ("adamerging", {"data": None}, "needs 'data'"),
        ("learned_soup", {"weights": [1, 0]}, "numbers above 0"),
        ("learned_soup", {"attack": 0}, "at least one step"),
    ],
)
def test_what_makes_no_sense_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    refused(method, message, **options)


def test_a_base_among_the_models_is_refused() -> None:
    base, *parents = folders("vit")
    refused("adamerging", "is the base, which adamerging does not merge", models=[base, *parents])


def test_tokens_are_not_perturbed() -> None:
    parents = folders("llama", 2)
    batch = data(parents[0], labels=True)
    with pytest.raises(RequestError, match="tokens have no neighbours"):
        isomerge.merge(parents, method="learned_soup", data=batches(batch), steps=2, perturbed=0.5).state_dict()


def test_the_entropy_of_numbers_is_refused() -> None:
    config = {"architectures": ["ViTForImageClassification"]}
    parents = [model("vit", seed, num_labels=1, problem_type="regression") for seed in range(2)]
    assert read_config(parents[0])["architectures"] == config["architectures"]
    with pytest.raises(RequestError, match="models that score classes or tokens"):
        merged(
            "adamerging", parents[1:], parents[0], data=batches(data(parents[0])), steps=2, objective="entropy"
        ).state_dict()
