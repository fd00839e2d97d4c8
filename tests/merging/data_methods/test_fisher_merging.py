"""Fisher merging against the formula, from data and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isomerge
from calibration.hooks import batches, data
from isomerge.calibration import Statistics, calibrate
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.aligned_tensors import AlignedTensors
from models import model, tensors


def merged(models: list[Path], **options: Any) -> dict[str, Tensor]:
    return isomerge.merge(models, method="fisher", **options).state_dict()


def weighted(models: list[Path], informations: list[dict], weight: list[float], floor: float) -> dict:
    states, found = [tensors(f) for f in models], {}
    for name in states[0]:
        information = torch.stack([f[name] for f in informations])
        counts = (information + floor * information.mean()) * torch.tensor(weight).double().reshape(
            -1, *[1] * states[0][name].ndim
        )
        stacked = torch.stack([s[name].double() for s in states])
        found[name] = (counts * stacked).sum(0) / counts.sum(0)
    return found


@pytest.mark.parametrize("kind", ["true", "empirical"])
def test_data_and_files_give_the_importance_weighted_mean(kind: str, tmp_path: Path) -> None:
    models = [model("vit", 0), model("vit", 1)]
    inputs = [batches(data(f, seed, 5, labels=True)) for seed, f in enumerate(models)]
    found = [calibrate(f, b, what={"fisher"}, fisher=kind) for f, b in zip(models, inputs, strict=True)]
    expected = weighted(models, [f.fisher for f in found], [1.0, 3.0], 1e-3)
    from_data = merged(models, data=inputs, calibrate={"fisher": kind}, weights=[1, 3], floor=1e-3)
    files = [str(f.save(tmp_path / f"{k}.safetensors")) for k, f in enumerate(found)]
    from_files = merged(models, importance=files, weight=[1.0, 3.0], floor=1e-3)
    from_objects = merged(models, importance=found, weight=[1, 3], floor=1e-3)
    for name, tensor in expected.items():
        for made in (from_data, from_files, from_objects):
            torch.testing.assert_close(made[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_normalized_information_counts_alike_however_much_a_model_has(tmp_path: Path) -> None:
    models = [model("vit", 0), model("vit", 1)]
    found = [calibrate(f, batches(data(f, seed, 5)), what={"fisher"}) for seed, f in enumerate(models)]
    parts = [{n: f / f.mean() if f.any() else f for n, f in each.fisher.items()} for each in found]
    expected = weighted(models, parts, [1.0, 3.0], 1e-3)
    little = Statistics.of({n: 1e-12 * t for n, t in found[0].fisher.items()}, found[0].info)
    options = {"weight": [1.0, 3.0], "floor": 1e-3}
    alike = merged(models, importance=found, normalize=True, **options)
    as_little = merged(models, importance=[little, found[1]], normalize=True, **options)
    files = [str(f.save(tmp_path / f"{k}.safetensors")) for k, f in enumerate((little, found[1]))]
    called = merged(models, importance=files, normalize=True, **options)
    for name, tensor in expected.items():
        for made in (alike, as_little, called):
            torch.testing.assert_close(made[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
    plain = merged(models, importance=[little, found[1]], weight=[1, 3], floor=0)
    name = "vit.encoder.layer.1.output.dense.weight"
    torch.testing.assert_close(plain[name], tensors(models[1])[name], rtol=1e-6, atol=1e-6)  # the other alone


def test_a_model_without_any_information_of_a_tensor_counts_by_the_floor() -> None:
    models = [model("vit", seed, torch.float32) for seed in (0, 1)]
    found = [calibrate(f, batches(data(f)), what={"fisher"}) for f in models]
    none = Statistics.of({n: torch.zeros_like(t) for n, t in found[0].fisher.items()}, found[0].info)
    little = Statistics.of({n: 1e-38 * t for n, t in found[0].fisher.items()}, found[0].info)
    for one, other in ((little, found[1]), (none, found[1]), (none, none)):
        result = merged(models, importance=[one, other], normalize=True)
        assert all(bool(tensor.isfinite().all()) for tensor in result.values())
    name = "vit.encoder.layer.1.output.dense.weight"
    mean = sum(tensors(m)[name] for m in models) / 2
    torch.testing.assert_close(result[name], mean)


def test_a_weight_that_nothing_touched_is_averaged() -> None:
    models = [model("bert", 0), model("bert", 1)]
    batch = data(models[0], examples=2)
    result = merged(models, data=batches(batch))
    unused = sorted(set(range(29)) - set(batch["input_ids"].flatten().tolist()) - {0})[0]
    name = "bert.embeddings.word_embeddings.weight"
    a, b = (tensors(m)[name][unused] for m in models)
    torch.testing.assert_close(result[name][unused], (a + b) / 2)


def test_information_does_not_move_so_files_are_refused_and_data_are_measured_after_aligning(tmp_path: Path) -> None:
    models = [model("vit", 0), model("vit", 1)]
    given = batches(data(models[0], examples=2))
    files = [str(calibrate(m, given, what={"fisher"}).save(tmp_path / f"{m.name}.safetensors")) for m in models]
    with pytest.raises(RequestError, match="a rotation mixes weights.*measure again"):
        merged(models, importance=files, align=True)
    opened = [open_checkpoint(m) for m in models]
    aligned = AlignedTensors(isomerge.align_family(opened[1:], anchor=opened[0]), opened[0])
    moved = aligned.as_checkpoint(opened[1])
    informations = [calibrate(m, given, what={"fisher"}).fisher for m in (models[0], moved)]
    result = merged(models, data=given, align={"evidence": "weights"})
    name = "vit.encoder.layer.1.output.dense.weight"
    counts = torch.stack([f[name] + 1e-6 * torch.stack([g[name] for g in informations]).mean() for f in informations])
    stacked = torch.stack([tensors(models[0])[name], moved.read(name)])
    torch.testing.assert_close(result[name], (counts * stacked).sum(0) / counts.sum(0), rtol=1e-6, atol=1e-9)


def test_information_that_is_wrong_is_refused(tmp_path: Path) -> None:
    models = [model("vit", 0), model("vit", 1)]
    other = calibrate(model("bert", 0), batches(data(model("bert", 0), examples=1)), what={"fisher"})
    grams = calibrate(models[0], batches(data(models[0])))
    for wrong in (other, grams):
        with pytest.raises(RequestError, match="has to hold every tensor"):
            merged(models, importance=[wrong, wrong])
    with pytest.raises(RequestError, match="weighs by importances"):
        merged(models)
