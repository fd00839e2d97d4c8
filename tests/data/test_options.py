"""How data is read is one value: keywords of open_data, or a mapping as in a recipe, mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isomerge.data import DataOptions, open_data
from isomerge.errors import RequestError
from models import bert


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [f"row {n},{'train' if n % 2 else 'test'},{'good' if n % 3 else 'bad'}" for n in range(12)]
    (tmp_path / "a.csv").write_text("\n".join(["text,split,label", *rows]))
    return tmp_path / "a.csv"


def test_a_mapping_means_the_same_as_keywords(table: Path) -> None:
    named = open_data({"path": table, "split": "test", "limit": 4})
    same = open_data(table, split="test", limit=4)
    assert named.sha256 == same.sha256 and named.limit == same.limit == 4 and named.used() == 4 and named.size == 6


def test_the_limit_of_data_holds_until_another_is_asked_for(table: Path, tmp_path: Path) -> None:
    bert(tmp_path / "model", "sequence", ["bad", "good"])
    import isomerge

    data = open_data(table, split="test", limit=4)
    assert isomerge.evaluate(tmp_path / "model", data).examples == 4
    assert isomerge.evaluate(tmp_path / "model", data, limit=2).examples == 2
    assert isomerge.evaluate(tmp_path / "model", {"path": table, "split": "test"}).examples == 6


def test_columns_may_be_positions() -> None:
    assert DataOptions(text=0, label=-1) == DataOptions(text="0", label="-1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "a.csv", "splitt": "test"}, "no option 'splitt'. Did you mean 'split'"),
        ({"path": "a.csv", "limit": "3"}, "limit must be a whole number"),
        ({"path": "a.csv", "split": 3}, "split must be a text"),
        ({"path": "a.csv", "kind": "image"}, "kind cannot be 'image'. Did you mean 'images'"),
        ({"path": "a.csv", "length": 1}, "too short"),
        ({"split": "test"}, "by its 'path'"),
        ({"input_ids": torch.zeros(1, 2)}, "Pass batches as a list"),
    ],
)
def test_options_that_cannot_be_are_refused(source: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("(", r"\(")):
        open_data(source)
