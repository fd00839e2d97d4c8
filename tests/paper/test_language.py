"""The language experiments: data sets, fine-tuning, heads."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import corpora
import figure4
import language
import parsers
from encoding import Inputs, batch_of, encode, load_tokenizer

from paper.small_jobs import OLD, TINY, job


# --- data sets --------------------------------------------------------------------------------------------------------
def test_other_emotions_are_left_out_and_a_fifth_is_for_testing(data: Path) -> None:
    train, test = (corpora.read("tec", split, data) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert sorted(target for _, target in train + test) == sorted([0, 1, 2, 3] * 5)
    assert all(text == f"in {parsers.EMOTIONS[target]} b" for text, target in train)


def test_entities_are_those_that_seqeval_sees() -> None:
    from seqeval.metrics.sequence_labeling import get_entities

    inside = ["I-PER", "I-PER", "O", "I-LOC", "I-ORG", "B-ORG", "I-ORG", "O"]
    tags = parsers.shared_tags(inside)
    assert tags == ["B-PER", "I-PER", "O", "B-LOC", "B-ORG", "B-ORG", "I-ORG", "O"]
    assert get_entities(tags) == get_entities(inside)
    assert parsers.shared_tags(["B-writer", "I-writer", "B-song", "I-song"]) == ["B-PER", "I-PER", "O", "O"]


def test_a_kind_after_another_of_the_same_shared_kind_begins_anew() -> None:
    assert parsers.shared_tags(["B-person", "B-politician", "I-politician"]) == ["B-PER", "B-PER", "I-PER"]


def test_document_marks_are_no_sentences(data: Path) -> None:
    found = sorted(words for words, _ in corpora.read("wikigold", "test", data))
    assert found == [["acme", "c"], ["anna", "b", "sees", "paris"]]


def test_missing_data_are_refused_with_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"2 files are missing .*ner/wnut17/train.conll.*Put each set under"):
        corpora.require(["wnut17"], tmp_path)
    with pytest.raises(SystemExit, match="Give --data DIR, a folder that holds emotion/tec, ner/btc"):
        corpora.require(["tec", "btc"], None)
    corpora.require(["glue-cola"], None)  # from the hub


def test_a_missing_base_is_refused_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="roberta-base holds no config.json"):
        language.base_path("FacebookAI/roberta-base", tmp_path)
    (tmp_path / "roberta-base").mkdir()
    (tmp_path / "roberta-base" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(SystemExit, match="config.json is not that of a model, as it names no model_type"):
        language.base_path("FacebookAI/roberta-base", tmp_path)
    assert language.base_path("FacebookAI/roberta-base", None) == "FacebookAI/roberta-base"


def test_sets_of_the_hub_are_read_by_the_papers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    stored = {
        "nyu-mll/glue": [{"sentence": "a", "label": 1, "sentence1": "b", "sentence2": "c"}],
        "eriktks/conll2003": [{"tokens": ["acme", "b"], "ner_tags": [3, 7]}],
        "ontonotes/conll2012_ontonotesv5": [
            {"document_id": "bc/x", "sentences": [{"words": ["paris", "a"], "named_entities": [9, 0]}]},
            {"document_id": "nw/x", "sentences": [{"words": ["anna"], "named_entities": [1]}]},
        ],
    }

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, config, split))
        return stored[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert corpora.read("glue-cola", "test", None) == [("a", 1)]
    assert corpora.read("glue-stsb", "train", None) == [(("b", "c"), 1.0)]
    assert corpora.read("conll2003", "test", None) == [(["acme", "b"], [5, 0])]
    assert corpora.read("ontonotes-bc", "train", None) == [(["paris", "a"], [3, 0])]
    assert corpora.read("ontonotes-nw", "train", None) == [(["anna"], [1])]
    assert asked[:2] == [("nyu-mll/glue", "cola", "validation"), ("nyu-mll/glue", "stsb", "train")]


def test_unified_emotions_are_told_apart_by_their_source(tmp_path: Path) -> None:
    rows = [{"source": "ssec", "text": "a", "emotions": {"joy": 1, "fear": 0}},
            {"source": "ssec", "text": "b", "emotions": {"joy": 1, "fear": 1}},
            {"source": "tec", "text": "c", "emotions": {"fear": 1}}]  # fmt: skip
    path = tmp_path / corpora.UNIFIED
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert corpora.read("unified-ssec", "train", tmp_path) == [("a", parsers.EKMAN.index("joy"))]


# --- training and heads -----------------------------------------------------------------------------------------------
def test_a_tag_is_asked_at_the_first_token_of_its_word(models: Path, data: Path) -> None:
    inputs = Inputs(str(models / "all-MiniLM-L6-v2"), data, None, None, 24)
    row = next(row for row in inputs.rows("wikigold", "test") if len(row["labels"]) == 6)
    assert row["labels"] == [-100, 1, 2, 0, 3, -100]  # [CLS] anna b sees paris [SEP]
    batch = next(inputs.batches("wikigold", "test", 2, range(2)))
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape == (2, 6)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [4, 6]


def test_a_note_beside_a_base_says_where_it_is_from(tmp_path: Path) -> None:
    assert language.origin(str(tmp_path)) is None
    (tmp_path / "NOTE.txt").write_text("trained on for another task\n")
    assert language.origin(str(tmp_path)) == f"{tmp_path.name}: trained on for another task"


def test_heads_of_a_seed_begin_alike_and_those_of_another_do_not(models: Path) -> None:
    base = str(models / language.title(OLD))
    one, same, other = (language.new_model(base, "emotion", seed).state_dict() for seed in (0, 0, 1))
    head = language.head_names(language.new_model(base, "emotion", 0))
    assert head == ["pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert torch.equal(one["classifier.weight"], same["classifier.weight"])
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert not one["classifier.bias"].any()


@pytest.mark.parametrize(("task", "expected"), [("CoLA", [(2, 32)]), ("STS-B", [(1, 32)]), ("ner", [(7, 32), (7,)])])
def test_the_head_of_a_model_that_reads_onward(task: str, expected: list[tuple[int, ...]], models: Path) -> None:
    model = language.new_model(str(models / language.title(language.BASES["reduced"][1])), task, 0)
    names = language.head_names(model)
    assert names == ["score.weight", "score.bias"][: len(names)]
    assert [tuple(model.state_dict()[name].shape) for name in names] == expected


def test_only_the_first_layers_are_kept_if_the_plan_says_so(models: Path, data: Path, tmp_path: Path) -> None:
    whole = job(models, data, tmp_path, "CoLA", base=1)
    folder = language.fine_tune(replace(whole, plan=replace(TINY, layers=2, rate=0.0)))
    kept, base = language.state_of(folder), language.state_of(Path(whole.base))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert {figure4.layer_of(name) for name in base} == {-1, 0, 1, 2}
    assert {figure4.layer_of(name) for name in kept} == {-1, 0, 1}
    assert all(torch.equal(kept[name], base[name]) for name in kept if name != "score.weight")
    assert language.fine_tune(whole) != folder


def test_padding_does_not_change_what_is_read_onward(models: Path, data: Path, tmp_path: Path) -> None:
    folder = language.fine_tune(job(models, data, tmp_path, "STS-B", base=1))
    tokenizer = load_tokenizer(str(models / language.title(language.BASES["reduced"][1])))
    rows = encode(tokenizer, "STS-B", [(("the a", "b"), 2.5), (("anna sees paris", "the good anna"), 1.0)], 24)
    model = language.load_model(folder).eval()
    batches = [batch_of(few, tokenizer.pad_token_id) for few in (rows, rows[:1], rows[1:])]
    assert not batches[0]["attention_mask"].all()  # one is padded
    both, one, other = (
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits for batch in batches
    )
    assert torch.allclose(both, torch.cat([one, other]), atol=1e-5)
    assert not torch.allclose(one, other, atol=1e-3)


def test_words_are_tagged_where_they_end_by_a_model_that_reads_onward(models: Path, data: Path) -> None:
    base = str(models / language.title(language.BASES["reduced"][1]))
    tokenizer = load_tokenizer(base)
    (row,) = encode(tokenizer, "ner", [(["anna", "xy", "paris"], [1, 2, 3])], 24)
    pieces = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert pieces == ["\u0120anna", "\u0120", "x", "y", "\u0120paris"]
    assert row["labels"] == [1, -100, -100, 2, 3]
    (row,) = encode(tokenizer, "STS-B", [(("the a", "b"), 2.5)], 24)
    assert tokenizer.decode(row["input_ids"]) == "the a\nb" and row["labels"] == 2.5
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_the_pooler_that_only_classifiers_read_belongs_to_the_head(models: Path) -> None:
    head = language.head_names(language.new_model(str(models / "all-MiniLM-L6-v2"), "emotion", 0))
    assert head == ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]


def test_training_lowers_the_loss_and_is_done_once(models: Path, data: Path, tmp_path: Path) -> None:
    longer = replace(job(models, data, tmp_path, "emoint"), plan=replace(TINY, least_steps=60, rate=1e-2, batch=8))
    folder = language.fine_tune(longer)
    judge = language.Judge(folder, "emotion", Inputs(longer.base, data, None, None, 24), "cpu")
    before = language.new_model(longer.base, "emotion", 0).state_dict()
    after = language.state_of(folder)
    assert judge(after, "emoint")["loss"] < judge(before, "emoint")["loss"] - 0.3
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert language.fine_tune(longer) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_the_score_of_entities_is_that_of_seqeval(models: Path, data: Path, tmp_path: Path) -> None:
    from seqeval.metrics import f1_score

    folder = language.fine_tune(job(models, data, tmp_path, "btc"))
    inputs = Inputs(str(models / "all-MiniLM-L6-v2"), data, None, None, 24)
    judge = language.Judge(folder, "ner", inputs, "cpu")
    state = language.state_of(folder)
    state["classifier.weight"] *= 50  # an untrained model's guesses, of all kinds
    found = judge(state, "wikigold")["score"]
    said, right = [], []
    for batch in inputs.batches("wikigold", "test", 1, inputs.by_length("wikigold", "test")):
        labels = batch.pop("labels")[0]
        guess = judge.model(**batch).logits[0].argmax(-1)[labels != -100]
        said.append([corpora.TAGS[n] for n in guess.tolist()])
        right.append([corpora.TAGS[n] for n in labels[labels != -100].tolist()])
    assert found == pytest.approx(100 * float(f1_score(right, said)))
