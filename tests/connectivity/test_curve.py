"""Curves between stock models: their ends, their points as files, what is measured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from typer.testing import CliRunner

import isomerge
from connectivity.test_barrier import pixels_and_labels, trained
from isomerge.choices import CURVES
from isomerge.cli.app import app
from isomerge.connectivity.curves.methods import METHODS
from isomerge.errors import CheckpointError, RequestError
from models import bert, llama, vit
from samples import DIGITS, SENTENCES, write_digits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("curve")
    pixels, labels = pixels_and_labels(write_digits(folder / "digits"))
    for seed, name in enumerate("ab"):
        trained(folder / name, seed, pixels, labels)
    return {"a": folder / "a", "b": folder / "b", "data": folder / "digits", "pixels": pixels, "labels": labels}


def found(pair: dict[str, Any], **options: Any) -> Any:
    return isomerge.curve(pair["a"], pair["b"], data=pair["data"], **{"steps": 30, "points": 3, **options})


def loss_of(folder: Path, pair: dict[str, Any]) -> float:
    """Of a stock class, on the examples that are held out: every fourth in the order of the data."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    data = isomerge.open_data(pair["data"])
    (batch,) = data.batches(isomerge.open_checkpoint(pair["a"]), batch_size=99, labels=True, task="image")
    with torch.no_grad():
        logits = model(pixel_values=batch["pixel_values"][3::4]).logits
    return float(F.cross_entropy(logits, batch["labels"][3::4]))


def test_every_method_is_offered() -> None:
    assert tuple(METHODS) == CURVES


@pytest.mark.parametrize("method", [name for name in CURVES if name != "subspace"])
def test_the_ends_are_the_models_bit_for_bit(method: str, pair: dict[str, Any], tmp_path: Path) -> None:
    curve = found(pair, method=method, steps=8)
    for t, end in ((0, "a"), (1, "b")):
        curve.save(t, tmp_path / end)
        written, model = (load_file(folder / "model.safetensors") for folder in (tmp_path / end, pair[end]))
        assert written.keys() == model.keys() and all(torch.equal(written[n], model[n]) for n in model)
    losses = [loss_of(pair[end], pair) for end in "ab"]
    assert [curve.points[0]["loss"], curve.points[-1]["loss"]] == pytest.approx(losses, rel=1e-5)
    assert [one["loss"] for one in curve.parents] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("method", CURVES)
def test_a_written_point_loads_and_has_the_loss_that_was_measured(
    method: str, pair: dict[str, Any], tmp_path: Path
) -> None:
    drawn = {"samples": 2} if method in ("simplex", "subspace") else {}
    curve = found(pair, method=method, steps=8, **drawn)
    curve.save(0.5, tmp_path / "middle")
    assert loss_of(tmp_path / "middle", pair) == pytest.approx(curve.points[1]["loss"], rel=1e-4)
    if curve.samples is not None:
        point = curve.samples.points[0]
        curve.save(point["weights"], tmp_path / "drawn")
        assert loss_of(tmp_path / "drawn", pair) == pytest.approx(point["loss"], rel=1e-4)
    assert (curve.samples is not None) == (method in ("simplex", "subspace"))


def test_written_points_lie_on_a_bezier_curve(pair: dict[str, Any], tmp_path: Path) -> None:
    curve = found(pair, steps=20)
    for t in (0.25, 0.5, 0.9):
        curve.save(t, tmp_path / str(t))
    files = [pair["a"], pair["b"], *(tmp_path / str(t) for t in (0.5, 0.25, 0.9))]
    for a, b, middle, *others in zip(*(load_file(f / "model.safetensors").values() for f in files), strict=True):
        pivot = 2 * middle.double() - (a.double() + b.double()) / 2
        for t, other in zip((0.25, 0.9), others, strict=True):
            expected = (1 - t) ** 2 * a.double() + 2 * t * (1 - t) * pivot + t**2 * b.double()
            assert torch.allclose(other.double(), expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"method": "chain"}, {"towards": "predictions"}])
def test_a_trained_path_stays_below_the_straight_barrier(options: dict[str, Any], pair: dict[str, Any]) -> None:
    curve = found(pair, points=5, steps=100, **options)
    line = isomerge.barrier(pair["a"], pair["b"], loss=lambda m: straight_loss(m, pair), points=5)
    assert curve.straight.barrier == pytest.approx(line.barrier, rel=1e-4)
    assert curve.barrier < 0.6 * curve.straight.barrier and curve.highest < curve.straight.highest
    assert curve.training["last_loss"] < curve.training["first_loss"] and curve.training["steps"] == 100


def test_a_geodesic_is_shorter_than_the_straight_line(pair: dict[str, Any]) -> None:
    curve = found(pair, method="geodesic", steps=60, pivots=3)
    assert curve.training["length"] < 0.9 * curve.training["straight_length"] and curve.towards is None


@torch.no_grad()
def straight_loss(module: Any, pair: dict[str, Any]) -> float:
    data = isomerge.open_data(pair["data"])
    (batch,) = data.batches(isomerge.open_checkpoint(pair["a"]), batch_size=99, labels=True, task="image")
    return float(F.cross_entropy(module(pixel_values=batch["pixel_values"][3::4]).logits, batch["labels"][3::4]))


def test_after_alignment_the_ends_still_compute_the_models(pair: dict[str, Any], tmp_path: Path) -> None:
    curve = found(pair, align=True, steps=4)
    losses = [loss_of(pair[end], pair) for end in "ab"]
    assert [curve.points[0]["loss"], curve.points[-1]["loss"]] == pytest.approx(losses, rel=1e-3)
    curve.save(1, tmp_path / "b")
    assert loss_of(tmp_path / "b", pair) == pytest.approx(losses[1], rel=1e-3)
    line = isomerge.barrier(pair["a"], pair["b"], loss=lambda m: straight_loss(m, pair), points=3, align=True)
    assert curve.level == "full" and curve.straight.barrier == pytest.approx(line.aligned.barrier, rel=1e-2)


def test_the_ensemble_of_samples_is_their_mean_probability(pair: dict[str, Any]) -> None:
    curve = found(pair, method="simplex", steps=20, samples=3)
    data = isomerge.open_data(pair["data"])
    (batch,) = data.batches(isomerge.open_checkpoint(pair["a"]), batch_size=99, labels=True, task="image")
    total = torch.zeros(())
    for drawn in curve.samples.points:
        with torch.no_grad():
            total = total + curve.module(drawn["weights"])(pixel_values=batch["pixel_values"][3::4]).logits.softmax(-1)
    truth = float(F.nll_loss((total / 3).log(), batch["labels"][3::4]))
    assert curve.samples.ensemble["loss"] == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("kind", ["noise", "attack"])
def test_a_robust_path_is_lower_where_inputs_are_perturbed(kind: str, pair: dict[str, Any]) -> None:
    robust = found(pair, steps=100, **{kind: 0.3})
    assert robust.perturbed is not None and robust.straight.perturbed is not None
    assert robust.perturbed[1]["loss"] < robust.straight.perturbed[1]["loss"]
    assert robust.perturbed[0]["loss"] == robust.straight.perturbed[0]["loss"] != robust.points[0]["loss"]


def test_language_models_with_tied_tables_in_16_bits(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 6))
    for seed, name in enumerate("ab"):
        llama(tmp_path / name, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        model.config.tie_word_embeddings = True
        type(model)(model.config).to(torch.bfloat16).save_pretrained(tmp_path / name)
    for method in ("chain", "geodesic"):
        curve = isomerge.curve(
            tmp_path / "a", tmp_path / "b", data=tmp_path / "book.txt", method=method, steps=4, points=3
        )
        assert curve.metric_name == "perplexity" and len(curve.points) == 3
        curve.save(0, tmp_path / f"{method} end")
        curve.save(0.4, tmp_path / method)
        ends = [load_file(folder / "model.safetensors") for folder in (tmp_path / "a", tmp_path / f"{method} end")]
        assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0]) and ends[0].keys() == ends[1].keys()
        middle = AutoModelForCausalLM.from_pretrained(tmp_path / method)
        assert middle.dtype == torch.bfloat16
        assert middle.lm_head.weight.data_ptr() == middle.get_input_embeddings().weight.data_ptr()


def test_a_function_and_modules_of_any_kind() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 3), torch.randn(32, 1)

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    a, b = net(), net()
    before = [p.clone() for p in a.parameters()]
    curve = isomerge.curve(a, b, loss=lambda m: (m(x) - y).square().mean(), steps=200, points=5)
    assert curve.towards == "function" and curve.highest <= curve.straight.highest
    assert curve.points[2]["loss"] == pytest.approx(float((curve.module(0.5)(x) - y).square().mean()), rel=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(before, a.parameters(), strict=True)), "the given module stays"
    with pytest.raises(RequestError, match="no config.json"):
        curve.save(0.5, "nowhere")


def test_a_point_can_be_merged_further(pair: dict[str, Any]) -> None:
    curve = found(pair, steps=4)
    halfway = curve.checkpoint(0.5)
    merged = isomerge.merge([pair["a"], halfway]).state_dict()
    first = load_file(pair["a"] / "model.safetensors")
    name = next(iter(first))
    assert torch.allclose(merged[name], (first[name] + halfway.read(name)) / 2, atol=1e-6)


def test_data_with_parts_is_learned_from_one_and_measured_on_another(pair: dict[str, Any], tmp_path: Path) -> None:
    for part, count in (("train", 36), ("test", 20)):
        write_digits(tmp_path / "parts" / part, count)
    curve = isomerge.curve(pair["a"], pair["b"], data=tmp_path / "parts", steps=2, points=3)
    whole = isomerge.evaluate(pair["a"], {"path": tmp_path / "parts", "split": "test"})
    assert curve.points[0]["loss"] == pytest.approx(whole.loss, rel=1e-6) and curve.examples == whole.examples
    named = found(pair, steps=2, test={"path": tmp_path / "parts", "split": "test"})
    assert named.examples == whole.examples and named.data == curve.data
    with pytest.raises(RequestError, match="fewer than 4 examples, so none can be held out"):
        found(pair, limit=3)
    with pytest.raises(RequestError, match="they are the same data"):
        found(pair, test=pair["data"])


def test_wrong_requests_are_told(pair: dict[str, Any], tmp_path: Path) -> None:
    bert(tmp_path / "bert", "sequence", ["x", "y"])
    vit(tmp_path / "more", [*DIGITS, "three"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "bezir"}, "method cannot be 'bezir'. Did you mean 'bezier'"),
        ({"towards": "label"}, "Did you mean 'labels'"),
        ({"points": 2}, "2 points are too few"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"rate": 0.0}, "a first step relative to each weight"),
        ({"pivots": 0}, "at least 1 pivots"),
        ({"spread": 0.1}, "spread weighs what keeps the vertices"),
        ({"noise": 0.1, "attack": 0.1}, "Name one of the two"),
        ({"noise": float("nan")}, "of a size above 0"),
        ({"method": "geodesic", "towards": "labels"}, "has no other goal"),
        ({"data": None}, "either loss=function or data="),
        ({"data": None, "loss": lambda m: 0, "test": "x"}, "test is other data"),
        ({"data": None, "loss": lambda m: 0, "noise": 0.1}, "loss=function replaces it"),
        ({"model_b": pair["a"]}, "their weights are the same"),
        ({"model_b": tmp_path / "bert"}, "a 'vit' model and the other a 'bert' model"),
        ({"model_b": tmp_path / "more"}, "different shapes"),
        ({"plot": tmp_path / "no" / "x.svg"}, "there is no folder"),
    ]
    for options, message in cases:
        with pytest.raises(RequestError, match=message):
            isomerge.curve(**{"model_a": pair["a"], "model_b": pair["b"], "data": pair["data"], **options})
    curve = found(pair, steps=2)
    for point, message in {2.0: "t goes from 0 to 1", (0.5, 0.5): "one coordinate"}.items():
        with pytest.raises(RequestError, match=message):
            curve.save(point, tmp_path / "out")
    with pytest.raises((RequestError, CheckpointError), match="input|overwrite|replace"):
        curve.save(0.5, pair["a"])
    for wrong in (None, "half", [0.5, None]):
        with pytest.raises(RequestError, match="cannot be .* Name t from 0 to 1"):
            curve.save(wrong, tmp_path / "point")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_verb_writes_points_and_prints_one_object(pair: dict[str, Any], tmp_path: Path) -> None:
    words = ["curve", str(pair["a"]), str(pair["b"]), "--data", str(pair["data"]), "--steps", "4", "--points", "3"]
    more = ["--method", "simplex", "--point", "0.5", "--point", "0.2,0,0.3,0.5", "-o", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*words, *more, "--plot", str(tmp_path / "curve.svg"), "--json"])
    record = json.loads(told.stdout)
    assert record["method"] == "simplex" and len(record["points"]) == 3 and record["training"]["vertices"] == 4
    assert [Path(one["out"]).name for one in record["written"]] == ["0.5", "0.2,0,0.3,0.5"]
    assert loss_of(tmp_path / "out" / "0.5", pair) == pytest.approx(record["points"][1]["loss"], rel=1e-4)
    assert "simplex" in (tmp_path / "curve.svg").read_text()
    told = CliRunner().invoke(app, [*words, "--noise", "0.2"])
    assert "barrier bezier" in told.stdout and "loss straight, perturbed" in told.stdout
    for wrong, message in {
        ("--point", "0.5"): "Add the other one",
        ("--point", "x", "-o", "y"): "--point cannot be 'x'",
        ("--point", "0.5,0.5", "-o", "y"): "one number, t",
        ("--point", "1.5", "-o", "y"): "from 0 to 1",
        ("--point", "0.5,0.5", "-o", "y", "--method", "simplex"): "there are 4 vertices",
        ("--point", "0.5,0.5,0,0", "-o", "y", "--method", "simplex"): "A and B share no simplex",
        ("--level", "rotation"): "no effect without --align",
        ("--test-split", "x"): "Add --test PATH",
    }.items():
        told = CliRunner().invoke(app, [*words, *wrong])
        assert told.exit_code == 2 and message in " ".join(told.stderr.split())


def test_the_report_draws_the_path_beside_the_straight_line(pair: dict[str, Any], tmp_path: Path) -> None:
    record = found(pair, steps=4, method="simplex", noise=0.2).to_dict()
    isomerge.merge([str(pair["a"]), str(pair["b"])]).save(tmp_path / "merged")
    (tmp_path / "merged" / "curve.json").write_text(json.dumps(record))
    told = isomerge.report(tmp_path / "merged")
    assert "Trained paths between two models" in told.sections and "Between two models" not in told.sections
    page = Path(told.page or "").read_text()
    assert "Loss on the simplex path" in page and "straight, perturbed" in page
    assert "barrier" not in told.summary, "what a trained path does says nothing of the mean"
