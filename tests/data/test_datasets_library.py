"""The real `datasets` package: what it holds in memory, in parts and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets", reason="the extra 'eval' is not installed")

from isomerge.calibration import calibrate  # noqa: E402
from isomerge.data import open_data  # noqa: E402
from isomerge.errors import RequestError  # noqa: E402
from isomerge.evaluation.evaluate import evaluate  # noqa: E402
from models import bert, bert_tokenizer  # noqa: E402
from samples import SENTENCES  # noqa: E402

LABELS = [number % 2 for number in range(len(SENTENCES))]


def table(texts: list[str] = SENTENCES, labels: list[int] = LABELS) -> Any:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def seen(source: Any, model: Any, **options: Any) -> dict[tuple[int, ...], int]:
    """Tokens without padding → label."""
    found = {}
    for batch in open_data(source, **options).batches(model, labels=True):
        for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            found[tuple(ids[mask.bool()].tolist())] = int(label)
    return found


def expected(labels: list[int]) -> dict[tuple[int, ...], int]:
    """The model below has its classes the other way round."""
    tokenizer = bert_tokenizer()
    return {tuple(tokenizer(t)["input_ids"]): 1 - label for t, label in zip(SENTENCES, labels, strict=True)}


def test_texts_and_class_names_of_a_table_in_memory(tmp_path: Path) -> None:
    model = bert(tmp_path / "m", "sequence", ["good", "bad"])
    assert seen(table(), model) == expected(LABELS)
    assert open_data(table()).classes == ["bad", "good"]
    assert open_data(table()).sha256 == open_data(table()).sha256 != open_data(table(labels=LABELS[::-1])).sha256
    assert evaluate(tmp_path / "m", table())["examples"] == len(SENTENCES)
    assert calibrate(tmp_path / "m", open_data(table())).info["examples"] == len(SENTENCES)


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    model = bert(tmp_path / "m", "sequence", ["good", "bad"])
    parts = datasets.DatasetDict({"train": table(), "validation": table(labels=LABELS[::-1])})
    assert seen(parts, model, split="validation") == expected(LABELS[::-1])
    assert seen(parts, model, split="train") == expected(LABELS)
    with pytest.raises(RequestError, match="no part 'test'.*It has"):
        open_data(parts, split="test")


def test_a_table_saved_to_disk_is_read_from_its_folder(tmp_path: Path) -> None:
    model = bert(tmp_path / "m", "sequence", ["good", "bad"])
    table().save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table(), "test": table(labels=LABELS[::-1])}).save_to_disk(tmp_path / "parts")
    assert seen(datasets.load_from_disk(tmp_path / "one"), model) == expected(LABELS)
    assert seen(tmp_path / "one", model) == expected(LABELS)
    assert seen(tmp_path / "parts", model, split="test") == expected(LABELS[::-1])


def test_what_cannot_be_used_is_told() -> None:
    with pytest.raises(RequestError, match="is empty"):
        open_data(table([], []))
    with pytest.raises(RequestError, match="without an end"):
        open_data(table().to_iterable_dataset())
    with pytest.raises(RequestError, match="'txet'.*Did you mean 'text'"):
        open_data(table(), text="txet")
