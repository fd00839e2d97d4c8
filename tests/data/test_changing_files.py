"""Data that is written while a run reads it is noticed like weights: the result would be a mix of old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.data import open_data
from isomerge.errors import CheckpointError
from isomerge.merging.run.jobs import Job
from models import gpt2
from samples import write_digits

TEXT = "the cat sat on the mat\na dog ran\n" * 6


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text(TEXT)
    return tmp_path / "texts.txt"


@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
def test_a_text_that_changes_during_a_pass(tmp_path: Path, texts: Path, how: str) -> None:
    batches = open_data(texts).batches(gpt2(tmp_path / "a"), batch_size=2)
    next(batches)
    if how == "written":
        texts.write_text(TEXT + "more\n")
    elif how == "replaced":
        (tmp_path / "new").write_text(TEXT)
        (tmp_path / "new").replace(texts)
    else:
        texts.unlink()
    with pytest.raises(CheckpointError, match="texts.txt' changed while it was being read"):
        list(batches)


def test_a_picture_that_changes_before_a_pass_ends(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", 6)
    data = open_data(tmp_path / "digits")
    assert data.changed() == []
    picture = next((tmp_path / "digits").rglob("*.png"))
    picture.write_bytes(picture.read_bytes() + b" ")
    assert data.changed() == [picture]


def test_data_that_changes_while_a_merge_is_written(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate("ab"):
        gpt2(tmp_path / name, seed=seed)
    merged = isomerge.merge([tmp_path / "a", tmp_path / "b"], method="regmean", data=texts, threads=1)
    pieces = Job.pieces

    def rewriting(job: Job) -> Any:
        texts.write_text(TEXT + "more\n")
        return pieces(job)

    monkeypatch.setattr(Job, "pieces", rewriting)
    with pytest.raises(CheckpointError, match="texts.txt' changed while it was being read"):
        merged.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_stays_is_read_as_often_as_one_likes(tmp_path: Path, texts: Path) -> None:
    data, checkpoint = open_data(texts), gpt2(tmp_path / "a")
    texts.read_text()
    assert len(list(data.batches(checkpoint))) == len(list(data.batches(checkpoint))) > 0
