"""The search against functions and merges whose best values are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import isomerge
from isomerge.errors import RequestError
from isomerge.sweeping.optimisers import OPTIMISERS, Dimension, Unit
from models import llama, mostly_slow
from samples import SENTENCES


def tried(
    algorithm: str, function: Any, dimensions: list[Dimension], evaluations: int, seed: int = 0
) -> list[tuple[Unit, float]]:
    """What an optimiser proposes, with the values of a function there."""
    proposals = OPTIMISERS[algorithm](dimensions, seed)
    seen: list[tuple[Unit, float]] = []
    batch = next(proposals)
    while len(seen) < evaluations:
        scores = [float(function(*point)) for point in batch]
        seen += zip(batch, scores, strict=True)
        batch = proposals.send(scores)
    return seen[:evaluations]


def lowest(seen: list[tuple[Unit, float]]) -> Unit:
    return min(seen, key=lambda one: one[1])[0]


def bowl(x: float, y: float, z: float) -> float:
    return (x - 0.3) ** 2 + (y - 0.6) ** 2 + (z - 0.6) ** 2 + 0.5 * (x - 0.3) * (y - 0.6)


@pytest.mark.parametrize("place", [0.137, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_valley_of_a_parabola_is_found(place: float) -> None:
    seen = tried("bayesian", lambda x: (x - place) ** 2, [Dimension()], 12)
    assert lowest(seen)[0] == pytest.approx(place, abs=0.01)


@pytest.mark.slow
def test_the_deeper_of_two_valleys_is_found() -> None:
    seen = tried("bayesian", lambda x: min((x - 0.2) ** 2 + 0.1, 2 * (x - 0.8) ** 2), [Dimension()], 16)
    assert lowest(seen)[0] == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("algorithm", "evaluations", "near"),
    [("cma", 200, 0.02), ("random", 200, 0.25), pytest.param("bayesian", 24, 0.05, marks=pytest.mark.slow)],
)
def test_three_parameters_with_a_tilted_bowl(algorithm: str, evaluations: int, near: float) -> None:
    seen = tried(algorithm, bowl, [Dimension()] * 3, evaluations)
    assert lowest(seen) == pytest.approx((0.3, 0.6, 0.6), abs=near)
    assert all(0 <= x <= 1 for point, _ in seen for x in point)


@pytest.mark.parametrize("algorithm", mostly_slow(OPTIMISERS, "cma", "random"))
def test_a_seed_names_the_points(algorithm: str) -> None:
    first, again, other = (tried(algorithm, bowl, [Dimension()] * 3, 9, seed) for seed in (0, 0, 1))
    assert first == again and first != other


@pytest.mark.slow
def test_levels_are_found_and_points_without_a_score_avoided() -> None:
    """One of twelve whole numbers, and one of three names that have no order."""
    levels = [Dimension(12), Dimension(3, ordered=False)]

    def function(x: float, y: float) -> float:
        whole, name = levels[0].level(x), levels[1].level(y)
        return (whole - 7) ** 2 + 5 * (name != 1) if whole > 2 else float("inf")

    x, y = lowest(tried("bayesian", function, levels, 20))
    assert (levels[0].level(x), levels[1].level(y)) == (7, 1)
    x, y = lowest(tried("cma", function, levels, 120))
    assert (levels[0].level(x), levels[1].level(y)) == (7, 1)


@pytest.mark.slow
def test_one_terrible_score_hides_no_other() -> None:
    seen = tried("bayesian", lambda x: 1e9 if x > 0.9 else (x - 0.4) ** 2, [Dimension()], 16)
    assert lowest(seen)[0] == pytest.approx(0.4, abs=0.02)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and two models that differ from it."""
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("base", "b", "c")):
        llama(folder / name, seed=seed)
    (folder / "book.txt").write_text("\n".join(SENTENCES))
    return folder


def distance(folder: Path, weights: dict[str, float]) -> Any:
    """How far a module is from base + Σ weight × (model − base), which is a parabola in the weights of a merge."""
    base = load_file(folder / "base" / "model.safetensors")
    goal = {name: tensor.double() for name, tensor in base.items()}
    for model, weight in weights.items():
        other = load_file(folder / model / "model.safetensors")
        goal = {name: goal[name] + weight * (other[name].double() - base[name].double()) for name in goal}

    def loss(module: torch.nn.Module) -> float:
        own = module.state_dict()
        return sum(float((own[name].double() - goal[name]).square().sum()) for name in goal)

    return loss


def test_the_share_that_was_hidden_is_found(models: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(models / name)} for name in ("base", "b")]}
    got = isomerge.sweep(recipe, {"t": "0:1"}, loss=distance(models, {"b": 0.37}), search=12)
    assert got.best.parameters["t"] == pytest.approx(0.37, abs=0.01)
    assert got.record["start"]["parameters"] == {} and got.record["mode"] == "search"
    assert got.record["start"]["loss"] > (got.best.loss or 0.0) and len(got.points) <= 11
    assert got.recipe.models is not None
    weights = [(entry.parameters or {})["weight"] for entry in got.recipe.models]
    assert weights == pytest.approx([0.63, 0.37], abs=0.01)


@pytest.mark.slow
def test_two_weights_that_were_hidden_are_found(models: Path) -> None:
    parts = [{"model": str(models / name)} for name in ("b", "c")]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(models / "base"), "models": parts}
    loss = distance(models, {"b": 0.3, "c": 0.8})
    got = isomerge.sweep(recipe, {"b.weight": "0:1", "c.weight": "0:1"}, loss=loss, search=24)
    assert got.best.parameters == pytest.approx({"b.weight": 0.3, "c.weight": 0.8}, abs=0.03)


@pytest.mark.slow
def test_a_noisy_copy_gets_no_weight(models: Path) -> None:
    """The model has learnt the text and its copy is disturbed: on that text the best share of the copy is small."""
    model = AutoModelForCausalLM.from_pretrained(models / "base")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(models / "base")(SENTENCES[0], return_tensors="pt").input_ids
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(models / "learnt")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(models / "noisy")
    for name in ("learnt", "noisy"):
        for file in (models / "base").glob("*token*"):
            (models / name / file.name).write_bytes(file.read_bytes())
    (models / "line.txt").write_text(SENTENCES[0])
    recipe = {"merge_method": "linear", "models": [{"model": str(models / n)} for n in ("learnt", "noisy")]}
    data = {"data": {"path": models / "line.txt", "kind": "lines"}}
    got = isomerge.sweep(recipe, {"t": "0:1"}, search=12, test=models / "book.txt", **data)
    assert got.best.parameters["t"] < 0.15
    assert got.record["test"]["best"]["loss"] != got.best.loss
    assert (got.best.loss or 0) < got.record["start"]["loss"]


def test_a_search_knows_which_parameters_are_whole_numbers(models: Path) -> None:
    parts = [{"model": str(models / name)} for name in ("b", "c")]
    recipe = {"merge_method": "dare_linear", "base_model": str(models / "base"), "models": parts}
    recipe["parameters"] = {"density": 0.5}
    over = {"seed": "0:9", "models[1].weight": "0:2"}
    got = isomerge.sweep(recipe, over, loss=distance(models, {"b": 1.0}), search=8)
    assert all(isinstance(point.parameters["seed"], int) for point in got.points)
    assert any(float(str(point.parameters["models[1].weight"])) % 1 for point in got.points)


def test_bounds_that_the_method_does_not_take_are_refused(models: Path) -> None:
    parts = [{"model": str(models / name)} for name in ("b", "c")]
    recipe = {"merge_method": "ties", "base_model": str(models / "base"), "models": parts}
    with pytest.raises(RequestError, match="density.*share between 0 and 1"):
        isomerge.sweep(recipe, {"density": "0.5:2"}, data=models / "book.txt", search=5)
    with pytest.raises(RequestError, match="at least 3"):
        isomerge.sweep(recipe, {"density": "0.5:1"}, data=models / "book.txt", search=2)
