"""Numbers of `evaluate` against plain loops over stock models, scikit-learn, scipy and seqeval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, log_loss
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import isomerge.evaluation
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.evaluation.evaluate import evaluate
from isomerge.evaluation.tasks import entities
from isomerge.running.stock import load_stock
from models import bert, bert_tokenizer, gpt2, llama, t5, vit
from samples import DIGITS, SENTENCES, write_digits

LABELS = ["good", "bad", "odd"] * (len(SENTENCES) // 3)


def table(path: Path, labels: list[Any] = LABELS) -> Path:
    path.write_text("sentence\tlabel\n" + "\n".join(f"{t}\t{y}" for t, y in zip(SENTENCES, labels, strict=True)))
    return path


def logits_one_by_one(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**tokenizer(t, return_tensors="pt")).logits for t in texts])


def test_images(tmp_path: Path) -> None:
    sample = write_digits(tmp_path / "digits")
    vit(tmp_path / "model", DIGITS)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    pixels = torch.tensor(np.stack([image for image, _ in sample]), dtype=torch.float32)[:, None] / 255
    with torch.no_grad():
        probabilities = model((pixels - 0.5) / 0.5).logits.softmax(-1).double().numpy()
    truth = [label for _, label in sample]
    said = probabilities.argmax(-1)
    got = isomerge.evaluate(tmp_path / "model", tmp_path / "digits", batch_size=7)
    assert got["loss"] == pytest.approx(log_loss(truth, probabilities / probabilities.sum(1, keepdims=True)), rel=1e-5)
    assert got["metric"] == got["metrics"]["accuracy"] == pytest.approx(accuracy_score(truth, said))
    assert got["metrics"]["macro_f1"] == pytest.approx(f1_score(truth, said, average="macro"))
    assert (got["task"], got["metric_name"], got["examples"]) == ("image", "accuracy", 36)
    assert got["data"]["sha256"] == open_data(tmp_path / "digits").sha256 and got["seconds"] > 0
    assert evaluate(model, tmp_path / "digits")["loss"] == pytest.approx(got["loss"])  # a module in memory
    assert isomerge.evaluate(tmp_path / "model", tmp_path / "digits", limit=10)["examples"] == 10


def test_sequences(tmp_path: Path) -> None:
    bert(tmp_path / "model", "sequence", ["odd", "GOOD", "bad"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    logits = logits_one_by_one(model, bert_tokenizer(), SENTENCES)
    truth = [["odd", "good", "bad"].index(y) for y in LABELS]
    got = evaluate(tmp_path / "model", table(tmp_path / "a.tsv"), batch_size=5)
    assert got["loss"] == pytest.approx(float(F.cross_entropy(logits, torch.tensor(truth))), rel=1e-5)
    assert got["metric"] == pytest.approx(accuracy_score(truth, logits.argmax(-1)))
    assert got["metrics"]["macro_f1"] == pytest.approx(f1_score(truth, logits.argmax(-1), average="macro"))


def test_several_classes(tmp_path: Path) -> None:
    flags = np.random.default_rng(0).integers(0, 2, (len(SENTENCES), 3))
    lines = ["a\tb\tc\ttext", *("\t".join([*map(str, f), t]) for f, t in zip(flags, SENTENCES, strict=True))]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    bert(tmp_path / "model", "sequence", ["a", "b", "c"], problem_type="multi_label_classification")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    logits = logits_one_by_one(model, bert_tokenizer(), SENTENCES)
    got = evaluate(tmp_path / "model", tmp_path / "a.tsv", batch_size=5)
    truth = torch.tensor(flags, dtype=torch.float32)
    assert got["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, truth)), rel=1e-5)
    assert got["metric"] == pytest.approx(f1_score(flags, (logits > 0).numpy(), average="micro"))


def test_numbers(tmp_path: Path) -> None:
    bert(tmp_path / "model", "sequence", ["score"])
    scores = [round(k * 0.37 % 5, 2) + 0.001 for k in range(len(SENTENCES))]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    said = logits_one_by_one(model, bert_tokenizer(), SENTENCES)[:, 0].double().numpy()
    got = evaluate(tmp_path / "model", table(tmp_path / "a.tsv", scores), batch_size=5)
    assert got["task"] == "regression" and got["metric_name"] == "pearson"
    assert got["loss"] == pytest.approx(float(np.mean((said - scores) ** 2)), rel=1e-5)
    assert got["metrics"]["pearson"] == pytest.approx(np.corrcoef(said, scores)[0, 1], rel=1e-4)
    assert got["metrics"]["spearman"] == pytest.approx(stats.spearmanr(said, scores).statistic, rel=1e-6)
    same = evaluate(tmp_path / "model", table(tmp_path / "b.tsv", [1.5] * len(SENTENCES)))
    assert math.isnan(same["metric"]) and "all the same" in same["notes"][-1]


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def test_tags(tmp_path: Path) -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    random = np.random.default_rng(1)
    words = [text.split() for text in SENTENCES]
    tags = [[TAGS[n] for n in random.integers(0, 5, len(line))] for line in words]
    lines = ["\n".join(f"{w}\t{t}" for w, t in zip(*pair, strict=True)) for pair in zip(words, tags, strict=True)]
    (tmp_path / "a.conll").write_text("\n\n".join(lines))
    bert(tmp_path / "model", "token", TAGS)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    said, losses = [], []
    for line, right in zip(words, tags, strict=True):
        encoded = bert_tokenizer()(line, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**encoded).logits[0]
        ids = encoded.word_ids()
        rows = logits[[ids.index(k) for k in range(len(line))]]
        said.append([TAGS[n] for n in rows.argmax(-1)])
        losses.append(F.cross_entropy(rows, torch.tensor([TAGS.index(t) for t in right]), reduction="none"))
    got = evaluate(tmp_path / "model", tmp_path / "a.conll", batch_size=5)
    assert got["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    for name in ("f1", "precision", "recall", "accuracy"):
        assert got["metrics"][name] == pytest.approx(getattr(seqeval, f"{name}_score")(tags, said))


def test_entities_are_those_of_seqeval() -> None:
    reference = pytest.importorskip("seqeval.metrics.sequence_labeling")
    random = np.random.default_rng(0)
    marks = ["O", "B-X", "I-X", "B-Y", "I-Y", "E-X", "S-Y", "B-a-b", "I-a-b"]
    for _ in range(500):
        tags = [marks[n] for n in random.integers(0, len(marks), random.integers(1, 9))]
        assert entities(tags) == set(reference.get_entities(tags)), tags


def causal_loss(model: Any, ids: list[int], length: int, start: list[int]) -> float:
    total, count = 0.0, 0
    body = length - len(start)
    for k in range(0, len(ids), body):
        row = torch.tensor([[*start, *ids[k : k + body]]])
        if row.shape[1] < 2:
            continue
        with torch.no_grad():
            logits = model(input_ids=row).logits[0, :-1].double()
        total += float(F.cross_entropy(logits, row[0, 1:], reduction="sum"))
        count += row.shape[1] - 1
    return total / count


@pytest.mark.parametrize(("made", "length", "start"), [(gpt2, 24, []), (llama, 20, [2])])
def test_the_next_token(made: Any, length: int, start: list[int], tmp_path: Path) -> None:
    made(tmp_path / "model", positions=length)
    text = "\n".join(SENTENCES * 3)
    (tmp_path / "book.txt").write_text(text)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(text, add_special_tokens=False)["input_ids"]
    got = evaluate(tmp_path / "model", tmp_path / "book.txt", batch_size=3)
    truth = causal_loss(model, ids, length, start)
    assert got["loss"] == pytest.approx(truth, rel=1e-5)
    assert got["metric"] == pytest.approx(math.exp(truth), rel=1e-5)
    assert got["metric_name"] == "perplexity" and got["higher_is_better"] is False


def test_the_hidden_token(tmp_path: Path) -> None:
    checkpoint = bert(tmp_path / "model", "masked")
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 3))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    total, count = 0.0, 0
    for batch in open_data(tmp_path / "book.txt").batches(checkpoint, labels=True, batch_size=1):
        with torch.no_grad():
            loss = model(**batch).loss  # the stock class's own mean over what is hidden
        asked = int((batch["labels"] != -100).sum())
        total, count = total + float(loss) * asked, count + asked
    got = evaluate(tmp_path / "model", tmp_path / "book.txt", batch_size=4)
    assert got["loss"] == pytest.approx(total / count, rel=1e-5)


def test_the_answer(tmp_path: Path) -> None:
    t5(tmp_path / "model")
    pairs = list(zip(SENTENCES, SENTENCES[::-1], strict=True))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"source": a, "target": b}) for a, b in pairs))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    total, count = 0.0, 0
    for source, target in pairs:
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss = model(input_ids=tokenizer(source, return_tensors="pt")["input_ids"], labels=labels).loss
        total, count = total + float(loss) * labels.numel(), count + labels.numel()
    assert evaluate(tmp_path / "model", tmp_path / "a.jsonl", batch_size=5)["loss"] == pytest.approx(
        total / count, rel=1e-5
    )


def test_a_loss_on_labels_comes_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers warns of classes whose name does not say their loss, such as GPT2LMHeadModel."""
    told: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", told.append)
    gpt2(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    model = load_stock(checkpoint.config, {name: checkpoint.read(name) for name in checkpoint.tensors})
    ids = torch.arange(2, 12).reshape(2, 5)
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(out.loss, expected) and not told


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert(tmp_path / "model", "sequence", ["odd", "good", "bad"])
    (tmp_path / "mine_for_test.py").write_text(
        "def count(model, batches):\n    return sum(len(b['labels']) for b in batches)\n"
        "def alone(model):\n    return {'loss': 2.5, 'metric_name': 'x'}\n"
        "def wrong(model):\n    return 'text'\n"
        "def hopeless(model):\n    return {'loss': float('inf')}\n"
    )
    monkeypatch.chdir(tmp_path)
    got = evaluate("model", table(tmp_path / "a.tsv"), "mine_for_test:count")
    assert got["metric"] == len(SENTENCES) and got["metric_name"] == "count" and got["loss"] is None
    assert evaluate("model", task="mine_for_test:alone")["loss"] == 2.5
    assert evaluate("model", task="mine_for_test:hopeless")["loss"] == float("inf")
    for task, message in [
        ("mine_for_test:cuont", "Did you mean 'count'"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("mine_for_test:wrong", "must return a number"),
    ]:
        with pytest.raises(RequestError, match=message):
            evaluate("model", None, task)


def test_the_harness_is_asked_for_by_name_and_its_absence_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    llama(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RequestError, match=r"pip install \"isomerge\[eval\]\""):
        evaluate(tmp_path / "model", task="lm-eval:hellaswag")


def test_wrong_requests_are_told(tmp_path: Path) -> None:
    bert(tmp_path / "model", "sequence", ["odd", "good", "bad"])
    data = table(tmp_path / "a.tsv")
    (tmp_path / "plain.tsv").write_text("sentence\tnothing\nthe cat\tx\na dog\ty\n")
    (tmp_path / "book.txt").write_text("the cat\n")
    write_digits(tmp_path / "digits")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (data, {"task": "sequences"}, "Did you mean 'sequence'"),
        (data, {"task": "token"}, "which is for 'sequence'"),
        (tmp_path / "digits", {}, "reads texts and the data is images"),
        (tmp_path / "book.txt", {}, "running text without labels"),
        (tmp_path / "plain.tsv", {}, "it has no labels"),
        (None, {}, "Pass data, for example a path"),
        (data, {"device": "cuda:9"}, "cuda:9"),
        (table(tmp_path / "b.tsv", ["love"] * 12), {}, "no 'love'.*'odd', 'good', 'bad'"),
    ]
    for source, options, message in cases:
        with pytest.raises(RequestError, match=message):
            evaluate(tmp_path / "model", source, **options)
    one = evaluate(tmp_path / "model", table(tmp_path / "c.tsv", ["odd"] * 12))
    assert any("one class only" in note for note in one["notes"])
    with pytest.raises(RequestError, match="it has no config.json"):
        evaluate({"weight": torch.zeros(2)}, data)
    with pytest.raises(RequestError, match="has no head"):
        evaluate(_headless(tmp_path), data)


def _headless(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    return tmp_path / "model"


def test_broken_models_are_told(tmp_path: Path) -> None:
    bert(tmp_path / "model", "sequence", ["odd", "good", "bad"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.classifier.weight[0, 0] = math.nan
    model.train()
    with pytest.raises(CheckpointError, match="12 of 12 predictions are not a number"):
        evaluate(model, table(tmp_path / "a.tsv"), tokenizer=bert_tokenizer())
    assert model.training  # left as it was
    tokenizer = bert_tokenizer()
    tokenizer.add_tokens(["zebra"])
    bert(tmp_path / "fine", "sequence", ["odd", "good", "bad"])
    (tmp_path / "z.tsv").write_text("sentence\tlabel\nzebra\tgood\n")
    with pytest.raises(IsomergeError, match="the embedding has"):
        evaluate(tmp_path / "fine", tmp_path / "z.tsv", tokenizer=tokenizer)


def test_models_in_double_precision_compute_in_it(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", 6)
    vit(tmp_path / "model", DIGITS)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model").double().eval()
    model.save_pretrained(tmp_path / "wide")
    one, two = (evaluate(tmp_path / name, tmp_path / "digits")["loss"] for name in ("model", "wide"))
    assert one == pytest.approx(two, rel=1e-5) and one != two


def test_the_picture_reader_is_not_the_model(tmp_path: Path) -> None:
    """A picture of another size than the model's is resized, in colour where the model wants it."""
    vit(tmp_path / "model", ["x", "y"], channels=3)
    for name in "xy":
        (tmp_path / "p" / name).mkdir(parents=True)
        Image.new("L", (30, 20), 90).save(tmp_path / "p" / name / "1.png")
    assert evaluate(tmp_path / "model", tmp_path / "p")["metric"] == 0.5
