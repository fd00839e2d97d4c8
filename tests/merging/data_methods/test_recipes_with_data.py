"""Every form of a recipe that merges with data gives what the call on batches gives, bit for bit where it can."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isomerge
from isomerge.calibration import calibrate
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.evaluation.evaluate import evaluate
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.data_methods.greedy_soup import choose_soup
from isomerge.merging.layerwise.goals import Beliefs
from isomerge.merging.repair import repair
from models import image_pair as pair
from models import tensors
from samples import digits

LIMIT = 60


def passes(folder: Path | None = None, *, labels: bool = False, limit: int | None = LIMIT) -> Any:
    first = open_checkpoint(pair()[0])
    return open_data(folder or digits()).passes(first, limit=limit, labels=labels)


def called(models: list[Any], data: Any, **options: Any) -> dict[str, Tensor]:
    """The call on batches that are in memory."""
    return isomerge.merge(models, data=data, **options).state_dict()


def merged(**recipe: Any) -> dict[str, Tensor]:
    models = [{"model": name} if isinstance(name, str) else name for name in recipe.pop("models", pair())]
    return isomerge.merge_recipe({"models": models, **recipe}).state_dict()


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """The same, but that moved weights are float64 in the one and were rounded to float32 in the other."""
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name].double(), expected[name].double(), rtol=1e-4, atol=1e-6) for name in expected)


def aligned_pair() -> list[Any]:
    """Both models next to the first, in memory."""
    opened = [open_checkpoint(name) for name in pair()]
    aligned = AlignedTensors(isomerge.align_family(opened[1:], anchor=opened[0]), opened[0])
    return [aligned.as_checkpoint(one) for one in opened]


DATA = {"path": str(digits()), "limit": LIMIT}


@pytest.mark.parametrize("evidence", ["weights", None])
def test_reconstruct(evidence: str | None) -> None:
    align: Any = {"evidence": evidence} if evidence else True
    parameters = {"ridge": 0.1, "floor": 1e-5}
    entries = [{"model": m, "parameters": {"weight": w}} for m, w in zip(pair(), (0.3, 0.7), strict=True)]
    found = merged(merge_method="reconstruct", models=entries, data=DATA, align=align, parameters=parameters)
    how = {"evidence": "weights"} if evidence else {"data": passes()}
    expected = called(pair(), passes(), method="reconstruct", weights=[0.3, 0.7], align=how, **parameters)
    assert same(found, expected)


def test_reconstruct_without_alignment_takes_the_data_of_all_models_together() -> None:
    halves = [digits(0, 40), digits(40, 40)]
    entries = [{"model": m, "data": str(d)} for m, d in zip(pair(), halves, strict=True)]
    found = merged(merge_method="reconstruct", models=entries, parameters={"goals": "mean"})
    batches = [passes(d, limit=None) for d in halves]
    expected = called(pair(), lambda: itertools.chain(batches[0](), batches[1]()), method="reconstruct", goals="mean")
    assert same(found, expected)


def test_regmean_plus_measures_each_model_on_its_own_data() -> None:
    halves = [digits(0, 40), digits(40, 40)]
    entries = [{"model": m, "data": str(d)} for m, d in zip(pair(), halves, strict=True)]
    batches = [passes(d, limit=None) for d in halves]
    expected = called(pair(), batches, method="regmean++", alpha=0.8, align={"evidence": "weights"})
    for name in ("alpha", "off_diagonal"):  # the earlier name of the option is still read
        found = merged(merge_method="regmean++", models=entries, align=True, parameters={name: 0.8})
        assert same(found, expected)


@pytest.mark.parametrize("kind", ["true", "empirical"])
@pytest.mark.parametrize("align", [False, True])
def test_fisher_is_measured_on_the_models_as_they_are_merged(kind: str, align: bool) -> None:
    setting: Any = {"evidence": "weights"} if align else False
    found = merged(
        merge_method="fisher", data=DATA, align=setting, calibrate={"fisher": kind}, parameters={"floor": 1e-3}
    )
    models, batches = aligned_pair() if align else pair(), passes(labels=kind == "empirical")
    expected = called(models, batches, method="fisher", floor=1e-3, calibrate={"fisher": kind})
    assert near(found, expected) if align else same(found, expected)


@pytest.mark.parametrize("align", [False, True])
def test_regmean_measures_each_model_on_its_own_data(align: bool) -> None:
    halves = [digits(0, 40), digits(40, 40)]
    entries = [{"model": m, "data": str(d)} for m, d in zip(pair(), halves, strict=True)]
    found = merged(merge_method="regmean", models=entries, align=align, parameters={"alpha": 0.7})
    batches = [passes(d, limit=None) for d in halves]
    expected = called(aligned_pair() if align else pair(), batches, method="regmean", alpha=0.7)
    assert near(found, expected) if align else same(found, expected)


def test_calibrate_may_measure_on_fewer_examples() -> None:
    result = isomerge.merge(pair(), method="fisher", data=DATA, calibrate={"limit": 20}, align=True)
    expected = called(pair(), passes(limit=20), method="fisher")
    found = merged(merge_method="fisher", data=DATA, calibrate={"limit": 20})
    assert same(found, expected)
    assert sorted(data["examples"] for data in result.report()["data"]) == [20, LIMIT]  # alignment sees them all


def test_ewc_takes_measured_importances_too(tmp_path: Path) -> None:
    files = []
    for place, name in enumerate(pair()):
        files.append(tmp_path / f"{place}.safetensors")
        calibrate(name, passes(), what={"fisher"}).save(files[-1])
    from_files = isomerge.merge(pair(), method="ewc", importance=[str(f) for f in files]).state_dict()
    assert same(merged(merge_method="ewc", data=DATA), from_files)


def test_alignment_by_activations_before_a_plain_average() -> None:
    how = {"evidence": {"residual": "mix", "ffn": "activations"}, "measure": "l2", "site": "pre"}
    found = merged(merge_method="linear", align=how, data=DATA)
    other, anchor = pair()[1], pair()[0]
    move = isomerge.align(other, anchor, data=passes(), **how).moved()
    source = {name: move.model.split(name, move.tensor(name)) for name in move.model.layouts}
    moved = {file: tensor for parts in source.values() for file, tensor in parts.items()}
    expected = {name: (tensor + moved[name]) / 2 for name, tensor in tensors(Path(anchor)).items()}
    assert all(torch.allclose(found[name], expected[name].float(), atol=1e-6) for name in expected)
    assert not same(found, merged(merge_method="linear", align=True))


def test_greedy_soup_keeps_what_helps_on_labelled_data() -> None:
    models = pair()

    def score(state: dict[str, Tensor]) -> float:
        checkpoint = open_checkpoint(state, config=open_checkpoint(models[0]).config)
        return float(evaluate(checkpoint, passes(labels=True))["metric"])

    expected = choose_soup(models, score)
    result = isomerge.merge_recipe(
        {"merge_method": "greedy_soup", "models": [{"model": m} for m in models], "data": DATA}
    )
    assert same(result.state_dict(), expected.state)
    record = result.report()
    assert record["chosen"] == [models[k] for k in expected.chosen] and record["score"] == expected.score
    assert record["scores"] == [{"model": m, "score": s} for m, s in zip(models, expected.own, strict=True)]
    assert record["metric"] == "accuracy"
    told = " ".join(note for note in record["notes"] if "soup" in note)
    assert all(f"{model} {score:.4f}" in told for model, score in zip(models, expected.own, strict=True))


@pytest.mark.parametrize("align", [False, True])
def test_repair_after_an_average(align: bool) -> None:
    setting: Any = {"evidence": "weights"} if align else False
    found = merged(merge_method="linear", data=DATA, align=setting, repair=True)
    plain = isomerge.merge(pair(), align=setting)
    parents = aligned_pair() if align else pair()
    config = open_checkpoint(pair()[0]).config
    expected = repair(open_checkpoint(plain.state_dict(), config=config), parents, passes())
    assert near(found, expected) if align else same(found, expected)
    assert not near(found, plain.state_dict())


def test_repair_follows_each_model_on_its_own_data() -> None:
    halves = [digits(0, 40), digits(40, 40)]
    entries = [{"model": m, "data": str(d)} for m, d in zip(pair(), halves, strict=True)]
    found = merged(merge_method="linear", models=entries, repair=True)
    batches = [passes(d, limit=None) for d in halves]
    sizes = [[len(one["pixel_values"]) for one in batch()] for batch in batches]
    assert sizes == [[40], [40]]
    own = Beliefs([torch.tensor([[1.0], [0.0]]).expand(-1, 40), torch.tensor([[0.0], [1.0]]).expand(-1, 40)])
    plain = open_checkpoint(isomerge.merge(pair()).state_dict(), config=open_checkpoint(pair()[0]).config)
    together = lambda: itertools.chain(batches[0](), batches[1]())  # noqa: E731
    assert same(found, repair(plain, pair(), together, believed=own))
    both = merged(merge_method="linear", models=entries, repair={"goals": "mean"})
    assert same(both, repair(plain, pair(), together))
    by_expert = merged(merge_method="linear", models=entries, repair={"goals": "expert"})
    assert not near(by_expert, found) and not near(by_expert, both)


def test_activations_are_seen_on_the_data_of_all_models_where_that_is_asked_for() -> None:
    halves = [digits(0, 40), digits(40, 40)]
    entries = [{"model": m, "data": str(d)} for m, d in zip(pair(), halves, strict=True)]
    found = merged(merge_method="linear", models=entries, align={"evidence": {"residual": "activations"}})
    batches = [passes(d, limit=None) for d in halves]
    how = {"evidence": {"residual": "activations"}, "data": lambda: itertools.chain(batches[0](), batches[1]())}
    assert same(found, isomerge.merge(pair(), align=how).state_dict())


def test_data_from_python_and_the_flags_of_merge_are_the_recipe() -> None:
    data = open_data(digits())
    expected = merged(merge_method="fisher", data=DATA, calibrate={"fisher": "empirical"})
    settings = {"method": "fisher", "calibrate": {"fisher": "empirical"}}
    assert same(isomerge.merge(pair(), data=DATA, **settings).state_dict(), expected)
    whole = isomerge.merge(pair(), data=data, **settings)
    assert same(
        whole.state_dict(), merged(merge_method="fisher", data=str(digits()), calibrate={"fisher": "empirical"})
    )
    about = {"name": data.name, "kind": "images", "sha256": data.sha256}
    assert whole.report()["data"] == [{**about, "size": 90, "examples": 90}]


def test_a_result_of_a_whole_model_method_feeds_another_document(tmp_path: Path) -> None:
    a, b = pair()
    text = (
        f"name: both\nmerge_method: reconstruct\nmodels: [{{model: {a}}}, {{model: {b}}}]\n"
        f"data: {{path: {digits()}, limit: 60}}\n---\n"
        f"merge_method: linear\nmodels: [{{model: both}}, {{model: {a}}}]\n"
    )
    found = isomerge.merge_recipe(text).state_dict()
    first = called(pair(), passes(), method="reconstruct")
    own = tensors(Path(a))
    assert all(torch.allclose(found[n], (first[n].float() + own[n]) / 2, atol=1e-6) for n in own)


def test_models_are_aligned_once_for_the_method_and_its_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*models: Any, **options: Any) -> Any:
        calls.append(models)
        return isomerge.align_family(*models, **options)

    monkeypatch.setattr("isomerge.merging.prepared_models.align_family", counted)
    options: dict[str, Any] = {"data": DATA, "align": {"evidence": "weights"}, "repair": True}
    for method in ("linear", "reconstruct", "greedy_soup", "ot_fusion"):
        calls.clear()
        isomerge.merge(pair(), method=method, **options)
        assert len(calls) == 1, method


def test_statistics_in_memory_are_inputs_of_a_saved_merge(tmp_path: Path) -> None:
    measured = [calibrate(name, passes()) for name in pair()]
    isomerge.merge(pair(), method="regmean", statistics=measured).save(tmp_path / "out")
    lock = (tmp_path / "out" / "isomerge.lock.json").read_text()
    assert all(one.name in lock for one in measured)


def test_the_limit_of_opened_data_is_what_the_record_counts() -> None:
    merged = isomerge.merge(pair(), method="regmean", data=open_data(digits(), limit=7))
    assert merged.report().to_dict()["data"][0]["examples"] == 7
