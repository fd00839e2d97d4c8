"""Distillation: the student is what a loop written out gives, and its controls are what each model says on its own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import isomerge
import models as tiny
from isomerge.errors import RequestError
from merging.layerwise.reconstructions import data, load
from models import model
from samples import digits, write_digits

Batch = dict[str, Tensor]


def parts(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every eighth example is held out."""
    found: tuple[list[Batch], list[Batch]] = ([], [])
    first = 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        held = (torch.arange(first, first + size) % 8) == 7
        for part, chosen in zip(found, (~held, held), strict=True):
            part.append({name: tensor[chosen] for name, tensor in batch.items()})
        first += size
    return found


def target(teachers: Sequence[Any], batch: Batch, shares: Tensor, temperature: float) -> Tensor:
    """Σ_m w_m softmax(t_m / T), where w_m is (models,) or (models, examples)."""
    given = torch.stack([teacher(**batch).logits for teacher in teachers]).detach()
    return ((given / temperature).softmax(-1) * shares.reshape(len(teachers), -1, 1)).sum(0)


def by_hand(
    student: Any, teachers: Sequence[Any], batches: Sequence[Batch], shares: Sequence[Tensor], *, steps: int,
    rate: float, temperature: float,
) -> Any:  # fmt: skip
    """Adam as in the paper (Kingma and Ba 2015), written out, with steps relative to each tensor and a cosine."""
    weights = [p for p in student.parameters() if p.is_floating_point()]
    sizes = [float(w.detach().square().mean().sqrt()) for w in weights]
    means, squares = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for t in range(1, steps + 1):
        batch, own = batches[(t - 1) % len(batches)], shares[(t - 1) % len(batches)]
        wanted = target(teachers, batch, own, temperature)
        log_student = (student(**batch).logits / temperature).log_softmax(-1)
        loss = temperature**2 * (wanted * (wanted.log() - log_student)).sum(-1).mean()
        gradients = torch.autograd.grad(loss, weights)
        share = 0.5 * (1 + math.cos(math.pi * (t - 1) / steps)) * min(1.0, t / 20)
        with torch.no_grad():
            for w, g, m, v, size in zip(weights, gradients, means, squares, sizes, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                w -= rate * size * share * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return student


def loaded(folder: Path) -> Any:
    made = load(folder)
    return made.requires_grad_(True)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("goals", ["mean", "own", "expert"])
def test_the_student_is_that_of_a_loop_written_out(goals: str, temperature: float) -> None:
    folders, start = [model("vit", seed) for seed in (0, 1)], model("vit", 2)
    sets = [data(folders[0], 2, seed, size=8) for seed in (3, 4)]
    teachers = [load(folder) for folder in folders]
    if goals == "own":
        trained = [parts(own)[0] for own in sets]
        batches = [batch for pair in zip(*trained, strict=True) for batch in pair]  # one of each in turn
        shares = [torch.eye(2, dtype=torch.float64)[number % 2] for number in range(4)]
    else:
        batches = parts(sets[0])[0]
        shares = [torch.tensor([0.25, 0.75], dtype=torch.float64)] * 2
    if goals == "expert":
        shares = []
        for batch in batches:  # w ∝ share · exp(−entropy / 0.1)
            answers = torch.stack([teacher(**batch).logits.log_softmax(-1) for teacher in teachers]).detach()
            entropy = -(answers.exp() * answers).sum(-1)
            prior = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
            shares.append((prior.log() - entropy / 0.1).softmax(0))
    student = isomerge.distill(
        folders, start, data=sets if goals == "own" else sets[0], goals=goals, weights=[1, 3], steps=7, rate=0.01,
        temperature=temperature, progress=False,
    )  # fmt: skip
    wanted = by_hand(loaded(start), teachers, batches, shares, steps=7, rate=0.01, temperature=temperature)
    found = load(start, student.state_dict())
    moved = load(start).state_dict()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=1e-6 if goals == "expert" else 1e-8)
    assert max(float((wanted.state_dict()[name] - moved[name]).abs().max()) for name in moved) > 1e-3


def test_the_controls_are_what_each_model_says_on_the_held_out_examples() -> None:
    folders = [model("vit", seed) for seed in (0, 1)]
    batches = data(folders[0], 2, 3, size=8)
    labels = torch.arange(48) % 5
    batches = [{**batch, "labels": labels[24 * n : 24 * n + 24]} for n, batch in enumerate(batches)]
    result = isomerge.distill(folders, model("vit", 2), data=batches, goals="mean", steps=4, progress=False)
    rows = {row["model"]: row for row in result.details["distilled"]["held_out"]}
    assert list(rows) == ["student before", str(folders[0]), str(folders[1]), "ensemble", "student after"]
    held = parts(batches)[1]
    pixels, right = (torch.cat([batch[name] for batch in held]) for name in ("pixel_values", "labels"))
    teachers = [load(folder) for folder in folders]
    mean = target(teachers, {"pixel_values": pixels}, torch.tensor([0.5, 0.5]), 1.0)
    after = load(folders[0], result.state_dict())
    said = {"student before": load(model("vit", 2)), **dict(zip(map(str, folders), teachers, strict=True))}
    for name, one in {**said, "student after": after}.items():
        own = one(pixel_values=pixels).logits.log_softmax(-1).detach()
        assert rows[name]["distance"] == pytest.approx(float((mean * (mean.log() - own)).sum(-1).mean()), rel=1e-6)
        assert rows[name]["loss"] == pytest.approx(float(F.nll_loss(own, right)), rel=1e-6)
        assert rows[name]["accuracy"] == pytest.approx(float((own.argmax(-1) == right).double().mean()))
    assert rows["ensemble"]["distance"] == pytest.approx(0, abs=1e-12)
    assert rows["ensemble"]["loss"] == pytest.approx(float(F.nll_loss(mean.log(), right)), rel=1e-6)
    assert rows["student after"]["distance"] < rows["student before"]["distance"]
    assert result.notes[0].startswith("distance to the goals on held-out examples")


def small_config(folder: Path, like: Path, **sizes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**tiny.read_config(like), **sizes}))
    return folder


def test_a_fresh_student_needs_a_config_alone_and_is_made_again_from_its_lock(tmp_path: Path) -> None:
    teacher = model("vit", 0, torch.float32)
    student = small_config(tmp_path / "small", teacher, num_hidden_layers=1, intermediate_size=5)
    options: dict[str, Any] = {"data": str(digits()), "fresh": True, "steps": 40, "seed": 5, "progress": False}
    result = isomerge.distill([teacher], student, **options)
    result.save(tmp_path / "out")
    stock = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    assert stock.config.num_hidden_layers == 1 and stock.config.intermediate_size == 5
    rows = result.details["distilled"]["held_out"]
    assert rows[-1]["distance"] < 0.5 * rows[0]["distance"]
    assert isomerge.verify(tmp_path / "out")["problems"] == []
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"
    # the first weights are those that the class draws
    config = transformers.ViTConfig.from_pretrained(student)
    torch.manual_seed(5)
    drawn = transformers.ViTForImageClassification(config)
    batch = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    lock = json.loads((tmp_path / "out" / "isomerge.lock.json").read_text())
    assert {entry["reference"]: entry["kind"] for entry in lock["inputs"]} == {
        str(student): "fresh",
        str(teacher): "model",
    }
    from isomerge.merging.distillation.fresh_student import fresh_student

    again = fresh_student(student, 5)
    same = load(student, {name: again.read(name) for name in again.tensors}, dtype=torch.float32)
    assert torch.equal(same(**batch).logits, drawn.eval()(**batch).logits)
    other = isomerge.distill([teacher], student, **{**options, "seed": 6})
    assert other.save(tmp_path / "other").sha256 != lock["output"]["sha256"]


def test_a_recipe_and_the_plain_verb_give_the_same_student(tmp_path: Path) -> None:
    folders = [model("vit", seed, torch.float32) for seed in (0, 1, 2)]
    made = isomerge.distill(
        folders[:2], folders[2], data=str(digits()), goals="mean", steps=5, batch_size=16, progress=False
    )
    recipe = {
        "merge_method": "distill", "models": [{"model": str(folder)} for folder in folders[:2]],
        "base_model": str(folders[2]), "data": {"path": str(digits()), "batch_size": 16},
        "parameters": {"goals": "mean", "steps": 5},
    }  # fmt: skip
    again = isomerge.merge_recipe(recipe, progress=False)
    assert made.save(tmp_path / "a").sha256 == again.save(tmp_path / "b").sha256
    assert made.donor.name == str(folders[2])


def test_a_teacher_may_be_the_student_and_stays_as_it_is(tmp_path: Path) -> None:
    folders = [model("vit", seed) for seed in (0, 1)]
    before = tiny.fingerprint(folders[0])
    batches = data(folders[0], 1, 3, size=8)
    made = isomerge.distill(folders, data=batches, goals="mean", steps=6, rate=0.01, progress=False)
    named = isomerge.distill(folders, folders[0], data=batches, goals="mean", steps=6, rate=0.01, progress=False)
    assert all(tiny.same_bytes(tensor, named.state_dict()[name]) for name, tensor in made.state_dict().items())
    rows = made.details["distilled"]["held_out"]
    assert rows[0]["distance"] == rows[1]["distance"] > rows[-1]["distance"]
    assert tiny.fingerprint(folders[0]) == before


def test_a_student_of_another_architecture_learns_from_texts(tmp_path: Path) -> None:
    """DistilBERT has no types of tokens, and its teacher wants them."""
    labels = ["bad", "good"]
    tiny.bert(tmp_path / "teacher", "sequence", labels)
    config = {"vocab_size": len(tiny.BERT_WORDS), "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    made = tiny.stock("DistilBertForSequenceClassification", 1, **config, id2label=dict(enumerate(labels)))
    made.save_pretrained(tmp_path / "student")
    tiny.bert_tokenizer().save_pretrained(tmp_path / "student")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{first} {second}" for first in tiny.WORDS for second in tiny.WORDS[:4]))
    result = isomerge.distill(
        [tmp_path / "teacher"], tmp_path / "student", data={"path": texts, "kind": "lines"}, steps=120, rate=0.1,
        batch_size=16, progress=False,
    )  # fmt: skip
    result.save(tmp_path / "out")
    loaded, about = transformers.DistilBertForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    rows = result.details["distilled"]["held_out"]
    assert rows[-1]["distance"] < 0.5 * rows[0]["distance"]
    assert "labels" not in rows[0] and "loss" not in rows[0]


def test_each_model_reads_images_by_its_own_settings(tmp_path: Path) -> None:
    teacher = shutil.copytree(model("vit", 0, torch.float32), tmp_path / "teacher")
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.7, 0.6, 0.5], "size": {"height": 8, "width": 8}}
    (tmp_path / "teacher" / "preprocessor_config.json").write_text(json.dumps(settings))
    images = write_digits(tmp_path / "images", 8)  # one of eight is held out: the last in the order of the draw
    result = isomerge.distill(
        [teacher], model("vit", 1, torch.float32), data={"path": tmp_path / "images", "split": "test", "seed": 0},
        goals="mean", steps=1, progress=False,
    )  # fmt: skip
    row = result.details["distilled"]["held_out"][0]
    pixels = torch.stack([torch.from_numpy(image) for image, _ in images]).float()[:, None].expand(-1, 3, -1, -1) / 255
    theirs = (pixels - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.7, 0.6, 0.5])[:, None, None]
    with torch.no_grad():
        goal = load(teacher, dtype=torch.float32)(pixel_values=theirs).logits.log_softmax(-1)
        own = load(model("vit", 1, torch.float32), dtype=torch.float32)(pixel_values=(pixels - 0.5) / 0.5).logits
    distances = (goal.exp() * (goal - own.log_softmax(-1))).sum(-1)
    assert min(abs(float(one) - row["distance"]) for one in distances) < 1e-5


def refused(match: str, *models: Any, **options: Any) -> None:
    with pytest.raises(RequestError, match=match):
        isomerge.distill(*models, **{"data": str(digits()), "steps": 1, "progress": False, **options})


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    first, second = (model("vit", seed, torch.float32) for seed in (0, 1))
    refused("steps is 0", [first], steps=0)
    refused("temperature is 0", [first], temperature=0.0)
    refused("rate is -1", [first], rate=-1.0)
    refused("none is named", [first], fresh=True)
    refused("a folder of its own", [first, second], first, fresh=True)
    refused("own needs data for each teacher", [first, second], goals="own")
    refused("Did you mean 'mean'", [first], goals="meen")
    names = [tiny.vit(tmp_path / letters, list(letters)) for letters in ("abcde", "abcdx")]
    refused("heads of .* differ: output 4 is 'x' in the first and 'e' in the second", [names[0]], names[1])
    refused("gives {'logits': \\(2, 4\\)}", [first], model("vit", 2, torch.float32, num_labels=4))
    refused("no config.json", [first], tmp_path, fresh=True)
    deep = small_config(tmp_path / "deep", first, num_hidden_layers=10**9)
    refused("num_hidden_layers is 1,000,000,000", [first], deep, fresh=True)
    with pytest.raises(RequestError, match="leave 'align' out"):
        isomerge.merge([first, second], method="distill", data=str(digits()), align=True)


@pytest.mark.parametrize("most", [1.0, 0.5])
def test_shares_of_teachers_that_disagree_are_the_best_of_a_grid(most: float) -> None:
    from isomerge.merging.distillation.agreement import agreed_shares

    draw = torch.Generator().manual_seed(3)
    student, *teachers = (2 * torch.randn(7, 4, generator=draw, dtype=torch.float64) for _ in range(4))

    def length(shares: Sequence[float]) -> float:
        away = student.softmax(-1) - sum(s * t.softmax(-1) for s, t in zip(shares, teachers, strict=True))
        return float(away.square().sum())

    found = agreed_shares(student, teachers, most)
    assert sum(found) == pytest.approx(1) and min(found) >= 0 and max(found) <= most + 1e-9
    grid = [(a / 50, b / 50, 1 - (a + b) / 50) for a in range(51) for b in range(51 - a)]
    best = min(length(shares) for shares in grid if max(shares) <= most)
    assert best - 2e-3 < length(found) <= best + 1e-9 < length([1 / 3] * 3)


def test_agreement_with_the_least_share_is_the_plain_mean_and_more_is_not() -> None:
    folders, batches = [model("vit", seed) for seed in (0, 1)], data(model("vit", 0), 2, 3, size=8)

    def weights(**options: Any) -> dict[str, Tensor]:
        made = isomerge.distill(folders, model("vit", 2), data=batches, steps=5, rate=0.01, progress=False, **options)
        return made.state_dict()

    mean, least, free = (weights(goals="mean"), weights(agree=0.5), weights(agree=1.0))
    assert max(float((mean[name] - least[name]).abs().max()) for name in mean) < 1e-8
    assert max(float((mean[name] - free[name]).abs().max()) for name in mean) > 1e-4
    with pytest.raises(RequestError, match="from 0.5 .* to 1"):
        weights(agree=0.4)
    with pytest.raises(RequestError, match="agree chooses the teachers' shares"):
        weights(agree=0.7, goals="expert")
