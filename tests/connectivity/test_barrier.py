"""Lines and planes between models against plain interpolation of stock models."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from isomerge.connectivity.barrier import barrier, height
from isomerge.connectivity.plane import plane
from isomerge.errors import RequestError
from models import bert, llama, vit
from samples import DIGITS, SENTENCES, write_digits


def pixels_and_labels(sample: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.tensor(np.stack([image for image, _ in sample]), dtype=torch.float32)[:, None] / 255
    return (pixels - 0.5) / 0.5, torch.tensor([label for _, label in sample])


def trained(path: Path, seed: int, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
    vit(path, DIGITS, seed=seed)
    model = AutoModelForImageClassification.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(pixels).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    pixels, labels = pixels_and_labels(write_digits(folder / "digits"))
    models = [trained(folder / name, seed, pixels, labels) for seed, name in enumerate("ab")]
    vit(folder / "c", DIGITS, seed=5)
    return {"folder": folder, "pixels": pixels, "labels": labels, "models": models}


def between(models: list[Any], t: float) -> Any:
    mixed = copy.deepcopy(models[0])
    ends = [model.state_dict() for model in models]
    mixed.load_state_dict({k: (1 - t) * ends[0][k].double() + t * ends[1][k].double() for k in ends[0]})
    return mixed


def test_the_line_between_two_models(pair: dict[str, Any]) -> None:
    folder = pair["folder"]
    got = barrier(folder / "a", folder / "b", data=folder / "digits", align=True, batch_size=10)
    losses, hits = [], []
    for n in range(11):
        with torch.no_grad():
            logits = between(pair["models"], n / 10)(pair["pixels"]).logits
        losses.append(float(F.cross_entropy(logits, pair["labels"])))
        hits.append(float((logits.argmax(-1) == pair["labels"]).double().mean()))
    assert [p["loss"] for p in got["points"]] == pytest.approx(losses, rel=1e-4)
    assert [p["metric"] for p in got["points"]] == pytest.approx(hits)
    assert [p["t"] for p in got["points"]] == pytest.approx([n / 10 for n in range(11)])
    line = [losses[0] + (losses[-1] - losses[0]) * n / 10 for n in range(11)]
    assert got["barrier"] == pytest.approx(max(a - b for a, b in zip(losses, line, strict=True)), rel=1e-3)
    drop = [hits[0] + (hits[-1] - hits[0]) * n / 10 - hits[n] for n in range(11)]
    assert got["metric_barrier"] == pytest.approx(max(drop))
    with torch.no_grad():
        mean = sum(model(pair["pixels"]).logits.softmax(-1) for model in pair["models"]) / 2
    assert got["ensemble"]["loss"] == pytest.approx(float(F.nll_loss(mean.log(), pair["labels"])), rel=1e-4)
    assert got["ensemble"]["metric"] == pytest.approx(float((mean.argmax(-1) == pair["labels"]).double().mean()))
    assert [p["loss"] for p in got["parents"]] == [got["points"][0]["loss"], got["points"][-1]["loss"]]
    assert got["examples"] == 36 and got["metric_name"] == "accuracy" and got["task"] == "image"


def test_the_aligned_line_has_the_parents_at_its_ends_and_is_lower(pair: dict[str, Any]) -> None:
    folder = pair["folder"]
    got = barrier(folder / "a", folder / "b", data=folder / "digits", align=True)
    for end in (0, -1):
        assert got["aligned"]["points"][end]["loss"] == pytest.approx(got["points"][end]["loss"], rel=1e-4)
        assert got["aligned"]["points"][end]["metric"] == got["points"][end]["metric"]
    assert got["aligned"]["ensemble"]["loss"] == pytest.approx(got["ensemble"]["loss"], rel=1e-4)
    assert got["aligned"]["barrier"] < got["barrier"]
    import isomerge

    moved = isomerge.align(folder / "b", anchor=folder / "a").apply(pair["models"][1])
    with torch.no_grad():
        middle = between([pair["models"][0], moved], 0.5)(pair["pixels"]).logits
    truth = float(F.cross_entropy(middle, pair["labels"]))
    assert got["aligned"]["points"][5]["loss"] == pytest.approx(truth, rel=1e-3)


def test_a_loss_function_and_modules(pair: dict[str, Any]) -> None:
    def loss(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(pair["pixels"]).logits, pair["labels"])

    before = copy.deepcopy(pair["models"][0].state_dict())
    got = barrier(*pair["models"], loss=loss, align=True, points=5)
    truth = [float(loss(between(pair["models"], n / 4))) for n in range(5)]
    assert [p["loss"] for p in got["points"]] == pytest.approx(truth, rel=1e-4)
    assert got["metric_barrier"] is None and got["ensemble"] is None
    assert got["aligned"]["barrier"] < got["barrier"]
    assert all(torch.equal(value, before[name]) for name, value in pair["models"][0].state_dict().items())


def test_modules_of_any_kind_without_alignment() -> None:
    torch.manual_seed(0)
    a, b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    x = torch.randn(8, 3)
    got = barrier(a, b, loss=lambda m: m(x).detach().square().mean(), points=3)
    middle = torch.lerp(a.weight, b.weight, 0.5), torch.lerp(a.bias, b.bias, 0.5)
    assert got["points"][1]["loss"] == pytest.approx(float(F.linear(x, *middle).square().mean().detach()), rel=1e-5)


def test_a_rotated_stream_unties_the_head_and_the_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 3))
    for seed, name in enumerate("ab"):
        llama(tmp_path / name, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        model.config.tie_word_embeddings = True
        type(model)(model.config).save_pretrained(tmp_path / name)
    got = barrier(tmp_path / "a", tmp_path / "b", data=tmp_path / "book.txt", align=True, points=3)
    for end in (0, -1):
        assert got["aligned"]["points"][end]["loss"] == pytest.approx(got["points"][end]["loss"], rel=1e-4)
    assert got["metric_name"] == "perplexity"
    metrics = [p["metric"] for p in got["points"]]
    assert got["metric_barrier"] == pytest.approx(max(0.0, metrics[1] - (metrics[0] + metrics[2]) / 2))


def test_the_plane_through_three_models(pair: dict[str, Any], tmp_path: Path) -> None:
    folder = pair["folder"]
    models = [*pair["models"], AutoModelForImageClassification.from_pretrained(folder / "c").eval()]
    got = plane(*(folder / n for n in "abc"), data=folder / "digits", points=3, plot=tmp_path / "map.svg")
    flat = [torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in models]
    u, v = flat[1] - flat[0], flat[2] - flat[0]
    e1 = u / u.norm()
    e2 = v - (v @ e1) * e1
    places = [(0.0, 0.0), (float(u.norm()), 0.0), (float(v @ e1), float(e2.norm()))]
    for model, place in zip(got["models"], places, strict=True):
        assert (model["x"], model["y"]) == pytest.approx(place, rel=1e-5, abs=1e-9)
    e2 = e2 / e2.norm()
    x, y = got["x"][2], got["y"][1]
    probe = copy.deepcopy(models[0])
    torch.nn.utils.vector_to_parameters((flat[0] + x * e1 + y * e2).float(), probe.parameters())
    with torch.no_grad():
        truth = float(F.cross_entropy(probe(pair["pixels"]).logits, pair["labels"]))
    assert got["loss"][1][2] == pytest.approx(truth, rel=1e-3)
    assert "<svg" in (tmp_path / "map.svg").read_text()
    with pytest.raises(RequestError, match="lie on one line"):
        plane(folder / "a", folder / "b", folder / "b", data=folder / "digits")


def test_the_picture_is_the_same_for_the_same_numbers(pair: dict[str, Any], tmp_path: Path) -> None:
    folder = pair["folder"]
    options: dict[str, Any] = {"data": folder / "digits", "points": 3, "align": True}
    barrier(folder / "a", folder / "b", plot=tmp_path / "one.svg", **options)
    barrier(folder / "a", folder / "b", plot=tmp_path / "two.svg", **options)
    barrier(folder / "a", folder / "b", plot=tmp_path / "one.png", **options)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text() and "accuracy" in text and "aligned" in text


def test_heights() -> None:
    assert height([1.0, 3.0, 2.0]) == 1.5 and height([1.0, None, 2.0]) is None
    assert math.isnan(height([1.0, math.nan, 2.0]) or 0.0)
    assert height([2.0, 1.0, 2.0]) == 0.0 and height([0.0, 1.0, 2.0]) == 0.0
    assert height([2.0, 5.0, 0.0, 0.0]) == pytest.approx(5 - 4 / 3)


def test_wrong_requests_are_told(pair: dict[str, Any], tmp_path: Path) -> None:
    folder = pair["folder"]
    a, b, data = folder / "a", folder / "b", folder / "digits"
    bert(tmp_path / "bert", "sequence", ["x", "y"])
    vit(tmp_path / "more", [*DIGITS, "three"])
    vit(tmp_path / "turned", DIGITS[::-1])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (b, {"points": 2, "data": data}, "at least 3"),
        (b, {}, "either loss=function or data="),
        (b, {"data": data, "task": "lm-eval:x"}, "lm-eval"),
        (b, {"data": data, "task": "token"}, "which is for 'image'"),
        (
            tmp_path / "bert",
            {"data": data},
            "a 'vit' model and the other a 'bert' model.*Name models of one architecture",
        ),
        (tmp_path / "more", {"data": data}, "different shapes.*classifier"),
        (tmp_path / "turned", {"data": data}, "same labels in another order"),
        (b, {"data": data, "plot": tmp_path / "no" / "x.svg"}, "there is no folder"),
    ]
    for other, options, message in cases:
        with pytest.raises(RequestError, match=message):
            barrier(a, other, **options)


def test_the_verbs_print_one_object(pair: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    import typer
    from typer.testing import CliRunner

    from isomerge.cli.barrier import barrier as barrier_verb
    from isomerge.cli.eval import eval_

    app = typer.Typer()
    app.command("eval")(eval_)
    app.command("barrier")(barrier_verb)
    folder = pair["folder"]
    run = CliRunner().invoke
    words = ["--data", str(folder / "digits"), "--limit", "20"]
    record = json.loads(run(app, ["eval", str(folder / "a"), *words, "--json"]).stdout)
    assert record["examples"] == 20 and {"loss", "metric", "metric_name", "seconds"} <= record.keys()
    ends = [str(folder / "a"), str(folder / "b")]
    record = json.loads(run(app, ["barrier", *ends, *words, "--align", "--points", "3", "--json"]).stdout)
    assert {"points", "barrier", "metric_barrier", "parents", "ensemble", "aligned"} <= record.keys()
    assert "barrier aligned" in run(app, ["barrier", *ends, *words, "--align", "--points", "3"]).stdout
    assert "accuracy" in run(app, ["eval", str(folder / "a"), *words]).stdout
    assert "lowest loss" in run(app, ["barrier", *ends, str(folder / "c"), *words, "--points", "2"]).stdout


def test_models_of_different_length_meet_at_the_shorter(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + "\n".join(f"{t}\t{k % 2}" for k, t in enumerate(SENTENCES)))
    for seed, (name, positions) in enumerate([("long", 48), ("short", 8)]):
        bert(tmp_path / name, "sequence", ["0", "1"], seed=seed, positions=positions)
    got = barrier(tmp_path / "long", tmp_path / "short", data=tmp_path / "a.tsv", points=3, align=True)
    from isomerge.evaluation.evaluate import evaluate

    alone = [evaluate(tmp_path / name, {"path": tmp_path / "a.tsv", "length": 8})["loss"] for name in ("long", "short")]
    assert [p["loss"] for p in got["parents"]] == pytest.approx(alone, rel=1e-5)
    assert [p["loss"] for p in got["aligned"]["parents"]] == pytest.approx(alone, rel=1e-4)
    assert any("different length" in note for note in got["notes"])
