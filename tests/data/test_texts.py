"""Texts and tables as the tokenizer itself would encode them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.data import Data, open_data
from isomerge.errors import RequestError
from models import bert, bert_tokenizer, gpt2, gpt2_classifier, llama, t5
from samples import SENTENCES


def rows(data: Data, checkpoint: Checkpoint, **options: object) -> dict[str, object]:
    """Decoded text → label, padding removed."""
    tokenizer = bert_tokenizer()
    found: dict[str, object] = {}
    for batch in data.batches(checkpoint, labels=True, **options):  # type: ignore[arg-type]
        for k, ids in enumerate(batch["input_ids"]):
            kept = ids[batch["attention_mask"][k].bool()]
            found[tokenizer.decode(kept)] = batch["labels"][k].tolist() if "labels" in batch else None
    return found


def encoded(text: str, pair: str | None = None) -> str:
    tokenizer = bert_tokenizer()
    return str(tokenizer.decode(tokenizer(text, pair)["input_ids"]))


LABELS = ["good", "bad"] * (len(SENTENCES) // 2)


def write_table(path: Path, style: str) -> None:
    pairs = list(zip(SENTENCES, LABELS, strict=True))
    if style == "jsonl":
        path.write_text("\n".join(json.dumps({"text": t, "label": y}) for t, y in pairs))
    elif style == "tsv-header":
        path.write_text("sentence\tlabel\n" + "\n".join(f"{t}\t{y}" for t, y in pairs) + "\n")
    elif style == "tsv-plain":
        path.write_text("\n".join(f"src\t{y}\t{t}" for t, y in pairs))
    elif style == "csv":
        path.write_bytes(
            ("﻿id,text,label\r\n" + "\r\n".join(f'{k},"{t}",{y}' for k, (t, y) in enumerate(pairs))).encode()
        )
    else:
        path.write_text("text;label_name\n" + "\n".join(f"{t};{y}" for t, y in pairs))


@pytest.mark.parametrize(
    ("style", "name"),
    [("jsonl", "a.jsonl"), ("tsv-header", "a.tsv"), ("tsv-plain", "a.tsv"), ("csv", "a.csv"), ("semicolon", "a.txt")],
)
def test_every_layout_gives_the_same_examples(style: str, name: str, tmp_path: Path) -> None:
    write_table(tmp_path / name, style)
    model = bert(tmp_path / "model", "sequence", ["BAD", "Good"])
    data = open_data(tmp_path / name)
    assert (data.kind, data.size, data.classes) == ("texts", len(SENTENCES), ["bad", "good"])
    truth = {encoded(t): ["bad", "good"].index(y) for t, y in zip(SENTENCES, LABELS, strict=True)}
    assert rows(data, model, batch_size=5) == truth


def test_pairs_and_numbers_by_position(tmp_path: Path) -> None:
    lines = [
        f"{k}\tnews\t{a}\t{b}\t{k / 4:.3f}" for k, (a, b) in enumerate(zip(SENTENCES, SENTENCES[::-1], strict=True))
    ]
    (tmp_path / "sts.tsv").write_text("\n".join(lines))
    model = bert(tmp_path / "model", "sequence", ["score"])
    truth = {encoded(a, b): k / 4 for k, (a, b) in enumerate(zip(SENTENCES, SENTENCES[::-1], strict=True))}
    guessed = open_data(tmp_path / "sts.tsv")
    assert guessed.kind == "pairs" and guessed.classes is None
    assert "column 2, 3 and labels from 4" in guessed.notes[0]
    assert rows(guessed, model) == pytest.approx(truth)
    assert rows(open_data(tmp_path / "sts.tsv", text="2,3", label="-1"), model) == pytest.approx(truth)
    batch = next(iter(guessed.batches(model, batch_size=4)))
    assert batch["token_type_ids"].max() == 1 and "labels" not in batch


def test_quotes_are_text_in_tables_by_tabs_and_marks_in_tables_by_commas(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('sentence\tlabel\nhe said "no\t1\nthe "cat" sat\t0\n')
    assert open_data(tmp_path / "a.tsv").size == 2
    (tmp_path / "a.csv").write_text('text,label\n"a, b\nand ""c""",1\nplain,0\n')
    data = open_data(tmp_path / "a.csv")
    assert [(e.text, e.label) for e in data._examples] == [('a, b\nand "c"', "1"), ("plain", "0")]  # type: ignore[attr-defined]


def test_tags_stand_at_the_first_token_of_each_word(tmp_path: Path) -> None:
    (tmp_path / "ner.conll").write_text(
        "-DOCSTART- -X- O O\n\nanna NNP O B-PER\nlives VB O O\nin IN O O\nzzrome NNP O B-LOC\n\nbob NN O B-PER\n"
    )
    tags = ["O", "B-PER", "I-PER", "B-LOC"]
    model = bert(tmp_path / "model", "token", tags)
    data = open_data(tmp_path / "ner.conll")
    assert (data.kind, data.size, data.classes) == ("tokens", 2, ["B-LOC", "B-PER", "O"])
    found = rows(data, model, batch_size=1)
    long = next(value for text, value in found.items() if "lives" in text)
    # zzrome is cut into z ##z ##r ##o ##m ##e: its tag stands once.
    assert long == [-100, 1, 0, 0, 3, -100, -100, -100, -100, -100, -100]
    records = [{"tokens": ["anna", "lives"], "tags": ["B-PER", "O"]}]
    (tmp_path / "ner.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert rows(open_data(tmp_path / "ner.jsonl"), model) == {encoded("anna lives"): [-100, 1, 0, -100]}


def test_several_classes_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(
        "split\tfear\tjoy\theadline\ntest\t1\t1\tthe cat\ntest\t0\t1\ta dog\ntrain\t0\t0\tx\n"
    )
    names = ["fear", "joy"]
    several = bert(tmp_path / "m", "sequence", names, problem_type="multi_label_classification")
    data = open_data(tmp_path / "a.tsv", split="test")
    assert rows(data, several) == {encoded("the cat"): [1.0, 1.0], encoded("a dog"): [0.0, 1.0]}
    single = bert(tmp_path / "n", "sequence", names)
    assert rows(data, single) == {encoded("a dog"): 1}
    assert any("1 of 2 examples have no class or several" in note for note in data.notes)
    (tmp_path / "b.tsv").write_text("the cat sat on\t0,1\nthe dog sat on\t1\n" * 20)
    assert open_data(tmp_path / "b.tsv", text="0", label="1").classes == ["0", "1"]


def test_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nthe cat sat on the mat\t1\na dog\t0\n")
    model = bert(tmp_path / "model", "sequence", positions=5)
    data = open_data(tmp_path / "a.tsv")
    assert max(b["input_ids"].shape[1] for b in data.batches(model)) == 5
    assert data.notes[-1] == "1 of 2 examples are longer than 5 tokens and were cut"
    exact = open_data(tmp_path / "a.tsv", length=4)
    assert max(b["input_ids"].shape[1] for b in exact.batches(model)) == 4


def test_running_text_is_cut_into_chunks_of_the_context(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 3) + "\n")
    model = gpt2(tmp_path / "gpt", positions=24)
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tmp_path / "gpt")("\n".join(SENTENCES * 3) + "\n")["input_ids"]
    batches = list(open_data(tmp_path / "book.txt").batches(model, batch_size=3, labels=True))
    chunks = sorted(
        tuple(i[m.bool()].tolist()) for b in batches for i, m in zip(b["input_ids"], b["attention_mask"], strict=True)
    )
    assert chunks == sorted(tuple(ids[k : k + 24]) for k in range(0, len(ids), 24))
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100))
    with_start = next(iter(open_data(tmp_path / "book.txt").batches(llama(tmp_path / "llama", positions=20))))
    assert (with_start["input_ids"][:, 0] == 2).all()  # its tokenizer begins texts with <s>


def test_masking_is_the_same_whatever_the_batches(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES * 4))
    model = bert(tmp_path / "model", "masked")

    def masked(batch_size: int, seed: int = 0) -> dict[tuple[int, ...], tuple[int, ...]]:
        found = {}
        data = open_data(tmp_path / "book.txt")
        for b in data.batches(model, batch_size=batch_size, labels=True, seed=seed):
            for ids, labels, mask in zip(b["input_ids"], b["labels"], b["attention_mask"], strict=True):
                kept = mask.bool()
                right = torch.where(labels == -100, ids, labels)
                found[tuple(right[kept].tolist())] = tuple(ids[kept].tolist())
        return found

    first = masked(2)
    assert first == masked(5) and first != masked(2, seed=1)
    asked = np.mean([a != b for right, seen in first.items() for a, b in zip(right, seen, strict=True)])
    assert 0.05 < asked < 0.25
    assert all(right[0] == seen[0] == 2 and right[-1] == seen[-1] == 3 for right, seen in first.items())


def test_encoder_decoders_read_one_text_and_say_the_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"source": "the cat", "target": "a dog ran"}))
    batch = next(iter(open_data(tmp_path / "a.jsonl").batches(t5(tmp_path / "t5"), labels=True)))
    assert (
        batch["labels"].tolist()[0][:3] == batch["decoder_input_ids"].tolist()[0][1:] + batch["labels"].tolist()[0][2:3]
    )
    assert batch["decoder_input_ids"][0, 0] == 0


def test_models_without_a_padding_token_get_one_text_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nthe cat sat\t1\na dog\t0\n")
    data = open_data(tmp_path / "a.tsv")
    batches = list(data.batches(gpt2_classifier(tmp_path / "m", ["0", "1"]), labels=True))
    assert [len(b["input_ids"]) for b in batches] == [1, 1]
    assert any("no padding token" in note for note in data.notes)


def test_texts_beside_their_labels_and_folders_of_parts(tmp_path: Path) -> None:
    (tmp_path / "test_text.txt").write_text("the cat\na dog\n")
    (tmp_path / "test_labels.txt").write_text("1\n0\n")
    (tmp_path / "train_text.txt").write_text("a bird\n")
    (tmp_path / "train_labels.txt").write_text("0\n")
    (tmp_path / "mapping.txt").write_text("0\tbad\n1\tgood\n")
    data = open_data(tmp_path, split="test")
    assert data.classes == ["bad", "good"] and data.size == 2
    assert open_data(tmp_path).size == 1
    (tmp_path / "test_labels.txt").write_text("1\n")
    with pytest.raises(RequestError, match="2 lines and test_labels.txt has 1"):
        open_data(tmp_path / "test_text.txt")


def test_ready_batches_are_taken_as_they_are(tmp_path: Path) -> None:
    model = open_checkpoint({"x": torch.zeros(1)})
    batch = {"input_ids": torch.arange(6).reshape(3, 2), "labels": torch.arange(3)}
    for source in ([batch, batch], iter([batch, batch]), lambda: iter([batch, batch])):
        data = open_data(source)
        assert data.size == 6 and data.kind == "batches"
        got = list(data.batches(model, limit=4, labels=True))
        assert [len(b["labels"]) for b in got] == [3, 1]
        assert data.sha256 == open_data([batch, batch]).sha256
    assert "labels" not in next(iter(open_data([batch]).batches(model)))
    for wrong in ([], [torch.zeros(2)], [{"a": torch.zeros(2), "b": torch.zeros(3)}]):
        with pytest.raises(RequestError):
            _ = open_data(wrong).size


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.tsv", "x\ty\n", {}, "not clear which of"),
        ("a.csv", "text,label\nthe cat,1\n", {"text": "txet"}, "'txet' is not a column of it.*Did you mean 'text'"),
        ("a.csv", "text,label\nthe cat,1\n", {"label": "7"}, "'7' is not a column"),
        ("a.csv", "text,label\n", {}, "a header and no row"),
        ("a.jsonl", '{"text": 1}\n', {}, "no text but 1"),
        ("a.jsonl", "{broken\n", {}, "line 1"),
        ("a.jsonl", '{"body_html": "x"}\n', {}, "Name one with the option text"),
        ("a.txt", "   \n", {}, "the file is empty"),
        ("a.conll", "word O\nlonely\n", {}, "without a tag in 'line 2"),
        ("a.xyz", "x", {}, "is not a kind of data"),
        ("a.txt", "just words\n", {"kind": "pictures"}, "kind cannot be 'pictures'"),
        ("a.txt", "just words\nand more\n", {"label": "0"}, "without columns"),
    ],
)
def test_bad_texts_are_told(name: str, content: str, options: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message):
        open_data(tmp_path / name, **options)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file or folder.*Did you mean 'data.tsv'"):
        (tmp_path / "data.tsv").write_text("text\tlabel\nthe cat\t\na dog\tx\n")
        open_data(tmp_path / "dta.tsv")
    model = bert(tmp_path / "m", "sequence", ["x", "y"])
    with pytest.raises(RequestError, match="1 of 2 examples have none"):
        list(open_data(tmp_path / "data.tsv").batches(model, labels=True))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(RequestError, match="not UTF-8"):
        open_data(tmp_path / "latin.txt")
    bare = open_checkpoint({"x": torch.zeros(1)})
    with pytest.raises(RequestError, match="no tokenizer beside it"):
        list(open_data(tmp_path / "data.tsv").batches(bare))
    with pytest.raises(RequestError, match="Leave limit out"):
        list(open_data(tmp_path / "data.tsv").batches(model, limit=0))


def test_a_given_tokenizer_serves_models_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the cat"}))
    bare = open_checkpoint({"x": torch.zeros(1)}, config={"pad_token_id": 0})
    batch = next(iter(open_data(tmp_path / "a.jsonl", tokenizer=bert_tokenizer()).batches(bare)))
    assert batch["input_ids"].tolist() == [bert_tokenizer()("the cat")["input_ids"]]


class FakeDataset:
    """What `datasets.Dataset` shows of itself; the package is not needed to have one."""

    column_names = ("text", "label")

    class ClassLabel:
        names = ("bad", "good")

    def __init__(self) -> None:
        self.features = {"label": self.ClassLabel()}

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> object:
        return iter([{"text": "the cat", "label": 1}, {"text": "a dog", "label": 0}])


FakeDataset.__module__ = "datasets.arrow_dataset"


def test_datasets_objects_bring_their_class_names(tmp_path: Path) -> None:
    model = bert(tmp_path / "m", "sequence", ["good", "bad"])
    data = open_data(FakeDataset())  # type: ignore[arg-type]
    assert rows(data, model) == {encoded("the cat"): 0, encoded("a dog"): 1}


def test_a_bare_list_of_letters_is_a_tokenizer(tmp_path: Path) -> None:
    vocabulary = {token: k for k, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "A", "C", "G", "T", "<mask>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    model = open_checkpoint({"x": torch.zeros(1)}, config={"max_position_embeddings": 34, "pad_token_id": 1})
    model.folder = tmp_path
    (tmp_path / "a.jsonl").write_text('{"text": "GAT?C"}\n{"text": "T"}\n')
    batch = next(iter(open_data(tmp_path / "a.jsonl").batches(model)))
    found = sorted(
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )
    assert found == [[0, 6, 4, 7, 3, 5, 2], [0, 7, 2]]


def test_passes_are_prepared_once_and_all_the_same(tmp_path: Path) -> None:
    write_table(tmp_path / "a.tsv", "tsv-header")
    model = bert(tmp_path / "model", "sequence", ["bad", "good"])
    data = open_data(tmp_path / "a.tsv")
    batches = data.passes(model, batch_size=5, labels=True)
    half = batches()
    next(half)  # a pass that is given up keeps nothing
    first, second = list(batches()), list(batches())
    fresh = list(data.batches(model, batch_size=5, labels=True))
    assert len(first) == 3 and all(a is b for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(first, fresh, strict=True) for k in b)


def test_numbers_of_classes_may_be_written_as_fractions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nthe cat,1.0\na dog,0.0\n")
    model = bert(tmp_path / "m", "sequence", ["bad", "good"])
    assert rows(open_data(tmp_path / "a.csv"), model) == {encoded("the cat"): 1, encoded("a dog"): 0}
    score = bert(tmp_path / "n", "sequence", ["score"])
    assert rows(open_data(tmp_path / "a.csv"), score) == {encoded("the cat"): 1.0, encoded("a dog"): 0.0}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "text\tlabel\na cat\t0\na dog\t1\n"),
        ("a.jsonl", '{"text": "a cat", "label": 0}\n{"text": "a dog", "label": 1}\n'),
        ("a.conll", "cats O\nrun O\n\nParis B-LOC\n"),
    ],
)
def test_a_part_that_a_file_does_not_have_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert open_data(tmp_path / name).size == 2
    with pytest.raises(RequestError, match=f"{name}: there is no part 'validation'.*leave split out"):
        open_data(tmp_path / name, split="val")
